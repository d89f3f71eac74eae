"""Operations on a tile of totals: R rows by C vectors of 16 lanes, as a tuple of R * C vectors in row-major order.

Each operation is one instruction per vector of the tile. Callers choose R and C such that a tile fits in the machine's
registers. The argument `offsets` has R array indices, at which the rows of the tile begin.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gemma_py.kernels.simd.builders import (
    I8,
    I32,
    LANES,
    add_constant,
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
    tuple_values,
    vector_constant,
)
from gemma_py.kernels.simd.dots import dot_pairs_value, dot_quads_value, load_splat_pair_value
from gemma_py.kernels.simd.neon import SIGN_BITS


def _vectors_from(context, builder, kind, array, at, count, stride=None):
    """Load `count` vectors from an array as f32. Vectors are `stride` elements apart, or contiguous if stride is None."""
    stride = ir.Constant(at.type, LANES) if stride is None else stride
    sig = f32x16(kind, types.intp)
    offsets = [builder.mul(stride, ir.Constant(at.type, number)) for number in range(count)]
    return [load_f32_vector(context, builder, sig, (array, builder.add(at, offset))) for offset in offsets]


def _fma(builder, a, b, total):
    return call_llvm(builder, "llvm.fma.v16f32", f32x16.llvm, [a, b, total])


def _splat_from(context, builder, kind, array, at):
    return splat_scalar(builder, load_f32(context, builder, types.float32(kind, types.intp), (array, at)), f32x16.llvm)


@intrinsic(prefer_literal=True)
def row_offsets(typing, at, stride, rows, R):
    """Return the offsets of R rows, at + r * stride.

    `rows` is the number of rows that are left. If `rows` is less than R, the offset of the last row is repeated.
    """
    if not isinstance(R, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        at, stride, rows = args[:3]
        offsets, last = [], add_constant(builder, rows, -1)
        for number in range(R.literal_value):
            row = ir.Constant(last.type, number)
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            offsets.append(builder.add(at, builder.mul(row, stride)))
        return context.make_tuple(builder, sig.return_type, offsets)

    return types.UniTuple(types.intp, R.literal_value)(types.intp, types.intp, types.intp, R), codegen


def _zero_tile(kind, name):
    def zero_tile(typing, offsets, C):
        """Return a tile of zeros, with C vectors for each of the offsets."""
        if not isinstance(C, types.IntegerLiteral):
            return None
        result = types.UniTuple(kind, offsets.count * C.literal_value)

        def codegen(context, builder, sig, args):
            return context.make_tuple(builder, result, [vector_constant(kind.llvm, [0] * 16)] * result.count)

        return result(offsets, C), codegen

    zero_tile.__name__ = name
    return intrinsic(prefer_literal=True)(zero_tile)


zero_totals, zero_dots = _zero_tile(f32x16, "zero_totals"), _zero_tile(i32x16, "zero_dots")


@intrinsic
def add_products(typing, a, offsets, step, b, at, stride, totals):
    """Compute totals[r, c] += a[offsets[r] + step] * b[i : i + 16], rounded once, where i = at + c * stride."""
    if not (is_flat(a, types.float32, types.uint16) and is_flat(b, types.float32, types.uint16)):
        return None

    def codegen(context, builder, sig, args):
        _, offsets, step, _, at, stride, totals = args
        rows = sig.args[1].count
        vectors = sig.args[6].count // rows
        columns = _vectors_from(context, builder, sig.args[3], args[3], at, vectors, stride)
        results = tuple_values(builder, totals)
        for r, offset in enumerate(tuple_values(builder, offsets)):
            factor = _splat_from(context, builder, sig.args[0], args[0], builder.add(offset, step))
            for c, column in enumerate(columns):
                results[r * vectors + c] = _fma(builder, factor, column, results[r * vectors + c])
        return context.make_tuple(builder, sig.return_type, results)

    return totals(a, offsets, types.intp, b, types.intp, types.intp, totals), codegen


@intrinsic(prefer_literal=True)
def load_columns(typing, array, at, C):
    """Load C vectors from array[at : at + 16 C], one for each column of a tile."""
    if not (is_flat(array, types.float32) and isinstance(C, types.IntegerLiteral)):
        return None
    result = types.UniTuple(f32x16, C.literal_value)

    def codegen(context, builder, sig, args):
        vectors = _vectors_from(context, builder, array, args[0], args[1], C.literal_value)
        return context.make_tuple(builder, result, vectors)

    return result(array, types.intp, C), codegen


@intrinsic
def add_multiples(typing, a, offsets, step, value, totals):
    """Compute totals[r] += a[offsets[r] + step] * value, rounded once."""
    if not is_flat(a, types.float32):
        return None

    def codegen(context, builder, sig, args):
        results = []
        for offset, total in zip(tuple_values(builder, args[1]), tuple_values(builder, args[4]), strict=True):
            factor = _splat_from(context, builder, sig.args[0], args[0], builder.add(offset, args[2]))
            results.append(_fma(builder, factor, args[3], total))
        return context.make_tuple(builder, sig.return_type, results)

    return totals(a, offsets, types.intp, value, totals), codegen


@intrinsic
def add_dots(typing, codes, offsets, step, weights, at, dots):
    """Add the exact dot products of 16 inputs and 16 C outputs to dots[r, c].

    inputs: 16 codes from codes[offsets[r] + step] on
    weights: for pair = 0 .. 7, 32 codes from weights[at + 32 (c + C pair)] on, two for each of 16 outputs

    The loop over pairs is unrolled, because the branch predictor mispredicts the end of so short a loop every time.
    """
    if not (is_flat(codes, types.int16) and is_flat(weights, types.int16)):
        return None

    def codegen(context, builder, sig, args):
        _, offsets, step, _, at, dots = args
        results, offsets = tuple_values(builder, dots), tuple_values(builder, offsets)
        vectors = len(results) // len(offsets)
        for pair in range(8):
            columns = [
                load_value_at(context, builder, sig.args[3], args[3], add_constant(builder, at, 32 * c), i16x32.llvm, 2)
                for c in range(vectors * pair, vectors * (pair + 1))
            ]
            for r, offset in enumerate(offsets):
                offset = add_constant(builder, builder.add(offset, step), 2 * pair)
                code = load_splat_pair_value(context, builder, sig.args[0], args[0], offset)
                for c, column in enumerate(columns):
                    results[r * vectors + c] = dot_pairs_value(context, builder, code, column, results[r * vectors + c])
        return context.make_tuple(builder, sig.return_type, results)

    return dots(codes, offsets, types.intp, weights, types.intp, dots), codegen


@intrinsic(prefer_literal=True)
def start_dots(typing, sums, offsets, step, count, C):
    """Return a tile of dots[r, c] = sums[i] + ... + sums[i + count - 1], where i = offsets[r] + step.

    sums: f32, whole numbers; their sum must be exact
    """
    if not (is_flat(sums, types.float32) and all(isinstance(n, types.IntegerLiteral) for n in (count, C))):
        return None
    result = types.UniTuple(i32x16, offsets.count * C.literal_value)

    def codegen(context, builder, sig, args):
        results = []
        for offset in tuple_values(builder, args[1]):
            at = builder.add(offset, args[2])
            total = _splat_from(context, builder, sums, args[0], at)
            for number in range(1, count.literal_value):
                total = builder.fadd(
                    total, _splat_from(context, builder, sums, args[0], add_constant(builder, at, number))
                )
            results += [builder.fptosi(total, i32x16.llvm)] * C.literal_value
        return context.make_tuple(builder, result, results)

    return result(sums, offsets, types.intp, count, C), codegen


@intrinsic(prefer_literal=True)
def start_dots_with_offset(typing, sums, offsets, step, factor, C):
    """Return a tile of dots[r, c] = sums[offsets[r] + step] * factor. sums: f32, whole numbers. factor: int32."""
    if not (is_flat(sums, types.float32) and isinstance(C, types.IntegerLiteral)):
        return None
    result = types.UniTuple(i32x16, offsets.count * C.literal_value)

    def codegen(context, builder, sig, args):
        results = []
        for offset in tuple_values(builder, args[1]):
            place = (args[0], builder.add(offset, args[2]))
            total = builder.fptosi(load_f32(context, builder, types.float32(sums, types.intp), place), I32)
            results += [splat_scalar(builder, builder.mul(total, args[3]), i32x16.llvm)] * C.literal_value
        return context.make_tuple(builder, result, results)

    return result(sums, offsets, types.intp, types.int32, C), codegen


@intrinsic(prefer_literal=True)
def add_quad_dots_to_tiles(typing, planes, offsets, step, quads, are_signed, highs, lows):
    """Add to highs[r, c] and lows[r, c] the dot products of four inputs' high bytes or low bytes and a quad of 16 outputs.

    planes: from planes[offsets[r] + step] on, the four signed high bytes, and then the four unsigned low bytes
    quads: C vectors of quads
    are_signed: 0 if all bytes of the quads are less than 128, else 1

    VNNI multiplies unsigned bytes with signed bytes. Therefore the high bytes are multiplied with signed weights plus 128, which
    are the weights with the sign bit flipped.
    """
    if not (is_flat(planes, types.int8) and isinstance(are_signed, types.IntegerLiteral)):
        return None

    def codegen(context, builder, sig, args):
        _, offsets, step, quads, _, highs, lows = args
        signed = [builder.bitcast(quad, i32x16.llvm) for quad in tuple_values(builder, quads)]
        unsigned = signed
        if are_signed.literal_value:
            sign_bits = vector_constant(i32x16.llvm, [SIGN_BITS] * 16)
            unsigned = [builder.xor(quad, sign_bits) for quad in signed]
        results = [tuple_values(builder, highs), tuple_values(builder, lows)]
        for r, offset in enumerate(tuple_values(builder, offsets)):
            for plane, totals in enumerate(results):
                place = add_constant(builder, builder.add(offset, step), 4 * plane)
                code = load_value_at(context, builder, planes, args[0], place, I32, 4)
                code = splat_scalar(builder, code, i32x16.llvm)
                for c, number in enumerate(range(r * len(signed), (r + 1) * len(signed))):
                    factors = (code, signed[c]) if plane else (unsigned[c], code)
                    totals[number] = dot_quads_value(builder, *factors, totals[number])
        tiles = [context.make_tuple(builder, highs_type, values) for values in results]
        return context.make_tuple(builder, sig.return_type, tiles)

    highs_type = highs
    return types.UniTuple(highs, 2)(planes, offsets, types.intp, quads, are_signed, highs, lows), codegen


@intrinsic
def shift_dots(typing, dots):
    """Return the dots times 256."""

    def codegen(context, builder, sig, args):
        eight = vector_constant(i32x16.llvm, [8] * 16)
        results = [builder.shl(value, eight) for value in tuple_values(builder, args[0])]
        return context.make_tuple(builder, sig.return_type, results)

    return dots(dots), codegen


@intrinsic
def add_tiles(typing, a, b):
    """Return the sums of the dots of two tiles."""

    def codegen(context, builder, sig, args):
        both = zip(*(tuple_values(builder, values) for values in args), strict=True)
        return context.make_tuple(builder, a, [builder.add(*values) for values in both])

    return (a(a, b), codegen) if a == b else None


@intrinsic
def add_scaled(typing, scales, offsets, step, columns, dots, totals):
    """Compute totals[r, c] += (scales[offsets[r] + step] * columns[c]) * dots[r, c]."""
    if not is_flat(scales, types.float32):
        return None

    def codegen(context, builder, sig, args):
        _, offsets, step, columns, dots, totals = args
        vectors, columns = sig.args[3].count, tuple_values(builder, columns)
        results, dots = tuple_values(builder, totals), tuple_values(builder, dots)
        for r, offset in enumerate(tuple_values(builder, offsets)):
            scale = _splat_from(context, builder, sig.args[0], args[0], builder.add(offset, step))
            for number in range(r * vectors, (r + 1) * vectors):
                factor = builder.fmul(scale, columns[number % vectors])
                results[number] = _fma(builder, factor, builder.sitofp(dots[number], f32x16.llvm), results[number])
        return context.make_tuple(builder, sig.return_type, results)

    return totals(scales, offsets, types.intp, columns, dots, totals), codegen


@intrinsic
def subtract_minimums(typing, scales, offsets, step, sums, sum_offsets, sum_step, columns, totals):
    """Compute totals[r, c] -= (scale[r] * columns[c]) * sum[r].

    scale[r]: scales[offsets[r] + step]
    sum[r]: sums[sum_offsets[r] + sum_step]
    """
    if not (is_flat(scales, types.float32) and is_flat(sums, types.float32)):
        return None

    def codegen(context, builder, sig, args):
        _, offsets, step, _, sum_offsets, sum_step, columns, totals = args
        vectors, columns = sig.args[6].count, tuple_values(builder, columns)
        results = tuple_values(builder, totals)
        both = zip(tuple_values(builder, offsets), tuple_values(builder, sum_offsets), strict=True)
        for r, (offset, sum_offset) in enumerate(both):
            scale = _splat_from(context, builder, sig.args[0], args[0], builder.add(offset, step))
            total = _splat_from(context, builder, sig.args[3], args[3], builder.add(sum_offset, sum_step))
            for number in range(r * vectors, (r + 1) * vectors):
                factor = builder.fmul(builder.fneg(scale), columns[number % vectors])
                results[number] = _fma(builder, factor, total, results[number])
        return context.make_tuple(builder, sig.return_type, results)

    step = types.intp
    return totals(scales, offsets, step, sums, sum_offsets, step, columns, totals), codegen


@intrinsic
def scale_totals(typing, a, offsets, totals):
    """Compute totals[r, c] *= a[offsets[r]]."""
    if not is_flat(a, types.float32):
        return None

    def codegen(context, builder, sig, args):
        results, vectors = tuple_values(builder, args[2]), sig.args[2].count // sig.args[1].count
        for r, offset in enumerate(tuple_values(builder, args[1])):
            factor = _splat_from(context, builder, sig.args[0], args[0], offset)
            for number in range(r * vectors, (r + 1) * vectors):
                results[number] = builder.fmul(results[number], factor)
        return context.make_tuple(builder, sig.return_type, results)

    return totals(a, offsets, totals), codegen


@intrinsic(prefer_literal=True)
def load_totals(typing, y, offsets, step, C):
    """Load totals[r, c] from y[i : i + 16], where i = offsets[r] + step + 16 c."""
    if not (is_flat(y, types.float32) and isinstance(C, types.IntegerLiteral)):
        return None
    result = types.UniTuple(f32x16, offsets.count * C.literal_value)

    def codegen(context, builder, sig, args):
        results = []
        for offset in tuple_values(builder, args[1]):
            results += _vectors_from(context, builder, y, args[0], builder.add(offset, args[2]), C.literal_value)
        return context.make_tuple(builder, result, results)

    return result(y, offsets, types.intp, C), codegen


@intrinsic(prefer_literal=True)
def prefetch_totals(typing, y, offsets, C):
    """Prefetch 16 C elements from y[offsets[r]] on, for each row r, because they will be written.

    Fetching these cache lines from memory takes half as long as computing a tile, so it should begin before the tile is
    computed.
    """
    if not isinstance(C, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        for offset in tuple_values(builder, args[1]):
            for c in range(C.literal_value):
                prefetch_line(
                    builder,
                    element_pointer(context, builder, y, args[0], add_constant(builder, offset, 16 * c), I8),
                    1,
                )
        return context.get_dummy_value()

    return types.void(y, offsets, C), codegen


@intrinsic
def store_totals(typing, y, offsets, step, totals):
    """Store totals[r, c] to y[i : i + 16], where i = offsets[r] + step + 16 c."""
    if not is_flat(y, types.float32):
        return None

    def codegen(context, builder, sig, args):
        results, vectors = tuple_values(builder, args[3]), sig.args[3].count // sig.args[1].count
        for r, offset in enumerate(tuple_values(builder, args[1])):
            for c in range(vectors):
                at = add_constant(builder, builder.add(offset, args[2]), 16 * c)
                address = element_pointer(context, builder, sig.args[0], args[0], at, f32x16.llvm)
                builder.store(results[r * vectors + c], address).align = 4
        return context.get_dummy_value()

    return types.void(y, offsets, types.intp, totals), codegen


@intrinsic
def store_partial_totals(typing, y, offsets, columns, totals):
    """Store the first `columns` lanes of each row totals[r] to y, from index offsets[r] on."""
    if not is_flat(y, types.float32):
        return None

    def codegen(context, builder, sig, args):
        results, vectors = tuple_values(builder, args[3]), sig.args[3].count // sig.args[1].count
        masks = [lane_mask(builder, add_constant(builder, args[2], -16 * c)) for c in range(vectors)]
        for r, offset in enumerate(tuple_values(builder, args[1])):
            for c in range(vectors):
                address = element_pointer(
                    context, builder, sig.args[0], args[0], add_constant(builder, offset, 16 * c), f32x16.llvm
                )
                masked_store(builder, results[r * vectors + c], address, masks[c])
        return context.get_dummy_value()

    return types.void(y, offsets, types.intp, totals), codegen
