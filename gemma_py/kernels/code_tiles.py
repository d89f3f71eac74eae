"""Matrix products of several rows with quantised weights as they are stored, with VNNI (see panels.py for the layout).

A tile has four rows and two panels. Unpacking a quad takes at most a few masks, shifts and ORs. Other units of the processor
compute these while VNNI multiplies, so unpacking takes little time, and unpacked codes need not be stored. In formats without
sub-scales, products of at most eight rows also read scales and minimums where they are stored. Otherwise it is faster to
unpack scales and minimums first.
"""

from typing import Any

import numpy as np

from gemma_py.kernels.decorator import force_inlined, inlined
from gemma_py.kernels.panels import (
    BLOCK_SCALE_BYTES,
    COLUMNS,
    INPUT_BLOCK,
    SMALL_GROUP,
    block_scale_bytes_of,
    for_each_width,
    sub_scale_bytes_of,
    unpack_scales,
)
from gemma_py.kernels.simd.codes import load_f16
from gemma_py.kernels.simd.tiles import (
    add_quad_dots_to_tiles,
    add_scaled,
    add_tiles,
    load_columns,
    prefetch_totals,
    row_offsets,
    shift_dots,
    start_dots,
    start_dots_with_offset,
    store_partial_totals,
    store_totals,
    subtract_minimums,
    zero_dots,
    zero_totals,
)
from gemma_py.kernels.simd.vectors import prefetch_to_l2

ROWS, PANELS = 4, 2  # of a tile
# In formats without sub-scales, so many tiles read scales and minimums where they are stored. If more tiles need them, unpacking
# them once is faster.
_TILES_IN_PLACE = 2


@force_inlined
def _scales_of_group(w, at, are_unpacked, unpacked, group):
    """Return the scales and the minimums of a group, each with one vector for each panel.

    In formats without minimums, callers ignore the second element.

    at: index of the codes of the group's run in the first panel
    are_unpacked: whether the unpack buffer holds them. Otherwise they must be in the arena right before the codes, which is so
        in formats without sub-scales.
    """
    if are_unpacked:
        first = group * PANELS * COLUMNS
        scales = load_columns(unpacked.scales, first, PANELS)
        return scales, load_columns(unpacked.minimums, first, PANELS) if w.minimums else scales
    first = at - block_scale_bytes_of(w)
    second = first + w.panel_bytes
    scales = load_f16(w.arena, first), load_f16(w.arena, second)
    if w.minimums:
        return scales, (load_f16(w.arena, first + BLOCK_SCALE_BYTES), load_f16(w.arena, second + BLOCK_SCALE_BYTES))
    return scales, scales


@force_inlined
def _add_group_to_tile(x, w, columns, blocks, block, sums, sum_offsets, group, dots, totals):
    """Return the totals plus the contribution of a group of inputs.

    columns: the result of `_scales_of_group`
    blocks: for each row, where it begins in x.scales
    sums, sum_offsets: for each row, the sums of the groups' input codes begin at sums[sum_offsets[row]]
    dots: the dot products of input codes and weight codes without their offset
    """
    scales, minimums = columns
    totals = add_scaled(x.scales, blocks, block, scales, dots, totals)
    if w.minimums:
        totals = subtract_minimums(x.scales, blocks, block, sums, sum_offsets, group, minimums, totals)
    return totals


