"""A tile of totals: R rows by C vectors of 16 lanes, as a tuple of R * C vectors, row after row.

An operation on a tile is one instruction for each of its vectors; a tile has as many vectors as the machine has registers
for. `offsets` says where each of its rows begins in an array.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gemma_py.kernels.simd.builders import (
    I8,
    LANES,
    call_llvm,
    element_pointer,
    f32x16,
    i16x32,
    i32x16,
    is_flat,
    lane_mask,
    load_f32,
    load_f32_vector,
    load_value_at,
    masked_store,
    prefetch_line,
    splat_scalar,
    vector_constant,
)
from gemma_py.kernels.simd.dots import dot_pairs_value, load_splat_pair_value


def tuple_values(builder, values):
    return [builder.extract_value(values, number) for number in range(values.type.count)]


def offset_index(builder, at, offset):
    return builder.add(at, ir.Constant(at.type, offset))


def _vectors_from(context, builder, kind, array, at, count, stride=None):
    """array[at + number * stride : ... + 16] as f32, for so many numbers; one after the other unless told otherwise."""
    stride = ir.Constant(at.type, LANES) if stride is None else stride
    sig = f32x16(kind, types.intp)
    offsets = [builder.mul(stride, ir.Constant(at.type, number)) for number in range(count)]
    return [load_f32_vector(context, builder, sig, (array, builder.add(at, offset))) for offset in offsets]


def fma_value(builder, a, b, total):
    return call_llvm(builder, "llvm.fma.v16f32", f32x16.llvm, [a, b, total])


def _splat_from(context, builder, kind, array, at):
    return splat_scalar(builder, load_f32(context, builder, types.float32(kind, types.intp), (array, at)), f32x16.llvm)


@intrinsic(prefer_literal=True)
def row_offsets(typing, at, stride, rows, R):
    """Where R rows begin: at + r * stride. From row number `rows` on, the last one before it again."""
    if not isinstance(R, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        at, stride, rows = args[:3]
        places, last = [], offset_index(builder, rows, -1)
        for number in range(R.literal_value):
            row = ir.Constant(last.type, number)
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            places.append(builder.add(at, builder.mul(row, stride)))
        return context.make_tuple(builder, sig.return_type, places)

    return types.UniTuple(types.intp, R.literal_value)(types.intp, types.intp, types.intp, R), codegen


def _zero_tile(kind, name):
    def zero_tile(typing, places, C):
        """All zero: C vectors for each of the places."""
        if not isinstance(C, types.IntegerLiteral):
            return None
        result = types.UniTuple(kind, places.count * C.literal_value)

        def codegen(context, builder, sig, args):
            return context.make_tuple(builder, result, [vector_constant(kind.llvm, [0] * 16)] * result.count)

        return result(places, C), codegen

    zero_tile.__name__ = name
    return intrinsic(prefer_literal=True)(zero_tile)


zero_totals, zero_dots = _zero_tile(f32x16, "zero_totals"), _zero_tile(i32x16, "zero_dots")


@intrinsic
def add_products(typing, a, places, step, b, at, stride, totals):
    """totals[r, c] += a[places[r] + step] * b[at + c * stride : ... + 16], rounded once."""
    if not (is_flat(a, types.float32, types.uint16) and is_flat(b, types.float32, types.uint16)):
        return None

    def codegen(context, builder, sig, args):
        _, places, step, _, at, stride, totals = args
        rows = sig.args[1].count
        vectors = sig.args[6].count // rows
        columns = _vectors_from(context, builder, sig.args[3], args[3], at, vectors, stride)
        made = tuple_values(builder, totals)
        for r, place in enumerate(tuple_values(builder, places)):
            factor = _splat_from(context, builder, sig.args[0], args[0], builder.add(place, step))
            for c, column in enumerate(columns):
                made[r * vectors + c] = fma_value(builder, factor, column, made[r * vectors + c])
        return context.make_tuple(builder, sig.return_type, made)

    return totals(a, places, types.intp, b, types.intp, types.intp, totals), codegen


@intrinsic
def add_dots(typing, codes, places, step, weights, at, dots):
    """dots[r, c] += the dot products of 16 codes, codes[places[r] + step : ... + 16], and of 8 times C vectors of sixteen
    pairs, weights[at + 32 (c + C pair) : ... + 32].

    Written out: the end of a loop so short is a wrong guess of the machine each time.
    """
    if not (is_flat(codes, types.int16) and is_flat(weights, types.int16)):
        return None

    def codegen(context, builder, sig, args):
        _, places, step, _, at, dots = args
        made, places = tuple_values(builder, dots), tuple_values(builder, places)
        vectors = len(made) // len(places)
        for pair in range(8):
            columns = [
                load_value_at(context, builder, sig.args[3], args[3], offset_index(builder, at, 32 * c), i16x32.llvm, 2)
                for c in range(vectors * pair, vectors * (pair + 1))
            ]
            for r, place in enumerate(places):
                place = offset_index(builder, builder.add(place, step), 2 * pair)
                code = load_splat_pair_value(context, builder, sig.args[0], args[0], place)
                for c, column in enumerate(columns):
                    made[r * vectors + c] = dot_pairs_value(context, builder, code, column, made[r * vectors + c])
        return context.make_tuple(builder, sig.return_type, made)

    return dots(codes, places, types.intp, weights, types.intp, dots), codegen


@intrinsic
def add_scaled(typing, scales, places, step, weights, at, dots, totals):
    """totals[r, c] += (scales[places[r] + step] * weights[at + 16 c : ... + 16]) * dots[r, c]"""
    if not (is_flat(scales, types.float32) and is_flat(weights, types.float32)):
        return None

    def codegen(context, builder, sig, args):
        _, places, step, _, at, dots, totals = args
        rows = sig.args[1].count
        vectors = sig.args[6].count // rows
        columns = _vectors_from(context, builder, sig.args[3], args[3], at, vectors)
        made, dots = tuple_values(builder, totals), tuple_values(builder, dots)
        for r, place in enumerate(tuple_values(builder, places)):
            scale = _splat_from(context, builder, sig.args[0], args[0], builder.add(place, step))
            for number in range(r * vectors, (r + 1) * vectors):
                factor = builder.fmul(scale, columns[number % vectors])
                made[number] = fma_value(builder, factor, builder.sitofp(dots[number], f32x16.llvm), made[number])
        return context.make_tuple(builder, sig.return_type, made)

    return totals(scales, places, types.intp, weights, types.intp, dots, totals), codegen


@intrinsic
def subtract_minimums(typing, scales, places, step, sums, sum_places, sum_step, weights, at, totals):
    """totals[r, c] -= (scales[places[r] + step] * weights[at + 16 c : ... + 16]) * sums[sum_places[r] + sum_step]"""
    if not (is_flat(scales, types.float32) and is_flat(sums, types.float32) and is_flat(weights, types.float32)):
        return None

    def codegen(context, builder, sig, args):
        _, places, step, _, sum_places, sum_step, _, at, totals = args
        rows = sig.args[1].count
        vectors = sig.args[8].count // rows
        columns = _vectors_from(context, builder, sig.args[6], args[6], at, vectors)
        made = tuple_values(builder, totals)
        both = zip(tuple_values(builder, places), tuple_values(builder, sum_places), strict=True)
        for r, (place, sum_place) in enumerate(both):
            scale = _splat_from(context, builder, sig.args[0], args[0], builder.add(place, step))
            total = _splat_from(context, builder, sig.args[3], args[3], builder.add(sum_place, sum_step))
            for number in range(r * vectors, (r + 1) * vectors):
                factor = builder.fmul(builder.fneg(scale), columns[number % vectors])
                made[number] = fma_value(builder, factor, total, made[number])
        return context.make_tuple(builder, sig.return_type, made)

    step = types.intp
    return totals(scales, places, step, sums, sum_places, step, weights, step, totals), codegen


@intrinsic
def scale_totals(typing, a, places, totals):
    """totals[r, c] *= a[places[r]]"""
    if not is_flat(a, types.float32):
        return None

    def codegen(context, builder, sig, args):
        made, vectors = tuple_values(builder, args[2]), sig.args[2].count // sig.args[1].count
        for r, place in enumerate(tuple_values(builder, args[1])):
            factor = _splat_from(context, builder, sig.args[0], args[0], place)
            for number in range(r * vectors, (r + 1) * vectors):
                made[number] = builder.fmul(made[number], factor)
        return context.make_tuple(builder, sig.return_type, made)

    return totals(a, places, totals), codegen


@intrinsic(prefer_literal=True)
def load_totals(typing, y, places, step, C):
    """totals[r, c] = y[places[r] + step + 16 c : ... + 16]"""
    if not (is_flat(y, types.float32) and isinstance(C, types.IntegerLiteral)):
        return None
    result = types.UniTuple(f32x16, places.count * C.literal_value)

    def codegen(context, builder, sig, args):
        made = []
        for place in tuple_values(builder, args[1]):
            made += _vectors_from(context, builder, y, args[0], builder.add(place, args[2]), C.literal_value)
        return context.make_tuple(builder, result, made)

    return result(y, places, types.intp, C), codegen


@intrinsic(prefer_literal=True)
def prefetch_totals(typing, y, places, C):
    """A hint that y[places[r] : ... + 16 C] will be written: a line that is far away takes as long as half a tile."""
    if not isinstance(C, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        for place in tuple_values(builder, args[1]):
            for c in range(C.literal_value):
                prefetch_line(
                    builder, element_pointer(context, builder, y, args[0], offset_index(builder, place, 16 * c), I8), 1
                )
        return context.get_dummy_value()

    return types.void(y, places, C), codegen


@intrinsic
def store_totals(typing, y, places, step, totals):
    """y[places[r] + step + 16 c : ... + 16] = totals[r, c]"""
    if not is_flat(y, types.float32):
        return None

    def codegen(context, builder, sig, args):
        made, vectors = tuple_values(builder, args[3]), sig.args[3].count // sig.args[1].count
        for r, place in enumerate(tuple_values(builder, args[1])):
            for c in range(vectors):
                at = offset_index(builder, builder.add(place, args[2]), 16 * c)
                address = element_pointer(context, builder, sig.args[0], args[0], at, f32x16.llvm)
                builder.store(made[r * vectors + c], address).align = 4
        return context.get_dummy_value()

    return types.void(y, places, types.intp, totals), codegen


@intrinsic
def store_partial_totals(typing, y, places, columns, totals):
    """y[places[r] : ... + columns] = the first of totals[r]"""
    if not is_flat(y, types.float32):
        return None

    def codegen(context, builder, sig, args):
        made, vectors = tuple_values(builder, args[3]), sig.args[3].count // sig.args[1].count
        masks = [lane_mask(builder, offset_index(builder, args[2], -16 * c)) for c in range(vectors)]
        for r, place in enumerate(tuple_values(builder, args[1])):
            for c in range(vectors):
                address = element_pointer(
                    context, builder, sig.args[0], args[0], offset_index(builder, place, 16 * c), f32x16.llvm
                )
                masked_store(builder, made[r * vectors + c], address, masks[c])
        return context.get_dummy_value()

    return types.void(y, places, types.intp, totals), codegen
