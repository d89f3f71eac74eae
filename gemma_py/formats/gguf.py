"""A memory-mapped reader of GGUF files, which validates every field.

The layout of a file is: magic, version, counts, metadata (key, type, value)*, tensor records (name, dims, type,
offset)*, padding, data. Before memory is allocated for a count, the count is compared with the remaining bytes of the
file.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np

from gemma_py.errors import FormatError, UnsupportedError
from gemma_py.formats.blocks import TYPES
from gemma_py.formats.files import drop_pages, map_file
from gemma_py.formats.tensor import StoredTensor

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_SMALLEST_FIELD = 8 + 4 + 1  # bytes: 8 for the key's length, 4 for the type, 1 for the smallest value
_SMALLEST_RECORD = 8 + 4 + 8 + 4 + 8  # bytes of: the name's length, the rank, one dimension, the type, the offset
_LARGEST_ALIGNMENT = 1 << 16
_MOST_STRINGS = 1 << 24  # limit on the strings in an array; Gemma 3's vocabulary has 2^18
_SEARCH_MINIMUM = 1000  # smaller arrays are read string by string
_SEARCH_BYTES = 20  # bytes to search per string; a vocabulary's strings take fewer on average, including the length
_MOST_FALSE_LENGTHS = 64  # `_find_strings` gives up after removing this many false lengths
# Bytes that `_find_strings` searches at once. Searching a whole vocabulary at once would leave 10 MiB of freed memory in the
# process.
_SEARCH_STEP = 1 << 16
_LARGEST_SHARD_COUNT = 99_999

# GGML's type numbers. Unsupported types are listed too, because error messages name these types.
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFFile:
    """The content of a GGUF file, or of all its shards.

    metadata: maps a key to a scalar, a str, a numpy array, or a sequence of str
    tensors: maps a name to a tensor, in file order
    """

    paths: tuple[Path, ...]
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class Texts(Sequence[str]):
    """A sequence of strings in a mapped file. Strings are decoded on access, to avoid decoding a whole vocabulary."""

    def __init__(self, data: memoryview, places: np.ndarray, lengths: np.ndarray) -> None:
        self._data, self._places, self._lengths = data, places, lengths

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, number: int) -> str: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[str]: ...

    def __getitem__(self, number: int | slice) -> str | Sequence[str]:
        if isinstance(number, slice):
            return Texts(self._data, self._places[number], self._lengths[number])
        first = int(self._places[number])
        return str(self._data[first : first + int(self._lengths[number])], "utf-8")


def _find_strings(data: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Find `count` consecutive strings. Return (starts, lengths), or None if the search fails.

    In a GGUF file, a string follows its length, a uint64. A length below 256 is one byte and seven zeros, so the search
    looks for seven zeros. If a string itself has seven zeros, the byte before these zeros looks like a length. Such a false
    length is removed: unlike a true length, it does not begin where the previous string ends.
    """
    # Neighbouring parts overlap by seven bytes, so that a length whose zeros lie in the next part is found, and only once.
    starts = range(0, len(data), _SEARCH_STEP)
    at = np.concatenate([start + _find_lengths(data[start : start + _SEARCH_STEP + 7]) for start in starts])
    for _ in range(_MOST_FALSE_LENGTHS):
        if len(at) < count or at[0] != 0:
            return None
        following = at + 8 + data[at]
        wrong = np.flatnonzero(following[: count - 1] != at[1:count])
        if not len(wrong):
            return at[:count] + 8, data[at[:count]]
        first = int(wrong[0])
        true = int(np.searchsorted(at, following[first]))
        at = np.delete(at, slice(first + 1, max(true, first + 2)))
    return None


def _find_lengths(data: np.ndarray) -> np.ndarray:
    """Return the index of every byte that is followed by seven zero bytes."""
    zeros = data == 0
    for step in (1, 2, 3):
        # zeros[i] tells whether a run of zero bytes begins at i: a run of 2 after the first round, then of 4, then of 7.
        zeros = zeros[:-step] & zeros[step:]
    return np.flatnonzero(zeros[1:])


