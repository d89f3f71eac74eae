"""Matrices in panels of 16 outputs, times rows: every output is one chain, k or the groups of k ascending.

All panels of a kind lie in one flat array (an arena), so that one compiled function serves every matrix of a model; a
matrix says where its own begin. They come in fours; what fills up the last ones is zero and never written to a result.

    float panel   [K, 16] of f32, or of uint16 holding bfloat16
    code panel    bytes, at the width of the stored format: see panels.py

An input lies in tiles of some rows, value k of all rows beside one another ([tiles, K, rows]), for the loads of a tile of
outputs follow one another then. A single row is a tile of its own. A pair of code panels is spread out to int16 once for
all rows of a call; a single row reads the bytes as they are, which is all that decoding waits for.

Any part of the work can be done by anyone: a call does the given rows of the given panels, each output by itself.
"""

from typing import Any, NamedTuple

import numpy as np

from gemma_py.kernels.decorator import borrowing, kernel, woven
from gemma_py.kernels.panels import (
    BLOCK,
    COLUMNS,
    HALF,
    factors_of,
    for_each_width,
    groups_of,
    spread_panel,
    stepped,
)
from gemma_py.kernels.simd import (
    WIDE,
    add,
    dot_pairs,
    dot_tile,
    fetch,
    fma,
    fma_tile,
    izeros,
    load_one,
    load_tile,
    minimum_tile,
    mul,
    scale_tile,
    splat_pair,
    splat_value,
    store,
    store_first,
    store_tile,
    sub,
    to_f32,
    zero,
    zeros,
)

# Rows and panels of a tile of outputs. Chains enough to hide their delay, few enough for the registers.
FLOAT_ROWS, FLOAT_PANELS = (12, 2) if WIDE else (6, 1)
CODE_ROWS, CODE_PANELS = (8, 2) if WIDE else (5, 1)
_FLOAT_TILE, _CODE_TILE = FLOAT_ROWS * FLOAT_PANELS, CODE_ROWS * CODE_PANELS
_AHEAD = 2048  # bytes of codes that are asked for early: the machine's own prefetching ends at every page
MATVEC_PANELS = 4  # of floats at once
ROWS_TOGETHER = 120  # what a call should do: a multiple of every tile's rows, whose input stays in the second cache


class FloatPanels(NamedTuple):
    """A matrix of float weights."""

    arena: np.ndarray
    at: int
    N: int
    K: int


class FloatRows(NamedTuple):
    """An input of T rows as it is."""

    values: np.ndarray  # [tiles, K, rows] flat
    rows: int  # of a tile


class CodedRows(NamedTuple):
    """An input of T rows as codes: x is nearly scale * code."""

    codes: np.ndarray  # int16 [tiles, K / 2, rows, 2] flat
    scales: np.ndarray  # [tiles, K / 32, rows]
    sums: np.ndarray  # [tiles, K / 32, rows]: the sums of 32 codes, exact
    half_sums: np.ndarray  # [tiles, K / 16, rows], of 16
    rows: int  # of a tile


