"""Matrix products of one or a few rows with quantised weights as they are stored, in panels of 16 outputs (see panels.py)."""

from typing import Any

import numpy as np

from gemma_py.kernels.decorator import force_inlined, inlined
from gemma_py.kernels.panels import (
    COLUMNS,
    INPUT_BLOCK,
    SMALL_GROUP,
    for_each_width,
    load_block_scales,
    load_run_scales,
    quads_to_pairs,
    sub_scale_bytes_of,
)
from gemma_py.kernels.simd.codes import words_xor
from gemma_py.kernels.simd.dots import dot_pairs, dot_quads, load_splat_pair, load_splat_quad
from gemma_py.kernels.simd.neon import dot_byte_run, dot_word_run
from gemma_py.kernels.simd.target import FLIPS_LOW, IS_ARM64, IS_ZEN, USES_SDOT, USES_VNNI
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

# While a run is multiplied, codes this many bytes after the run are prefetched. Both distances were measured: 4,096 on AMD's
# Zen 4, 1,024 on an Intel Xeon, where decoding a 4B took 12 to 17% longer with 4,096.
_AHEAD = 4096 if IS_ZEN else 1024
_SIGN_BITS = 0x8080


@force_inlined
def _store_columns(y, at, value, columns):
    """Store the first `columns` lanes of value from y[at] on. If `columns` is larger than 16, store all 16 lanes."""
    if columns >= COLUMNS:
        store(y, at, value)
    elif columns > 0:
        store_partial(y, at, value, columns)


@force_inlined
def _add_scaled_dot(total, sx, sw, dot):
    """Return total + (sx * sw) * dot. sx: the scale of a block of inputs. sw: the weight scales of 16 outputs."""
    return fma(mul(splat(sx), sw), to_f32(dot), total)


@force_inlined
def _subtract_minimum(total, sx, minimum, code_sum):
    """Return total - (sx * minimum) * code_sum."""
    return fma(mul(splat(-sx), minimum), splat(code_sum), total)


@force_inlined
def _add_group(total, w, dot, offset, sx, scales, minimums, code_sum):
    """Return the total plus the contribution of one group of weights.

    dot: the dot product of the group's codes, where each weight code is too large by `offset`
    code_sum: the sum of the group's input codes; code_sum * offset is subtracted from `dot`
    """
    total = _add_scaled_dot(total, sx, scales, sub(dot, splat(np.int32(np.int32(code_sum) * offset))))
    return _subtract_minimum(total, sx, minimums, code_sum) if w.minimums else total


@force_inlined
def _add_quad_dots(x, at, quads, width, high, low):
    """Add the dot product of four input codes and four weights to `high` and `low`, for each of 16 outputs.

    VNNI multiplies unsigned bytes with signed bytes. So `high` accumulates products of the input's signed high bytes
    with unsigned weights, and `low` accumulates products of the input's unsigned low bytes with signed weights. Without
    VNNI, `low` accumulates products of whole 16-bit codes.
    """
    if USES_VNNI:
        unsigned = words_xor(quads, _SIGN_BITS) if width == 8 else quads
        high = dot_quads(unsigned, load_splat_quad(x.byte_planes, 2 * at), high)
        return high, dot_quads(load_splat_quad(x.byte_planes, 2 * at + 4), quads, low)
    even, odd = quads_to_pairs(quads, width)
    return high, dot_pairs(load_splat_pair(x.codes, at), even, dot_pairs(load_splat_pair(x.codes, at + 2), odd, low))


@force_inlined
def _join_dots(high, low):
    return add(shift_left(high, splat(np.int32(8))), low) if USES_VNNI else low


