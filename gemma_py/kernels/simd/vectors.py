"""Loads, stores, arithmetic, comparisons and reductions of vectors of 16 lanes."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gemma_py.kernels.simd.builders import (
    F32,
    I8,
    I16,
    I32,
    b1x16,
    call_llvm,
    element_pointer,
    f32x16,
    i32x16,
    is_flat,
    lane_mask,
    load_bf16_as_f32,
    load_f32,
    load_f32_vector,
    masked_store,
    prefetch_line,
    shuffle,
    splat_scalar,
    vector_constant,
    widen_bf16,
)


@intrinsic
def load(typing, array, index):
    """Load array[index : index + 16] as f32.

    array: f32, uint16 that holds bfloat16, or int8
    """
    if not is_flat(array, types.float32, types.uint16, types.int8):
        return None

    return f32x16(array, types.intp), load_f32_vector


@intrinsic
def store(typing, array, index, value):
    """Store value to array[index : index + 16]."""
    if not is_flat(array, types.float32) or value != f32x16:
        return None

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1], f32x16.llvm)
        builder.store(args[2], pointer).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def load_partial(typing, array, index, count):
    """Load array[index : index + count], count <= 16. The other lanes are zero, and their memory is not read."""
    if not is_flat(array, types.float32):
        return None

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1], f32x16.llvm)
        kind = ir.FunctionType(f32x16.llvm, [pointer.type, I32, b1x16.llvm, f32x16.llvm])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v16f32.p0")
        zeros = vector_constant(f32x16.llvm, [0.0] * 16)
        return builder.call(function, [pointer, ir.Constant(I32, 4), lane_mask(builder, args[2]), zeros])

    return f32x16(array, types.intp, types.intp), codegen


@intrinsic
def store_partial(typing, array, index, value, count):
    if not is_flat(array, types.float32):
        return None

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1], f32x16.llvm)
        masked_store(builder, args[2], pointer, lane_mask(builder, args[3]))
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16, types.intp), codegen


@intrinsic
def load_scalar(typing, array, index):
    """Load array[index] as f32.

    array: f32, uint16 that holds bfloat16, or int8
    """
    if not is_flat(array, types.float32, types.uint16, types.int8):
        return None
    return types.float32(array, types.intp), load_f32


@intrinsic
def store_scalar(typing, array, index, value):
    """Store a float to array[index].

    array: f32, uint16 that holds bfloat16 (rounded to nearest, ties to even; NaN becomes a quiet NaN), or int8 (the
    float must be a whole number from -128 to 127)
    """
    if not is_flat(array, types.float32, types.uint16, types.int8) or value != types.float32:
        return None

    def codegen(context, builder, sig, args):
        value = args[2]
        if sig.args[0].dtype == types.int8:
            value = builder.fptosi(value, I8)
        elif sig.args[0].dtype == types.uint16:
            word = builder.bitcast(value, I32)
            high = builder.lshr(word, ir.Constant(I32, 16))
            odd = builder.and_(high, ir.Constant(I32, 1))
            rounded = builder.lshr(builder.add(builder.add(word, ir.Constant(I32, 0x7FFF)), odd), ir.Constant(I32, 16))
            quiet = builder.or_(high, ir.Constant(I32, 0x40))
            value = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
            value = builder.trunc(value, I16)
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1], value.type)
        builder.store(value, pointer).align = value.type.width // 8 if isinstance(value.type, ir.IntType) else 4
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


@intrinsic
def load_bf16(typing, array, index):
    """Load the bfloat16 that begins at array[index], as f32. The array may have any dtype."""
    return types.float32(array, types.intp), load_bf16_as_f32


@intrinsic
def store_bf16(typing, array, index, value):
    """Store a float that is a bfloat16 to the two bytes from array[index] on. The array may have any dtype."""

    def codegen(context, builder, sig, args):
        word = builder.trunc(builder.lshr(builder.bitcast(args[2], I32), ir.Constant(I32, 16)), I16)
        builder.store(word, element_pointer(context, builder, sig.args[0], args[0], args[1], I16)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def holds_codes(typing, array):
    """Return whether the dtype of an array is int8. The result is a constant, so LLVM removes the branch not taken."""
    constant = ir.Constant(ir.IntType(1), int(array.dtype == types.int8))
    return types.boolean(array), lambda context, builder, sig, args: constant


@intrinsic
def floats_of(typing, array, unpacked):
    """Return `array`, or `unpacked` if the dtype of `array` is int8. The choice is made when a kernel is compiled."""
    chosen = int(array.dtype == types.int8)
    return (array, unpacked)[chosen](array, unpacked), lambda context, builder, sig, args: args[chosen]


@intrinsic
def load_splat(typing, array, index):
    """Load array[index] as f32 into all 16 lanes.

    array: f32, or uint16 that holds bfloat16
    """
    if not is_flat(array, types.float32, types.uint16):
        return None

    def codegen(context, builder, sig, args):
        return splat_scalar(builder, load_f32(context, builder, sig, args), f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_columns(typing, array, index, stride):
    """Return four vectors: lane `row` of vector `column` is array[index + row * stride + column]."""
    if not is_flat(array, types.float32, types.uint16):
        return None
    stored, align = (F32, 4) if array.dtype == types.float32 else (I16, 2)

    def codegen(context, builder, sig, args):
        def row(number):
            at = builder.add(args[1], builder.mul(args[2], ir.Constant(args[2].type, number)))
            value = builder.load(element_pointer(context, builder, sig.args[0], args[0], at, ir.VectorType(stored, 4)))
            value.align = align
            return value if stored == F32 else widen_bf16(builder, value, 4)

        # Rows k and k + 4 are joined to a vector of 8 lanes. Then the later shuffles move lanes only within 128 bits, which
        # is faster.
        by_eight = []
        for first in (0, 8):
            a, b, c, d = (shuffle(builder, row(first + k), row(first + k + 4), range(8)) for k in range(4))
            low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
            ab, cd = shuffle(builder, a, b, low), shuffle(builder, c, d, low)
            ef, gh = shuffle(builder, a, b, high), shuffle(builder, c, d, high)
            left, right = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
            parts = ((ab, cd, left), (ab, cd, right), (ef, gh, left), (ef, gh, right))
            by_eight.append([shuffle(builder, *part) for part in parts])
        columns = [shuffle(builder, a, b, range(16)) for a, b in zip(*by_eight, strict=True)]
        return context.make_tuple(builder, sig.return_type, columns)

    return types.UniTuple(f32x16, 4)(array, types.intp, types.intp), codegen


@intrinsic
def prefetch(typing, array, index):
    """Prefetch array[index] for reading. The index may be outside the array."""

    def codegen(context, builder, sig, args):
        prefetch_line(builder, element_pointer(context, builder, sig.args[0], args[0], args[1], I8), 0)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def prefetch_to_l2(typing, array, index):
    """Prefetch array[index] into the L2 cache, but not into the smaller L1 cache. The index may be outside the array."""

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1], I8)
        prefetch_line(builder, pointer, 0, locality=2)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def splat(typing, value):
    result = {types.float32: f32x16, types.int32: i32x16}.get(value)
    if result is None:
        return None
    return result(value), lambda context, builder, sig, args: splat_scalar(builder, args[0], result.llvm)


@intrinsic
def zero(typing):
    return f32x16(), lambda context, builder, sig, args: vector_constant(f32x16.llvm, [0.0] * 16)


@intrinsic(prefer_literal=True)
def zero_ints(typing, count):
    kind = types.UniTuple(i32x16, count.literal_value)
    value = vector_constant(i32x16.llvm, [0] * 16)
    return kind(count), lambda context, builder, sig, args: context.make_tuple(builder, kind, [value] * kind.count)


def _operation(float_name, integer_name, arguments=2):
    """Return an intrinsic that applies an LLVM instruction to vectors.

    The instruction is `float_name` for f32x16 and `integer_name` for i32x16. None means that vectors of this type are
    not supported.
    """

    def signature(operands):
        kind = operands[0]
        name = {f32x16: float_name, i32x16: integer_name}.get(kind)
        if name is None or any(other != kind for other in operands):
            return None
        return kind(*operands), lambda context, builder, sig, args: getattr(builder, name)(*args)

    if arguments == 1:

        @intrinsic
        def operation(typing, a):
            return signature((a,))
    else:

        @intrinsic
        def operation(typing, a, b):
            return signature((a, b))

    return operation


add = _operation("fadd", "add")
sub = _operation("fsub", "sub")
mul = _operation("fmul", "mul")
div = _operation("fdiv", None)
neg = _operation("fneg", "neg", 1)
bit_and = _operation(None, "and_")
shift_left = _operation(None, "shl")
shift_right = _operation(None, "ashr")  # an arithmetic shift, which keeps the sign


@intrinsic
def fma(typing, a, b, c):
    """Return a * b + c, rounded once, in every lane."""
    return f32x16(f32x16, f32x16, f32x16), lambda context, builder, sig, args: call_llvm(
        builder, "llvm.fma.v16f32", f32x16.llvm, args
    )


@intrinsic
def sqrt(typing, x):
    return f32x16(f32x16), lambda context, builder, sig, args: call_llvm(builder, "llvm.sqrt.v16f32", f32x16.llvm, args)


@intrinsic
def less(typing, a, b):
    """Return the mask of a < b. Where a or b is NaN, the mask is false."""
    if a != b or a not in (f32x16, i32x16):
        return None
    if a == f32x16:
        return b1x16(a, b), lambda context, builder, sig, args: builder.fcmp_ordered("<", *args)
    return b1x16(a, b), lambda context, builder, sig, args: builder.icmp_signed("<", *args)


@intrinsic
def mask_and(typing, a, b):
    return b1x16(b1x16, b1x16), lambda context, builder, sig, args: builder.and_(*args)


@intrinsic
def select(typing, mask, a, b):
    if a != b or a not in (f32x16, i32x16):
        return None
    return a(b1x16, a, b), lambda context, builder, sig, args: builder.select(*args)


@intrinsic
def bitcast(typing, a):
    result = {f32x16: i32x16, i32x16: f32x16}.get(a)
    if result is None:
        return None
    return result(a), lambda context, builder, sig, args: builder.bitcast(args[0], result.llvm)


@intrinsic
def to_f32(typing, a):
    return f32x16(i32x16), lambda context, builder, sig, args: builder.sitofp(args[0], f32x16.llvm)


@intrinsic
def to_i32(typing, a):
    """Convert floats to int32. The floats must be whole numbers in the range of int32."""
    return i32x16(f32x16), lambda context, builder, sig, args: builder.fptosi(args[0], i32x16.llvm)


@intrinsic
def sum_lanes(typing, a):
    return types.int32(i32x16), lambda context, builder, sig, args: call_llvm(
        builder, "llvm.vector.reduce.add.v16i32", I32, args
    )


def _reduced(builder, vectors, combine):
    """Reduce the lanes of each of four vectors with `combine`. The order has no effect, because integers are not rounded.

    Lanes 0, 4, 8 and 12 of the result hold the reduction of the first vector, lanes 1, 5, 9 and 13 that of the second, and
    so on. Reducing four vectors together takes a third of the time of four separate reductions.
    """

    def joined(x, y, firsts, seconds):
        """Shuffle the lanes of x and y in two ways, and combine the two results.

        `firsts` and `seconds` are the patterns of the shuffles for four lanes, which repeat for the next four lanes, and so
        on. A number i means lane i of x, and 16 + i means lane i of y.
        """
        lanes = ([lane + 4 * part for part in range(4) for lane in chosen] for chosen in (firsts, seconds))
        return combine(*(shuffle(builder, x, y, each) for each in lanes))

    a, b, c, d = vectors
    ab, cd = (joined(x, y, (0, 16, 1, 17), (2, 18, 3, 19)) for x, y in ((a, b), (c, d)))
    a = joined(ab, cd, (0, 1, 16, 17), (2, 3, 18, 19))
    for turn in (8, 4):
        a = combine(a, shuffle(builder, a, a, [(lane + turn) % 16 for lane in range(16)]))
    return a


@intrinsic
def sums_of_four(typing, a, b, c, d):
    """Return the lane sums of a, b, c and d.

    The sum of a is in lanes 0, 4, 8 and 12, the sum of b in lanes 1, 5, 9 and 13, and so on.
    """
    return i32x16(i32x16, i32x16, i32x16, i32x16), lambda context, builder, sig, args: _reduced(
        builder, args, builder.add
    )


@intrinsic
def max_of_four(typing, a, b, c, d):
    """Return the largest lane of each of a, b, c and d.

    The maximum of a is in lanes 0, 4, 8 and 12, the maximum of b in lanes 1, 5, 9 and 13, and so on.
    """

    def codegen(context, builder, sig, args):
        return _reduced(builder, args, lambda x, y: call_llvm(builder, "llvm.smax.v16i32", i32x16.llvm, [x, y]))

    return i32x16(i32x16, i32x16, i32x16, i32x16), codegen


@intrinsic
def splat_first_four(typing, a):
    """Return four vectors: vector i has lane i of `a` in all 16 lanes, for i = 0 .. 3."""

    def codegen(context, builder, sig, args):
        splats = [shuffle(builder, args[0], args[0], [lane] * 16) for lane in range(4)]
        return context.make_tuple(builder, sig.return_type, splats)

    return types.UniTuple(f32x16, 4)(f32x16), codegen


@intrinsic
def interleave(typing, a, b):
    """Return a[0], b[0], a[1], b[1], ..., a[7], b[7]."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: shuffle(
        builder, args[0], args[1], [lane // 2 + 16 * (lane % 2) for lane in range(16)]
    )
