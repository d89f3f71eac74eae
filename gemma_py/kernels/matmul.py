"""Matrix products with weights in panels of 16 outputs. Each output is one chain of additions, with k ascending.

    T rows   K inputs   N outputs

All panels of one format are in one flat array, the arena, so that one compiled function serves every matrix of a model. A
matrix is identified by where its first panel begins. The number of panels is a multiple of four. The last panels are padded
with outputs whose weights are zero, and whose results are not stored.

    float panel   [K, 16] of f32, or of uint16 that hold bfloat16
    code panel    codes and scales as bytes, see panels.py

Codes are multiplied in several ways, which give equal bits, because the dot product of a group of codes is an exact integer:

    one or two rows  as they are stored, because the speed of memory is the limit, and the stored codes are small
    few rows         as they are stored, because unpacking to int16 would take too long; at most 64 rows with VNNI, and 16
                     without
    many rows        unpacked to int16, because such dot products are the fastest
    with sdot        for 3 rows and more, unpacked to signed bytes

One call computes the given rows of the given panels. Outputs are independent, so any worker can compute any part.
"""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels import code_tiles
from gemma_py.kernels.code_rows import few_rows, one_row
from gemma_py.kernels.code_tiles import multiply_tiles
from gemma_py.kernels.decorator import force_inlined, inlined
from gemma_py.kernels.intrinsics import array_from_address
from gemma_py.kernels.panels import (
    COLUMNS,
    INPUT_BLOCK,
    SMALL_GROUP,
    reads_quads_in_place,
    unpack_panel,
    unpack_quads,
    unpack_scales,
)
from gemma_py.kernels.simd.neon_tiles import add_byte_dots, add_paired_dots, split_rows
from gemma_py.kernels.simd.target import FLIPS_LOW, IS_ARM64, USES_I8MM, USES_SDOT, USES_VNNI, USES_ZMM
from gemma_py.kernels.simd.tiles import (
    add_dots,
    add_products,
    add_scaled,
    add_tiles,
    load_columns,
    prefetch_totals,
    row_offsets,
    shift_dots,
    start_dots,
    store_partial_totals,
    store_totals,
    subtract_minimums,
    zero_dots,
    zero_totals,
)
from gemma_py.kernels.simd.vectors import (
    prefetch_to_l2,
)

# Rows and panels in a tile of outputs. The sums of a tile hide the latency of an FMA, and still fit in the registers.
FLOAT_ROWS, FLOAT_PANELS = (6, 4) if USES_ZMM else (6, 1)
CODE_ROWS, CODE_PANELS = (6, 2) if USES_ZMM else (3, 1) if IS_ARM64 else (5, 1)
# Rows of a tile with sdot or smmla. With smmla, which multiplies two rows at a time, 6 rows would not fit in the registers.
QUAD_ROWS = 4
_add_byte_dots = add_paired_dots if USES_I8MM else add_byte_dots
# How many cache lines a tile prefetches in each quarter of a run. A run of 8-bit codes with its scales has 8.5 lines.
_LINES = 3
MATVEC_PANELS = 4  # the number of float panels with which a single row is multiplied at a time
FEW_ROWS = 16  # without VNNI, unpacking codes to int16 pays off only for more rows than this
USES_BYTES = USES_VNNI or USES_SDOT
MAX_FEW_ROWS = 2 if USES_BYTES else FEW_ROWS  # `few_rows` multiplies at most this many rows
# Tiles that multiply bytes compute at most this many rows. An input has two bytes. VNNI multiplies twice as many bytes as int16
# in one instruction, so bytes only save the unpacking to int16, and are faster only up to 64 rows. ARM64's sdot multiplies four
# times as many.
MAX_BYTE_ROWS = np.iinfo(np.int64).max if USES_SDOT else 64 if USES_VNNI else FEW_ROWS
# How many rows one call of a matmul should compute. A multiple of 30 rows consists of whole tiles of 3, 5 or 6 rows. Fewer than 120 rows
# do not repay the unpacking, and more than 540 rows gain nothing.
TILE_ROWS_MULTIPLE, MIN_TILE_ROWS, MAX_TILE_ROWS = 30, 120, 540


