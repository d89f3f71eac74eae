import struct
from collections.abc import Sequence

import numpy as np

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def record(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    head = text(name) + struct.pack("<I", len(dims))
    return head + b"".join(struct.pack("<Q", dim) for dim in dims) + struct.pack("<IQ", kind, offset)


def assemble(fields: Sequence[bytes], records: Sequence[bytes], data: bytes, alignment: int = 32, **head: int) -> bytes:
    counts = struct.pack("<QQ", head.get("tensor_count", len(records)), head.get("field_count", len(fields)))
    start = b"GGUF" + struct.pack("<I", head.get("version", 3)) + counts + b"".join(fields) + b"".join(records)
    return start + b"\0" * (-len(start) % alignment) + data


def small() -> bytes:
    """A valid file with two tensors and a few fields. The second tensor ends at the end of the file."""
    fields = [
        field("general.architecture", STRING, text("gemma3")),
        field("a.number", U32, struct.pack("<I", 7)),
        field("a.flag", BOOL, b"\1"),
        field("a.list", ARRAY, struct.pack("<IQ", STRING, 3) + text("x") + text("") + text("ü")),
        field("a.table", ARRAY, struct.pack("<IQ", F32, 2) + struct.pack("<ff", 1.5, -2.0)),
    ]
    records = [record("first", [8, 3], 0, 0), record("second", [32], 8, 96)]
    return assemble(fields, records, np.arange(24, dtype="<f4").tobytes() + bytes(range(34)))
