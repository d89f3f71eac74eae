"""Models of a released shape with random weights: as fast as the real ones, before anybody has downloaded them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py import machine
from gemma_py.catalog import catalogue
from gemma_py.errors import InputError
from gemma_py.formats.blocks import F32, TYPES, BlockType
from gemma_py.formats.tensor import StoredTensor
from gemma_py.model.checkpoint import Checkpoint
from gemma_py.model.config import Config, Norm
from gemma_py.model.config_hf import config_from_hf
from gemma_py.model.packed import packed_bytes
from gemma_py.model.weights import GGUF_NAMES, Weights, build_weights, whole
from gemma_py.runtime.runner import CHUNK
from gemma_py.tokenizer import Tokenizer

_ROWS = 64  # of the sample that an estimate is made from: whole panels
_BY_SHAPE = {"D": "hidden_size", "L": "num_hidden_layers", "H": "num_attention_heads", "G": "num_key_value_heads",
             "E": "head_dim", "F": "intermediate_size", "V": "vocab_size", "W": "sliding_window",
             "context": "max_position_embeddings"}  # fmt: skip


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """Its layers have the same weights, each a copy of its own in memory once they are packed."""

    def weights(self) -> Weights:
        one = replace(self.config, layers=self.config.layers[:1])
        tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if not name.startswith("blk.") or name.startswith("blk.0.")
        }
        weights = build_weights(tensors, one, self.names, str(self.path))
        return replace(weights, layers=weights.layers * len(self.config.layers))

    def tokenizer(self) -> Tokenizer | None:
        return None


def config_of(name: str) -> Config:
    """Of a model in the catalogue."""
    entry = next((entry for entry in catalogue() if entry.name == name), None)
    if entry is None:
        raise InputError(f"{name}: no model of that name; `gemma_py models` lists those whose shapes are known")
    shape = dict(entry.shape)
    document: dict[str, Any] = {"model_type": shape.pop("family")}
    document |= {_BY_SHAPE[letter]: value for letter, value in shape.items()}
    return config_from_hf(document, name)


def random_checkpoint(name: str, type_name: str, tokens: int) -> RandomCheckpoint:
    """The layers' matrices in the type; the embedding, which is the head too, in Q8_0 if that is a quantised one.

    tokens: that a session will hold. Refused if all together would not fit into memory.
    """
    config = config_of(name)
    kind = TYPES.get(type_name.upper())
    if kind is None:
        raise InputError(f"{type_name}: no such type; there are {', '.join(TYPES).lower()}")
    for label, shape in _matrices(config):
        if shape[1] % kind.block and label != GGUF_NAMES.embedding:
            raise InputError(
                f"{name} in {kind.name}: rows should be a multiple of {kind.block} values, {label} has {shape[1]}"
            )
    _refuse_what_does_not_fit(name, config, kind, tokens)
    seeds = np.random.SeedSequence(1)
    made: dict[tuple[str, tuple[int, ...]], StoredTensor] = {}
    tensors = {}
    for label, shape in _matrices(config):
        stored = _kind_of(label, kind)
        key = (stored.name, shape)
        if key not in made:
            made[key] = _random(label, stored, shape, np.random.default_rng(seeds.spawn(1)[0]))
        tensors[label] = replace(made[key], name=label)
    for label, width in _gains(config):
        tensors[label] = StoredTensor(label, F32, (width,), np.ones(width, np.float32).view(np.uint8), Path(name))
    return RandomCheckpoint(
        Path(f"{name} random {kind.name}"), f"random {kind.name}", config, tensors, GGUF_NAMES, None, {}
    )


def _kind_of(label: str, kind: BlockType) -> BlockType:
    return TYPES["Q8_0"] if kind.quantised and label == GGUF_NAMES.embedding else kind


def _matrices(config: Config) -> Iterator[tuple[str, tuple[int, int]]]:
    D = config.hidden_size
    yield GGUF_NAMES.embedding, (config.vocab_size, D)
    for number, layer in enumerate(config.layers):
        HE, GE = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
        F = layer.intermediate_size
        shapes = {"q": (HE, D), "k": (GE, D), "v": (GE, D), "o": (D, HE), "gate": (F, D), "up": (F, D), "down": (D, F)}
        for part, shape in shapes.items():
            yield GGUF_NAMES.matrices[part].format(number), shape


def _gains(config: Config) -> Iterator[tuple[str, int]]:
    yield GGUF_NAMES.final_norm, config.hidden_size
    for number, layer in enumerate(config.layers):
        for norm in layer.norms:
            width = layer.head_dim if norm in (Norm.QUERY, Norm.KEY) else config.hidden_size
            yield GGUF_NAMES.norms[norm].format(number), width


def _random(label: str, kind: BlockType, shape: tuple[int, ...], rng: np.random.Generator) -> StoredTensor:
    """Bytes that mean moderate numbers, since tiny and infinite ones may take the processor longer."""
    count = math.prod(shape)
    if kind.quantised:
        # Without its highest bit, no exponent of a half makes more than 2: whatever bytes hold scales, they are finite.
        data = rng.integers(0, 256, count // kind.block * kind.bytes, np.uint8) & np.uint8(0xBF)
    else:
        values = rng.standard_normal(count, np.float32)
        values *= np.float32(0.05)
        if kind.name == "BF16":
            data = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
        elif kind.name == "F16":
            data = values.astype(np.float16).view(np.uint8)
        else:
            data = values.view(np.uint8)
    return StoredTensor(label, kind, shape, data, Path(label))


def estimate(config: Config, kind: BlockType, tokens: int) -> tuple[int, int]:
    """Bytes of (packed weights, all else at the worst moment).

    A few rows of each matrix are packed in earnest, so this knows no layouts. All else: the largest matrix twice on its way
    in, the keys and values of the tokens, and a chunk's intermediate results.
    """
    sizes: dict[tuple[str, tuple[int, int]], int] = {}
    total = largest = 0
    for label, (N, K) in _matrices(config):
        stored = _kind_of(label, kind)
        if (stored.name, (N, K)) not in sizes:
            sample = _random(label, stored, (_ROWS, K), np.random.default_rng(1))
            sizes[stored.name, (N, K)] = packed_bytes([whole(sample)]) * -(-N // _ROWS)
        total += sizes[stored.name, (N, K)]
        largest = max(largest, sizes[stored.name, (N, K)])
    rows = sum(
        min(tokens, (y.sliding_window or tokens) + CHUNK) * 2 * y.num_key_value_heads * y.head_dim
        for y in config.layers
    )
    widest = max(y.intermediate_size for y in config.layers)
    return total, 2 * largest + 4 * rows + CHUNK * 4 * (
        2 * widest + 6 * config.hidden_size + config.vocab_size // CHUNK
    )


def _refuse_what_does_not_fit(name: str, config: Config, kind: BlockType, tokens: int) -> None:
    weights, rest = estimate(config, kind, tokens)
    free = machine.memory()
    if free is not None and weights + rest > free:
        gib = 1 << 30
        raise InputError(
            f"{name} in {kind.name} would take {(weights + rest) / gib:.1f} GiB here, {weights / gib:.1f} of them for the "
            f"weights; {free / gib:.1f} GiB are free"
        )