def bench_sizes(K: int) -> tuple[int, int, int]:
    """Of a bench for matrices of at most K inputs: codes, scales (and minimums), outputs."""
    return K * COLUMNS * CODE_PANELS, (K // HALF + 1) * COLUMNS * CODE_PANELS, max(_FLOAT_TILE, _CODE_TILE) * COLUMNS


@borrowing
def _copy_edge(outputs, width, y, at, N, rows, columns):
    """The rows and columns of a tile that exist, from the bench to y."""
    for row in range(rows):
        for column in range(columns):
            y[at + row * N + column] = outputs[row * width + column]


@woven
def _put(y, at, value, columns):
    if columns >= COLUMNS:
        store(y, at, value)
    elif columns > 0:
        store_first(y, at, value, columns)


# --- float weights ----------------------------------------------------------------------------------------------------


@borrowing
def _float_tile(x, x_at, K, arena, at, y, y_at, stride):
    tile = zeros(_FLOAT_TILE)
    for k in range(K):
        w = load_tile(FLOAT_PANELS, arena, at + k * COLUMNS, K * COLUMNS)
        tile = fma_tile(FLOAT_ROWS, x, x_at + k * FLOAT_ROWS, w, tile)
    store_tile(FLOAT_ROWS, y, y_at, stride, tile)


@borrowing
def _float_row(x, x_at, K, arena, at, y, y_at, columns):
    """One row times four panels, of which so many columns exist."""
    tile = zeros(MATVEC_PANELS)
    for k in range(K):
        w = load_tile(MATVEC_PANELS, arena, at + k * COLUMNS, K * COLUMNS)
        tile = fma_tile(1, x, x_at + k, w, tile)
    _put(y, y_at, tile[0], columns)
    _put(y, y_at + COLUMNS, tile[1], columns - COLUMNS)
    _put(y, y_at + 2 * COLUMNS, tile[2], columns - 2 * COLUMNS)
    _put(y, y_at + 3 * COLUMNS, tile[3], columns - 3 * COLUMNS)


@borrowing
def _one_float_row(x, w, y, first_row, last_row, first_panel, last_panel):
    N, K = w.N, w.K
    for row in range(first_row, last_row):
        for p in range(first_panel, last_panel, MATVEC_PANELS):
            column = p * COLUMNS
            _float_row(x.values, row * K, K, w.arena, w.at + column * K, y, row * N + column, N - column)


@borrowing
def _many_float_rows(x, w, y, first_row, last_row, first_panel, last_panel, bench):
    N, K, width = w.N, w.K, FLOAT_PANELS * COLUMNS
    for p in range(first_panel, last_panel, FLOAT_PANELS):
        column, at = p * COLUMNS, w.at + p * K * COLUMNS
        for t in range(first_row, last_row, FLOAT_ROWS):
            rows, columns = min(FLOAT_ROWS, last_row - t), min(width, N - column)
            if rows == FLOAT_ROWS and columns == width:
                _float_tile(x.values, t * K, K, w.arena, at, y, t * N + column, N)
            else:
                _float_tile(x.values, t * K, K, w.arena, at, bench.outputs, 0, width)
                _copy_edge(bench.outputs, width, y, t * N + column, N, rows, columns)


@kernel
def matmul_floats(x, w, y, first_row, last_row, first_panel, last_panel, bench):
    """y[t, n] = sum over k of x[t, k] * w[n, k], rows first_row .. last_row - 1, outputs of these panels alone.

    x: FloatRows   w: FloatPanels   y: [T * N], written   first_row: the first of a tile; first_panel, last_panel: multiples of 4
    """
    if x.rows == 1:
        _one_float_row(x, w, y, first_row, last_row, first_panel, last_panel)
    else:
        _many_float_rows(x, w, y, first_row, last_row, first_panel, last_panel, bench)


# --- quantised weights ------------------------------------------------------------------------------------------------


@borrowing
def _code_tile(x, t, w, bench, y, y_at, stride):
    """Rows t .. of the panels on the bench: exact sums of a group, then one float operation for it."""
    K, group = w.K, w.group
    codes_at, scales_at = t * K, t * (K // BLOCK)
    tile = zeros(_CODE_TILE)
    for g in range(K // group):
        dots = izeros(_CODE_TILE)
        for pair in range(g * group // 2, (g + 1) * group // 2):
            weights = load_tile(CODE_PANELS, bench.codes, pair * CODE_PANELS * 2 * COLUMNS, 2 * COLUMNS)
            dots = dot_tile(CODE_ROWS, x.codes, codes_at + pair * CODE_ROWS * 2, weights, dots)
        scale_at = scales_at + g * group // BLOCK * CODE_ROWS
        scales = load_tile(CODE_PANELS, bench.scales, g * CODE_PANELS * COLUMNS, COLUMNS)
        tile = scale_tile(CODE_ROWS, x.scales, scale_at, scales, dots, tile)
        if w.minimums:
            minimums = load_tile(CODE_PANELS, bench.minimums, g * CODE_PANELS * COLUMNS, COLUMNS)
            if group == BLOCK:
                tile = minimum_tile(CODE_ROWS, x.scales, scale_at, x.sums, scale_at, minimums, tile)
            else:
                sums_at = t * (K // HALF) + g * CODE_ROWS
                tile = minimum_tile(CODE_ROWS, x.scales, scale_at, x.half_sums, sums_at, minimums, tile)
    store_tile(CODE_ROWS, y, y_at, stride, tile)


@woven
def _scaled(total, sx, sw, dot):
    """total + (sx * sw) * dot, for sx of one row and sw of 16 columns."""
    return fma(mul(splat_value(sx), sw), to_f32(dot), total)


@woven
def _without_minimum(total, sx, minimum, codes):
    """total - (sx * minimum) * codes"""
    return fma(mul(splat_value(-sx), minimum), splat_value(codes), total)


@woven
def _with_group(total, w, dot, offset, sx, scales, minimums, codes):
    """The total and one group more: its dot product with codes that are `offset` too large, codes' own sum, scales."""
    total = _scaled(total, sx, scales, sub(dot, splat_value(np.int32(np.int32(codes) * offset))))
    return _without_minimum(total, sx, minimums, codes) if w.minimums else total


def _row_with(pairs: Any, width: int) -> Any:
    @borrowing
    def row_of(x, row, w, panel):
        """One row times one panel, whose bytes are read once, one after the other."""
        K, at, offset = w.K, w.at + panel * w.bytes, np.int32(w.offset)
        total, codes_at, block = zero(), row * K, row * (K // BLOCK)
        steps = groups_of(w) * COLUMNS
        for _ in range(K // w.span):
            factors, minimum_factors, at = factors_of(w, at)
            for _ in range(w.span // BLOCK):
                steps_at, sx = at, load_one(x.scales, block)
                at += steps * (1 + w.minimums)
                for line in range(_AHEAD, _AHEAD + 64 * width, 64):
                    fetch(w.arena, at + line)
                low, high = izeros(2)
                for p in range(8):
                    a, b = pairs(w.arena, at, p)
                    low = dot_pairs(splat_pair(x.codes, codes_at + 2 * p), a, low)
                    high = dot_pairs(splat_pair(x.codes, codes_at + HALF + 2 * p), b, high)
                scales, minimums = stepped(w, factors, steps_at, 0), stepped(w, minimum_factors, steps_at + steps, 0)
                if w.group == BLOCK:
                    sum = load_one(x.sums, block)
                    total = _with_group(total, w, add(low, high), offset, sx, scales, minimums, sum)
                else:
                    sum = load_one(x.half_sums, 2 * block)
                    total = _with_group(total, w, low, offset, sx, scales, minimums, sum)
                    scales = stepped(w, factors, steps_at, 1)
                    minimums = stepped(w, minimum_factors, steps_at + steps, 1)
                    sum = load_one(x.half_sums, 2 * block + 1)
                    total = _with_group(total, w, high, offset, sx, scales, minimums, sum)
                at, codes_at, block = at + 64 * width, codes_at + BLOCK, block + 1
        return total

    return row_of


_row_4, _row_5, _row_6, _row_8 = for_each_width(_row_with)


@woven
def _code_row(x, row, w, panel):
    if w.width == 4:
        return _row_4(x, row, w, panel)
    if w.width == 5:
        return _row_5(x, row, w, panel)
    if w.width == 6:
        return _row_6(x, row, w, panel)
    return _row_8(x, row, w, panel)


@borrowing
def _one_row(x, w, y, first_row, last_row, first_panel, last_panel):
    for row in range(first_row, last_row):
        for p in range(first_panel, last_panel):
            _put(y, row * w.N + p * COLUMNS, _code_row(x, row, w, p), w.N - p * COLUMNS)


@borrowing
def _many_rows(x, w, y, first_row, last_row, first_panel, last_panel, bench):
    N, width = w.N, CODE_PANELS * COLUMNS
    for p in range(first_panel, last_panel, CODE_PANELS):
        for column in range(CODE_PANELS):
            spread_panel(w, p + column, bench, column, np.int64(CODE_PANELS))
        first = p * COLUMNS
        for t in range(first_row, last_row, CODE_ROWS):
            rows, columns = min(CODE_ROWS, last_row - t), min(width, N - first)
            if rows == CODE_ROWS and columns == width:
                _code_tile(x, t, w, bench, y, t * N + first, N)
            else:
                _code_tile(x, t, w, bench, bench.outputs, 0, width)
                _copy_edge(bench.outputs, width, y, t * N + first, N, rows, columns)


@kernel
def matmul_codes(x, w, y, first_row, last_row, first_panel, last_panel, bench):
    """y[t, n] = sum over groups of (sx * sw) * dot(codes) - (sx * minimum) * sum(codes of x), of these rows and panels.

    x: CodedRows   w: CodePanels   y: [T * N], written   first_row: the first of a tile; first_panel, last_panel: multiples of 4
    """
    if x.rows == 1:
        _one_row(x, w, y, first_row, last_row, first_panel, last_panel)
    else:
        _many_rows(x, w, y, first_row, last_row, first_panel, last_panel, bench)
