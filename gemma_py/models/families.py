"""The registry of model families. It finds the family that a config.json or a GGUF file names."""

from collections.abc import Mapping
from typing import Any

from gemma_py.errors import ConfigError, UnsupportedError
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models import embedding_gemma2, gemma, gemma3n, gemma4, gemma4_assistant
from gemma_py.models.config import Config
from gemma_py.models.family import Family, ModelDescription, dense_shapes
from gemma_py.models.fields import Fields

FAMILIES = (gemma.FAMILY, gemma3n.FAMILY, gemma4.FAMILY, embedding_gemma2.FAMILY, gemma4_assistant.FAMILY)
_LATER = ("t5gemma",)
_BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_DENSE = ("dense_2.weight", "dense_3.weight")  # names in GGUF of an embedding model's dense layers
Shapes = tuple[tuple[int, int], ...]


def config_from_hf(document: Any, where: str, generation: Any = None, dense: Shapes = ()) -> tuple[Family, Config]:
    """Read the config of a Hugging Face checkpoint.

    document: the parsed config.json. generation: the parsed generation_config.json, or None if the file is missing.
    dense: the shapes of an embedding model's dense layers, which sentence-transformers stores in other files.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: should be a JSON object")
    if generation is not None and not isinstance(generation, dict):
        raise ConfigError(f"{where}: generation_config.json in this directory should be a JSON object")
    outer = Fields(where, document)
    fields = outer.table("text_config") or outer
    written = fields.text("model_type", outer.text("model_type", ""))
    # The text_config of a Gemma 4 assistant has the model_type of Gemma 4, so the outer model_type is read instead.
    if outer.text("model_type", "") in gemma4_assistant.FAMILY.model_types:
        written = outer.text("model_type")
    if written not in _BY_MODEL_TYPE:
        what = "is not supported yet" if written in _LATER else "is not a Gemma model"
        known = ", ".join(_BY_MODEL_TYPE)
        raise UnsupportedError(f"{where}: model_type {written!r:.40} {what}; supported model types: {known}")
    family = _BY_MODEL_TYPE[written]
    tokens = Fields(f"{where}: generation_config", generation or {})
    config = family.config_from_hf(ModelDescription(family.model_types[written], fields, outer, tokens, dense=dense))
    if dense and config.embedding is None:
        raise UnsupportedError(f"{where}: modules.json has dense layers, but the model has causal attention")
    return family, config


def config_from_gguf(
    metadata: dict[str, Any], where: str, vocab_size: int, tied: bool, tensors: Mapping[str, StoredTensor]
) -> tuple[Family, Config]:
    """Read the config of a GGUF file that has these metadata and tensors.

    vocab_size: the number of rows of the embedding matrix. tied: whether the embedding matrix is also the output
    matrix.
    """
    outer = Fields(where, metadata)
    name = outer.text("general.architecture")
    if name not in _BY_ARCHITECTURE:
        known = ", ".join(_BY_ARCHITECTURE)
        raise UnsupportedError(f"{where}: architecture {name!r:.40} is not supported; supported architectures: {known}")
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    family = _BY_ARCHITECTURE[name]
    dense = dense_shapes(tensors[name] for name in _DENSE if name in tensors)
    none = Fields(where, {})
    description = ModelDescription(name, Fields(where, own), outer, none, vocab_size, tied, tensors, dense)
    return family, family.config_from_gguf(description)
