"""Exact dot products of codes (pairs of int16, or quads of bytes), added to int32 lanes."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gemma_py.kernels.simd.builders import (
    I32,
    LANES,
    call_llvm,
    i16x32,
    i32x16,
    is_flat,
    load_value,
    load_value_at,
    shuffle,
    splat_scalar,
)
from gemma_py.kernels.simd.target import is_arm64, multiplies_and_adds_pairs, pair_instruction, uses_vnni


@intrinsic
def load_splat_pair(typing, array, index):
    """Load the int16 pair array[index], array[index + 1] into each of the sixteen lanes."""
    if not is_flat(array, types.int16):
        return None
    return i16x32(array, types.intp), lambda context, builder, sig, args: load_splat_pair_value(
        context, builder, sig.args[0], args[0], args[1]
    )


def load_splat_pair_value(context, builder, array_type, array, index):
    pair = load_value_at(context, builder, array_type, array, index, I32, 2)
    return builder.bitcast(splat_scalar(builder, pair, i32x16.llvm), i16x32.llvm)


def _vpdpwssd(builder, instruction, a, b, total):
    """Return total + the dot products of pairs of int16, computed in registers of the width of `total`.

    instruction: "vpdpwssd", or "{vex} vpdpwssd" for AVX-VNNI

    The instruction is inline assembly, because LLVM would replace a chain of its intrinsics by twice as many other
    instructions.
    """
    kind = ir.FunctionType(total.type, [total.type] * 3)
    registers = "=v,v,v,0" if total.type == i32x16.llvm else "=x,x,x,0"  # AVX-VNNI has only registers 0 to 15
    assembly = ir.InlineAsm(kind, f"{instruction} $2, $1, $0", registers)
    return builder.call(assembly, [builder.bitcast(a, total.type), builder.bitcast(b, total.type), total])


def dot_pairs_value(context, builder, a, b, total):
    """Return the IR of `dot_pairs`: VNNI, pmaddwd on 512 or 256 bits, smlal, or plain products, depending on the target."""
    undefined = ir.Constant(i16x32.llvm, ir.Undefined)
    instruction = pair_instruction(*context.codegen().magic_tuple())
    if is_arm64(context.codegen().magic_tuple()[0]):
        # The codes are shuffled before they are widened, because LLVM then finds smlal, which widens, multiplies and adds.
        for first in (0, 1):
            x, y = (builder.sext(shuffle(builder, v, undefined, range(first, 32, 2)), i32x16.llvm) for v in (a, b))
            total = builder.add(total, builder.mul(x, y))
        return total
    if instruction is None:
        wide = ir.VectorType(I32, 32)
        products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
        blank = ir.Constant(wide, ir.Undefined)
        even, odd = (shuffle(builder, products, blank, range(k, 32, 2)) for k in (0, 1))
        return builder.add(builder.add(total, even), odd)
    name, lanes = instruction
    if uses_vnni(*context.codegen().magic_tuple()):
        return _vpdpwssd(builder, "vpdpwssd", a, b, total)
    if lanes == LANES:
        return builder.add(total, call_llvm(builder, name, i32x16.llvm, [a, b]))
    halves = []
    for first in (0, lanes):
        x, y = (shuffle(builder, whole, undefined, range(2 * first, 2 * (first + lanes))) for whole in (a, b))
        half = shuffle(builder, total, total, range(first, first + lanes))
        if multiplies_and_adds_pairs(*context.codegen().magic_tuple()):
            halves.append(_vpdpwssd(builder, "{vex} vpdpwssd", x, y, half))
        else:
            halves.append(builder.add(half, call_llvm(builder, name, half.type, [x, y])))
    low, high = halves
    return shuffle(builder, low, high, range(LANES))


def dot_quads_value(builder, unsigned, signed, total):
    a, b = (builder.bitcast(value, total.type) for value in (unsigned, signed))
    return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, [total, a, b])


@intrinsic
def dot_pairs(typing, a, b, total):
    """Return total[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in each lane i.

    On x86 with AVX2 or AVX-512, LLVM is told to use the instruction pmaddwd or vpdpwssd. Without this, LLVM computes products
    and sums separately, which takes four times as long.
    """
    return i32x16(i16x32, i16x32, i32x16), lambda context, builder, sig, args: dot_pairs_value(context, builder, *args)


@intrinsic
def load_splat_quad(typing, array, index):
    """Load the four bytes from array[index] on into each of the sixteen 32-bit lanes."""
    if not is_flat(array, types.int8):
        return None

    def codegen(context, builder, sig, args):
        quad = load_value(context, builder, sig, args, I32, 4)
        return builder.bitcast(splat_scalar(builder, quad, i32x16.llvm), i16x32.llvm)

    return i16x32(array, types.intp), codegen


@intrinsic
def dot_quads(typing, unsigned, signed, total):
    """Return, in each lane i, total[i] + the dot product of lane i of `unsigned` and lane i of `signed`.

    Each of these lanes has four bytes.

    The instruction (vpdpbusd) exists only where USES_VNNI is true.
    """
    return i32x16(i16x32, i16x32, i32x16), lambda context, builder, sig, args: dot_quads_value(builder, *args)