def _is_utf8(data: np.ndarray) -> bool:
    try:
        str(data.data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


class _Cursor:
    """A reader that moves forward through the mapped bytes and never beyond the end of the file."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self.at, self.size = path, 0, len(data)
        self.bytes = memoryview(data.data)

    def fail(self, message: str) -> NoReturn:
        raise FormatError(f"{self.path}: {message}")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            self.fail(f"{what} needs {count} bytes at offset {self.at}, but the file ends at {self.size}")

    def scalar(self, form: str, what: str) -> Any:
        size = struct.calcsize(form)
        self.need(size, what)
        (value,) = struct.unpack_from(form, self.bytes, self.at)
        self.at += size
        return value

    def text(self, what: str) -> str:
        length = self.scalar("<Q", f"the length of {what}")
        self.need(length, what)
        raw = bytes(self.bytes[self.at : self.at + length])
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason} at byte {error.start}")

    def texts(self, count: int, what: str) -> Sequence[str]:
        """Read `count` strings. Short valid strings, as in a vocabulary, are found and checked all at once by numpy. Other
        strings are read one by one.
        """
        window = np.frombuffer(self.bytes, np.uint8)[self.at : self.at + _SEARCH_BYTES * count]
        found = _find_strings(window, count) if count >= _SEARCH_MINIMUM else None
        if found is not None:
            places, lengths = found
            end = int(places[-1]) + int(lengths[-1])
            # A length below 128 is a character of its own. So if the region is UTF-8, including the lengths between the
            # strings, every string is UTF-8.
            if end <= len(window) and int(lengths.max()) < 128 and _is_utf8(window[:end]):
                made = Texts(self.bytes[self.at : self.at + end], places, lengths)
                self.at += end
                return made
        return self._texts_one_by_one(count, what)

    def _texts_one_by_one(self, count: int, what: str) -> list[str]:
        data, at, size = self.bytes, self.at, self.size
        out: list[str] = []
        length_of = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                (length,) = length_of(data, at)
                at += 8
                if length > size - at:
                    self.fail(f"{what}, element {len(out)}: {length} bytes at offset {at}, but the file ends at {size}")
                out.append(str(data[at : at + length], "utf-8"))
                at += length
        except struct.error:
            self.fail(f"{what} has {count} elements, but the file ends in element {len(out)}")
        except UnicodeDecodeError as error:
            self.fail(f"{what}, element {len(out)}: not UTF-8: {error.reason}")
        self.at = at
        return out

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            if _SCALARS[kind] == "<?":
                return self.flag(what)
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what)
        self.fail(f"{what} has the unknown type {kind}")

    def flag(self, what: str) -> bool:
        value = self.scalar("<B", what)
        if value > 1:
            self.fail(f"{what} is a boolean of value {value}; 0 or 1 is expected")
        return bool(value)

    def array(self, what: str) -> Any:
        kind = self.scalar("<I", f"the element type of {what}")
        count = self.scalar("<Q", f"the length of {what}")
        if kind == _STRING:
            if count > _MOST_STRINGS:
                self.fail(f"{what} has {count} strings; at most {_MOST_STRINGS} are allowed")
            self.need(8 * count, f"{what} of {count} strings")
            return self.texts(count, what)
        if kind == _ARRAY:
            raise UnsupportedError(f"{self.path}: {what} is an array of arrays, which is not supported")
        if kind not in _SCALARS:
            self.fail(f"{what} has elements of the unknown type {kind}")
        form = np.dtype(np.uint8 if _SCALARS[kind] == "<?" else _SCALARS[kind])
        self.need(form.itemsize * count, f"{what} of {count} elements")
        values = np.frombuffer(self.bytes, form, count, self.at)
        self.at += values.nbytes
        return values


def read_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file. A file whose name ends in `-00001-of-0000N.gguf` is read together with its other shards."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None:
        file = _read_one(path)
        count = _integer(file.metadata, "split.count", path, 1)
        if count > 1:
            raise FormatError(
                f"{path}: the file is one of {count} shards, but its name does not end in -0000N-of-{count:05}.gguf"
            )
        return file
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= _LARGEST_SHARD_COUNT:
        raise FormatError(
            f"{path}: the file name says shard {match[2]} of {match[3]}; the numbers should be 1 to {_LARGEST_SHARD_COUNT}"
        )
    names = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    for name in names:
        if not name.exists():
            raise FormatError(f"{name}: the shard is missing; all {count} shards are needed")
    return _join([_read_one(name) for name in names])


def _integer(metadata: dict[str, Any], key: str, path: Path, default: int) -> int:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FormatError(f"{path}: {key} should be a non-negative integer, found {value!r:.60}")
    return value


def _join(shards: list[GGUFFile]) -> GGUFFile:
    first = shards[0]
    tensors: dict[str, StoredTensor] = {}
    for number, shard in enumerate(shards):
        path = shard.paths[0]
        if _integer(shard.metadata, "split.count", path, 0) != len(shards):
            raise FormatError(f"{path}: split.count should be {len(shards)}, found {shard.metadata.get('split.count')}")
        if _integer(shard.metadata, "split.no", path, 0) != number:
            raise FormatError(f"{path}: split.no should be {number}, found {shard.metadata.get('split.no')}")
        for name, tensor in shard.tensors.items():
            if name in tensors:
                raise FormatError(f"{path}: tensor {name!r} is in two shards, this shard and {tensors[name].path}")
            tensors[name] = tensor
    expected = _integer(first.metadata, "split.tensors.count", first.paths[0], len(tensors))
    if expected != len(tensors):
        raise FormatError(f"{first.paths[0]}: {expected} tensors expected in all shards together, found {len(tensors)}")
    return GGUFFile(tuple(shard.paths[0] for shard in shards), first.version, first.metadata, tensors)


def _read_one(path: Path) -> GGUFFile:
    data = map_file(path)
    cursor = _Cursor(path, data)
    if bytes(data[:4]) != b"GGUF":
        cursor.fail("not a GGUF file, because the file does not begin with 'GGUF'")
    cursor.at = 4
    version = cursor.scalar("<I", "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (2, 3):
            raise UnsupportedError(f"{path}: a big-endian GGUF file; only little-endian files are supported")
        raise UnsupportedError(f"{path}: GGUF version {version}; versions 2 and 3 are supported")
    tensor_count = cursor.scalar("<Q", "the number of tensors")
    field_count = cursor.scalar("<Q", "the number of metadata fields")
    cursor.need(field_count * _SMALLEST_FIELD, f"metadata of {field_count} fields")
    metadata: dict[str, Any] = {}
    for number in range(field_count):
        key = cursor.text(f"the key of metadata field {number}")
        if key in metadata:
            cursor.fail(f"the metadata field {key!r:.80} appears twice")
        kind = cursor.scalar("<I", f"the type of {key!r:.80}")
        metadata[key] = cursor.value(kind, f"the metadata field {key!r:.80}")
    alignment = _integer(metadata, "general.alignment", path, 32)
    if not 1 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"general.alignment should be a power of two up to {_LARGEST_ALIGNMENT}, found {alignment}")
    cursor.need(tensor_count * _SMALLEST_RECORD, f"a table of {tensor_count} tensors")
    tensors = _read_tensors(cursor, data, tensor_count, alignment)
    drop_pages(data)
    return GGUFFile((path,), version, metadata, tensors)


def _read_tensors(cursor: _Cursor, data: np.ndarray, count: int, alignment: int) -> dict[str, StoredTensor]:
    records = {}
    for number in range(count):
        name = cursor.text(f"the name of tensor {number}")
        what = f"tensor {name!r:.80}"
        if name in records:
            cursor.fail(f"{what} appears twice")
        rank = cursor.scalar("<I", f"the rank of {what}")
        if not 1 <= rank <= 4:
            cursor.fail(f"{what} has rank {rank}; ranks 1 to 4 are allowed")
        dims = [cursor.scalar("<Q", f"dimension {axis} of {what}") for axis in range(rank)]
        number_of_type = cursor.scalar("<I", f"the type of {what}")
        offset = cursor.scalar("<Q", f"the offset of {what}")
        type_name = _TYPE_NAMES.get(number_of_type)
        if type_name is None:
            cursor.fail(f"{what} has the unknown type {number_of_type}")
        if type_name not in TYPES:
            raise UnsupportedError(
                f"{cursor.path}: {what} is of type {type_name}; supported types are {', '.join(TYPES)}"
            )
        kind = TYPES[type_name]
        size = kind.bytes
        for dim in dims:  # a product of Python integers cannot overflow
            size *= dim
        if size == 0 or size // kind.block > len(data):
            cursor.fail(f"{what} of shape {dims[::-1]} takes {size // kind.block} bytes, but the file has {len(data)}")
        if dims[0] % kind.block:
            cursor.fail(
                f"{what} has rows of {dims[0]} values, which is not a multiple of {type_name}'s block size {kind.block}"
            )
        records[name] = (kind, tuple(reversed(dims)), offset, size // kind.block)
    if not records:
        return {}  # the first shard may contain only metadata
    start = -(-cursor.at // alignment) * alignment
    end = 0
    tensors = {}
    for name, (kind, shape, offset, size) in sorted(records.items(), key=lambda item: item[1][2]):
        expected = -(-end // alignment) * alignment
        if offset != expected:
            problem = "overlaps the tensor before it" if offset < end else "leaves a gap before it"
            cursor.fail(f"tensor {name!r:.80} at offset {offset} {problem}; offset {expected} expected")
        end = offset + size
        if start + end > len(data):
            cursor.fail(f"tensor {name!r:.80} ends at byte {start + end}, but the file ends at {len(data)}")
        tensors[name] = StoredTensor(name, kind, shape, data[start + offset : start + end], cursor.path)
    if len(data) - start - end > alignment:
        cursor.fail(
            f"{len(data) - start - end} bytes follow the last tensor; at most {alignment} bytes of padding are allowed"
        )
    return {name: tensors[name] for name in records}
