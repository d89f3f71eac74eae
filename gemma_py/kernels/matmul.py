"""Matrices in panels of 16 outputs, times rows: every output is one chain, k or the groups of k ascending.

All panels of a kind lie in one flat array (an arena), so that one compiled function serves every matrix of a model; a
matrix says where its own begin. They come in fours; what fills up the last ones is zero and never written to a result.

    float panel   [K, 16] of f32, or of uint16 holding bfloat16
    code panel    bytes, at the width of the stored format: see panels.py

A pair of code panels is spread out to int16 once for all rows of a call; a few rows read the bytes as they are, which is
all that decoding waits for.

Any part of the work can be done by anyone: a call does the given rows of the given panels, each output by itself.
"""

from typing import Any, NamedTuple

import numpy as np

from gemma_py.kernels.decorator import force_inlined, inlined
from gemma_py.kernels.panels import (
    COLUMNS,
    INPUT_BLOCK,
    SMALL_GROUP,
    for_each_width,
    group_scales,
    load_block_scales,
    pairs_of,
    sub_scale_groups,
    unpack_panel,
)
from gemma_py.kernels.simd.codes import words_xor
from gemma_py.kernels.simd.dots import dot_pairs, dot_quads, load_splat_pair, load_splat_quad
from gemma_py.kernels.simd.target import USES_VNNI, USES_ZMM
from gemma_py.kernels.simd.tiles import (
    add_dots,
    add_products,
    add_scaled,
    prefetch_totals,
    row_offsets,
    store_partial_totals,
    store_totals,
    subtract_minimums,
    zero_dots,
    zero_totals,
)
from gemma_py.kernels.simd.vectors import (
    add,
    fma,
    load,
    load_scalar,
    mul,
    prefetch,
    shift_left,
    splat,
    store,
    store_partial,
    sub,
    to_f32,
    zero,
    zero_ints,
)

# Rows and panels of a tile of outputs. Chains enough to hide their delay, few enough for the registers.
FLOAT_ROWS, FLOAT_PANELS = (6, 4) if USES_ZMM else (6, 1)
CODE_ROWS, CODE_PANELS = (6, 2) if USES_ZMM else (5, 1)
_AHEAD = 2048  # bytes of codes that are asked for early: the machine's own prefetching ends at every page
MATVEC_PANELS = 4  # of floats at once
FEW_ROWS = 16  # times panels of codes as they are stored: spreading them out would take longer
_SIGNS, _LEAST_BYTE = 0x8080, np.int32(-128)
TILE_ROWS_MULTIPLE = 30  # what a call should do is some of: every tile's rows divide it
MIN_TILE_ROWS, MAX_TILE_ROWS = 120, 540  # of it: fewer do not pay for a panel that is spread out, more gain nothing


class FloatPanels(NamedTuple):
    """A matrix of float weights."""

    arena: np.ndarray
    at: int
    N: int
    K: int


class CodedRows(NamedTuple):
    """An input of T rows as codes: x is nearly scale * code."""

    codes: np.ndarray  # int16 [T * K], of every four numbers 0, 2, 1, 3
    byte_planes: np.ndarray  # int8 [T * K / 4, 2, 4]: the upper bytes of four codes, signed, then the lower ones
    scales: np.ndarray  # [T * K / 32]
    sums: np.ndarray  # [T * K / 32]: the sums of 32 codes, exact
    high_byte_sums: np.ndarray  # [T * K / 32]: of their upper bytes
    sums_of_16: np.ndarray  # [T * K / 16], of 16


