"""The registry of model families, which selects the family that a config.json or GGUF file names."""

from collections.abc import Mapping
from typing import Any

from gemma_py.errors import ConfigError, UnsupportedError
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models import gemma, gemma3n, gemma4
from gemma_py.models.config import Config
from gemma_py.models.family import Family, ModelDescription, dense_shapes
from gemma_py.models.fields import Fields

FAMILIES = (gemma.FAMILY, gemma3n.FAMILY, gemma4.FAMILY)
_LATER = ("t5gemma",)
_BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_DENSE = ("dense_2", "dense_3")  # GGUF's names of the dense layers of an embedding model
_MEAN = 1  # the value of pooling_type for the mean of all hidden states
Shapes = tuple[tuple[int, int], ...]


def config_from_hf(document: Any, where: str, generation: Any = None, dense: Shapes = ()) -> tuple[Family, Config]:
    """Read the config of a Hugging Face checkpoint.

    document: the parsed config.json. generation: the parsed generation_config.json, or None if the file is missing.
    dense: the shapes of the dense layers among the modules of sentence-transformers.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: should be a JSON object")
    if generation is not None and not isinstance(generation, dict):
        raise ConfigError(f"{where}: generation_config.json in this directory should be a JSON object")
    outer = Fields(where, document)
    fields = outer.table("text_config") or outer
    written = fields.text("model_type", outer.text("model_type", ""))
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
    """Read the config of a GGUF file with these metadata and tensors.

    vocab_size: the number of rows of the embedding matrix. tied: whether the embedding matrix is also the output matrix.
    """
    outer = Fields(where, metadata)
    name = outer.text("general.architecture")
    if name not in _BY_ARCHITECTURE:
        known = ", ".join(_BY_ARCHITECTURE)
        raise UnsupportedError(f"{where}: architecture {name!r:.40} is not supported; supported architectures: {known}")
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    family = _BY_ARCHITECTURE[name]
    dense = dense_shapes(tensors[f"{layer}.weight"] for layer in _DENSE if f"{layer}.weight" in tensors)
    none = Fields(where, {})
    description = ModelDescription(name, Fields(where, own), outer, none, vocab_size, tied, tensors, dense)
    _check_direction(description)
    return family, family.config_from_gguf(description)


def _check_direction(description: ModelDescription) -> None:
    """Raise an error unless an embedding model has bidirectional attention and mean pooling, and another model has neither."""
    fields, where, embeds = description.fields, description.outer.where, description.name == "gemma-embedding"
    if fields.flag("attention.causal", not embeds) is embeds:
        found = "true" if embeds else "false; only gemma-embedding files are embedding models"
        raise UnsupportedError(f"{where}: attention.causal should be {str(not embeds).lower()}, found {found}")
    if description.dense and not embeds:
        raise ConfigError(f"{where}: the dense layers of an embedding are not part of a {description.name} model")
    pooling = fields.integer("pooling_type", _MEAN, least=0)
    if embeds and pooling != _MEAN:
        raise UnsupportedError(f"{where}: pooling_type should be 1 (mean), found {pooling}")
    for layer in _DENSE:
        tensor, sizes = f"{layer}.weight", (f"{layer}_feat_out", f"{layer}_feat_in")
        if tensor in description.tensors:
            for name, size in zip(sizes, description.tensors[tensor].shape, strict=True):
                if fields.integer(name, size) != size:
                    raise ConfigError(f"{where}: {name} should be {size}, as in tensor {tensor}")
        elif any(fields.values.get(name) is not None for name in sizes):
            raise ConfigError(f"{where}: tensor {tensor} is missing, although {sizes[0]} or {sizes[1]} is set")