class FloatPanels(NamedTuple):
    """A matrix of float weights in panels."""

    arena: np.ndarray  # f32, or uint16 that holds bfloat16
    start: int  # index in the arena at which the first panel begins
    N: int
    K: int


class CodedRows(NamedTuple):
    """The input of a matrix product, quantised to 16-bit codes in blocks of 32: x is about scale * code.

    Sums of codes are whole numbers, which the float arrays `sums`, `flip_sums` and `sums_of_16` hold exactly.
    """

    codes: np.ndarray  # int16 [T * K]; every four codes are stored in the order 0, 2, 1, 3
    byte_planes: np.ndarray  # for every four codes, their signed high bytes, then their unsigned low bytes
    scales: np.ndarray  # f32 [T * K / 32]
    sums: np.ndarray  # f32 [T * K / 32]: the sum of the codes of each block
    # f32 [T * K / 16]: -128 times the sum of the high bytes of each half block's codes, or of the low bytes if FLIPS_LOW
    flip_sums: np.ndarray
    sums_of_16: np.ndarray  # f32 [T * K / 16]: the sum of the codes of each half block


def unpack_buffer_sizes(K: int) -> tuple[int, int]:
    """Return the number of codes and the number of scales in an unpack buffer for matrices of K inputs.

    There are as many minimums as scales.
    """
    return K * COLUMNS * CODE_PANELS, max(FEW_ROWS, (K // SMALL_GROUP + 1) * CODE_PANELS) * COLUMNS


# --- float weights ----------------------------------------------------------------------------------------------------


@inlined
def _float_tile(x, t, rows, w, panel, y):
    """Multiply FLOAT_ROWS rows, from row t on, with FLOAT_PANELS panels.

    `rows` is the number of rows that are left. If it is less than FLOAT_ROWS, the last row is computed several times.
    """
    N, K, column = w.N, w.K, panel * COLUMNS
    at, values = w.start + column * K, row_offsets(t * K, K, rows, FLOAT_ROWS)
    outputs = row_offsets(t * N + column, N, rows, FLOAT_ROWS)
    prefetch_totals(y, outputs, FLOAT_PANELS)
    totals = zero_totals(values, FLOAT_PANELS)
    for k in range(K):
        totals = add_products(x, values, k, w.arena, at + k * COLUMNS, K * COLUMNS, totals)
    if column + FLOAT_PANELS * COLUMNS <= N:
        store_totals(y, outputs, 0, totals)
    else:
        store_partial_totals(y, outputs, N - column, totals)


@inlined
def _float_row(x, t, w, panel, y):
    K, column = w.K, panel * COLUMNS
    at, values = w.start + column * K, row_offsets(t * K, K, 1, 1)
    totals = zero_totals(values, MATVEC_PANELS)
    for k in range(K):
        totals = add_products(x, values, k, w.arena, at + k * COLUMNS, K * COLUMNS, totals)
    store_partial_totals(y, row_offsets(t * w.N + column, w.N, 1, 1), w.N - column, totals)


@inlined
def matmul_floats(x, w, y, first_row, last_row, first_panel, last_panel):
    """Compute y[t, n] = sum over k of x[t, k] * w[n, k], k ascending, one fused multiply-add per product.

    One call computes rows first_row .. last_row - 1 and the outputs of panels first_panel .. last_panel - 1. Both panel
    numbers must be multiples of 4.

    x: [T * K] f32, read
    w: FloatPanels, read
    y: [T * N] f32, written for these rows and outputs
    """
    if last_row - first_row == 1:
        for panel in range(first_panel, last_panel, MATVEC_PANELS):
            _float_row(x, first_row, w, panel, y)
    else:
        for panel in range(first_panel, last_panel, FLOAT_PANELS):
            for t in range(first_row, last_row, FLOAT_ROWS):
                _float_tile(x, t, last_row - t, w, panel, y)


# --- quantised weights: many rows -------------------------------------------------------------------------------------


@inlined
def _code_tile(x, t, rows, w, panel, unpacked, y):
    """Multiply CODE_ROWS rows, from row t on, with the panels in the unpack buffer.

    `rows` is the number of rows that are left. If it is less than CODE_ROWS, the last row is computed several times. The
    dot product of a group of codes is an exact integer, which one fused multiply-add scales and adds to the total.
    """
    K, N, group, column = w.K, w.N, w.group, panel * COLUMNS
    codes = row_offsets(t * K, K, rows, CODE_ROWS)
    scales = row_offsets(t * (K // INPUT_BLOCK), K // INPUT_BLOCK, rows, CODE_ROWS)
    sums_of_16 = row_offsets(t * (K // SMALL_GROUP), K // SMALL_GROUP, rows, CODE_ROWS)
    outputs = row_offsets(t * N + column, N, rows, CODE_ROWS)
    prefetch_totals(y, outputs, CODE_PANELS)
    totals = zero_totals(codes, CODE_PANELS)
    for g in range(K // group):
        dots = zero_dots(codes, CODE_PANELS)
        for pair in range(g * group // 2, (g + 1) * group // 2, 8):
            dots = add_dots(x.codes, codes, 2 * pair, unpacked.codes, pair * CODE_PANELS * 2 * COLUMNS, dots)
        block, weights_at = g * group // INPUT_BLOCK, g * CODE_PANELS * COLUMNS
        columns = load_columns(unpacked.scales, weights_at, CODE_PANELS)
        totals = add_scaled(x.scales, scales, block, columns, dots, totals)
        if w.minimums:
            minimums = load_columns(unpacked.minimums, weights_at, CODE_PANELS)
            if group == INPUT_BLOCK:
                totals = subtract_minimums(x.scales, scales, block, x.sums, scales, g, minimums, totals)
            else:
                totals = subtract_minimums(x.scales, scales, block, x.sums_of_16, sums_of_16, g, minimums, totals)
    if column + CODE_PANELS * COLUMNS <= N:
        store_totals(y, outputs, 0, totals)
    else:
        store_partial_totals(y, outputs, N - column, totals)


# --- quantised weights: bytes, with sdot ------------------------------------------------------------------------------


@force_inlined
def _prefetch_lines(array, at, step):
    """Prefetch array[at], array[at + step], and so on. Return the index after the last one."""
    for place in range(_LINES):
        prefetch_to_l2(array, at + place * step)
    return at + _LINES * step


@inlined
def _quad_tile(x, t, rows, w, panel, quads, run_stride, unpacked, y, ahead, step):
    """Multiply QUAD_ROWS rows, from row t on, with a panel.

    rows: the number of rows that are left. If it is less than QUAD_ROWS, the last row is computed several times.
    quads: int8, the signed weight codes; runs are run_stride bytes apart
    unpacked: UnpackBuffer with the scales and minimums of the panel
    ahead, step: from index `ahead` on, the arena is prefetched at steps of `step` bytes, 4 * _LINES times in a run

    A dot product is 256 times that of the inputs' high bytes, plus that of their low bytes.
    """
    K, N, halves, column = w.K, w.N, w.group // SMALL_GROUP, panel * COLUMNS
    planes = row_offsets(2 * t * K, 2 * K, rows, QUAD_ROWS)
    scales = row_offsets(t * (K // INPUT_BLOCK), K // INPUT_BLOCK, rows, QUAD_ROWS)
    of_16 = row_offsets(t * (K // SMALL_GROUP), K // SMALL_GROUP, rows, QUAD_ROWS)
    outputs = row_offsets(t * N + column, N, rows, QUAD_ROWS)
    prefetch_totals(y, outputs, 1)
    totals, line = zero_totals(planes, 1), ahead
    for g in range(K // w.group):
        half = g * halves
        block, at, weights_at = half // 2, half // 2 * run_stride + half % 2 * 256, g * COLUMNS
        dots = zero_dots(planes, 1)
        for h in range(halves):
            line = _prefetch_lines(w.arena, line, step)
            dots = _add_byte_dots(1, x.byte_planes, planes, (half + h) * 32, quads, at + h * 256, dots)
        dots = shift_dots(dots)
        if FLIPS_LOW:
            if halves == 2:
                dots = add_tiles(dots, start_dots(x.flip_sums, of_16, half, 2, 1))
            else:
                dots = add_tiles(dots, start_dots(x.flip_sums, of_16, half, 1, 1))
        for h in range(halves):
            line = _prefetch_lines(w.arena, line, step)
            dots = _add_byte_dots(0, x.byte_planes, planes, (half + h) * 32, quads, at + h * 256, dots)
        if USES_I8MM:
            dots = split_rows(dots)
        totals = add_scaled(x.scales, scales, block, load_columns(unpacked.scales, weights_at, 1), dots, totals)
        if w.minimums:
            minimums = load_columns(unpacked.minimums, weights_at, 1)
            if halves == 2:
                totals = subtract_minimums(x.scales, scales, block, x.sums, scales, g, minimums, totals)
            else:
                totals = subtract_minimums(x.scales, scales, block, x.sums_of_16, of_16, g, minimums, totals)
    if column + COLUMNS <= N:
        store_totals(y, outputs, 0, totals)
    else:
        store_partial_totals(y, outputs, N - column, totals)


@inlined
def _quad_tiles(x, first_row, last_row, w, panel, next_panel, unpacked, y):
    """Multiply the rows with a panel. Each tile prefetches a part of the next panel.

    next_panel: the panel that this worker probably multiplies next
    """
    run_stride, address = INPUT_BLOCK * COLUMNS, np.int64(unpacked.codes.ctypes.data)
    if reads_quads_in_place(w):
        unpack_scales(w, panel, unpacked, 0, 1)
        run_stride = w.panel_bytes // (w.K // INPUT_BLOCK)
        first = w.start + panel * w.panel_bytes + run_stride - INPUT_BLOCK * COLUMNS
        address = np.int64(w.arena.ctypes.data) + first
    else:
        unpack_quads(w, panel, unpacked, 0, 1)
    quads = array_from_address(address, w.K // INPUT_BLOCK * run_stride, w.arena)
    runs, tiles = w.K // INPUT_BLOCK, (last_row - first_row + QUAD_ROWS - 1) // QUAD_ROWS
    ahead = w.start + next_panel * w.panel_bytes
    step = w.panel_bytes // (4 * _LINES * runs * tiles) + 1
    for t in range(first_row, last_row, QUAD_ROWS):
        _quad_tile(x, t, last_row - t, w, panel, quads, run_stride, unpacked, y, ahead, step)
        ahead += 4 * _LINES * runs * step


# Products of bytes: the function, the rows of a tile, and the panels that one call multiplies.
_byte_tiles, BYTE_ROWS, _BYTE_PANELS = (
    (multiply_tiles, code_tiles.ROWS, code_tiles.PANELS) if USES_VNNI else (_quad_tiles, QUAD_ROWS, 1)
)


@inlined
def matmul_codes(x, w, y, first_row, last_row, first_panel, last_panel, others, unpacked):
    """Compute y[t, n] = sum over groups of (sx * sw) * dot(x codes, w codes) - (sx * minimum) * sum(x codes).

    The groups of k are summed in ascending order. One call computes rows first_row .. last_row - 1 and the outputs of
    panels first_panel .. last_panel - 1. Both panel numbers must be multiples of 4.

    x: CodedRows, read
    w: CodePanels, read
    y: [T * N] f32, written for these rows and outputs
    others: how many of the following panels other workers probably compute. Tiles of bytes do not prefetch these panels.
    unpacked: UnpackBuffer, the worker's own scratch
    """
    rows = last_row - first_row
    if rows == 1:
        for panel in range(first_panel, last_panel):
            one_row(x, first_row, w, panel, y)
    elif rows <= MAX_FEW_ROWS:
        for panel in range(first_panel, last_panel):
            few_rows(x, first_row, rows, w, panel, unpacked, y)
    elif USES_BYTES and rows <= MAX_BYTE_ROWS:
        for panel in range(first_panel, last_panel, _BYTE_PANELS):
            next_panel = panel + _BYTE_PANELS
            if next_panel >= last_panel:
                next_panel = min(next_panel + others, (w.N + COLUMNS - 1) // COLUMNS)
            _byte_tiles(x, first_row, last_row, w, panel, next_panel, unpacked, y)
    else:
        for panel in range(first_panel, last_panel, CODE_PANELS):
            for column in range(CODE_PANELS):
                unpack_panel(w, panel + column, unpacked, column, CODE_PANELS)
            for t in range(first_row, last_row, CODE_ROWS):
                _code_tile(x, t, last_row - t, w, panel, unpacked, y)
