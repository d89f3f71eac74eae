"""Checkpoints with random weights in the shapes of released models, for benchmarks without a download."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py import machine
from gemma_py.catalog import catalogue
from gemma_py.errors import InputError
from gemma_py.formats.blocks import F32, TYPES, BlockType
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models.config import Config
from gemma_py.models.families import config_from_hf
from gemma_py.models.family import Family
from gemma_py.models.program import Tensor
from gemma_py.runtime.runner import CHUNK
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.pack import PackingPlan
from gemma_py.weights.tensors import EMBEDDING, HEAD, gguf_source

Make = Callable[[BlockType, int], np.ndarray]
_BY_SHAPE = {"D": "hidden_size", "L": "num_hidden_layers", "H": "num_attention_heads", "G": "num_key_value_heads",
             "E": "head_dim", "F": "intermediate_size", "V": "vocab_size", "W": "sliding_window",
             "context": "max_position_embeddings", "EF": "global_head_dim", "GF": "num_global_key_value_heads",
             "P": "hidden_size_per_layer_input", "shared": "num_kv_shared_layers", "k_eq_v": "attention_k_eq_v",
             "double": "use_double_wide_mlp", "cap": "final_logit_softcapping", "moe": "enable_moe_block",
             "X": "num_experts", "C": "top_k_experts", "FX": "moe_intermediate_size",
             "embedding": "embedding_dim"}  # fmt: skip
# For GGUF architectures with another name in Hugging Face: the fields of config.json that select the model class.
_HUGGING_FACE: dict[str, dict[str, Any]] = {
    "gemma-embedding": {"model_type": "gemma3_text", "use_bidirectional_attention": True},
    "gemma-embedding2": {"model_type": "embedding_gemma2_text"},
}


def _shape(name: str) -> dict[str, Any]:
    entry = next((entry for entry in catalogue() if entry.name == name), None)
    if entry is None:
        raise InputError(f"{name}: unknown model; `gemma_py models` lists the models with known shapes")
    return dict(entry.shape)


def config_document(name: str) -> dict[str, Any]:
    """Return the fields of config.json that follow from the catalogue's description of a model."""
    shape = _shape(name)
    kind = shape.pop("family")
    shape.pop("dense", None)  # the dense layers are described in a file of sentence-transformers, not in config.json
    document = dict(_HUGGING_FACE.get(kind, {"model_type": kind}))
    period = shape.pop("period", 0)
    if period:
        types = ("full_attention", *["sliding_attention"] * (period - 1))
        document["layer_types"] = [types[number % period] for number in range(1, shape["L"] + 1)]
    return document | {_BY_SHAPE[letter]: value for letter, value in shape.items()}


def config_of(name: str) -> tuple[Family, Config]:
    shape = _shape(name)
    widths = [shape["D"], *shape.get("dense", [])]
    return config_from_hf(config_document(name), name, dense=tuple((N, K) for K, N in pairwise(widths)))


def random_checkpoint(name: str, type_name: str, tokens: int) -> Checkpoint:
    """Return a checkpoint with random matrices of a type. For quantised types, the embedding is Q8_0.

    Matrices of equal shape share memory in this checkpoint. Packing copies each of them, because a benchmark of shared
    matrices would read them from the processor's cache.
    tokens: the length of the session. Raise InputError if weights and session do not fit into memory.
    """
    family, config = config_of(name)
    kind = TYPES.get(type_name.upper())
    if kind is None:
        raise InputError(f"{type_name}: unknown type; expected one of {', '.join(TYPES).lower()}")
    shortest = min(kind.block, config.hidden_size)
    for label, spec in _specs(family, config).items():
        whole = len(spec.shape) == 1 or spec.shape[-1] < shortest or spec.shape[-1] % kind.block == 0
        if not whole and label != EMBEDDING:
            raise InputError(
                f"{name} in {kind.name}: row lengths should be multiples of {kind.block}, found {spec.shape[-1]} in {label}"
            )
    _check_memory(name, family, config, kind, tokens)
    return _checkpoint(name, family, config, kind, _random)