def unpack_buffer_sizes(K: int) -> tuple[int, int]:
    """How many codes, and how many scales (and minimums), an unpack buffer holds for matrices of at most K inputs."""
    return K * COLUMNS * CODE_PANELS, max(FEW_ROWS, (K // SMALL_GROUP + 1) * CODE_PANELS) * COLUMNS


@force_inlined
def _put(y, at, value, columns):
    if columns >= COLUMNS:
        store(y, at, value)
    elif columns > 0:
        store_partial(y, at, value, columns)


# --- float weights ----------------------------------------------------------------------------------------------------


@inlined
def _float_tile(x, t, rows, w, panel, y):
    N, K, column = w.N, w.K, panel * COLUMNS
    at, values = w.at + column * K, row_offsets(t * K, K, rows, FLOAT_ROWS)
    places = row_offsets(t * N + column, N, rows, FLOAT_ROWS)
    prefetch_totals(y, places, FLOAT_PANELS)
    totals = zero_totals(values, FLOAT_PANELS)
    for k in range(K):
        totals = add_products(x, values, k, w.arena, at + k * COLUMNS, K * COLUMNS, totals)
    if column + FLOAT_PANELS * COLUMNS <= N:
        store_totals(y, places, 0, totals)
    else:
        store_partial_totals(y, places, N - column, totals)


@inlined
def _float_row(x, t, w, panel, y):
    """One row times four panels."""
    K, column = w.K, panel * COLUMNS
    at, places = w.at + column * K, row_offsets(t * K, K, 1, 1)
    totals = zero_totals(places, MATVEC_PANELS)
    for k in range(K):
        totals = add_products(x, places, k, w.arena, at + k * COLUMNS, K * COLUMNS, totals)
    store_partial_totals(y, row_offsets(t * w.N + column, w.N, 1, 1), w.N - column, totals)


@inlined
def matmul_floats(x, w, y, first_row, last_row, first_panel, last_panel):
    """y[t, n] = sum over k of x[t, k] * w[n, k], rows first_row .. last_row - 1, outputs of these panels alone.

    x: [T * K]   w: FloatPanels   y: [T * N], written   first_panel, last_panel: multiples of 4
    """
    if last_row - first_row == 1:
        for panel in range(first_panel, last_panel, MATVEC_PANELS):
            _float_row(x, first_row, w, panel, y)
    else:
        for panel in range(first_panel, last_panel, FLOAT_PANELS):
            for t in range(first_row, last_row, FLOAT_ROWS):
                _float_tile(x, t, last_row - t, w, panel, y)


# --- quantised weights ------------------------------------------------------------------------------------------------


@inlined
def _code_tile(x, t, rows, w, panel, unpacked, y):
    """Rows t .. times the panels in the unpack buffer: exact sums of a group, then one float operation for it."""
    K, N, group, column = w.K, w.N, w.group, panel * COLUMNS
    codes = row_offsets(t * K, K, rows, CODE_ROWS)
    scales = row_offsets(t * (K // INPUT_BLOCK), K // INPUT_BLOCK, rows, CODE_ROWS)
    byte_planes = row_offsets(t * (K // SMALL_GROUP), K // SMALL_GROUP, rows, CODE_ROWS)
    places = row_offsets(t * N + column, N, rows, CODE_ROWS)
    prefetch_totals(y, places, CODE_PANELS)
    totals = zero_totals(codes, CODE_PANELS)
    for g in range(K // group):
        dots = zero_dots(codes, CODE_PANELS)
        for pair in range(g * group // 2, (g + 1) * group // 2, 8):
            dots = add_dots(x.codes, codes, 2 * pair, unpacked.codes, pair * CODE_PANELS * 2 * COLUMNS, dots)
        block, weights_at = g * group // INPUT_BLOCK, g * CODE_PANELS * COLUMNS
        totals = add_scaled(x.scales, scales, block, unpacked.scales, weights_at, dots, totals)
        if w.minimums:
            if group == INPUT_BLOCK:
                totals = subtract_minimums(
                    x.scales, scales, block, x.sums, scales, g, unpacked.minimums, weights_at, totals
                )
            else:
                totals = subtract_minimums(
                    x.scales, scales, block, x.sums_of_16, byte_planes, g, unpacked.minimums, weights_at, totals
                )
    if column + CODE_PANELS * COLUMNS <= N:
        store_totals(y, places, 0, totals)
    else:
        store_partial_totals(y, places, N - column, totals)


@force_inlined
def _scaled(total, sx, sw, dot):
    """total + (sx * sw) * dot, for sx of one row and sw of 16 columns."""
    return fma(mul(splat(sx), sw), to_f32(dot), total)


@force_inlined
def _without_minimum(total, sx, minimum, codes):
    """total - (sx * minimum) * codes"""
    return fma(mul(splat(-sx), minimum), splat(codes), total)


@force_inlined
def _with_group(total, w, dot, offset, sx, scales, minimums, codes):
    """The total and one group more: its dot product with codes that are `offset` too large, codes' own sum, scales."""
    total = _scaled(total, sx, scales, sub(dot, splat(np.int32(np.int32(codes) * offset))))
    return _without_minimum(total, sx, minimums, codes) if w.minimums else total


@force_inlined
def _dots_of(x, at, quads, width, high, low):
    """The dot products of a quad and the codes at `at` added to these two, of which `_joined` makes one."""
    if USES_VNNI:
        # Bytes: upper ones of the input times codes without a sign, codes times lower ones of the input.
        unsigned = words_xor(quads, _SIGNS) if width == 8 else quads
        high = dot_quads(unsigned, load_splat_quad(x.byte_planes, 2 * at), high)
        return high, dot_quads(load_splat_quad(x.byte_planes, 2 * at + 4), quads, low)
    even, odd = pairs_of(quads, width)
    return high, dot_pairs(load_splat_pair(x.codes, at), even, dot_pairs(load_splat_pair(x.codes, at + 2), odd, low))


@force_inlined
def _joined(high, low):
    return add(shift_left(high, splat(np.int32(8))), low) if USES_VNNI else low


def _rows_with(quads: Any, width: int) -> Any:
    @force_inlined
    def quads_of(w, at):
        """All eight of a run."""
        for line in range(_AHEAD, _AHEAD + 64 * (width + 1), 64):
            prefetch(w.arena, at + line)
        return quads(w.arena, at, 0), quads(w.arena, at, 1), quads(w.arena, at, 2), quads(w.arena, at, 3)

    @force_inlined
    def with_run(x, codes_at, w, run, scales, more_scales, minimums, more_minimums, total):
        """The total of a row and the 32 inputs more whose codes are at `codes_at`."""
        block, offset = codes_at // INPUT_BLOCK, np.int32(w.offset)
        sx, (high, low, more_high, more_low) = load_scalar(x.scales, block), zero_ints(4)
        if USES_VNNI and width == 8:  # codes have a sign here: 128 is added to each, and taken away in advance
            high = splat(np.int32(np.int32(load_scalar(x.high_byte_sums, block)) * _LEAST_BYTE))
        for v, (first, second) in enumerate(run):
            high, low = _dots_of(x, codes_at + 4 * v, first, width, high, low)
            more_high, more_low = _dots_of(x, codes_at + SMALL_GROUP + 4 * v, second, width, more_high, more_low)
        dot, more = _joined(high, low), _joined(more_high, more_low)
        if w.group == INPUT_BLOCK:
            return _with_group(total, w, add(dot, more), offset, sx, scales, minimums, load_scalar(x.sums, block))
        total = _with_group(total, w, dot, offset, sx, scales, minimums, load_scalar(x.sums_of_16, 2 * block))
        sum = load_scalar(x.sums_of_16, 2 * block + 1)
        return _with_group(total, w, more, offset, sx, more_scales, more_minimums, sum)

    @inlined
    def one_row(x, row, w, panel, y):
        """A row times a panel, whose bytes are read one after the other."""
        at, codes_at, total = w.at + panel * w.bytes, row * w.K, zero()
        sub_scale_bytes = sub_scale_groups(w) * COLUMNS
        for _ in range(w.K // w.block):
            block_scales, block_minimums, at = load_block_scales(w, at)
            for _ in range(w.block // INPUT_BLOCK):
                run = quads_of(w, at + sub_scale_bytes * (1 + w.minimums))
                scales, minimums = (
                    group_scales(w, block_scales, at, 0),
                    group_scales(w, block_minimums, at + sub_scale_bytes, 0),
                )
                more, more_minimums = (
                    group_scales(w, block_scales, at, 1),
                    group_scales(w, block_minimums, at + sub_scale_bytes, 1),
                )
                total = with_run(x, codes_at, w, run, scales, more, minimums, more_minimums, total)
                at, codes_at = at + sub_scale_bytes * (1 + w.minimums) + 64 * width, codes_at + INPUT_BLOCK
        _put(y, row * w.N + panel * COLUMNS, total, w.N - panel * COLUMNS)

    @inlined
    def few_rows(x, first_row, rows, w, panel, unpacked, y):
        """The same of some rows at once, whose totals are kept in the unpack buffer."""
        at, k, totals = w.at + panel * w.bytes, first_row * w.K, unpacked.scales
        sub_scale_bytes = sub_scale_groups(w) * COLUMNS
        for row in range(rows):
            store(totals, row * COLUMNS, zero())
        for _ in range(w.K // w.block):
            block_scales, block_minimums, at = load_block_scales(w, at)
            for _ in range(w.block // INPUT_BLOCK):
                run = quads_of(w, at + sub_scale_bytes * (1 + w.minimums))
                scales, minimums = (
                    group_scales(w, block_scales, at, 0),
                    group_scales(w, block_minimums, at + sub_scale_bytes, 0),
                )
                more, more_minimums = (
                    group_scales(w, block_scales, at, 1),
                    group_scales(w, block_minimums, at + sub_scale_bytes, 1),
                )
                for row in range(rows):
                    total, codes_at = load(totals, row * COLUMNS), k + row * w.K
                    total = with_run(x, codes_at, w, run, scales, more, minimums, more_minimums, total)
                    store(totals, row * COLUMNS, total)
                at, k = at + sub_scale_bytes * (1 + w.minimums) + 64 * width, k + INPUT_BLOCK
        for row in range(rows):
            _put(y, (first_row + row) * w.N + panel * COLUMNS, load(totals, row * COLUMNS), w.N - panel * COLUMNS)

    return one_row, few_rows


(_one_4, _few_4), (_one_5, _few_5), (_one_6, _few_6), (_one_8, _few_8) = for_each_width(_rows_with)


@inlined
def _one_row(x, row, w, panel, y):
    if w.width == 4:
        _one_4(x, row, w, panel, y)
    elif w.width == 5:
        _one_5(x, row, w, panel, y)
    elif w.width == 6:
        _one_6(x, row, w, panel, y)
    else:
        _one_8(x, row, w, panel, y)


@inlined
def _few_rows(x, first_row, rows, w, panel, unpacked, y):
    if w.width == 4:
        _few_4(x, first_row, rows, w, panel, unpacked, y)
    elif w.width == 5:
        _few_5(x, first_row, rows, w, panel, unpacked, y)
    elif w.width == 6:
        _few_6(x, first_row, rows, w, panel, unpacked, y)
    else:
        _few_8(x, first_row, rows, w, panel, unpacked, y)


@inlined
def matmul_codes(x, w, y, first_row, last_row, first_panel, last_panel, unpacked):
    """y[t, n] = sum over groups of (sx * sw) * dot(codes) - (sx * minimum) * sum(codes of x), of these rows and panels.

    x: CodedRows   w: CodePanels   y: [T * N], written   first_panel, last_panel: multiples of 4
    """
    rows = last_row - first_row
    if rows == 1:
        for panel in range(first_panel, last_panel):
            _one_row(x, first_row, w, panel, y)
    elif rows <= FEW_ROWS:
        for panel in range(first_panel, last_panel):
            _few_rows(x, first_row, rows, w, panel, unpacked, y)
    else:
        for panel in range(first_panel, last_panel, CODE_PANELS):
            for column in range(CODE_PANELS):
                unpack_panel(w, panel + column, unpacked, column, CODE_PANELS)
            for t in range(first_row, last_row, CODE_ROWS):
                _code_tile(x, t, last_row - t, w, panel, unpacked, y)
