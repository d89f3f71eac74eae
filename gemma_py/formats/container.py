"""The format of gemma_py's cache files and saved conversations: safetensors with a checksum in the metadata.

The `safetensors` package reads these files. Its writer is not used, because the writer needs all tensors in memory at once
and cannot align the data to a page.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gemma_py.errors import FormatError
from gemma_py.formats.files import drop_pages, map_file
from gemma_py.formats.safetensors import NUMPY_TYPES, read_header

SUFFIX = ".safetensors"
_DIGEST, _NO_DIGEST = "sha256", "0" * 64
_BLOCK = 1 << 22


class Spec(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def dtype_name(kind: np.dtype) -> str:
    return next(name for name, known in NUMPY_TYPES.items() if np.dtype(known) == kind and name != "BF16")


def make_header(specs: Mapping[str, Spec], metadata: Mapping[str, str], alignment: int = 64) -> bytes:
    """Return a file's header, padded with spaces so that the first tensor begins at a multiple of `alignment`.

    The sha256 digest in the metadata is 64 zeros, which `with_digest` replaces.
    """
    table: dict[str, Any] = {"__metadata__": {_DIGEST: _NO_DIGEST, **metadata}}
    first = 0
    for name, (dtype, shape) in specs.items():
        last = first + np.dtype(NUMPY_TYPES[dtype]).itemsize * math.prod(shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}
        first = last
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    size = -(-(8 + len(text)) // alignment) * alignment
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def with_digest(header: bytes, digest: str) -> bytes:
    return header.replace(_digest_field(_NO_DIGEST), _digest_field(digest), 1)


def without_digest(header: bytes, metadata: Mapping[str, str]) -> bytes:
    """Return the header with zeros in place of the digest, as it was when the digest was computed."""
    return header.replace(_digest_field(metadata.get(_DIGEST, "")), _digest_field(_NO_DIGEST), 1)


def _digest_field(digest: str) -> bytes:
    return f'"{_DIGEST}":"{digest}"'.encode()


def write_arrays(
    file: BinaryIO, specs: Mapping[str, Spec], arrays: Iterable[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a file. Its sha256 is computed with zeros in place of the digest, and then written into the metadata.

    arrays: in the order of `specs`
    """
    header = make_header(specs, metadata)
    digest = hashlib.sha256(header)
    file.write(header)
    for (dtype, shape), array in zip(specs.values(), arrays, strict=True):
        assert array.shape == shape and array.dtype.itemsize == np.dtype(NUMPY_TYPES[dtype]).itemsize
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
        digest.update(data)
        file.write(data)
    file.seek(0)
    file.write(with_digest(header, digest.hexdigest()))


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return (memory-mapped arrays, metadata) of a file that `write_arrays` wrote. Raise FormatError for a wrong checksum."""
    data = map_file(path)
    header = read_header(path, len(data))
    if _DIGEST not in header.metadata:
        raise FormatError(f"{path}: not a file that gemma_py wrote, because its metadata has no sha256")
    digest = hashlib.sha256(without_digest(data[: header.size].tobytes(), header.metadata))
    for first in range(header.size, len(data), _BLOCK):
        digest.update(data[first : first + _BLOCK].data)
    drop_pages(data)
    if digest.hexdigest() != header.metadata.get(_DIGEST):
        raise FormatError(f"{path}: the file is damaged, because its content does not match its checksum")
    arrays = {
        name: data[first:last].view(NUMPY_TYPES[dtype]).reshape(shape)
        for name, (dtype, shape, first, last) in header.entries.items()
    }
    return arrays, header.metadata
