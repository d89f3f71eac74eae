"""Reading of a model's weights from a checkpoint's tensors. Names, shapes and values are checked."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn, Protocol

import numpy as np

from gemma_py.errors import ConfigError, FormatError, InputError
from gemma_py.formats.blocks import QUANTS, Minimum, scales_of
from gemma_py.formats.files import FileState, advise_random, file_state
from gemma_py.formats.tensor import QuantisedTensor, StoredTensor
from gemma_py.models.program import Tensor

# The number of values that are checked or unpacked at a time. With so few, numpy's temporary arrays fit into the processor's
# caches.
_CHUNK = 1 << 19
# `parts` divides a matrix at multiples of this many rows, because a part must consist of whole groups of four panels.
_RUN = 64


@dataclass(frozen=True)
class FloatMatrix:
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True)
class CodeMatrix:
    """A quantised matrix, in which a weight is scale * code - minimum.

    The scale of a group of weights is the block's scale times the group's sub-scale. In a format without sub-scales, a
    block has one group. Minimums are stored like scales, but some formats have none.
    """

    codes: np.ndarray  # int8 [N, K]
    block_scales: tuple[np.ndarray, ...]  # float16 [N, K / block]: scales, then minimums if the format has any
    sub_scales: tuple[np.ndarray, ...]  # int8 [N, K / group] for each array of block_scales, or empty
    width: int  # a panel stores the sum code + offset in this number of bits
    offset: int  # added to every code, so that no code of less than 8 bits is stored as a negative number

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
        """The scale of each group, f32 [N, K / group]."""
        return scales_of(self.block_scales[0], self.sub_scales[0] if self.sub_scales else None)

    @cached_property
    def minimums(self) -> np.ndarray:
        if len(self.block_scales) == 1:
            return np.empty((0, 0), np.float32)
        return scales_of(self.block_scales[1], self.sub_scales[1] if self.sub_scales else None)


Matrix = FloatMatrix | CodeMatrix


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix whose name and shape are checked, and whose values are still in the checkpoint's file.

    first, count: an expert's matrix is the rows first .. first + count - 1 of the tensor. If the matrix is the whole tensor,
    count is None.
    """

    tensor: StoredTensor
    first: int = 0
    count: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0] if self.count is None else self.count, self.tensor.shape[-1]

    @property
    def of_expert(self) -> bool:
        """Whether this is an expert's matrix, which a pass reads only if the expert is chosen."""
        return self.count is not None

    @property
    def data(self) -> np.ndarray:
        rows, bytes_ = math.prod(self.tensor.shape[:-1]), self.tensor.data.reshape(-1)
        per_row = len(bytes_) // rows
        return bytes_[self.first * per_row : (self.first + self.shape[0]) * per_row]

    def rows(self, first: int, last: int) -> Matrix:
        """Read rows first .. last - 1, and check the values."""
        first, last = self.first + first, self.first + last
        quantised = self.tensor.type.quantised
        return _code_rows(self.tensor, first, last) if quantised else _float_rows(self.tensor, first, last)

    def parts(self) -> Iterator[tuple[int, Matrix]]:
        """Yield the matrix in parts of consecutive rows, each with the number of the part's first row, a multiple of 64."""
        N, K = self.shape
        step = max(1, _CHUNK // (K * _RUN)) * _RUN
        for first in range(0, N, step):
            yield first, self.rows(first, min(first + step, N))

    def whole(self) -> Matrix:
        """Return the whole matrix, for the specification. Codes are unpacked; floats are memory-mapped if possible."""
        if not self.tensor.type.quantised:
            return self.rows(0, self.shape[0])
        parts = [part for _, part in self.parts() if isinstance(part, CodeMatrix)]
        block_scales = tuple(np.concatenate(of_all) for of_all in zip(*(p.block_scales for p in parts), strict=True))
        sub_scales = tuple(np.concatenate(of_all) for of_all in zip(*(p.sub_scales for p in parts), strict=True))
        codes = np.concatenate([part.codes for part in parts])
        for array in (codes, *block_scales, *sub_scales):
            array.flags.writeable = False
        return CodeMatrix(codes, block_scales, sub_scales, self.tensor.type.width, self.tensor.type.offset)


class RowTable(Protocol):
    """A table from which one row for each token of a pass is copied to a buffer, before the kernel starts."""

    def gather(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Write the row for ids[t] to rows[t].    ids: int64 [T], read   rows: f32 [T, K], written"""


@dataclass(frozen=True)
class GatheredTable:
    """A matrix that stays in the checkpoint's file. A pass reads only its tokens' rows, in the type of the file.

    The table of per-layer inputs is as large as all other weights together, and a token needs one row, so packing the table
    would waste memory and disk space. If the file has changed since loading, `gather` raises FormatError.
    """

    matrix: StoredMatrix
    state: FileState | None  # None if the matrix is not in a file, as with the random weights of a benchmark

    @classmethod
    def of(cls, tensor: StoredTensor) -> "GatheredTable":
        advise_random(tensor.data)
        return cls(StoredMatrix(tensor), file_state(tensor.path))

    def gather(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Copy row ids[t] of the table to rows[t]. An id beyond the last row selects row 0.

        ids: int64 [T], read   rows: f32 [T, K], written
        """
        tensor, (N, K) = self.matrix.tensor, self.matrix.shape
        found = file_state(tensor.path)
        if self.state and found and found.file == self.state.file and found != self.state:
            raise FormatError(f"{tensor.where}: the file was changed while it was in use; load the model again")
        blocks = tensor.data.reshape(N, -1)
        ids = np.where(ids < N, ids, 0)
        step = max(1, _CHUNK // K)
        for first in range(0, len(ids), step):
            part = blocks[ids[first : first + step]].reshape(-1, tensor.type.bytes)
            rows[first : first + step] = tensor.type.dequantise(part).reshape(-1, K)
        if not np.isfinite(rows).all():
            _not_finite(tensor)


Stored = StoredMatrix | GatheredTable | np.ndarray  # an array is the gain of a norm, f32 [width]
# The unpacked weights by name. Tied embeddings are one matrix under two names. A table that stays in the file (see
# `GatheredTable`) is a StoredMatrix.
Weights = Mapping[str, Matrix | StoredMatrix | np.ndarray]
StoredWeights = Mapping[str, Stored]
_WRAPPERS = re.compile(r"((?:language_)?model\.)*")  # prefixes of tensor names in multimodal checkpoints
_IGNORED = (".rotary_emb.inv_freq",)  # tensors whose names have these endings are ignored, because no model uses them
_OTHER_PARTS = ("vision_tower", "vision_model", "vision_embedder", "multi_modal_projector", "embed_vision", "audio_tower",
                "embed_audio", "v", "a", "mm")  # fmt: skip
EMBEDDING, HEAD = "embed_tokens", "lm_head"
# The prefix of the names of an embedding model's dense layers. Each dense layer is in a file of its own.
DENSE = "dense."
# An assistant's tensors outside the text model, whose names have no prefix.
_OUTSIDE = ("pre_projection", "post_projection")


@dataclass(frozen=True)
class Source:
    """A checkpoint's tensors, and the tensors that the model family expects.

    specs: the expected tensors. names: for each expected tensor, its name in the checkpoint. fused: the expected tensors
    that are a part of a larger tensor in the checkpoint, see `Tensor.part`.
    plus_one: whether this format stores gain - 1, instead of the gain, for tensors whose `Tensor.plus_one` is set.
    tied: whether the embedding matrix is also the output matrix, unless the checkpoint has another output matrix.
    unused: the names of tensors that the checkpoint may have although the model does not use them.
    """

    tensors: Mapping[str, StoredTensor]
    specs: Mapping[str, Tensor]
    names: Mapping[str, str]
    plus_one: bool
    tied: bool
    where: str
    unused: Collection[str] = ()
    fused: frozenset[str] = frozenset()


def gguf_source(
    tensors: Mapping[str, StoredTensor],
    specs: Mapping[str, Tensor],
    tied: bool,
    where: str,
    unused: Collection[str] = (),
) -> Source:
    """Return the source for GGUF. A tensor [count, N, K] (see `Tensor.stack`) becomes `count` tensors [N, K]."""
    fused = frozenset(name for name, spec in specs.items() if spec.gguf_fused and spec.gguf_fused in tensors)
    tensors = dict(tensors)
    names = {name: spec.gguf_fused if name in fused else spec.gguf for name, spec in specs.items()}
    for name, spec in specs.items():
        if spec.stack is not None and spec.gguf in tensors:
            part = _part_of_stack(tensors[spec.gguf], spec)
            names[name] = part.name
            tensors[part.name] = part
    for whole in {spec.gguf for spec in specs.values() if spec.stack is not None}:
        tensors.pop(whole, None)
    return Source(tensors, specs, names, False, tied, where, unused, fused)


def _part_of_stack(tensor: StoredTensor, spec: Tensor) -> StoredTensor:
    """Return matrix `number` of a tensor [count, N, K], where (number, count) is `spec.stack`."""
    if tensor.shape != spec.gguf_shape:
        raise ConfigError(
            f"{tensor.where}: shape {list(spec.gguf_shape)} expected from the config, found {list(tensor.shape)}"
        )
    assert spec.stack is not None
    number, count = spec.stack
    size = len(tensor.data) // count
    data = tensor.data[number * size : (number + 1) * size]
    return replace(tensor, name=f"{tensor.name}[{number}]", shape=spec.shape, data=data)


def hugging_face_source(
    tensors: Mapping[str, StoredTensor],
    specs: Mapping[str, Tensor],
    tied: bool,
    where: str,
    unused: Collection[str] = (),
) -> Source:
    """Return the source for safetensors.

    In a multimodal checkpoint, the names of the text model's tensors have a prefix. The name of the embedding shows which
    prefix the tensors have, but the output head may have another prefix.
    """
    by_own_name = {_without_wrappers(name): name for name in tensors}
    embedding = specs[EMBEDDING].hugging_face
    if embedding not in by_own_name:
        raise ConfigError(f"{where}: tensor {embedding} of the text model is missing")
    prefix = by_own_name[embedding].removesuffix(embedding)
    names = {name: prefix + spec.hugging_face for name, spec in specs.items()}
    if HEAD in specs:
        names[HEAD] = by_own_name.get(specs[HEAD].hugging_face, specs[HEAD].hugging_face)
    names |= {name: spec.hugging_face for name, spec in specs.items() if name.startswith((DENSE, *_OUTSIDE))}
    fused = frozenset(name for name, spec in specs.items() if spec.part[1] > 1)
    unused = {*unused, *(prefix + name for name in unused)}
    return Source(tensors, specs, names, True, tied, where, unused, fused)


def _without_wrappers(name: str) -> str:
    return _WRAPPERS.sub("", name, count=1)


def other_part(name: str) -> str | None:
    """Return the part of a multimodal checkpoint to which a tensor belongs, such as "vision_tower". For the text model,
    return None.
    """
    part = _without_wrappers(name).split(".")[0]
    return part if part in _OTHER_PARTS else None


def stored_weights(source: Source, quant: str | None = None) -> dict[str, Stored]:
    """Return the tensors that the model family expects, after checking names, shapes and types.

    Gains are read; the values of matrices stay in the file. A tensor that the family does not expect raises ConfigError,
    because the config then describes another model than the weights.
    quant: the type, a key of QUANTS, to which float matrices are quantised, or None.
    """
    weights: dict[str, Stored] = {}
    for name, spec in source.specs.items():
        if name == HEAD and source.tied and not _differs(source):
            weights[HEAD] = weights[EMBEDDING]
            continue
        tensor = _take(source, source.names[name], _stored_shape(source, name))
        if len(spec.shape) == 3:
            weights |= _experts(source, name, tensor, quant)
        elif spec.gathered:
            weights[name] = GatheredTable.of(tensor)
        elif len(spec.shape) == 2:
            weights[name] = StoredMatrix(tensor if spec.stays_float else quantised_to(quant, tensor))
        else:
            weights[name] = _gain(tensor, source.plus_one and spec.plus_one)
    # `source.names` includes the output head, because some files with tied embeddings store the matrix twice.
    used = {*source.names.values(), *source.unused}
    for name in source.tensors:
        if name not in used and not name.endswith(_IGNORED):
            raise ConfigError(f"{source.where}: tensor {name!r:.80} is not part of the model that the config describes")
    return weights


def read_weights(stored: StoredWeights) -> dict[str, Matrix | StoredMatrix | np.ndarray]:
    """Read all weights, for the specification. The matrix of a `GatheredTable` stays in the file."""
    whole: dict[int, Matrix] = {}
    made: dict[str, Matrix | StoredMatrix | np.ndarray] = {}
    for name, part in stored.items():
        if isinstance(part, GatheredTable):
            made[name] = part.matrix
        elif isinstance(part, StoredMatrix):
            made[name] = whole[id(part)] = whole.get(id(part)) or part.whole()
        else:
            made[name] = part
    return made


def matrices_of(stored: StoredWeights) -> list[StoredMatrix]:
    """Return the matrices in the order in which they are packed. Tied embeddings, which have two names, occur once."""
    return list({id(part): part for part in stored.values() if isinstance(part, StoredMatrix)}.values())


def _stored_shape(source: Source, name: str) -> tuple[int, ...]:
    """Return the shape that the tensor of this name should have in the checkpoint."""
    shape = source.specs[name].shape
    return (shape[0], source.specs[name].part[1] * shape[1], shape[2]) if name in source.fused else shape


def _experts(source: Source, name: str, tensor: StoredTensor, quant: str | None) -> dict[str, Stored]:
    """Return the matrix of each expert, as NAME.0, NAME.1 and so on."""
    (experts, N, _), (part, parts) = source.specs[name].shape, source.specs[name].part
    if name not in source.fused:
        part, parts = 0, 1
    stored = quantised_to(quant, tensor)
    return {f"{name}.{expert}": StoredMatrix(stored, (expert * parts + part) * N, N) for expert in range(experts)}


def _take(source: Source, name: str, shape: tuple[int, ...]) -> StoredTensor:
    tensor = source.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"{source.where}: tensor {name!r:.80} is missing")
    if tensor.shape != shape:
        raise ConfigError(
            f"{tensor.where}: the shape should be {list(shape)} according to the config, found {list(tensor.shape)}"
        )
    return tensor


def _gain(tensor: StoredTensor, plus_one: bool) -> np.ndarray:
    if tensor.type.quantised:
        raise ConfigError(f"{tensor.where}: a norm's gain should be a float type, found {tensor.type.name}")
    values = tensor.to_float32()
    if plus_one:
        values = values + np.float32(1)
    if not np.isfinite(values).all():
        _not_finite(tensor)
    return values


def _differs(source: Source) -> bool:
    """Return whether the checkpoint has an output head other than the embedding.

    transformers uses such a head even if the config says tie_word_embeddings.
    """
    head, embedding = (source.tensors.get(source.names[name]) for name in (HEAD, EMBEDDING))
    return head is not None and embedding is not None and not np.array_equal(head.data, embedding.data)


def stays_float(quant: str, tensor: StoredTensor) -> bool:
    """Return whether the matrix must stay float, because its rows are not whole blocks."""
    return len(tensor.shape) > 1 and tensor.shape[-1] % QUANTS[quant].block != 0


def quantised_to(quant: str | None, tensor: StoredTensor) -> StoredTensor:
    """Return the matrix quantised to `quant`. If quant is None or the matrix cannot be quantised, return it unchanged."""
    if quant is None:
        return tensor
    if tensor.type.quantised:
        raise InputError(f"{tensor.where}: quant {quant!r} needs float weights, found {tensor.type.name} weights")
    if stays_float(quant, tensor):
        return tensor
    return QuantisedTensor(tensor.name, QUANTS[quant], tensor.shape, tensor.data, tensor.path, tensor)


def _not_finite(tensor: StoredTensor) -> NoReturn:
    raise FormatError(f"{tensor.where}: holds NaN or infinite values")


def _float_rows(tensor: StoredTensor, first: int, last: int) -> FloatMatrix:
    """Read rows of a float tensor. float32 and bfloat16 (as uint16) stay memory-mapped; float16 is converted to float32."""
    shape = (last - first, tensor.shape[-1])
    blocks = tensor.blocks(first, last)
    if tensor.type.name == "F16":
        values = tensor.type.dequantise(blocks).reshape(shape)
    else:
        values = blocks.reshape(-1).view("<u2" if tensor.type.name == "BF16" else "<f4").reshape(shape)
        values = np.require(values, requirements=["C", "A"])  # copies the data only if it is unaligned in the file
    flat = values.reshape(-1)
    for at in range(0, flat.size, _CHUNK):
        part = flat[at : at + _CHUNK]
        finite = (part & np.uint16(0x7F80)) != np.uint16(0x7F80) if part.dtype == np.uint16 else np.isfinite(part)
        if not finite.all():
            _not_finite(tensor)
    values.flags.writeable = False
    return FloatMatrix(values)


def _code_rows(tensor: StoredTensor, first: int, last: int) -> CodeMatrix:
    """Read rows of a quantised tensor, and unpack the codes to one int8 per weight."""
    kind, K = tensor.type, tensor.shape[-1]
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
