"""Data structures of attention: the ring of keys and values, query blocks, and the layout of a worker's scratch."""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.simd.target import USES_ZMM

# The number of keys in a tile. The softmax maximum is updated once per tile. A tile begins at a multiple of 32.
TILE = 32
LANES = 16
QUERY_BLOCK = 64  # the most queries in a block
# In a block of at most FEW_QUERIES queries, vectors have one lane for each key, not for each query. More than four queries are
# computed KEY_LANE_QUERIES at a time.
FEW_QUERIES, KEY_LANE_QUERIES = (16, 8) if USES_ZMM else (8, 4)
# Rows and vectors of the largest tile of sums that fits in the registers.
ROWS, VECTORS = (8, 2) if USES_ZMM else (4, 1)
COLUMNS = VECTORS * LANES


class Ring(NamedTuple):
    """A layer's keys and values in a ring buffer. Element e of head g at position t has the index

        start + t % capacity * row_stride + g * head_stride + e

    In the layout [capacity, G, E], row_stride is G * E, and head_stride is E. In the layout [G, capacity, E], row_stride is
    E, and head_stride is capacity * E. The second layout is faster. In the first layout, neighbouring rows of a head are
    G * E elements apart. If this distance is a multiple of 4 KiB, the rows evict each other from the L1 cache.
    Rows of q8_0 (see kv_rows.py) are longer than E elements, and so are the distances.

    G: number of key/value heads, E: width of a head
    """

    keys: np.ndarray  # f32, uint16 that holds bfloat16, or int8 that holds q8_0 rows
    values: np.ndarray  # an array like `keys`
    start: int
    capacity: int  # rows
    row_stride: int
    head_stride: int
    G: int
    E: int


class AttentionParams(NamedTuple):
    """How a dot product q . k becomes a score, and which keys a query sees."""

    H: int  # query heads
    # A query sees the key at its own position, window - 1 keys before it and `ahead` keys after it.
    window: int  # a huge number for full attention
    ahead: int  # 0 in causal attention
    length: int  # number of positions of the sequence, beyond which there are no keys
    scale: np.float32
    cap: np.float32  # soft cap of scores; 0 means no cap


class ScratchLayout(NamedTuple):
    """The indices at which the parts of a worker's scratch begin.

    The parts `starts`, `lasts`, `maximum`, `weight_sum` and `rescale` hold one number per query.
    """

    q: int  # [QUERY_BLOCK / COLUMNS, E, COLUMNS]: the transposed queries
    out: int  # [QUERY_BLOCK, E]: the weighted sum of the values so far
    unpacked: int  # [TILE, E]: the keys or the values of a tile as floats, if they are stored in another form
    scores: int  # [TILE + ROWS, QUERY_BLOCK]: scores of a tile, later weights; the last ROWS rows are padding
    starts: int  # the position of the first key that each query sees, as the bits of an int32
    lasts: int  # the position of the last key that each query sees, as the bits of an int32
    maximum: int  # the maximum of each query's scores so far
    weight_sum: int  # the sum of each query's weights so far
    rescale: int  # exp(old maximum - new maximum), by which the query's earlier sums are multiplied
    end: int


@inlined
def scratch_layout(E):
    out = QUERY_BLOCK * E
    unpacked = 2 * out
    scores = unpacked + TILE * E
    starts = scores + (TILE + ROWS) * QUERY_BLOCK
    lasts, maximum = starts + QUERY_BLOCK, starts + 2 * QUERY_BLOCK
    weight_sum, rescale = starts + 3 * QUERY_BLOCK, starts + 4 * QUERY_BLOCK
    return ScratchLayout(
        0, out, unpacked, scores, starts, lasts, maximum, weight_sum, rescale, starts + 5 * QUERY_BLOCK
    )


def scratch_size(E: int) -> int:
    """Return how many f32 numbers of scratch a worker needs for heads of at most E columns."""
    return scratch_layout.py_func(E).end


class Block(NamedTuple):
    """A block of queries. Query n is head n % heads at position origin + n // heads."""

    first: int
    used: int  # the number of queries, which are first .. first + used - 1
    heads: int  # number of query heads that share the key/value head
    origin: int  # position of row 0 of q and out
    window: int  # window, ahead and length: as in AttentionParams
    ahead: int
    length: int
    left: int  # columns left .. right - 1 of each head are computed
    right: int


@inlined
def keys_of_all(block, lane, end):
    """Return (first, last + 1) of the keys that each of the queries lane .. end - 1 sees.

    There are no such keys if last + 1 <= first.
    """
    first = block.origin + (block.first + lane) // block.heads
    last = block.origin + (block.first + end - 1) // block.heads
    return max(np.int64(0), last - block.window + 1), min(first + block.ahead + 1, block.length)


@inlined
def keys_of_any(block, lane, end):
    """Return (first, last + 1) of the keys that at least one of the queries lane .. end - 1 sees.

    There is at least one such key, because a query sees the key at its own position.
    """
    first = block.origin + (block.first + lane) // block.heads
    last = block.origin + (block.first + end - 1) // block.heads
    return max(np.int64(0), first - block.window + 1), min(last + block.ahead + 1, block.length)
