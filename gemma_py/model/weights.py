"""A checkpoint's tensors as the weights of a model: named, shaped, checked, and laid out for the arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np

from gemma_py.errors import ConfigError, FormatError
from gemma_py.formats.blocks import Minimum, scales_of
from gemma_py.formats.tensor import StoredTensor
from gemma_py.model.config import Config, Layer, Norm

_CHUNK = 1 << 22  # values looked at or unpacked at a time: bounds the memory on the way


@dataclass(frozen=True)
class FloatMatrix:
    """values: [N, K], f32, or uint16 holding bfloat16."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True)
class CodeMatrix:
    """A value is scale * code - minimum; scales and minimums are factors times steps, where there are steps."""

    codes: np.ndarray  # int8 [N, K]
    factors: tuple[np.ndarray, ...]  # float16 [N, K / span]: of scales, and of minimums where the format has them
    steps: tuple[np.ndarray, ...]  # int8 [N, K / group] of each, or none
    width: int  # bits that hold a code without loss, once the offset is added
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def span(self) -> int:
        return self.shape[1] // self.factors[0].shape[1]

    @property
    def group(self) -> int:
        return self.shape[1] // self.steps[0].shape[1] if self.steps else self.span

    @cached_property
    def scales(self) -> np.ndarray:
        """f32 [N, K / group]"""
        return scales_of(self.factors[0], self.steps[0] if self.steps else None)

    @cached_property
    def minimums(self) -> np.ndarray:
        """f32 [N, K / group], or [0, 0] where the format has none"""
        if len(self.factors) == 1:
            return np.empty((0, 0), np.float32)
        return scales_of(self.factors[1], self.steps[1] if self.steps else None)


Matrix = FloatMatrix | CodeMatrix


@dataclass(frozen=True)
class LayerWeights:
    """Matrices have a row an output. Gains already contain the 1 that Hugging Face's files leave out."""

    q: Matrix  # [H * E, D]
    k: Matrix  # [G * E, D]
    v: Matrix  # [G * E, D]
    o: Matrix  # [D, H * E]
    gate: Matrix  # [F, D]
    up: Matrix  # [F, D]
    down: Matrix  # [D, F]
    gains: Mapping[Norm, np.ndarray]  # f32 [D], or [E] of a head; only the norms that the layer has


@dataclass(frozen=True)
class Weights:
    embedding: Matrix  # [V, D]
    head: Matrix  # [V, D], the embedding itself where tied
    final_gain: np.ndarray  # [D]
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True)
class Names:
    """How a format calls its tensors. A layer's names hold a {} for its number."""

    embedding: str
    head: str
    final_norm: str
    matrices: Mapping[str, str]
    norms: Mapping[Norm, str]
    gain_offset: float  # what a stored gain lacks
    ignored: tuple[str, ...] = ()  # endings of tensors that mean nothing to the text model


GGUF_NAMES = Names(
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    {
        "q": "blk.{}.attn_q.weight",
        "k": "blk.{}.attn_k.weight",
        "v": "blk.{}.attn_v.weight",
        "o": "blk.{}.attn_output.weight",
        "gate": "blk.{}.ffn_gate.weight",
        "up": "blk.{}.ffn_up.weight",
        "down": "blk.{}.ffn_down.weight",
    },
    {
        Norm.ATTENTION: "blk.{}.attn_norm.weight",
        Norm.QUERY: "blk.{}.attn_q_norm.weight",
        Norm.KEY: "blk.{}.attn_k_norm.weight",
        Norm.ATTENTION_OUTPUT: "blk.{}.post_attention_norm.weight",
        Norm.FEED_FORWARD: "blk.{}.ffn_norm.weight",
        Norm.FEED_FORWARD_OUTPUT: "blk.{}.post_ffw_norm.weight",
    },
    gain_offset=0.0,
)


