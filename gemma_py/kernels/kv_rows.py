"""How a row of keys or values is stored: as float32, as bfloat16, or in 8 bits (q8_0). bfloat16 is converted when it is
loaded. Rows of q8_0 are unpacked to float32 before attention reads them, a tile at a time.

A q8_0 row of E numbers has E codes of one byte, and then a scale in bfloat16 for each block of 32 codes. The last block may
be shorter.

    scale  = (largest magnitude of the block) / 127, rounded up to bfloat16
    code   = round(number / scale)
    number = scale * code

The product of a code and a scale has at most 15 significant bits, so float32 holds it exactly. A block with a NaN or an
infinity gets the scale NaN.
"""

import numpy as np

from gemma_py.kernels.attention_layout import TILE, Ring
from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.intrinsics import bits_of_f32, f32_of_bits
from gemma_py.kernels.simd.vectors import (
    floats_of,
    holds_codes,
    load,
    load_bf16,
    load_scalar,
    mul,
    prefetch_to_l2,
    splat,
    store,
    store_bf16,
    store_scalar,
)

BLOCK = 32
_LANES = 16
_LINE = 64  # bytes of a cache line
_F = np.float32
_LARGEST_CODE, _ROUND, _ZERO, _NAN = _F(127.0), _F(12582912.0), _F(0.0), _F(np.nan)
_LARGEST_F32_BITS = np.int32(0x7F7FFFFF)


@inlined
def row_size(rows, E):
    """Return how many elements of the array `rows` hold one row of E numbers."""
    return E + 2 * ((E + BLOCK - 1) // BLOCK) if holds_codes(rows) else E


@inlined
def store_row(rows, at, E, x, source):
    """Store x[source : source + E] to rows[at:].

    rows: f32, uint16 that holds bfloat16, or int8 that holds q8_0 rows; written
    x: f32, read
    """
    if holds_codes(rows):
        for first in range(0, E, BLOCK):
            last = min(first + BLOCK, E)
            scale = _scale_of(x, source + first, source + last)
            store_bf16(rows, at + E + first // BLOCK * 2, scale)
            for e in range(first, last):
                code = _ZERO
                if scale > _ZERO:  # false if the scale is NaN
                    code = (x[source + e] / scale + _ROUND) - _ROUND
                store_scalar(rows, at + e, code)
    else:
        for e in range(E):
            store_scalar(rows, at + e, x[source + e])


@inlined
def _scale_of(x, first, last):
    largest = np.int32(0)
    for at in range(first, last):
        largest = max(largest, np.int32(bits_of_f32(x[at]) & np.int32(0x7FFFFFFF)))
    scale = f32_of_bits(largest) / _LARGEST_CODE if largest <= _LARGEST_F32_BITS else _NAN
    return f32_of_bits(np.int32((bits_of_f32(scale) + np.int32(0xFFFF)) & np.int32(-0x10000)))


@inlined
def _load_row(rows, at, E, left, right, out, to):
    """Store columns left .. right - 1 of a q8_0 row as floats to out[to + left : to + right]. left: a multiple of 16

    rows: int8, read
    out: f32, written
    """
    whole = right - (right - left) % _LANES
    for e in range(left, whole, _LANES):
        scale = load_bf16(rows, at + E + 2 * (e // BLOCK))
        store(out, to + e, mul(load(rows, at + e), splat(scale)))
    for e in range(whole, right):
        out[to + e] = load_scalar(rows, at + e) * load_bf16(rows, at + E + 2 * (e // BLOCK))


@inlined
def readable_tile(ring, base, rows, begin, end, block, scratch, layout):
    """Return (ring, base) from which keys or values of positions begin .. end - 1 can be loaded as floats.

    If `rows`, which is ring.keys or ring.values, holds q8_0 rows, columns block.left .. block.right - 1 are unpacked to the
    scratch, and the rows of the next tile are prefetched. A tile begins at a multiple of TILE, so TILE unpacked rows are a
    ring of their own.
    """
    keys, values = floats_of(ring.keys, scratch), floats_of(ring.values, scratch)
    if not holds_codes(rows):
        return Ring(keys, values, ring.start, ring.capacity, ring.row_stride, ring.head_stride, ring.G, ring.E), base
    for t in range(begin, end):
        row, to = base + t % ring.capacity * ring.row_stride, layout.unpacked + t % TILE * ring.E
        for line in range(0, ring.row_stride, _LINE):
            prefetch_to_l2(rows, row + TILE * ring.row_stride + line)
        _load_row(rows, row, ring.E, block.left, block.right, scratch, to)
    return Ring(keys, values, layout.unpacked, TILE, ring.E, 0, ring.G, ring.E), layout.unpacked
