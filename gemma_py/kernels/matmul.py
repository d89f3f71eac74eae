"""Matrices in panels of 16 outputs, times rows: every output is one chain, k or the groups of k ascending.

    float panel    [K, 16]          f32, or uint16 holding bfloat16
    code panel     [K / 2, 16, 2]   int8, with scales and, in some formats, minimums: [K / group, 16] f32

All panels of a kind lie in one flat array (an arena), so that one compiled function serves every matrix of a model; a
matrix says where its own begin. Columns that fill the last panel are zero and are never written to a result.

Any part of the work can be done by anyone: a call does the given rows of the given panels, each output by itself.
Rows go six or five at a time, so that a panel's values are loaded once for all of them; what is left over is filled
with the last row again, which writes the same bits twice. One row alone goes through four panels at a time.
"""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.simd import (
    dot_pairs,
    fma,
    izero,
    load,
    load_one,
    load_pairs,
    mul,
    splat,
    splat_pair,
    splat_value,
    store,
    store_first,
    to_f32,
    zero,
)

COLUMNS = 16
BLOCK = 32  # codes of an input that share a scale
HALF = 16  # codes of an input whose sum is kept


class FloatPanels(NamedTuple):
    """A matrix of float weights."""

    arena: np.ndarray
    at: int
    N: int
    K: int


class CodePanels(NamedTuple):
    """A matrix of quantised weights."""

    codes: np.ndarray  # arena of int8
    scales: np.ndarray  # arena of f32, of minimums too
    codes_at: int
    scales_at: int
    minimums_at: int  # negative where the format has none
    N: int
    K: int
    group: int  # 16 or 32


class CodedRows(NamedTuple):
    """Rows of an input as codes; see rows.quantise_rows."""

    codes: np.ndarray  # [T * K] int16
    scales: np.ndarray  # [T * K / 32]
    sums: np.ndarray  # [T * K / 16], the sums of 16 codes as floats, exact


def panels_of(N: int) -> int:
    return (N + COLUMNS - 1) // COLUMNS


def pack_floats(values: np.ndarray, out: np.ndarray) -> None:
    """values: [N, K]   out: [panels * K * 16], written, in the same type"""
    N, K = values.shape
    panels = out.reshape(-1, K, COLUMNS)
    whole = N // COLUMNS
    panels[:whole] = values[: whole * COLUMNS].reshape(whole, COLUMNS, K).transpose(0, 2, 1)
    if N % COLUMNS:
        panels[whole] = 0
        panels[whole, :, : N % COLUMNS] = values[whole * COLUMNS :].T


