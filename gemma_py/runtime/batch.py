"""The arguments of the forward pass that change with every pass: the batch of tokens, and the scratch memory.

T tokens of the batch   S sequences   R tokens whose logits are wanted
"""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels.attention_layout import scratch_size
from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.experts import lists_size
from gemma_py.kernels.intrinsics import array_from_address
from gemma_py.kernels.kv_rows import row_size
from gemma_py.kernels.matmul import TILE_ROWS_MULTIPLE, CodedRows, unpack_buffer_sizes
from gemma_py.kernels.memory import aligned
from gemma_py.kernels.panels import INPUT_BLOCK, UnpackBuffer
from gemma_py.runtime import cache as c
from gemma_py.runtime import program as p

# The most rows of an expert in a tile. With this many rows, unpacking the expert's panels takes a small part of the time.
EXPERT_ROWS = 8 * TILE_ROWS_MULTIPLE
FIRST, END_ROW, ORIGIN = range(3)  # columns of `Batch.segments`
ROWS, LONGEST = range(2)  # columns of `Batch.counts`


class Batch(NamedTuple):
    """The tokens of a pass, sequence after sequence.

    A phase computes the rows of ALL tokens, or only the WANTED rows, those of the tokens whose logits are wanted.
    Therefore `rows`, `positions`, `segments` and `counts` have one entry for ALL and one for WANTED. The rows of a
    sequence are contiguous and are called a segment.
    """

    tokens: np.ndarray  # int64 [T]
    rows: np.ndarray  # int64 [2, T]: the index in `tokens` of each row; for WANTED, only the first R entries are used
    positions: np.ndarray  # int64 [2, T]
    # int64 [2, S, 3]: first row, last row + 1, and the origin; row r is at position origin + r.
    segments: np.ndarray
    counts: np.ndarray  # int64 [2, 2]: the number of rows (T or R), and the number of rows of the longest segment
    tables: np.ndarray  # int64 [S, kv layers, 3]: the addresses and the capacity of the KV rows, see cache.py
    kv_type: np.ndarray  # an empty array, whose dtype is that of the KV rows
    logits: np.ndarray  # f32 [R * V], written


class ExpertScratch(NamedTuple):
    """The scratch memory of products with experts' matrices. Every array has a part for each worker.

    Rows of an expert are copied to `floats` or `coded`, so that they are contiguous. R: the most rows that are copied.
    """

    lists: np.ndarray  # int64 [workers * lists_size(T, experts, chosen experts of a row)]
    floats: np.ndarray  # f32 [workers * R * K]
    coded: CodedRows  # [workers * R] rows of K codes
    outputs: np.ndarray  # f32 [workers * R * N]


class Scratch(NamedTuple):
    """The scratch memory of a pass.

    Workers share `floats`, `coded` and `scores`. The other arrays have a part for each worker.
    """

    floats: np.ndarray  # the buffers of the program
    coded: CodedRows  # the quantised inputs of matrix products
    unpacked: UnpackBuffer  # [workers * unpack_buffer_sizes(widest)]
    attention: np.ndarray  # [workers * scratch_size(E)]
    scores: np.ndarray  # [(workers - 1) * keys * LANES]: attention scores, used if several workers share a position
    experts: ExpertScratch


def new_scratch(sizes: p.Sizes, T: int, workers: int) -> Scratch:
    """Allocate scratch memory for passes of up to T rows. `scores` stays empty until the runner needs it."""

    def floats(count: int) -> np.ndarray:
        return aligned(max(1, count))

    def coded(codes: int) -> CodedRows:
        blocks = codes // INPUT_BLOCK
        return CodedRows(
            aligned(codes, np.int16), aligned(2 * codes, np.int8),
            floats(blocks), floats(blocks), floats(2 * blocks), floats(2 * blocks),
        )  # fmt: skip

    panel, scales = (workers * size for size in unpack_buffer_sizes(max(INPUT_BLOCK, sizes.widest_input)))
    unpacked = UnpackBuffer(aligned(panel, np.int16), floats(scales), floats(scales))
    K, N = (workers * min(T, EXPERT_ROWS) * size for size in (sizes.expert_inputs, sizes.expert_outputs))
    lists = workers * lists_size(T, sizes.experts, sizes.routes)
    experts = ExpertScratch(aligned(lists, np.int64), floats(K), coded(max(INPUT_BLOCK, K)), floats(N))
    return Scratch(
        floats(T * sizes.floats), coded(T * max(INPUT_BLOCK, sizes.codes)), unpacked,
        floats(workers * scratch_size(sizes.widest_head)), floats(0), experts,
    )  # fmt: skip


@inlined
def buffer_of(model, batch, scratch, number, width):
    """Return buffer `number`, an array of rows of this width, in a tuple of one element.

    Without reference counting, a compiled function may return a new array only inside a tuple.
    """
    if number == model.offsets.shape[0]:
        return (batch.logits,)
    T = batch.tokens.shape[0]
    return (scratch.floats[model.offsets[number] * T : (model.offsets[number] + width) * T],)


@inlined
def codes_of(scratch, batch, slot):
    at = slot * batch.tokens.shape[0]
    blocks = at // INPUT_BLOCK
    return CodedRows(
        scratch.coded.codes[at:], scratch.coded.byte_planes[2 * at :], scratch.coded.scales[blocks:], scratch.coded.sums[blocks:],
        scratch.coded.flip_sums[2 * blocks :], scratch.coded.sums_of_16[2 * blocks :],
    )  # fmt: skip


@inlined
def own_part(part, worker, workers):
    size = part.shape[0] // workers
    return slice(worker * size, (worker + 1) * size)


@inlined
def own_codes(coded, worker, workers):
    blocks = own_part(coded.scales, worker, workers)
    return CodedRows(
        coded.codes[own_part(coded.codes, worker, workers)], coded.byte_planes[own_part(coded.byte_planes, worker, workers)],
        coded.scales[blocks], coded.sums[blocks], coded.flip_sums[own_part(coded.flip_sums, worker, workers)],
        coded.sums_of_16[own_part(coded.sums_of_16, worker, workers)],
    )  # fmt: skip


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
    """Return the keys and the values of one sequence and layer, [G * capacity * row size] each, without copying.

    ring: the entry of `Batch.tables` for this sequence and layer.
    """
    size = op[p.KV_HEADS] * ring[c.ROWS] * row_size(kv_type, op[p.WIDTH])
    return array_from_address(ring[c.KEYS], size, kv_type), array_from_address(ring[c.VALUES], size, kv_type)


@inlined
def tiles_of(segments, number, rows):
    return (segments[number, END_ROW] - segments[number, FIRST] + rows - 1) // rows


@inlined
def tiles_in(segments, rows):
    tiles = 0
    for number in range(segments.shape[0]):
        tiles += tiles_of(segments, number, rows)
    return tiles


@inlined
def rows_of_tile(segments, tile, rows):
    """Return the segment, the first row, and the last row + 1 of a tile. A tile never spans two segments."""
    number = 0
    while tile >= tiles_of(segments, number, rows):
        tile -= tiles_of(segments, number, rows)
        number += 1
    first = segments[number, FIRST] + tile * rows
    return number, first, min(first + rows, segments[number, END_ROW])
