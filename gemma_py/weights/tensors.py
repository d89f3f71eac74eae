"""A checkpoint's tensors as the weights of a model: named, shaped, checked, and laid out for the arithmetic."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NoReturn, TypeVar

import numpy as np

from gemma_py.errors import ConfigError, FormatError, InputError
from gemma_py.formats.blocks import QUANTS, Minimum, scales_of
from gemma_py.formats.tensor import QuantisedTensor, StoredTensor
from gemma_py.models.config import Config, Layer, Norm

_CHUNK = 1 << 19  # values looked at or unpacked at a time: what numpy makes on the way stays in the caches
_RUN = 64  # rows of a part are a multiple of this, so that whoever lays parts out in panels never sees a part of four


@dataclass(frozen=True)
class FloatMatrix:
    """values: [N, K], f32, or uint16 holding bfloat16."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True)
class CodeMatrix:
    """A value is scale * code - minimum; each scale and minimum is its block's, times a sub-scale in formats that have them."""

    codes: np.ndarray  # int8 [N, K]
    block_scales: tuple[np.ndarray, ...]  # float16 [N, K / block]: of scales, and of minimums where the format has them
    sub_scales: tuple[np.ndarray, ...]  # int8 [N, K / group] of each, or none
    width: int  # bits that hold a code without loss, once the offset is added
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def block(self) -> int:
        return self.shape[1] // self.block_scales[0].shape[1]

    @property
    def group(self) -> int:
        return self.shape[1] // self.sub_scales[0].shape[1] if self.sub_scales else self.block

    @cached_property
    def scales(self) -> np.ndarray:
        """f32 [N, K / group]"""
        return scales_of(self.block_scales[0], self.sub_scales[0] if self.sub_scales else None)

    @cached_property
    def minimums(self) -> np.ndarray:
        """f32 [N, K / group], or [0, 0] where the format has none"""
        if len(self.block_scales) == 1:
            return np.empty((0, 0), np.float32)
        return scales_of(self.block_scales[1], self.sub_scales[1] if self.sub_scales else None)


Matrix = FloatMatrix | CodeMatrix


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix that is still in its file: named and shaped, its values unread."""

    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def rows(self, first: int, last: int) -> Matrix:
        """These rows, read and checked."""
        quantised = self.tensor.type.quantised
        return _code_rows(self.tensor, first, last) if quantised else _float_rows(self.tensor, first, last)

    def parts(self) -> Iterator[tuple[int, Matrix]]:
        """All rows in runs of moderate size, each with the number of its first row, a multiple of 16."""
        N, K = self.shape
        step = max(1, _CHUNK // (K * _RUN)) * _RUN
        for first in range(0, N, step):
            yield first, self.rows(first, min(first + step, N))


M = TypeVar("M", Matrix, StoredMatrix)


@dataclass(frozen=True)
class LayerWeights(Generic[M]):
    """Matrices have a row an output. Gains already contain the 1 that Hugging Face's files leave out."""

    q: M  # [H * E, D]
    k: M  # [G * E, D]
    v: M  # [G * E, D]
    o: M  # [D, H * E]
    gate: M  # [F, D]
    up: M  # [F, D]
    down: M  # [D, F]
    gains: Mapping[Norm, np.ndarray]  # f32 [D], or [E] of a head; only the norms that the layer has

    @property
    def matrices(self) -> tuple[M, ...]:
        return self.q, self.k, self.v, self.o, self.gate, self.up, self.down


@dataclass(frozen=True)
class Weights(Generic[M]):
    embedding: M  # [V, D]
    head: M  # [V, D], the embedding itself where tied
    final_gain: np.ndarray  # [D]
    layers: tuple[LayerWeights[M], ...]

    @property
    def matrices(self) -> tuple[M, ...]:
        """Each once, in the order in which they are laid out."""
        made = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        for layer in self.layers:
            made += layer.matrices
        return tuple(made)


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


def build_weights(
    tensors: Mapping[str, StoredTensor],
    config: Config,
    names: Names,
    where: str,
    read: Callable[[StoredTensor], M],
    quant: str | None = None,
) -> Weights[M]:
    """Every tensor the config asks for, and no other: a tensor left over means that the config is not its own.

    read: `whole`, or StoredMatrix to leave the matrices in their file. Gains, which are small, are read in any case.
    quant: of QUANTS, what matrices of floats are packed to; None leaves all as it is stored.
    """
    source = _Source(tensors, config, names, where, read, quant)
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