def pack_codes(codes: np.ndarray, out: np.ndarray) -> None:
    """codes: [N, K] int8   out: [panels * K * 16], written: pairs of neighbours in k stay together"""
    N, K = codes.shape
    pack_floats(codes.view(np.uint16), out.view(np.uint16).reshape(-1)[: panels_of(N) * K // 2 * COLUMNS])


@inlined
def _put(y, at, value, columns):
    if columns >= COLUMNS:
        store(y, at, value)
    else:
        store_first(y, at, value, columns)


# --- float weights ----------------------------------------------------------------------------------------------------


@kernel
def _floats_6_rows(x, K, rows, arena, at, y, N, column):
    """y[rows[i], column : column + 16] for six rows, which fill the twelve AVX2 registers that six chains need."""
    x0, x1, x2, x3, x4, x5 = rows[0] * K, rows[1] * K, rows[2] * K, rows[3] * K, rows[4] * K, rows[5] * K
    y0, y1, y2, y3, y4, y5 = zero(), zero(), zero(), zero(), zero(), zero()
    for k in range(K):
        w = load(arena, at + k * COLUMNS)
        y0 = fma(splat(x, x0 + k), w, y0)
        y1 = fma(splat(x, x1 + k), w, y1)
        y2 = fma(splat(x, x2 + k), w, y2)
        y3 = fma(splat(x, x3 + k), w, y3)
        y4 = fma(splat(x, x4 + k), w, y4)
        y5 = fma(splat(x, x5 + k), w, y5)
    columns = N - column
    _put(y, rows[0] * N + column, y0, columns)
    _put(y, rows[1] * N + column, y1, columns)
    _put(y, rows[2] * N + column, y2, columns)
    _put(y, rows[3] * N + column, y3, columns)
    _put(y, rows[4] * N + column, y4, columns)
    _put(y, rows[5] * N + column, y5, columns)


@kernel
def _floats_4_panels(x, K, row, arena, at, panels, y, N):
    """y[row] of four panels: eight AVX2 registers, so that one chain's delay is hidden by the others'."""
    x0, size = row * K, K * COLUMNS
    w0, w1, w2, w3 = at + panels[0] * size, at + panels[1] * size, at + panels[2] * size, at + panels[3] * size
    y0, y1, y2, y3 = zero(), zero(), zero(), zero()
    for k in range(K):
        x_k = splat(x, x0 + k)
        y0 = fma(x_k, load(arena, w0 + k * COLUMNS), y0)
        y1 = fma(x_k, load(arena, w1 + k * COLUMNS), y1)
        y2 = fma(x_k, load(arena, w2 + k * COLUMNS), y2)
        y3 = fma(x_k, load(arena, w3 + k * COLUMNS), y3)
    _put(y, row * N + panels[0] * COLUMNS, y0, N - panels[0] * COLUMNS)
    _put(y, row * N + panels[1] * COLUMNS, y1, N - panels[1] * COLUMNS)
    _put(y, row * N + panels[2] * COLUMNS, y2, N - panels[2] * COLUMNS)
    _put(y, row * N + panels[3] * COLUMNS, y3, N - panels[3] * COLUMNS)


@kernel
def matmul_floats(x, w, y, first_row, last_row, first_panel, last_panel):
    """y[t, n] = sum over k of x[t, k] * w[n, k], rows first_row .. last_row - 1, outputs of these panels alone.

    x: [T * K] f32   w: FloatPanels   y: [T * N], written
    """
    N, K = w.N, w.K
    row_end, panel_end = last_row - 1, last_panel - 1
    if last_row - first_row == 1:
        for p in range(first_panel, last_panel, 4):
            panels = (p, min(p + 1, panel_end), min(p + 2, panel_end), min(p + 3, panel_end))
            _floats_4_panels(x, K, first_row, w.arena, w.at, panels, y, N)
        return
    for p in range(first_panel, last_panel):
        for t in range(first_row, last_row, 6):
            rows = (
                t,
                min(t + 1, row_end),
                min(t + 2, row_end),
                min(t + 3, row_end),
                min(t + 4, row_end),
                min(t + 5, row_end),
            )
            _floats_6_rows(x, K, rows, w.arena, w.at + p * K * COLUMNS, y, N, p * COLUMNS)


# --- quantised weights ------------------------------------------------------------------------------------------------


@inlined
def _scaled(total, sx, sw, dot):
    """total + (sx * sw) * dot, for sx of one row and sw of 16 columns."""
    return fma(mul(splat_value(sx), sw), to_f32(dot), total)


@inlined
def _without_minimum(total, sx, minimum, codes):
    """total - (sx * minimum) * codes"""
    return fma(mul(splat_value(-sx), minimum), splat_value(codes), total)


@kernel
def _codes_5_rows(x, K, rows, arena, at, scales, scales_at, minimums_at, group, y, N, column):
    """y[rows[i], column : column + 16] for five rows: ten AVX2 registers of exact sums, two of weights, one of x."""
    x0, x1, x2, x3, x4 = rows[0] * K, rows[1] * K, rows[2] * K, rows[3] * K, rows[4] * K
    y0, y1, y2, y3, y4 = zero(), zero(), zero(), zero(), zero()
    for g in range(K // group):
        i0, i1, i2, i3, i4 = izero(), izero(), izero(), izero(), izero()
        for k in range(g * group, g * group + group, 2):
            w = load_pairs(arena, at + k * COLUMNS)
            i0 = dot_pairs(splat_pair(x.codes, x0 + k), w, i0)
            i1 = dot_pairs(splat_pair(x.codes, x1 + k), w, i1)
            i2 = dot_pairs(splat_pair(x.codes, x2 + k), w, i2)
            i3 = dot_pairs(splat_pair(x.codes, x3 + k), w, i3)
            i4 = dot_pairs(splat_pair(x.codes, x4 + k), w, i4)
        sw, k = load(scales, scales_at + g * COLUMNS), g * group
        s0, s1, s2 = _scale(x, x0 + k), _scale(x, x1 + k), _scale(x, x2 + k)
        s3, s4 = _scale(x, x3 + k), _scale(x, x4 + k)
        y0, y1, y2 = _scaled(y0, s0, sw, i0), _scaled(y1, s1, sw, i1), _scaled(y2, s2, sw, i2)
        y3, y4 = _scaled(y3, s3, sw, i3), _scaled(y4, s4, sw, i4)
        if minimums_at >= 0:
            m = load(scales, minimums_at + g * COLUMNS)
            y0 = _without_minimum(y0, s0, m, _codes_sum(x, x0 + k, group))
            y1 = _without_minimum(y1, s1, m, _codes_sum(x, x1 + k, group))
            y2 = _without_minimum(y2, s2, m, _codes_sum(x, x2 + k, group))
            y3 = _without_minimum(y3, s3, m, _codes_sum(x, x3 + k, group))
            y4 = _without_minimum(y4, s4, m, _codes_sum(x, x4 + k, group))
    columns = N - column
    _put(y, rows[0] * N + column, y0, columns)
    _put(y, rows[1] * N + column, y1, columns)
    _put(y, rows[2] * N + column, y2, columns)
    _put(y, rows[3] * N + column, y3, columns)
    _put(y, rows[4] * N + column, y4, columns)


@inlined
def _scale(x, k):
    return load_one(x.scales, k // BLOCK)


@inlined
def _codes_sum(x, k, group):
    """The sum of the codes from k on, exact: of two halves it is below 2^21."""
    if group == HALF:
        return load_one(x.sums, k // HALF)
    return load_one(x.sums, k // HALF) + load_one(x.sums, k // HALF + 1)


@kernel
def _codes_4_panels(x, K, row, w, panels, y):
    """y[row] of four panels."""
    x0, group, arena, size, groups = row * K, w.group, w.codes, K * COLUMNS, K // w.group * COLUMNS
    w0, w1 = w.codes_at + panels[0] * size, w.codes_at + panels[1] * size
    w2, w3 = w.codes_at + panels[2] * size, w.codes_at + panels[3] * size
    y0, y1, y2, y3 = zero(), zero(), zero(), zero()
    for g in range(K // group):
        i0, i1, i2, i3 = izero(), izero(), izero(), izero()
        for k in range(g * group, g * group + group, 2):
            x_k = splat_pair(x.codes, x0 + k)
            i0 = dot_pairs(x_k, load_pairs(arena, w0 + k * COLUMNS), i0)
            i1 = dot_pairs(x_k, load_pairs(arena, w1 + k * COLUMNS), i1)
            i2 = dot_pairs(x_k, load_pairs(arena, w2 + k * COLUMNS), i2)
            i3 = dot_pairs(x_k, load_pairs(arena, w3 + k * COLUMNS), i3)
        sx = _scale(x, x0 + g * group)
        at = w.scales_at + g * COLUMNS
        y0 = _scaled(y0, sx, load(w.scales, at + panels[0] * groups), i0)
        y1 = _scaled(y1, sx, load(w.scales, at + panels[1] * groups), i1)
        y2 = _scaled(y2, sx, load(w.scales, at + panels[2] * groups), i2)
        y3 = _scaled(y3, sx, load(w.scales, at + panels[3] * groups), i3)
        if w.minimums_at >= 0:
            codes, at = _codes_sum(x, x0 + g * group, group), w.minimums_at + g * COLUMNS
            y0 = _without_minimum(y0, sx, load(w.scales, at + panels[0] * groups), codes)
            y1 = _without_minimum(y1, sx, load(w.scales, at + panels[1] * groups), codes)
            y2 = _without_minimum(y2, sx, load(w.scales, at + panels[2] * groups), codes)
            y3 = _without_minimum(y3, sx, load(w.scales, at + panels[3] * groups), codes)
    _put(y, row * w.N + panels[0] * COLUMNS, y0, w.N - panels[0] * COLUMNS)
    _put(y, row * w.N + panels[1] * COLUMNS, y1, w.N - panels[1] * COLUMNS)
    _put(y, row * w.N + panels[2] * COLUMNS, y2, w.N - panels[2] * COLUMNS)
    _put(y, row * w.N + panels[3] * COLUMNS, y3, w.N - panels[3] * COLUMNS)


@kernel
def matmul_codes(x, w, y, first_row, last_row, first_panel, last_panel):
    """y[t, n] = sum over groups of (sx * sw) * dot(codes) - (sx * minimum) * sum(codes of x), of these rows and panels.

    x: CodedRows   w: CodePanels   y: [T * N], written
    """
    N, K = w.N, w.K
    row_end, panel_end, groups = last_row - 1, last_panel - 1, K // w.group * COLUMNS
    if last_row - first_row == 1:
        for p in range(first_panel, last_panel, 4):
            panels = (p, min(p + 1, panel_end), min(p + 2, panel_end), min(p + 3, panel_end))
            _codes_4_panels(x, K, first_row, w, panels, y)
        return
    for p in range(first_panel, last_panel):
        at, scales_at = w.codes_at + p * K * COLUMNS, w.scales_at + p * groups
        minimums_at = w.minimums_at + p * groups if w.minimums_at >= 0 else -1
        for t in range(first_row, last_row, 5):
            rows = (t, min(t + 1, row_end), min(t + 2, row_end), min(t + 3, row_end), min(t + 4, row_end))
            _codes_5_rows(x, K, rows, w.codes, at, w.scales, scales_at, minimums_at, w.group, y, N, p * COLUMNS)
