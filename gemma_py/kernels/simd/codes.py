"""Operations on the bytes and 16-bit words of quantised weights and inputs."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gemma_py.kernels.simd.builders import (
    I8,
    I16,
    element_pointer,
    f32x16,
    i16x32,
    i32x16,
    is_flat,
    load_value,
    shuffle,
    splat_scalar,
    vector_constant,
)
from gemma_py.kernels.simd.target import is_arm64, is_zen


@intrinsic
def load_words(typing, array, index):
    """Load the 64 bytes from array[index] on, as 32 words of 16 bits."""
    if not is_flat(array, types.int8):
        return None
    return i16x32(array, types.intp), lambda context, builder, sig, args: load_value(
        context, builder, sig, args, i16x32.llvm, 1
    )


@intrinsic
def store_words(typing, array, index, value):
    """Store value to array[index : index + 32]."""
    if not is_flat(array, types.int16) or value != i16x32:
        return None

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1], i16x32.llvm)
        builder.store(args[2], pointer).align = 2
        return context.get_dummy_value()

    return types.void(array, types.intp, i16x32), codegen


@intrinsic
def join_quads(typing, quads, next_quads):
    """Return two vectors with eight bytes of each output: the first with outputs 0 to 7, the second with outputs 8 to 15.

    quads, next_quads: four bytes of each of sixteen outputs, and the next four
    """

    def codegen(context, builder, sig, args):
        a, b = (builder.bitcast(value, i32x16.llvm) for value in args)
        joined = []
        for first in (0, 8):
            order = [lane + vector for lane in range(first, first + 8) for vector in (0, 16)]
            joined.append(builder.bitcast(shuffle(builder, a, b, order), i16x32.llvm))
        return context.make_tuple(builder, sig.return_type, joined)

    return types.UniTuple(i16x32, 2)(i16x32, i16x32), codegen


@intrinsic
def store_codes(typing, array, index, value):
    """Store sixteen integers as int16. Every four are stored in the order 0, 2, 1, 3, which matches the code panels."""
    if not is_flat(array, types.int16):
        return None
    order = [4 * quad + number for quad in range(4) for number in (0, 2, 1, 3)]

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(I16, 16)
        words = builder.trunc(args[2], kind)
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1], kind)
        builder.store(shuffle(builder, words, ir.Constant(kind, ir.Undefined), order), pointer).align = 2
        return context.get_dummy_value()

    return types.void(array, types.intp, i32x16), codegen


@intrinsic
def store_byte_planes(typing, array, index, value):
    """Store sixteen 16-bit integers as bytes. For every four, the high bytes come first, then the low bytes."""
    if not is_flat(array, types.int8):
        return None
    order = [8 * quad + 2 * number + high for quad in range(4) for high in (1, 0) for number in range(4)]

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(I8, 32)
        both_bytes = builder.bitcast(builder.trunc(args[2], ir.VectorType(I16, 16)), kind)
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1], kind)
        builder.store(shuffle(builder, both_bytes, ir.Constant(kind, ir.Undefined), order), pointer).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, i32x16), codegen


@intrinsic
def load_f16(typing, array, index):
    """Load the sixteen float16 in the 32 bytes from array[index] on, as f32. All sixteen must be finite.

    On ARM64 and on AMD's Zen, one instruction converts them. On other x86-64 processors, nobody has measured how long such an
    instruction takes with subnormal float16, and scales are often subnormal. So there, the conversion uses only integer
    operations and one exact subtraction. No operand is a subnormal float, which would take a hundred cycles.
    """
    if not is_flat(array, types.int8):
        return None

    def codegen(context, builder, sig, args):
        def constant(value):
            return vector_constant(i32x16.llvm, [value] * 16)

        words = load_value(context, builder, sig, args, ir.VectorType(I16, 16), 1)
        triple, cpu, _ = context.codegen().magic_tuple()
        if is_arm64(triple) or is_zen(cpu):
            return builder.fpext(builder.bitcast(words, ir.VectorType(ir.HalfType(), 16)), f32x16.llvm)
        words = builder.zext(words, i32x16.llvm)
        sign = builder.shl(builder.and_(words, constant(0x8000)), constant(16))
        size = builder.shl(builder.and_(words, constant(0x7FFF)), constant(13))
        normal = builder.add(size, constant(112 << 23))
        small = builder.bitcast(builder.add(size, constant(113 << 23)), f32x16.llvm)
        small = builder.bitcast(builder.fsub(small, vector_constant(f32x16.llvm, [2.0**-14] * 16)), i32x16.llvm)
        size = builder.select(builder.icmp_signed("<", size, constant(1 << 23)), small, normal)
        return builder.bitcast(builder.or_(size, sign), f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_bytes(typing, array, index):
    """Load array[index : index + 16] of int8, as f32."""
    if not is_flat(array, types.int8):
        return None
    return f32x16(array, types.intp), lambda context, builder, sig, args: builder.sitofp(
        load_value(context, builder, sig, args, ir.VectorType(I8, 16), 1), f32x16.llvm
    )


def _on_words(name):
    """Return an intrinsic that applies the LLVM instruction `name` to 32 words and one number."""

    @intrinsic
    def operation(typing, a, number):
        if a != i16x32 or not isinstance(number, types.Integer):
            return None

        def codegen(context, builder, sig, args):
            word = context.cast(builder, args[1], sig.args[1], types.int16)
            return getattr(builder, name)(args[0], splat_scalar(builder, word, i16x32.llvm))

        return i16x32(i16x32, number), codegen

    return operation


words_and = _on_words("and_")
words_shl = _on_words("shl")
words_lshr = _on_words("lshr")
words_ashr = _on_words("ashr")
words_xor = _on_words("xor")
words_sub = _on_words("sub")


@intrinsic
def words_or(typing, a, b):
    return i16x32(i16x32, i16x32), lambda context, builder, sig, args: builder.or_(*args)


@intrinsic
def bytes_sub(typing, a, number):
    """Subtract a number from each of 64 bytes."""
    if a != i16x32 or not isinstance(number, types.Integer):
        return None

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(I8, 64)
        byte = context.cast(builder, args[1], sig.args[1], types.int8)
        return builder.bitcast(
            builder.sub(builder.bitcast(args[0], kind), splat_scalar(builder, byte, kind)), i16x32.llvm
        )

    return i16x32(i16x32, number), codegen


@intrinsic
def bytes_lshr(typing, a, number):
    """Shift each of 64 bytes to the right, and fill with zeros. x86 has no such instruction."""
    if a != i16x32 or not isinstance(number, types.Integer):
        return None

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(I8, 64)
        byte = context.cast(builder, args[1], sig.args[1], types.int8)
        return builder.bitcast(
            builder.lshr(builder.bitcast(args[0], kind), splat_scalar(builder, byte, kind)), i16x32.llvm
        )

    return i16x32(i16x32, number), codegen