def hugging_face_names(tensors: Mapping[str, StoredTensor], config: Config, where: str) -> Names:
    """The names under the prefix that this checkpoint uses; a multimodal one keeps its text model deeper inside."""
    prefixes = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
    prefix = next((p for p in prefixes if f"{p}embed_tokens.weight" in tensors), None)
    if prefix is None:
        raise ConfigError(f"{where}: no tensor embed_tokens.weight under any known prefix")
    heads = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
    layer = prefix + "layers.{}."
    norms = {
        Norm.ATTENTION: f"{layer}input_layernorm.weight",
        Norm.QUERY: f"{layer}self_attn.q_norm.weight",
        Norm.KEY: f"{layer}self_attn.k_norm.weight",
        Norm.ATTENTION_OUTPUT: f"{layer}post_attention_layernorm.weight",
        Norm.FEED_FORWARD: f"{layer}pre_feedforward_layernorm.weight",
        Norm.FEED_FORWARD_OUTPUT: f"{layer}post_feedforward_layernorm.weight",
    }
    if Norm.ATTENTION_OUTPUT not in config.layers[0].norms:
        # Gemma 1 calls the norm in front of the feed-forward by its place after attention.
        norms[Norm.FEED_FORWARD] = norms[Norm.ATTENTION_OUTPUT]
    attention = {part: f"{layer}self_attn.{part}_proj.weight" for part in "qkvo"}
    feed_forward = {part: f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    return Names(
        f"{prefix}embed_tokens.weight",
        next((name for name in heads if name in tensors), heads[0]),
        f"{prefix}norm.weight",
        {**attention, **feed_forward},
        norms,
        gain_offset=1.0,
        ignored=(".rotary_emb.inv_freq",),
    )


def is_text_tensor(name: str) -> bool:
    """False for what belongs to other parts of a multimodal checkpoint."""
    others = ("vision_tower.", "multi_modal_projector.", "vision_model.", "embed_vision.", "v.", "mm.")
    return not name.removeprefix("model.").startswith(others)


def build_weights(tensors: Mapping[str, StoredTensor], config: Config, names: Names, where: str) -> Weights:
    """Every tensor the config asks for, and no other: a tensor left over means that the config is not its own."""
    source = _Source(tensors, config, names, where)
    D = config.hidden_size
    embedding = source.matrix(names.embedding, config.vocab_size, D)
    tied = config.tie_word_embeddings and not _differs(tensors, names)
    head = embedding if tied else source.matrix(names.head, config.vocab_size, D)
    final_gain = source.gain(names.final_norm, D)
    layers = tuple(source.layer(number, layer) for number, layer in enumerate(config.layers))
    source.used.add(names.head)  # some files store the shared matrix twice
    for name in tensors:
        if name not in source.used and is_text_tensor(name) and not name.endswith(names.ignored or ("\0",)):
            raise ConfigError(
                f"{where}: tensor {name!r:.80} is not part of a {config.model_type} model of {len(config.layers)} layers"
            )
    return Weights(embedding, head, final_gain, layers)


def _differs(tensors: Mapping[str, StoredTensor], names: Names) -> bool:
    """Whether a head is stored that is not the embedding. transformers uses it then, whatever the config says."""
    head, embedding = tensors.get(names.head), tensors.get(names.embedding)
    return head is not None and embedding is not None and not np.array_equal(head.data, embedding.data)


class _Source:
    """Takes tensors out by name and checks them on the way."""

    def __init__(self, tensors: Mapping[str, StoredTensor], config: Config, names: Names, where: str) -> None:
        self.tensors, self.config, self.names, self.where = tensors, config, names, where
        self.used: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self.where}: tensor {name!r:.80} is missing")
        if tensor.shape != shape:
            raise ConfigError(
                f"{tensor.where}: shape {list(shape)} expected from the config, found {list(tensor.shape)}"
            )
        self.used.add(name)
        return tensor

    def gain(self, name: str, width: int) -> np.ndarray:
        tensor = self.take(name, (width,))
        if tensor.type.quantised:
            raise ConfigError(f"{tensor.where}: a norm's gain should be a float type, found {tensor.type.name}")
        values = tensor.to_float32() + np.float32(self.names.gain_offset)
        if not np.isfinite(values).all():
            _not_finite(tensor)
        return values

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        tensor = self.take(name, (rows, columns))
        return _codes(tensor) if tensor.type.quantised else _floats(tensor)

    def layer(self, number: int, layer: Layer) -> LayerWeights:
        D, F = self.config.hidden_size, layer.intermediate_size
        HE, GE = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
        shapes = {"q": (HE, D), "k": (GE, D), "v": (GE, D), "o": (D, HE), "gate": (F, D), "up": (F, D), "down": (D, F)}
        matrices = {
            part: self.matrix(self.names.matrices[part].format(number), *shape) for part, shape in shapes.items()
        }
        widths = {Norm.QUERY: layer.head_dim, Norm.KEY: layer.head_dim}
        gains = {
            norm: self.gain(self.names.norms[norm].format(number), widths.get(norm, D))
            for norm in Norm
            if norm in layer.norms
        }
        return LayerWeights(**matrices, gains=gains)


def _not_finite(tensor: StoredTensor) -> NoReturn:
    raise FormatError(f"{tensor.where}: holds NaN or infinite values")


def _floats(tensor: StoredTensor) -> FloatMatrix:
    """Mapped as it is where the kernels can read it: f32, and bfloat16 as uint16. float16 is widened."""
    if tensor.type.name == "F16":
        values = tensor.to_float32()
    else:
        values = tensor.data.view("<u2" if tensor.type.name == "BF16" else "<f4").reshape(tensor.shape)
        values = np.require(values, requirements=["C", "A"])  # a copy where the file has it unaligned
    flat = values.reshape(-1)
    for first in range(0, flat.size, _CHUNK):
        part = flat[first : first + _CHUNK]
        finite = (part & np.uint16(0x7F80)) != np.uint16(0x7F80) if part.dtype == np.uint16 else np.isfinite(part)
        if not finite.all():
            _not_finite(tensor)
    values.flags.writeable = False
    return FloatMatrix(values)


def _codes(tensor: StoredTensor) -> CodeMatrix:
    """Unpacked to one int8 a weight, so that the arithmetic need not know formats."""
    kind, (N, K) = tensor.type, tensor.shape
    assert kind.unpack is not None
    codes, parts = np.empty((N, K), np.int8), []
    step = max(1, _CHUNK // K)
    for first in range(0, N, step):
        part = kind.unpack(tensor.blocks(first, min(first + step, N)))
        codes[first : first + step] = part.codes.reshape(-1, K)
        parts.append(part)
    factors = [np.concatenate([part.factor for part in parts]).reshape(N, -1)]
    if parts[0].minimum_factor is not None:
        minimums = np.concatenate([part.minimum_factor for part in parts]).reshape(N, -1)
        factors.append(-minimums if kind.minimum is Minimum.ADDED else minimums)
    found = [
        np.concatenate(of_all).reshape(N, -1)
        for of_all in ([part.steps for part in parts], [part.minimum_steps for part in parts])
        if of_all[0] is not None
    ]
    if not all(np.isfinite(values).all() for values in factors):
        _not_finite(tensor)
    for array in (codes, *factors, *found):
        array.flags.writeable = False
    return CodeMatrix(codes, tuple(factors), tuple(found), kind.width, kind.offset)
