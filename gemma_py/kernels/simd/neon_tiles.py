"""Dot products of bytes on ARM64, added to a tile of totals with one vector of 16 lanes a row (see tiles.py)."""

from numba import types
from numba.extending import intrinsic

from gemma_py.kernels.simd.builders import (
    add_constant,
    i32x16,
    is_flat,
    load_value_at,
    shuffle,
    tuple_values,
    vector_constant,
)
from gemma_py.kernels.simd.neon import SIGN_BITS, add_byte_dot, add_matrix_dots, load_planes
from gemma_py.kernels.simd.target import FLIPS_LOW


@intrinsic(prefer_literal=True)
def add_byte_dots(typing, high, planes, offsets, step, weights, at, dots):
    """Add to dots[r] the dot products of 16 inputs and 16 outputs, with one byte of each input. Needs ARM64's sdot.

    high: 1 for the inputs' high bytes, 0 for their low bytes
    planes: for every four inputs, from planes[offsets[r] + step] on, four signed high bytes and four unsigned low bytes
    weights: from weights[at] on, the signed bytes of 4 quads of 16 outputs

    Where FLIPS_LOW is true, the low bytes are multiplied with the weights plus 128, which are the weights with the sign bit
    flipped.
    """
    if not (is_flat(planes, types.int8) and is_flat(weights, types.int8) and isinstance(high, types.IntegerLiteral)):
        return None
    is_high = high.literal_value == 1

    def codegen(context, builder, sig, args):
        _, _, offsets, step, _, at, dots = args
        results, offsets = tuple_values(builder, dots), tuple_values(builder, offsets)
        sign_bits = vector_constant(i32x16.llvm, [SIGN_BITS] * 16)
        for quad in range(4):
            place = add_constant(builder, at, 64 * quad)
            column = load_value_at(context, builder, weights, args[4], place, i32x16.llvm, 1)
            if FLIPS_LOW and not is_high:
                column = builder.xor(column, sign_bits)
            for r, offset in enumerate(offsets):
                place = builder.add(offset, step)
                code = load_planes(context, builder, planes, args[1], place, quad // 2)
                results[r] = add_byte_dot(context, builder, is_high, column, code, quad % 2, results[r])
        return context.make_tuple(builder, sig.return_type, results)

    return dots(high, planes, offsets, types.intp, weights, types.intp, dots), codegen


@intrinsic(prefer_literal=True)
def add_paired_dots(typing, high, planes, offsets, step, weights, at, dots):
    """Do what `add_byte_dots` does, but with smmla, for an even number of rows.

    weights: the quads of each output are joined to pairs; see `join_quads`
    dots: in the layout of `add_matrix_dots`, from which `split_rows` makes rows
    """
    is_high = high.literal_value == 1
    if dots.count != offsets.count or offsets.count % 2:
        return None

    def codegen(context, builder, sig, args):
        _, _, offsets, step, _, at, dots = args
        results, offsets = tuple_values(builder, dots), tuple_values(builder, offsets)
        for pair in range(2):
            parts = [
                load_value_at(context, builder, weights, args[4], add_constant(builder, at, place), i32x16.llvm, 1)
                for place in (128 * pair, 128 * pair + 64)
            ]
            for r in range(0, len(offsets), 2):
                places = [builder.add(offset, step) for offset in offsets[r : r + 2]]
                codes = [load_planes(context, builder, planes, args[1], place, pair) for place in places]
                results[r : r + 2] = add_matrix_dots(builder, is_high, parts, codes, results[r : r + 2])
        return context.make_tuple(builder, sig.return_type, results)

    return dots(high, planes, offsets, types.intp, weights, types.intp, dots), codegen


@intrinsic
def split_rows(typing, totals):
    """Return a tile of totals by rows and outputs, from totals that `add_matrix_dots` computed for each pair of rows."""

    def codegen(context, builder, sig, args):
        values, rows = tuple_values(builder, args[0]), []
        for a, b in zip(values[::2], values[1::2], strict=True):
            for row in range(2):
                order = [4 * quarter + 2 * row + column for quarter in range(8) for column in range(2)]
                rows.append(shuffle(builder, a, b, order))
        return context.make_tuple(builder, totals, rows)

    return totals(totals), codegen