def _checkpoint(name: str, family: Family, config: Config, kind: BlockType, make: Make) -> Checkpoint:
    made: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
    tensors, specs, path = {}, _specs(family, config), Path(f"{name} random {kind.name}")
    for label, spec in specs.items():
        if len(spec.shape) == 1:
            ones = np.ones(spec.shape, np.float32).view(np.uint8)
            tensors[spec.gguf] = StoredTensor(spec.gguf, F32, spec.shape, ones, path)
            continue
        stored, shape = _stored_type(label, spec, kind), spec.gguf_shape
        if (stored.name, shape) not in made:
            made[stored.name, shape] = make(stored, math.prod(shape))
        tensors[spec.gguf] = StoredTensor(spec.gguf, stored, shape, made[stored.name, shape], path)
    source = gguf_source(tensors, family.tensors(config), True, name)
    return Checkpoint(path, f"random {kind.name}", family, config, source, None, {}, cacheable=False)


def _stored_type(label: str, spec: Tensor, kind: BlockType) -> BlockType:
    """Return the type of a matrix. Rows shorter than a block stay floats, because no converter quantises them."""
    if spec.shape[1] < kind.block:
        return F32
    return TYPES["Q8_0"] if kind.quantised and label == EMBEDDING else kind


def _specs(family: Family, config: Config) -> dict[str, Tensor]:
    """Return the model's tensors. There is no output head, because the embedding serves as the head."""
    return {label: spec for label, spec in family.tensors(config).items() if label != HEAD}


def _random(kind: BlockType, count: int) -> np.ndarray:
    """Return the bytes of `count` random values. There are no subnormals and infinities, which some processors compute
    slowly.
    """
    rng = np.random.default_rng(count)
    if kind.quantised:
        # Clearing bit 6 of each byte makes every float16 scale in a block less than 2, and therefore finite.
        return rng.integers(0, 256, count // kind.block * kind.bytes, np.uint8) & np.uint8(0xBF)
    values = rng.standard_normal(count, np.float32)
    values *= np.float32(0.05)
    if kind.name == "BF16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    return values.astype(np.float16).view(np.uint8) if kind.name == "F16" else values.view(np.uint8)


def _blank(kind: BlockType, count: int) -> np.ndarray:
    """Return as many zero bytes as `count` values of type `kind` have. All elements share one byte of memory."""
    return np.broadcast_to(np.uint8(0), count // kind.block * kind.bytes)


def estimate(family: Family, config: Config, kind: BlockType, tokens: int) -> tuple[int, int]:
    """Return two sizes in bytes: the packed weights, and everything else in memory.

    Everything else is the random weights before packing, the KV cache and the scratch memory of a chunk.
    """
    blank = _checkpoint("", family, config, kind, _blank)
    random = {(tensor.type.name, tensor.shape): tensor.data.nbytes for tensor in blank.tensors.values()}
    rows = sum(
        min(tokens, (y.sliding_window or tokens) + CHUNK) * 2 * y.num_key_value_heads * y.head_dim
        for y in config.kv_layers
    )
    widest = 2 * max(y.intermediate_size for y in config.layers) + 6 * config.hidden_size
    widest += config.top_k_experts * (2 * config.moe_intermediate_size + config.hidden_size)
    widest += 3 * len(config.layers) * config.hidden_size_per_layer_input
    return PackingPlan(blank.stored_weights()).bytes, sum(random.values()) + 4 * (rows + CHUNK * widest)


def _check_memory(name: str, family: Family, config: Config, kind: BlockType, tokens: int) -> None:
    weights, rest = estimate(family, config, kind, tokens)
    free = machine.memory()
    if free is not None and weights + rest > free:
        gib = 1 << 30
        raise InputError(
            f"{name} in {kind.name} needs {(weights + rest) / gib:.1f} GiB of memory ({weights / gib:.1f} GiB for the "
            f"weights), but only {free / gib:.1f} GiB are free"
        )
