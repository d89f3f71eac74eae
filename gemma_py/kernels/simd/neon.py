"""Exact dot products of integer codes on ARM64, whose registers (NEON) have 128 bits, a quarter of sixteen lanes.

sdot, udot and usdot multiply bytes: four products are added to each of four lanes. smmla and usmmla multiply two rows of
eight bytes with two columns: eight products are added to each of four lanes. smlal multiplies four int16.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gemma_py.kernels.simd.builders import (
    I8,
    I16,
    I32,
    call_llvm,
    i32x16,
    is_flat,
    load_value_at,
    shuffle,
    splat_scalar,
)
from gemma_py.kernels.simd.target import has_neon_dot

SIGN_BITS = 0x80808080
_FOUR, _WORDS, _BYTES = ir.VectorType(I32, 4), ir.VectorType(I16, 8), ir.VectorType(I8, 16)


def _lanes(builder, vector, lanes):
    return shuffle(builder, vector, ir.Constant(vector.type, ir.Undefined), lanes)


def _quarter_of(builder, vector, quarter):
    return _lanes(builder, builder.bitcast(vector, i32x16.llvm), range(4 * quarter, 4 * quarter + 4))


def _join_quarters(builder, quarters):
    a, b, c, d = quarters
    return shuffle(builder, shuffle(builder, a, b, range(8)), shuffle(builder, c, d, range(8)), range(16))


def _constant(value):
    return ir.Constant(_FOUR, [ir.Constant(I32, value)] * 4)


def _in_place(builder, value):
    """Return `value`. LLVM would otherwise move the computation of `value` to later code, which has no free registers."""
    kind = ir.FunctionType(_FOUR, [_FOUR])
    return builder.call(ir.InlineAsm(kind, "", "=w,0", side_effect=True), [value])


# --- bytes ------------------------------------------------------------------------------------------------------------


def load_planes(context, builder, kind, planes, index, number):
    """Load the byte planes of inputs 8 number .. 8 number + 7: the high and low bytes of two quads."""
    at = builder.add(index, ir.Constant(index.type, 16 * number))
    return load_value_at(context, builder, kind, planes, at, _FOUR, 1)


def _byte_dot(context, builder, high, weights, planes, quad, total):
    """Return total + the dot products of four quads of weights and one quad of inputs.

    high: True for the inputs' signed high bytes, False for their unsigned low bytes
    weights: signed bytes, or unsigned bytes for low bytes where FLIPS_LOW is true
    quad: which of the two quads in `planes`

    Each instruction can read one lane in place of a splat.
    """
    code = _lanes(builder, planes, [2 * quad + (0 if high else 1)] * 4)
    name, factors = ("sdot" if high else "udot"), (weights, code)
    if not high and has_neon_dot("usdot", *context.codegen().magic_tuple()):
        name, factors = "usdot", (code, weights)
    operands = [total, *(builder.bitcast(factor, _BYTES) for factor in factors)]
    return call_llvm(builder, f"llvm.aarch64.neon.{name}.v4i32.v16i8", _FOUR, operands)


def add_byte_dot(context, builder, high, weights, planes, quad, total):
    """Return `_byte_dot` for sixteen quads of weights."""
    quarters = [[_quarter_of(builder, value, quarter) for value in (weights, total)] for quarter in range(4)]
    dots = [_byte_dot(context, builder, high, part, planes, quad, sums) for part, sums in quarters]
    return _join_quarters(builder, dots)


def add_matrix_dots(builder, high, weights, planes, totals):
    """Return the totals of two rows, plus the dot products of eight inputs and sixteen outputs. Needs smmla.

    high: True for the inputs' signed high bytes, False for their unsigned low bytes
    weights: a pair of vectors, as `join_quads` returns them
    planes: for each of the two rows, what `load_planes` returns
    totals: a pair of vectors. Each quarter belongs to two outputs, and has row 0 and then row 1; see `split_rows`
    """
    name = "smmla" if high else "usmmla"
    row_0, row_1 = planes
    codes = builder.bitcast(shuffle(builder, row_0, row_1, range(0 if high else 1, 8, 2)), _BYTES)
    results = []
    for part, total in zip(weights, totals, strict=True):
        quarters = []
        for quarter in range(4):
            operands = [_quarter_of(builder, total, quarter), codes]
            operands.append(builder.bitcast(_quarter_of(builder, part, quarter), _BYTES))
            quarters.append(call_llvm(builder, f"llvm.aarch64.neon.{name}.v4i32.v16i8", _FOUR, operands))
        results.append(_join_quarters(builder, quarters))
    return results


@intrinsic(prefer_literal=True)
def dot_byte_run(typing, planes, index, run, flips, start, start_2):
    """Return (start + dot, start_2 + dot_2), where dot and dot_2 are the dot products of the halves of a run and 32 inputs.

    planes: the byte planes of the inputs, from planes[index] on
    run: for v = 0 .. 3, the pair of quads v and v + 4
    flips: 1 if the weights' sign bits are to be flipped for the low bytes

    The quarters are computed one after the other, because more would not fit in the registers. Needs sdot.
    """
    if not (is_flat(planes, types.int8) and isinstance(flips, types.IntegerLiteral)):
        return None

    def codegen(context, builder, sig, args):
        planes, index, run, _, *starts = args
        codes = [load_planes(context, builder, sig.args[0], planes, index, number) for number in range(4)]
        pairs = [builder.extract_value(run, v) for v in range(4)]
        dots: tuple[list[ir.Value], ...] = [], []
        for quarter in range(4):
            for half, start in enumerate(starts):
                total = _constant(0)
                weights = [_quarter_of(builder, builder.extract_value(pair, half), quarter) for pair in pairs]
                for v, quads in enumerate(weights):
                    total = _byte_dot(context, builder, True, quads, codes[2 * half + v // 2], v % 2, total)
                total = builder.add(builder.shl(total, _constant(8)), splat_scalar(builder, start, _FOUR))
                for v, quads in enumerate(weights):
                    quads = builder.xor(quads, _constant(SIGN_BITS)) if flips.literal_value else quads
                    total = _byte_dot(context, builder, False, quads, codes[2 * half + v // 2], v % 2, total)
                dots[half].append(_in_place(builder, total))
        return context.make_tuple(builder, sig.return_type, [_join_quarters(builder, each) for each in dots])

    return types.UniTuple(i32x16, 2)(planes, types.intp, run, flips, types.int32, types.int32), codegen


# --- words ------------------------------------------------------------------------------------------------------------


@intrinsic
def dot_word_run(typing, codes, index, run):
    """Return (dot, dot_2), the dot products of the halves of a run and 32 inputs.

    codes: int16, from codes[index] on; every four are in the order 0, 2, 1, 3
    run: for v = 0 .. 3, the pair of quads v and v + 4, as signed bytes
    """
    if not is_flat(codes, types.int16):
        return None

    def codegen(context, builder, sig, args):
        codes, index, run = args
        places = [builder.add(index, ir.Constant(index.type, at)) for at in range(0, 32, 8)]
        inputs = [load_value_at(context, builder, sig.args[0], codes, at, _WORDS, 2) for at in places]
        pairs = [builder.extract_value(run, v) for v in range(4)]
        eight = ir.Constant(_WORDS, [8] * 8)
        dots: tuple[list[ir.Value], ...] = [], []
        for first in (0, 8):  # eight outputs at a time
            for half in range(2):
                totals = [_constant(0), _constant(0)]
                for v, pair in enumerate(pairs):
                    quads = builder.bitcast(builder.extract_value(pair, half), ir.VectorType(I8, 64))
                    for number, element in enumerate((0, 2, 1, 3)):
                        # Of every word, the low byte belongs to one element and the high byte to another.
                        words = builder.bitcast(
                            _lanes(builder, quads, range(4 * first + element % 2, 4 * first + 32, 2)), _WORDS
                        )
                        weights = builder.ashr(words if element > 1 else builder.shl(words, eight), eight)
                        code = _lanes(builder, inputs[2 * half + v // 2], [4 * (v % 2) + number] * 4)
                        for part in range(2):
                            factors = [_lanes(builder, weights, range(4 * part, 4 * part + 4)), code]
                            product = call_llvm(builder, "llvm.aarch64.neon.smull.v4i32", _FOUR, factors)
                            totals[part] = builder.add(totals[part], product)
                dots[half].extend(_in_place(builder, total) for total in totals)
        return context.make_tuple(builder, sig.return_type, [_join_quarters(builder, each) for each in dots])

    return types.UniTuple(i32x16, 2)(codes, types.intp, run), codegen
