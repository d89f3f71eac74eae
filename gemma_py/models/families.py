"""The families that are known, and from a description to its family and config."""

from typing import Any

from gemma_py.errors import ConfigError, UnsupportedError
from gemma_py.models import gemma
from gemma_py.models.config import Config
from gemma_py.models.family import Described, Family
from gemma_py.models.fields import Fields

FAMILIES = (gemma.FAMILY,)
_LATER = ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "vaultgemma", "t5gemma")
_BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def config_from_hf(document: Any, where: str, generation: Any = None) -> tuple[Family, Config]:
    """document: config.json, parsed. generation: generation_config.json, parsed, or None."""
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: should be a JSON object")
    if generation is not None and not isinstance(generation, dict):
        raise ConfigError(f"{where}: generation_config.json beside it should be a JSON object")
    outer = Fields(where, document)
    fields = outer.table("text_config") or outer
    written = fields.text("model_type", outer.text("model_type", ""))
    if written not in _BY_MODEL_TYPE:
        what = "is not supported yet" if written in _LATER else "is no Gemma"
        known = ", ".join(_BY_MODEL_TYPE)
        raise UnsupportedError(f"{where}: model_type {written!r:.40} {what}; readable are {known}")
    family = _BY_MODEL_TYPE[written]
    tokens = Fields(f"{where}: generation_config", generation or {})
    return family, family.config_from_hf(Described(family.model_types[written], fields, outer, tokens))


def config_from_gguf(metadata: dict[str, Any], where: str, vocab_size: int, tied: bool) -> tuple[Family, Config]:
    """vocab_size: of the embedding. tied: the file has no head of its own."""
    outer = Fields(where, metadata)
    name = outer.text("general.architecture")
    if name not in _BY_ARCHITECTURE:
        known = ", ".join(_BY_ARCHITECTURE)
        raise UnsupportedError(f"{where}: architecture {name!r:.40}; readable are {known}")
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    family = _BY_ARCHITECTURE[name]
    described = Described(name, Fields(where, own), outer, Fields(where, {}), vocab_size, tied)
    return family, family.config_from_gguf(described)
