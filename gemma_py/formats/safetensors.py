"""safetensors files, memory-mapped: a single file, or the shards that an index lists.

The `safetensors` package parses and validates every header. The package would copy tensors, and has no bfloat16 for numpy.
So this module returns views of the mapped file. The package reports the order, dtypes and shapes of the tensors, but not the
offsets. The tensors fill the file without gaps, so this module can compute the offsets.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from gemma_py.errors import FormatError, UnsupportedError
from gemma_py.formats.blocks import BF16, F16, F32
from gemma_py.formats.files import map_file, read_json
from gemma_py.formats.tensor import StoredTensor

_WEIGHTS = {"F32": F32, "F16": F16, "BF16": BF16}
# numpy has no bfloat16, so BF16 values are read as uint16.
NUMPY_TYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4", "I16": "<i2",
    "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
_MOST_DIMENSIONS = 16


class TensorEntry(NamedTuple):
    """A tensor in the bytes first .. last - 1 of a file."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


class Header(NamedTuple):
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    size: int


def read_header(path: Path, size: int) -> Header:
    """Read and validate the header of a file of `size` bytes. The entries are sorted by offset."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        message = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise FormatError(f"{path}: not a valid safetensors file: {message:.300}") from None
    described = {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices.items()}
    counts = {name: _bytes(path, name, dtype, shape) for name, (dtype, shape) in described.items()}
    start = first = size - sum(counts.values())
    if start < 8:
        raise FormatError(f"{path}: the file changed while it was read")
    entries = {}
    for name, (dtype, shape) in described.items():
        entries[name] = TensorEntry(dtype, shape, first, first + counts[name])
        first += counts[name]
    return Header(entries, metadata, start)


def _bytes(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in NUMPY_TYPES:
        raise UnsupportedError(
            f"{path}: tensor {name!r:.80} has the type {dtype!r:.40}; supported types are {', '.join(_WEIGHTS)}"
        )
    if len(shape) > _MOST_DIMENSIONS:
        raise FormatError(
            f"{path}: tensor {name!r:.80} has {len(shape)} dimensions; at most {_MOST_DIMENSIONS} are allowed"
        )
    return np.dtype(NUMPY_TYPES[dtype]).itemsize * math.prod(shape)


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the weights of one file by name. Integer, boolean and empty tensors are left out."""
    return {name: tensor for name, tensor in _read(path).items() if tensor is not None}


def _read(path: Path) -> dict[str, StoredTensor | None]:
    """Return the tensors of one file by name, with None for integer, boolean and empty tensors."""
    data = map_file(path)
    tensors: dict[str, StoredTensor | None] = {}
    for name, (dtype, shape, first, last) in read_header(path, len(data)).entries.items():
        kind = _WEIGHTS.get(dtype)
        tensors[name] = StoredTensor(name, kind, shape, data[first:last], path) if kind and last > first else None
    return tensors


def read_index(path: Path) -> dict[str, StoredTensor]:
    """Return the weights of a sharded checkpoint by name. path: the index, `model.safetensors.index.json`."""
    index = read_json(path)
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not table:
        raise FormatError(f"{path}: weight_map should map tensor names to files, found {table!r:.80}")
    tensors: dict[str, StoredTensor | None] = {}
    for file in sorted({_shard_name(path, name) for name in table.values()}):
        shard = path.parent / file
        if not shard.exists():
            raise FormatError(f"{shard}: the shard is missing, although {path.name} lists it")
        for name, tensor in _read(shard).items():
            if table.get(name) != file:
                raise FormatError(
                    f"{shard}: contains tensor {name!r:.80}, which is not listed for this file in {path.name}"
                )
            tensors[name] = tensor
    for name, file in table.items():
        if name not in tensors:
            raise FormatError(f"{path}: tensor {name!r:.80} is listed for {file}, which does not contain it")
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _shard_name(index: Path, name: Any) -> str:
    """Return a shard's file name. Raise FormatError if the file is not in the index's directory."""
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", "..") or len(name) > 255:
        raise FormatError(f"{index}: weight_map should name files beside the index, found {name!r:.80}")
    return name