def _make_tiles(quads: Any, width: int) -> Any:
    """Return (a function for groups of 32 inputs, a function for groups of 16) for codes of `width` bits.

    quads: the function that loads such codes
    """
    are_signed = 1 if width == 8 else 0
    lines = PANELS * (width + 1)  # the cache lines of a run of each panel, with its scales

    @force_inlined
    def add_quads(x, planes, plane_at, w, at, v, highs, lows):
        """Add the products of quads v and v + 4, which one call of `quads` loads."""
        first, second = quads(w.arena, at, v)
        next_first, next_second = quads(w.arena, at + w.panel_bytes, v)
        highs, lows = add_quad_dots_to_tiles(
            x.byte_planes, planes, plane_at, (first, next_first), are_signed, highs, lows
        )
        return add_quad_dots_to_tiles(
            x.byte_planes, planes, plane_at + 2 * SMALL_GROUP, (second, next_second), are_signed, highs, lows
        )

    @force_inlined
    def add_quad(x, planes, plane_at, w, at, v, half, highs, lows):
        """Add the products of one quad of a half of a run."""
        quad, next_quad = quads(w.arena, at, v)[half], quads(w.arena, at + w.panel_bytes, v)[half]
        return add_quad_dots_to_tiles(x.byte_planes, planes, plane_at, (quad, next_quad), are_signed, highs, lows)

    @force_inlined
    def add_run_of_32(x, w, unpacked, are_unpacked, at, block, planes, blocks, of_16, totals):
        """Return the totals plus the products of 32 inputs with a run of each panel.

        at: index of the run's codes    block: the number of the block of 32 inputs
        planes, blocks, of_16: for each row, where it begins in x.byte_planes, in x.scales, and in x.flip_sums
        """
        # For the high bytes, `add_quad_dots_to_tiles` adds 128 to signed weights. flip_sums subtracts what this adds to the sum.
        if are_signed:
            highs, lows = start_dots(x.flip_sums, of_16, 2 * block, 2, PANELS), zero_dots(planes, PANELS)
        else:
            highs, lows = (
                zero_dots(planes, PANELS),
                start_dots_with_offset(x.sums, blocks, block, np.int32(-w.offset), PANELS),
            )
        plane_at = 2 * INPUT_BLOCK * block
        highs, lows = add_quads(x, planes, plane_at, w, at, 0, highs, lows)
        highs, lows = add_quads(x, planes, plane_at + 8, w, at, 1, highs, lows)
        highs, lows = add_quads(x, planes, plane_at + 16, w, at, 2, highs, lows)
        highs, lows = add_quads(x, planes, plane_at + 24, w, at, 3, highs, lows)
        columns, dots = _scales_of_group(w, at, are_unpacked, unpacked, block), add_tiles(shift_dots(highs), lows)
        return _add_group_to_tile(x, w, columns, blocks, block, x.sums, blocks, block, dots, totals)

    @force_inlined
    def add_half_run(x, w, unpacked, are_unpacked, at, block, half, planes, blocks, of_16, totals):
        group, plane_at = 2 * block + half, 2 * (INPUT_BLOCK * block + SMALL_GROUP * half)
        lows = start_dots_with_offset(x.sums_of_16, of_16, group, np.int32(-w.offset), PANELS)
        highs, lows = add_quad(x, planes, plane_at, w, at, 0, half, zero_dots(planes, PANELS), lows)
        highs, lows = add_quad(x, planes, plane_at + 8, w, at, 1, half, highs, lows)
        highs, lows = add_quad(x, planes, plane_at + 16, w, at, 2, half, highs, lows)
        highs, lows = add_quad(x, planes, plane_at + 24, w, at, 3, half, highs, lows)
        columns, dots = _scales_of_group(w, at, are_unpacked, unpacked, group), add_tiles(shift_dots(highs), lows)
        return _add_group_to_tile(x, w, columns, blocks, block, x.sums_of_16, of_16, group, dots, totals)

    @force_inlined
    def add_run_of_16(x, w, unpacked, are_unpacked, at, block, planes, blocks, of_16, totals):
        totals = add_half_run(x, w, unpacked, are_unpacked, at, block, 0, planes, blocks, of_16, totals)
        return add_half_run(x, w, unpacked, are_unpacked, at, block, 1, planes, blocks, of_16, totals)

    def make_tiles(add_run: Any) -> Any:
        @inlined
        def tile(x, t, rows, w, panel, unpacked, are_unpacked, y, ahead, step):
            """Multiply ROWS rows, from row t on, with PANELS panels, from `panel` on.

            rows: the number of rows that are left. If it is less than ROWS, the last row is computed several times.
            are_unpacked: whether the scales and minimums of these panels are in the UnpackBuffer `unpacked`
            ahead, step: from index `ahead` on, the arena is prefetched at steps of `step` bytes, `lines` times in a run
            """
            K, N, column = w.K, w.N, panel * COLUMNS
            planes = row_offsets(2 * t * K, 2 * K, rows, ROWS)
            blocks = row_offsets(t * (K // INPUT_BLOCK), K // INPUT_BLOCK, rows, ROWS)
            of_16 = row_offsets(t * (K // SMALL_GROUP), K // SMALL_GROUP, rows, ROWS)
            outputs = row_offsets(t * N + column, N, rows, ROWS)
            prefetch_totals(y, outputs, PANELS)
            totals, at = zero_totals(planes, PANELS), w.start + panel * w.panel_bytes
            block_mask = w.block // INPUT_BLOCK - 1  # the number of runs in a block is a power of two
            before_block, before_run = block_scale_bytes_of(w), sub_scale_bytes_of(w) * (1 + w.minimums)
            for block in range(K // INPUT_BLOCK):
                at += before_run + (0 if block & block_mask else before_block)
                for line in range(lines):
                    prefetch_to_l2(w.arena, ahead + line * step)
                totals = add_run(x, w, unpacked, are_unpacked, at, block, planes, blocks, of_16, totals)
                at, ahead = at + 64 * width, ahead + lines * step
            if column + PANELS * COLUMNS <= N:
                store_totals(y, outputs, 0, totals)
            else:
                store_partial_totals(y, outputs, N - column, totals)

        @inlined
        def tiles(x, first_row, last_row, w, panel, next_panel, unpacked, y):
            runs, count = w.K // INPUT_BLOCK, (last_row - first_row + ROWS - 1) // ROWS
            are_unpacked = w.block > INPUT_BLOCK or count > _TILES_IN_PLACE
            if are_unpacked:
                for column in range(PANELS):
                    unpack_scales(w, panel + column, unpacked, column, PANELS)
            ahead, step = w.start + next_panel * w.panel_bytes, PANELS * w.panel_bytes // (lines * runs * count) + 1
            for t in range(first_row, last_row, ROWS):
                tile(x, t, last_row - t, w, panel, unpacked, are_unpacked, y, ahead, step)
                ahead += lines * runs * step

        return tiles

    return make_tiles(add_run_of_32), make_tiles(add_run_of_16)


# Formats of 5 and 8 bits have groups of 32, and formats of 6 bits have groups of 16.
(_four_of_32, _four_of_16), (_five_of_32, _), (_, _six_of_16), (_eight_of_32, _) = for_each_width(_make_tiles)


@inlined
def multiply_tiles(x, first_row, last_row, w, panel, next_panel, unpacked, y):
    """Multiply the rows with PANELS panels, from `panel` on.

    Each tile prefetches a part of the next panels, because the hardware prefetches only what is near the latest loads.

    next_panel: the first panel that this worker probably multiplies next
    """
    if w.width == 4 and w.group == INPUT_BLOCK:
        _four_of_32(x, first_row, last_row, w, panel, next_panel, unpacked, y)
    elif w.width == 4:
        _four_of_16(x, first_row, last_row, w, panel, next_panel, unpacked, y)
    elif w.width == 5:
        _five_of_32(x, first_row, last_row, w, panel, next_panel, unpacked, y)
    elif w.width == 6:
        _six_of_16(x, first_row, last_row, w, panel, next_panel, unpacked, y)
    else:
        _eight_of_32(x, first_row, last_row, w, panel, next_panel, unpacked, y)