def _make_row_functions(quads: Any, width: int) -> Any:
    """Return (one_row, few_rows) for codes of `width` bits. `quads` is the function that loads such codes."""

    @force_inlined
    def load_run(x, codes_at, w, at):
        return quads(w.arena, at, 0), quads(w.arena, at, 1), quads(w.arena, at, 2), quads(w.arena, at, 3)

    flips_low = 1 if FLIPS_LOW and width == 8 else 0
    # How many bytes are prefetched for each run. Codes may begin within a cache line, so a run of codes may lie in one line
    # more than it fills. With 8-bit codes and VNNI, prefetches make products of one or two rows 13 to 21% slower on AMD's Zen 4,
    # but decoding the demo model 15 to 18% faster on an Intel Xeon. On ARM64, prefetches were not measured.
    prefetched = 0 if IS_ARM64 or (IS_ZEN and USES_VNNI and width == 8) else 64 * (width + 1)

    @force_inlined
    def prefetch_run(w, at):
        """Prefetch the codes of a run, which begin at index `at`."""
        for line in range(0, prefetched, 64):
            prefetch(w.arena, at + line)

    @force_inlined
    def dot_run(x, codes_at, w, at):
        """Return the dot product of 16 inputs and the first half of a run, and that of 16 inputs and the second half."""
        start, start_2 = np.int32(0), np.int32(0)
        if flips_low:  # flip_sums subtracts what the 128 that are added to each weight add to the dot product
            start = np.int32(load_scalar(x.flip_sums, codes_at // SMALL_GROUP))
            start_2 = np.int32(load_scalar(x.flip_sums, codes_at // SMALL_GROUP + 1))
        return dot_byte_run(x.byte_planes, 2 * codes_at, load_run(x, codes_at, w, at), flips_low, start, start_2)

    @force_inlined
    def dot_run_as_words(x, codes_at, w, at):
        return dot_word_run(x.codes, codes_at, load_run(x, codes_at, w, at))

    # The 32 registers of ARM64 hold neither a run, nor a part of it together with the scales. So on ARM64, each row multiplies
    # a run while loading it, before the scales are loaded.
    read_run = load_run if not IS_ARM64 else dot_run if USES_SDOT else dot_run_as_words

    @force_inlined
    def add_run(x, codes_at, w, run, scales, minimums, total):
        """Return a row's total plus the products of 32 inputs with a run of weights.

        codes_at: index of the first of the 32 input codes
        run: what `read_run` returned: on ARM64 the dot products, elsewhere the weights
        scales, minimums: pairs, one element for each group of 16 inputs
        """
        block, offset = codes_at // INPUT_BLOCK, np.int32(w.offset)
        sx = load_scalar(x.scales, block)
        if IS_ARM64:
            dot, dot_2 = run
        else:
            high, low, high_2, low_2 = zero_ints(4)
            # With VNNI, `_add_quad_dots` makes 8-bit weight codes unsigned by adding 128. The totals begin with flip_sums,
            # which subtracts what the 128 add to the dot product.
            if USES_VNNI and width == 8:
                high = splat(np.int32(load_scalar(x.flip_sums, 2 * block)))
                high_2 = splat(np.int32(load_scalar(x.flip_sums, 2 * block + 1)))
            for v, (first, second) in enumerate(run):
                high, low = _add_quad_dots(x, codes_at + 4 * v, first, width, high, low)
                high_2, low_2 = _add_quad_dots(x, codes_at + SMALL_GROUP + 4 * v, second, width, high_2, low_2)
            dot, dot_2 = _join_dots(high, low), _join_dots(high_2, low_2)
        if w.group == INPUT_BLOCK:
            code_sum = load_scalar(x.sums, block)
            return _add_group(total, w, add(dot, dot_2), offset, sx, scales[0], minimums[0], code_sum)
        code_sum, code_sum_2 = load_scalar(x.sums_of_16, 2 * block), load_scalar(x.sums_of_16, 2 * block + 1)
        total = _add_group(total, w, dot, offset, sx, scales[0], minimums[0], code_sum)
        return _add_group(total, w, dot_2, offset, sx, scales[1], minimums[1], code_sum_2)

    @inlined
    def one_row(x, row, w, panel, y):
        at, codes_at, total = w.start + panel * w.panel_bytes, row * w.K, zero()
        sub_scale_bytes = sub_scale_bytes_of(w)
        run_scale_bytes = sub_scale_bytes * (1 + w.minimums)
        for _ in range(w.K // w.block):
            block_scales, block_minimums, at = load_block_scales(w, at)
            for _ in range(w.block // INPUT_BLOCK):
                prefetch_run(w, at + run_scale_bytes + _AHEAD)
                run = read_run(x, codes_at, w, at + run_scale_bytes)
                scales, minimums = load_run_scales(w, block_scales, block_minimums, at, sub_scale_bytes)
                total = add_run(x, codes_at, w, run, scales, minimums, total)
                at, codes_at = at + run_scale_bytes + 64 * width, codes_at + INPUT_BLOCK
        _store_columns(y, row * w.N + panel * COLUMNS, total, w.N - panel * COLUMNS)

    @inlined
    def few_rows(x, first_row, rows, w, panel, unpacked, y):
        """Multiply `rows` rows with one panel. Each run of the panel is loaded once for all rows.

        The unpack buffer holds the totals of the rows.
        """
        at, k, totals = w.start + panel * w.panel_bytes, first_row * w.K, unpacked.scales
        sub_scale_bytes = sub_scale_bytes_of(w)
        run_scale_bytes = sub_scale_bytes * (1 + w.minimums)
        for row in range(rows):
            store(totals, row * COLUMNS, zero())
        for _ in range(w.K // w.block):
            block_scales, block_minimums, at = load_block_scales(w, at)
            for _ in range(w.block // INPUT_BLOCK):
                prefetch_run(w, at + run_scale_bytes + _AHEAD)
                run = load_run(x, k, w, at + run_scale_bytes)
                scales, minimums = load_run_scales(w, block_scales, block_minimums, at, sub_scale_bytes)
                for row in range(rows):
                    total = load(totals, row * COLUMNS)
                    total = add_run(x, k + row * w.K, w, run, scales, minimums, total)
                    store(totals, row * COLUMNS, total)
                at, k = at + run_scale_bytes + 64 * width, k + INPUT_BLOCK
        for row in range(rows):
            column = panel * COLUMNS
            _store_columns(y, (first_row + row) * w.N + column, load(totals, row * COLUMNS), w.N - column)

    @inlined
    def few_rows_one_by_one(x, first_row, rows, w, panel, unpacked, y):
        for row in range(first_row, first_row + rows):
            one_row(x, row, w, panel, y)

    return one_row, few_rows_one_by_one if IS_ARM64 else few_rows


_FOUR, _FIVE, _SIX, _EIGHT = for_each_width(_make_row_functions)
(_one_row_4, _few_rows_4), (_one_row_5, _few_rows_5) = _FOUR, _FIVE
(_one_row_6, _few_rows_6), (_one_row_8, _few_rows_8) = _SIX, _EIGHT


@inlined
def one_row(x, row, w, panel, y):
    if w.width == 4:
        _one_row_4(x, row, w, panel, y)
    elif w.width == 5:
        _one_row_5(x, row, w, panel, y)
    elif w.width == 6:
        _one_row_6(x, row, w, panel, y)
    else:
        _one_row_8(x, row, w, panel, y)


@inlined
def few_rows(x, first_row, rows, w, panel, unpacked, y):
    if w.width == 4:
        _few_rows_4(x, first_row, rows, w, panel, unpacked, y)
    elif w.width == 5:
        _few_rows_5(x, first_row, rows, w, panel, unpacked, y)
    elif w.width == 6:
        _few_rows_6(x, first_row, rows, w, panel, unpacked, y)
    else:
        _few_rows_8(x, first_row, rows, w, panel, unpacked, y)
