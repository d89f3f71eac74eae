"""The arguments of the forward pass beside the model: the rows that it computes, and its scratch memory.

T rows of the pass   S sequences that they belong to   R rows whose logits are wanted
"""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels.attention_layout import scratch_size
from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.intrinsics import array_from_address
from gemma_py.kernels.matmul import CodedRows, unpack_buffer_sizes
from gemma_py.kernels.memory import aligned
from gemma_py.kernels.panels import INPUT_BLOCK, UnpackBuffer
from gemma_py.runtime import cache as c
from gemma_py.runtime import program as p

FIRST, END_ROW, ORIGIN = range(3)  # columns of the segments
ROWS, LONGEST = range(2)  # columns of the counts


class Batch(NamedTuple):
    """Tokens of one sequence or of several, one after the other.

    An operation computes every row (ALL), or only the rows whose logits are wanted (WANTED), which are then stored side by
    side; so there are two tables of rows, positions, segments and counts. The rows of one sequence are a segment.
    """

    tokens: np.ndarray  # int64 [T]
    rows: np.ndarray  # int64 [2, T]: the index in `tokens` of each row; of WANTED, only the first R are used
    positions: np.ndarray  # int64 [2, T]
    segments: (
        np.ndarray
    )  # int64 [2, S, 3]: first row, last row + 1, and the position that row 0 of the batch would have
    counts: np.ndarray  # int64 [2, 2]: the number of rows, T and R, and the number of rows of the longest segment
    tables: np.ndarray  # int64 [S, kv layers, 3]: the addresses of each sequence's KV rows, see cache.py
    kv_type: np.ndarray  # empty; its dtype is that of the KV rows
    buffers: np.ndarray  # int64 [buffers + 1]: the addresses of the program's buffers, and of the logits [R * V]


class Scratch(NamedTuple):
    """What a pass writes beside KV rows and logits. All workers share it, except that `attention` and `unpacked` have a part for each."""

    floats: np.ndarray  # all buffers of the program
    coded: CodedRows  # the codes of all inputs that are quantised
    unpacked: UnpackBuffer  # [workers * unpack_buffer_sizes(widest)]
    attention: np.ndarray  # [workers * scratch_size(E)]
    scores: np.ndarray  # [(workers - 1) * keys * 16], attention scores of single positions that several workers share


def new_scratch(sizes: p.Sizes, T: int, workers: int) -> Scratch:
    """Scratch for passes of up to T rows; `scores` is empty."""

    def floats(count: int) -> np.ndarray:
        return aligned(max(1, count))

    codes = T * max(INPUT_BLOCK, sizes.codes)
    blocks = codes // INPUT_BLOCK
    coded = CodedRows(
        aligned(codes, np.int16), aligned(2 * codes, np.int8),
        floats(blocks), floats(blocks), floats(blocks), floats(2 * blocks),
    )  # fmt: skip
    panel, scales = (workers * size for size in unpack_buffer_sizes(max(INPUT_BLOCK, sizes.widest_input)))
    unpacked = UnpackBuffer(aligned(panel, np.int16), floats(scales), floats(scales))
    return Scratch(
        floats(T * sizes.floats), coded, unpacked, floats(workers * scratch_size(sizes.widest_head)), floats(0)
    )


@inlined
def codes_of(scratch, batch, slot):
    """The codes in a slot, row by row."""
    at = slot * batch.tokens.shape[0]
    blocks = at // INPUT_BLOCK
    return CodedRows(
        scratch.coded.codes[at:], scratch.coded.byte_planes[2 * at :], scratch.coded.scales[blocks:], scratch.coded.sums[blocks:],
        scratch.coded.high_byte_sums[blocks:], scratch.coded.sums_of_16[2 * blocks :],
    )  # fmt: skip


@inlined
def own_part(part, worker, workers):
    """The slice of an array that belongs to this worker, where each worker has an equal part."""
    size = part.shape[0] // workers
    return slice(worker * size, (worker + 1) * size)


@inlined
def unpack_buffer_of(scratch, worker, workers):
    scales = own_part(scratch.unpacked.scales, worker, workers)
    return UnpackBuffer(
        scratch.unpacked.codes[own_part(scratch.unpacked.codes, worker, workers)],
        scratch.unpacked.scales[scales],
        scratch.unpacked.minimums[scales],
    )


@inlined
def kv_rows_of(op, ring, kv_type):
    """Views of one layer's KV rows of one sequence: keys and values, [G * capacity * E] each.

    ring: the row of the batch's tables that says where they are."""
    size = op[p.KV_HEADS] * ring[c.ROWS] * op[p.WIDTH]
    return array_from_address(ring[c.KEYS], size, kv_type), array_from_address(ring[c.VALUES], size, kv_type)


@inlined
def tiles_of(segments, number, rows):
    """How many tiles of up to `rows` rows a segment has. No tile has rows of two segments."""
    return (segments[number, END_ROW] - segments[number, FIRST] + rows - 1) // rows


@inlined
def tiles_in(segments, rows):
    tiles = 0
    for number in range(segments.shape[0]):
        tiles += tiles_of(segments, number, rows)
    return tiles


@inlined
def rows_of_tile(segments, tile, rows):
    """(segment, first row, last row + 1)"""
    number = 0
    while tile >= tiles_of(segments, number, rows):
        tile -= tiles_of(segments, number, rows)
        number += 1
    first = segments[number, FIRST] + tile * rows
    return number, first, min(first + rows, segments[number, END_ROW])
