"""safetensors, memory-mapped: one file, or many with an index.

The `safetensors` package cannot give bfloat16 to numpy and copies what it gives; a header of JSON is all there is to read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gemma_py.errors import FormatError, UnsupportedError
from gemma_py.formats.blocks import BF16, F16, F32
from gemma_py.formats.files import map_file, parse_json, read_json
from gemma_py.formats.tensor import StoredTensor

HEADER_LIMIT = 32 << 20  # bytes; a model of a thousand tensors needs 200 KB
_READABLE = {"F32": F32, "F16": F16, "BF16": BF16}
# Counters, masks and the like, which are nobody's weights. (No text weight is a double or has 8 bits: those are refused.)
_OTHER_BITS = {"I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8}


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one file, by name. Tensors of types that no text weight has are left out."""
    return {name: tensor for name, tensor in _read(path).items() if tensor is not None}


def _read(path: Path) -> dict[str, StoredTensor | None]:
    """None stands for a tensor of a type that no text weight has, or of no values."""

    def fail(message: str) -> NoReturn:
        raise FormatError(f"{path}: {message}")

    data = map_file(path)
    if len(data) < 8:
        fail(f"a safetensors file begins with 8 bytes of length, found {len(data)} in all")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > HEADER_LIMIT:
        fail(f"a header of {length} bytes; {HEADER_LIMIT} are allowed")
    if length > len(data) - 8:
        fail(f"a header of {length} bytes is larger than the file of {len(data)}")
    header = parse_json(data[8 : 8 + length].tobytes(), f"{path}: header")
    if not isinstance(header, dict):
        fail("the header is not a JSON object")
    header.pop("__metadata__", None)
    body = data[8 + length :]
    spans = []
    tensors: dict[str, StoredTensor | None] = {}
    for name, entry in header.items():
        kind, bits, shape, first, last = _entry(path, name, entry, fail)
        size = bits
        for dim in shape:
            size *= dim
        if size != (last - first) * 8:
            fail(f"tensor {name!r:.80}: {entry['dtype']} of shape {shape} takes {size // 8} bytes, not {last - first}")
        if last > len(body):
            fail(f"tensor {name!r:.80} ends at byte {last} of the data, but the data has {len(body)}")
        spans.append((first, last, name))
        readable = kind is not None and last > first
        tensors[name] = StoredTensor(name, kind, tuple(shape), body[first:last], path) if readable else None
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            problem = "overlaps the tensor before it" if first < end else "leaves a gap before it"
            fail(f"tensor {name!r:.80} at offset {first} {problem}: {end} expected")
        end = last
    if end != len(body):
        fail(f"{len(body) - end} bytes stand after the last tensor")
    return tensors


def _entry(path: Path, name: str, entry: Any, fail: Callable[[str], NoReturn]) -> tuple[Any, int, list[int], int, int]:
    """(type or None, bits a value, shape, first byte, last byte) of one header entry."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        fail(f"tensor {name!r:.80}: expected dtype, shape and data_offsets, found {entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63

    if not isinstance(shape, list) or not all(map(whole, shape)) or len(shape) > 16:
        fail(f"tensor {name!r:.80}: shape should be a list of whole numbers, found {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(whole, offsets)) or offsets[0] > offsets[1]:
        fail(f"tensor {name!r:.80}: data_offsets should be [first, last], found {offsets!r:.80}")
    if isinstance(dtype, str) and dtype in _READABLE:
        kind = _READABLE[dtype]
        return kind, kind.bytes * 8, shape, offsets[0], offsets[1]
    if not isinstance(dtype, str) or dtype not in _OTHER_BITS:
        raise UnsupportedError(
            f"{path}: tensor {name!r:.80}: the type {dtype!r:.40}; readable are {', '.join(_READABLE)}"
        )
    return None, _OTHER_BITS[dtype], shape, offsets[0], offsets[1]


def read_index(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a sharded checkpoint (`model.safetensors.index.json`)."""
    index = read_json(path)
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not table:
        raise FormatError(f"{path}: weight_map should map tensor names to files")
    tensors: dict[str, StoredTensor | None] = {}
    for file in sorted({_shard_name(path, name) for name in table.values()}):
        shard = path.parent / file
        if not shard.exists():
            raise FormatError(f"{shard}: this shard is missing, {path.name} names it")
        for name, tensor in _read(shard).items():
            if table.get(name) != file:
                raise FormatError(f"{shard}: tensor {name!r:.80} is not listed for this file in {path.name}")
            tensors[name] = tensor
    for name, file in table.items():
        if name not in tensors:
            raise FormatError(f"{path}: tensor {name!r:.80} is not in {file}, which should hold it")
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _shard_name(index: Path, name: Any) -> str:
    """A plain file name: an index must not lead out of its directory."""
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", "..") or len(name) > 255:
        raise FormatError(f"{index}: weight_map should name files beside it, found {name!r:.80}")
    return name
