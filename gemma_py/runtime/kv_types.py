"""The number types of the KV cache: how many bytes a row takes, and how its numbers are read in Python."""

from typing import NamedTuple

import numpy as np

from gemma_py.errors import InputError
from gemma_py.kernels.kv_rows import BLOCK


class KvType(NamedTuple):
    name: str
    dtype: type  # of the arrays that hold the rows
    # An element that makes all numbers of a row NaN if the whole row is filled with it. The bytes 0xFF are a scale of NaN.
    poison: float | int

    def row_size(self, E: int) -> int:
        """Return how many elements of the arrays hold one row of E numbers."""
        return E + 2 * -(-E // BLOCK) if self.dtype == np.int8 else E

    def row_bytes(self, E: int) -> int:
        return self.row_size(E) * np.dtype(self.dtype).itemsize

    def floats(self, rows: np.ndarray, E: int) -> np.ndarray:
        """Return the numbers of rows [..., row size] as float32 [..., E]."""
        if self.dtype == np.uint16:
            return _widened(rows)
        if self.dtype == np.int8:
            scales = _widened(np.ascontiguousarray(rows[..., E:]).view(np.uint16))
            return rows[..., :E] * scales.repeat(BLOCK, -1)[..., :E]
        return rows


def _widened(bf16: np.ndarray) -> np.ndarray:
    return (bf16.astype(np.uint32) << np.uint32(16)).view(np.float32)


# bfloat16 is stored as its bit pattern in uint16. See kernels/kv_rows.py for q8_0.
KV_TYPES = {
    kv.name: kv
    for kv in (
        KvType("float32", np.float32, np.nan),
        KvType("bfloat16", np.uint16, 0x7FC0),
        KvType("q8_0", np.int8, -1),
    )
}


def check_kv_type(kv: object) -> None:
    if not isinstance(kv, str) or kv not in KV_TYPES:
        raise InputError(f"kv should be one of {', '.join(KV_TYPES)}, found {kv!r:.40}")
