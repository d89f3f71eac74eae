"""What a pass computes, and what it writes on the way: the arguments of the forward pass beside the model.

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

    Operations compute every row (ALL), or those whose logits are wanted (WANTED), which then lie side by side; so the rows'
    tables are there twice. A sequence's rows of either are a segment.
    """

    tokens: np.ndarray  # int64 [T]
    rows: (
        np.ndarray
    )  # int64 [2, T]: the row of `tokens` that each row stands for; of WANTED, the first R mean something
    positions: np.ndarray  # int64 [2, T]
    segments: np.ndarray  # int64 [2, S, 3]: first row, last row + 1, and the position that row 0 would have
    counts: np.ndarray  # int64 [2, 2]: how many rows, T and R; and how many the longest segment has
    tables: np.ndarray  # int64 [S, kv layers, 3]: where each sequence's keys and values are, see cache.py
    stored: np.ndarray  # [0], of the type that keys and values are stored as
    buffers: np.ndarray  # int64 [buffers + 1]: the addresses of the program's buffers, and of the logits [R * V]


class Scratch(NamedTuple):
    """What a pass writes beside caches and logits. Shared by all workers but for `attention` and `unpacked`."""

    floats: np.ndarray  # all buffers of the program
    coded: CodedRows  # all inputs that are there as codes
    unpacked: UnpackBuffer  # [workers * unpack_buffer_sizes(widest)]
    attention: np.ndarray  # [workers * scratch_size(E)]
    scores: np.ndarray  # [(workers - 1) * keys * 16], of single positions that several workers share


def new_scratch(sizes: p.Sizes, T: int, workers: int) -> Scratch:
    """Room for passes of up to T rows, but for scores."""

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
def codes_of(s, batch, slot):
    """The codes of a slot, row by row."""
    at = slot * batch.tokens.shape[0]
    blocks = at // INPUT_BLOCK
    return CodedRows(
        s.coded.codes[at:], s.coded.byte_planes[2 * at :], s.coded.scales[blocks:], s.coded.sums[blocks:],
        s.coded.high_byte_sums[blocks:], s.coded.sums_of_16[2 * blocks :],
    )  # fmt: skip


@inlined
def own_part(part, worker, workers):
    """Which numbers are a worker's, of what all of them share."""
    size = part.shape[0] // workers
    return slice(worker * size, (worker + 1) * size)


@inlined
def unpack_buffer_of(s, worker, workers):
    scales = own_part(s.unpacked.scales, worker, workers)
    return UnpackBuffer(
        s.unpacked.codes[own_part(s.unpacked.codes, worker, workers)],
        s.unpacked.scales[scales],
        s.unpacked.minimums[scales],
    )


@inlined
def kv_rows_of(op, place, stored):
    """A layer's keys and values of one sequence: [G * capacity * E] each."""
    size = op[p.KV_HEADS] * place[c.ROWS] * op[p.WIDTH]
    return array_from_address(place[c.KEYS], size, stored), array_from_address(place[c.VALUES], size, stored)


@inlined
def tiles_of(segments, number, rows):
    """Tiles of so many rows in a segment; no tile has rows of two."""
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
