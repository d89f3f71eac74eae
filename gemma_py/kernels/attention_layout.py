"""Data structures of attention: the ring of keys and values, query blocks, and the layout of a worker's scratch."""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.simd.target import USES_ZMM

TILE = 32  # keys between two updates of the running softmax maximum; a tile begins at a multiple of 32
LANES = 16
QUERY_BLOCK = 64  # largest number of queries in a block
FEW_QUERIES = 8  # in a block of at most 8 queries, vector lanes hold keys while scores are computed
ROWS, VECTORS = (8, 2) if USES_ZMM else (4, 1)  # rows and vectors of a tile of sums that fits in the registers
COLUMNS = VECTORS * LANES


class Ring(NamedTuple):
    """The keys and values of a layer in a ring buffer. Element e of head g at position t has the index

        start + t % capacity * row_stride + g * head_stride + e

    A layout of [capacity, G, E] has row_stride = G * E and head_stride = E. A layout of [G, capacity, E] has row_stride
    = E and head_stride = capacity * E. The second layout is faster: in the first one, the rows of a head are G * E
    elements apart, and rows at a distance of a multiple of 4 KiB evict each other from the L1 cache.
    """

    keys: np.ndarray  # flat arena: f32, or uint16 that holds bfloat16
    values: np.ndarray  # flat arena of the dtype of `keys`
    start: int
    capacity: int  # rows
    row_stride: int
    head_stride: int
    G: int  # key/value heads
    E: int  # width of a head


class AttentionParams(NamedTuple):
    """The parameters that turn a dot product q . k into a score and determine which keys a query sees."""

    H: int  # query heads
    window: int  # number of keys that a query sees up to its own key, which is included; a huge number means no limit
    ahead: int  # number of keys after its own key that a query sees; 0 in causal attention
    length: int  # number of positions of the sequence; a query sees no key at a later position
    scale: np.float32
    cap: np.float32  # soft cap of scores; 0 means no cap


class ScratchLayout(NamedTuple):
    """The indices at which the parts of a worker's scratch begin.

    Each part from `starts` to `rescale` holds one number per query.
    """

    q: int  # [QUERY_BLOCK / COLUMNS, E, COLUMNS]: the transposed queries
    out: int  # [QUERY_BLOCK, E]: the weighted sum of the values so far
    scores: int  # [TILE + ROWS, QUERY_BLOCK]: scores of a tile, later weights; the last ROWS rows are padding
    starts: int  # first key that each query sees, stored as the bits of an int32
    lasts: int  # last key that each query sees, stored as the bits of an int32
    maximum: int  # running maximum of each query's scores
    weight_sum: int  # running sum of each query's weights
    rescale: int  # exp(old maximum - new maximum), the factor for each query's earlier sums
    end: int


@inlined
def scratch_layout(E):
    out = QUERY_BLOCK * E
    scores = 2 * out
    starts = scores + (TILE + ROWS) * QUERY_BLOCK
    lasts, maximum = starts + QUERY_BLOCK, starts + 2 * QUERY_BLOCK
    weight_sum, rescale = starts + 3 * QUERY_BLOCK, starts + 4 * QUERY_BLOCK
    return ScratchLayout(0, out, scores, starts, lasts, maximum, weight_sum, rescale, starts + 5 * QUERY_BLOCK)


def scratch_size(E: int) -> int:
    """Return how many f32 numbers of scratch a worker needs for heads of at most E columns."""
    return scratch_layout.py_func(E).end


class Block(NamedTuple):
    """A block of queries, numbered so that query n is head n % heads at position origin + n // heads."""

    first: int
    used: int  # number of queries; the block is queries first .. first + used - 1
    heads: int  # number of query heads that share the key/value head
    origin: int  # position of row 0 of q and out
    window: int  # as in AttentionParams, and likewise ahead and length
    ahead: int
    length: int
    left: int  # columns left .. right - 1 of each head are computed
    right: int


@inlined
def keys_of_all(block, lane, end):
    """Return (first, last + 1) of the keys that every query in lanes lane .. end - 1 sees.

    The range is empty if last + 1 <= first.
    """
    first = block.origin + (block.first + lane) // block.heads
    last = block.origin + (block.first + end - 1) // block.heads
    return max(np.int64(0), last - block.window + 1), min(first + block.ahead + 1, block.length)


@inlined
def keys_of_any(block, lane, end):
    """Return (first, last + 1) of the keys that at least one query in lanes lane .. end - 1 sees.

    The range is never empty, because a query sees the key at its own position.
    """
    first = block.origin + (block.first + lane) // block.heads
    last = block.origin + (block.first + end - 1) // block.heads
    return max(np.int64(0), first - block.window + 1), min(last + block.ahead + 1, block.length)
