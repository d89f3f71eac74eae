"""What attention works on: the ring of keys and values, blocks of queries and the keys that they see, and its scratch."""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.simd.target import USES_ZMM

TILE = 32  # keys between two updates of the running maximum; tiles begin at multiples of it
LANES = 16
QUERY_BLOCK = 64  # queries of a block, at most
FEW_QUERIES = 8  # a block of at most so many computes its scores with keys in the lanes
ROWS, VECTORS = (8, 2) if USES_ZMM else (4, 1)  # of a tile of totals: as many chains as the machine has registers for
COLUMNS = VECTORS * LANES


class Ring(NamedTuple):
    """The keys and values of a layer. Element e of head g at position t has the index

        start + t % capacity * row_stride + g * head_stride + e

    A layout of [capacity, G, E] has row_stride = G * E and head_stride = E; one of [G, capacity, E] has row_stride = E and
    head_stride = capacity * E. The latter is faster: rows that lie a multiple of 4 KiB apart evict each other from the
    first cache.
    """

    keys: np.ndarray  # flat arena, f32, or uint16 holding bfloat16
    values: np.ndarray  # the same
    start: int
    capacity: int  # rows
    row_stride: int
    head_stride: int
    G: int  # key/value heads
    E: int  # width of a head


class AttentionParams(NamedTuple):
    """What turns a dot product q * k into a score, and which keys a query sees."""

    H: int  # query heads
    window: int  # keys that a query sees, its own included; a huge number: all
    scale: np.float32
    cap: np.float32  # soft cap of scores, 0 for none


class ScratchLayout(NamedTuple):
    """Where each part of a worker's scratch begins. The last five parts have one number a query."""

    q: int  # [QUERY_BLOCK / COLUMNS, E, COLUMNS]: the queries, transposed
    out: int  # [QUERY_BLOCK, E]: the weighted sum of values so far
    scores: (
        int  # [TILE + ROWS, QUERY_BLOCK]: scores of a tile of keys, then their weights; the last ROWS rows are padding
    )
    starts: int  # the first key that a query sees, as the bits of an int32
    positions: int  # a query's own position, as the bits of an int32
    maximum: int  # of the scores so far
    weight_sum: int  # of the weights so far
    rescale: int  # factor by which the sums so far shrink because the maximum grew
    end: int


@inlined
def scratch_layout(E):
    out = QUERY_BLOCK * E
    scores = 2 * out
    starts = scores + (TILE + ROWS) * QUERY_BLOCK
    positions, maximum = starts + QUERY_BLOCK, starts + 2 * QUERY_BLOCK
    weight_sum, rescale = starts + 3 * QUERY_BLOCK, starts + 4 * QUERY_BLOCK
    return ScratchLayout(0, out, scores, starts, positions, maximum, weight_sum, rescale, starts + 5 * QUERY_BLOCK)


def scratch_size(E: int) -> int:
    """How many floats of scratch a worker needs for heads of at most this width."""
    return scratch_layout.py_func(E).end


class Block(NamedTuple):
    """A block of queries, as a range of numbers: query n is head n % heads at position origin + n // heads."""

    first: int
    used: int  # queries first .. first + used - 1
    heads: int  # query heads that share the key/value head
    origin: int  # position of row 0
    window: int  # keys that a query sees
    left: int  # columns left .. right - 1 of each head are computed
    right: int


@inlined
def keys_of_all(block, lane, end):
    """(first, last + 1) of the keys that every query of lane .. end - 1 sees; none if last + 1 <= first."""
    first = block.origin + (block.first + lane) // block.heads
    last = block.origin + (block.first + end - 1) // block.heads
    return max(np.int64(0), last - block.window + 1), first + 1


@inlined
def keys_of_any(block, lane, end):
    """(first, last + 1) of the keys that at least one query of lane .. end - 1 sees. There always is one: its own."""
    first = block.origin + (block.first + lane) // block.heads
    last = block.origin + (block.first + end - 1) // block.heads
    return max(np.int64(0), first - block.window + 1), last + 1