def stays_float(quant: str, tensor: StoredTensor) -> bool:
    """A matrix whose rows are not whole blocks, which no converter packs either."""
    return len(tensor.shape) == 2 and tensor.shape[1] % QUANTS[quant].block != 0


def packed_to(quant: str | None, tensor: StoredTensor) -> StoredTensor:
    """The matrix as blocks of that type, where it can be."""
    if quant is None:
        return tensor
    if tensor.type.quantised:
        raise InputError(f"{tensor.where}: quant {quant!r} wants float weights, found {tensor.type.name} already")
    if stays_float(quant, tensor):
        return tensor
    return QuantisedTensor(tensor.name, QUANTS[quant], tensor.shape, tensor.data, tensor.path, tensor)


class _Source(Generic[M]):
    """Takes tensors out by name and checks them on the way."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        config: Config,
        names: Names,
        where: str,
        read: Callable[[StoredTensor], M],
        quant: str | None,
    ) -> None:
        self.tensors, self.config, self.names, self.where = tensors, config, names, where
        self.read: Callable[[StoredTensor], M] = read
        self.quant = quant
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

    def matrix(self, name: str, rows: int, columns: int) -> M:
        return self.read(packed_to(self.quant, self.take(name, (rows, columns))))

    def layer(self, number: int, layer: Layer) -> LayerWeights[M]:
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


def whole(tensor: StoredTensor) -> Matrix:
    """The matrix for the specification: floats mapped as they are where that is possible, codes unpacked."""
    stored = StoredMatrix(tensor)
    N = stored.shape[0]
    if not tensor.type.quantised:
        return _float_rows(tensor, 0, N)
    parts = [part for _, part in stored.parts() if isinstance(part, CodeMatrix)]
    block_scales = tuple(np.concatenate(of_all) for of_all in zip(*(part.block_scales for part in parts), strict=True))
    sub_scales = tuple(np.concatenate(of_all) for of_all in zip(*(part.sub_scales for part in parts), strict=True))
    codes = np.concatenate([part.codes for part in parts])
    for array in (codes, *block_scales, *sub_scales):
        array.flags.writeable = False
    return CodeMatrix(codes, block_scales, sub_scales, tensor.type.width, tensor.type.offset)


def _float_rows(tensor: StoredTensor, first: int, last: int) -> FloatMatrix:
    """Mapped as it is where the kernels can read it: f32, and bfloat16 as uint16. float16 is widened."""
    shape = (last - first, tensor.shape[1])
    blocks = tensor.blocks(first, last)
    if tensor.type.name == "F16":
        values = tensor.type.dequantise(blocks).reshape(shape)
    else:
        values = blocks.reshape(-1).view("<u2" if tensor.type.name == "BF16" else "<f4").reshape(shape)
        values = np.require(values, requirements=["C", "A"])  # a copy where the file has it unaligned
    flat = values.reshape(-1)
    for at in range(0, flat.size, _CHUNK):
        part = flat[at : at + _CHUNK]
        finite = (part & np.uint16(0x7F80)) != np.uint16(0x7F80) if part.dtype == np.uint16 else np.isfinite(part)
        if not finite.all():
            _not_finite(tensor)
    values.flags.writeable = False
    return FloatMatrix(values)


def _code_rows(tensor: StoredTensor, first: int, last: int) -> CodeMatrix:
    """Unpacked to one int8 a weight, so that the arithmetic need not know formats."""
    kind, K = tensor.type, tensor.shape[1]
    assert kind.unpack is not None
    part = kind.unpack(tensor.blocks(first, last))
    block_scales = [part.block_scale.reshape(last - first, -1)]
    if part.minimum_block_scale is not None:
        minimums = part.minimum_block_scale.reshape(last - first, -1)
        block_scales.append(-minimums if kind.minimum is Minimum.ADDED else minimums)
    sub_scales = [
        made.reshape(last - first, -1) for made in (part.sub_scales, part.minimum_sub_scales) if made is not None
    ]
    if not all(np.isfinite(values).all() for values in block_scales):
        _not_finite(tensor)
    return CodeMatrix(part.codes.reshape(-1, K), tuple(block_scales), tuple(sub_scales), kind.width, kind.offset)
