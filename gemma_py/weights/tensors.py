"""A checkpoint's tensors as the weights of a model: names, shapes and values are checked, codes are unpacked."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import numpy as np

from gemma_py.errors import ConfigError, FormatError, InputError
from gemma_py.formats.blocks import QUANTS, Minimum, scales_of
from gemma_py.formats.files import FileState, advise_random, file_state
from gemma_py.formats.tensor import QuantisedTensor, StoredTensor
from gemma_py.models.program import Tensor

_CHUNK = (
    1 << 19
)  # values that are checked or unpacked at a time, so that numpy's temporary arrays stay in the processor's caches
_RUN = 64  # rows of a run are a multiple of this, and so whole panels and groups of panels


@dataclass(frozen=True)
class FloatMatrix:
    """values: [N, K], f32, or uint16 holding bfloat16."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True)
class CodeMatrix:
    """A value is scale * code - minimum. A scale or minimum is that of its block, times a sub-scale in formats that have them."""

    codes: np.ndarray  # int8 [N, K]
    block_scales: tuple[np.ndarray, ...]  # float16 [N, K / block]: of scales, and of minimums where the format has them
    sub_scales: tuple[np.ndarray, ...]  # int8 [N, K / group] of each, or none
    width: int  # bits of a code after the offset is added
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
    """A matrix in its file: name and shape are checked, the values are not read yet."""

    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def rows(self, first: int, last: int) -> Matrix:
        """Read and check these rows."""
        quantised = self.tensor.type.quantised
        return _code_rows(self.tensor, first, last) if quantised else _float_rows(self.tensor, first, last)

    def parts(self) -> Iterator[tuple[int, Matrix]]:
        """All rows in runs of moderate size, each with the number of its first row, a multiple of 64."""
        N, K = self.shape
        step = max(1, _CHUNK // (K * _RUN)) * _RUN
        for first in range(0, N, step):
            yield first, self.rows(first, min(first + step, N))

    def whole(self) -> Matrix:
        """The whole matrix, for the specification: floats are memory-mapped where possible, codes are unpacked."""
        if not self.tensor.type.quantised:
            return _float_rows(self.tensor, 0, self.shape[0])
        parts = [part for _, part in self.parts() if isinstance(part, CodeMatrix)]
        block_scales = tuple(np.concatenate(of_all) for of_all in zip(*(p.block_scales for p in parts), strict=True))
        sub_scales = tuple(np.concatenate(of_all) for of_all in zip(*(p.sub_scales for p in parts), strict=True))
        codes = np.concatenate([part.codes for part in parts])
        for array in (codes, *block_scales, *sub_scales):
            array.flags.writeable = False
        return CodeMatrix(codes, block_scales, sub_scales, self.tensor.type.width, self.tensor.type.offset)


@dataclass(frozen=True)
class GatheredTable:
    """A matrix of which a pass reads the rows of its tokens, from the checkpoint's mapped file and in that file's type.

    It is neither packed nor ever read as a whole, because a table of per-layer inputs is as large as all other weights
    together and a token needs one row of it. What the file has in these rows when they are read decides the result, so
    a file that was changed in place since is refused.
    """

    matrix: StoredMatrix
    state: FileState | None  # None: the tensor is in no file

    @classmethod
    def of(cls, tensor: StoredTensor) -> "GatheredTable":
        advise_random(tensor.data)
        return cls(StoredMatrix(tensor), file_state(tensor.path))

    def gather(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """rows[t] = row ids[t] of the table, or row 0 where the table has no such row.

        ids: int64 [T], read   rows: f32 [T, K], written; the same bits as `reference.operations.matrix_row`
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


# A matrix in its file that will be packed, one that stays there, or a gain, f32 [width].
Stored = StoredMatrix | GatheredTable | np.ndarray
# By the family's names. lm_head is embed_tokens itself where they are tied; a gathered table is a StoredMatrix.
Weights = Mapping[str, Matrix | StoredMatrix | np.ndarray]
StoredWeights = Mapping[str, Stored]
_WRAPPERS = re.compile(r"((?:language_)?model\.)*")  # what a multimodal checkpoint has in front of a tensor's name
_IGNORED = (".rotary_emb.inv_freq",)  # endings of tensors that are not used
_OTHER_PARTS = ("vision_tower", "vision_model", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio", "v",
                "a", "mm")  # fmt: skip
EMBEDDING, HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True)
class Source:
    """A checkpoint's tensors, and which of them the family needs.

    specs: the family's tensors. names: the checkpoint's name of each of them. plus_one: gains are stored without their 1.
    """

    tensors: Mapping[str, StoredTensor]
    specs: Mapping[str, Tensor]
    names: Mapping[str, str]
    plus_one: bool
    tied: bool  # the head is the embedding, unless the checkpoint has a head that differs
    where: str


def gguf_source(tensors: Mapping[str, StoredTensor], specs: Mapping[str, Tensor], tied: bool, where: str) -> Source:
    """A tensor that holds several matrices is replaced by these matrices, each under a name of its own."""
    tensors, names = dict(tensors), {name: spec.gguf for name, spec in specs.items()}
    for name, spec in specs.items():
        if spec.stack is not None and spec.gguf in tensors:
            part = _part_of_stack(tensors[spec.gguf], spec)
            names[name] = part.name
            tensors[part.name] = part
    for whole in {spec.gguf for spec in specs.values() if spec.stack is not None}:
        tensors.pop(whole, None)
    return Source(tensors, specs, names, False, tied, where)


def _part_of_stack(tensor: StoredTensor, spec: Tensor) -> StoredTensor:
    """One of the matrices of a tensor [count, N, K]."""
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
    tensors: Mapping[str, StoredTensor], specs: Mapping[str, Tensor], tied: bool, where: str
) -> Source:
    """The names of the text model have a prefix, which is found by the embedding's name; the head may have another one."""
    by_own_name = {_without_wrappers(name): name for name in tensors}
    embedding = specs[EMBEDDING].hugging_face
    if embedding not in by_own_name:
        raise ConfigError(f"{where}: no tensor {embedding} under any known prefix")
    prefix = by_own_name[embedding].removesuffix(embedding)
    names = {name: prefix + spec.hugging_face for name, spec in specs.items()}
    if HEAD in specs:
        names[HEAD] = by_own_name.get(specs[HEAD].hugging_face, specs[HEAD].hugging_face)
    return Source(tensors, specs, names, True, tied, where)


def _without_wrappers(name: str) -> str:
    return _WRAPPERS.sub("", name, count=1)


def other_part(name: str) -> str | None:
    """The part of a multimodal checkpoint that the tensor belongs to, for instance "vision_tower"; None for the text model."""
    part = _without_wrappers(name).split(".")[0]
    return part if part in _OTHER_PARTS else None


def stored_weights(source: Source, quant: str | None = None) -> dict[str, Stored]:
    """The tensors that the family needs. A further tensor is an error, because it means that the config describes another model.

    Matrices stay in their file; gains, which are small, are read. Names, shapes and types are checked.
    quant: the type in QUANTS that float matrices are quantised to; None leaves them as they are.
    """
    weights: dict[str, Stored] = {}
    for name, spec in source.specs.items():
        if name == HEAD and source.tied and not _differs(source):
            weights[HEAD] = weights[EMBEDDING]
            continue
        if spec.unused:
            continue
        tensor = _take(source, source.names[name], spec.shape)
        if spec.gathered:
            weights[name] = GatheredTable.of(tensor)
        elif len(spec.shape) == 2:
            weights[name] = StoredMatrix(quantised_to(quant, tensor))
        else:
            weights[name] = _gain(tensor, source.plus_one and spec.plus_one)
    used = {*source.names.values()}  # the head too: some files store the shared matrix twice
    for name in source.tensors:
        if name not in used and not name.endswith(_IGNORED):
            raise ConfigError(f"{source.where}: tensor {name!r:.80} is not part of the model that the config describes")
    return weights


def read_weights(stored: StoredWeights) -> dict[str, Matrix | StoredMatrix | np.ndarray]:
    """All weights in memory, for the specification; gathered tables stay in their file."""
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
    """The matrices in the order of the packed weights. A matrix with two names (a tied head) is there once."""
    return list({id(part): part for part in stored.values() if isinstance(part, StoredMatrix)}.values())


def _take(source: Source, name: str, shape: tuple[int, ...]) -> StoredTensor:
    tensor = source.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"{source.where}: tensor {name!r:.80} is missing")
    if tensor.shape != shape:
        raise ConfigError(f"{tensor.where}: shape {list(shape)} expected from the config, found {list(tensor.shape)}")
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
    """Whether the checkpoint has a head that differs from the embedding. transformers then uses it, whatever the config says."""
    head, embedding = (source.tensors.get(source.names[name]) for name in (HEAD, EMBEDDING))
    return head is not None and embedding is not None and not np.array_equal(head.data, embedding.data)


def stays_float(quant: str, tensor: StoredTensor) -> bool:
    """Whether the matrix stays float because its rows are not whole blocks. No converter quantises such a matrix either."""
    return len(tensor.shape) == 2 and tensor.shape[1] % QUANTS[quant].block != 0


def quantised_to(quant: str | None, tensor: StoredTensor) -> StoredTensor:
    """The matrix quantised to that type, if its rows are whole blocks."""
    if quant is None:
        return tensor
    if tensor.type.quantised:
        raise InputError(f"{tensor.where}: quant {quant!r} needs float weights, found {tensor.type.name}")
    if stays_float(quant, tensor):
        return tensor
    return QuantisedTensor(tensor.name, QUANTS[quant], tensor.shape, tensor.data, tensor.path, tensor)


def _not_finite(tensor: StoredTensor) -> NoReturn:
    raise FormatError(f"{tensor.where}: holds NaN or infinite values")


def _float_rows(tensor: StoredTensor, first: int, last: int) -> FloatMatrix:
    """Float rows: f32, and bfloat16 as uint16, are memory-mapped; float16 is widened to f32."""
    shape = (last - first, tensor.shape[1])
    blocks = tensor.blocks(first, last)
    if tensor.type.name == "F16":
        values = tensor.type.dequantise(blocks).reshape(shape)
    else:
        values = blocks.reshape(-1).view("<u2" if tensor.type.name == "BF16" else "<f4").reshape(shape)
        values = np.require(values, requirements=["C", "A"])  # a copy where the data is unaligned in the file
    flat = values.reshape(-1)
    for at in range(0, flat.size, _CHUNK):
        part = flat[at : at + _CHUNK]
        finite = (part & np.uint16(0x7F80)) != np.uint16(0x7F80) if part.dtype == np.uint16 else np.isfinite(part)
        if not finite.all():
            _not_finite(tensor)
    values.flags.writeable = False
    return FloatMatrix(values)


def _code_rows(tensor: StoredTensor, first: int, last: int) -> CodeMatrix:
    """Quantised rows, unpacked to one int8 a weight, so that the arithmetic does not depend on formats."""
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
