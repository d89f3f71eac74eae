"""Numba intrinsics for scalar operations that Python has no notation for. simd/ has the vector operations."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


def _call(builder, name, result, operands):
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


@intrinsic
def fma(typing, a, b, c):
    """Return a * b + c, rounded once. The arguments are all f32 or all f64."""
    if not (a == b == c and a in (types.float32, types.float64)):
        return None
    name = f"llvm.fma.f{a.bitwidth}"
    return a(a, b, c), lambda context, builder, sig, args: _call(builder, name, args[0].type, args)


@intrinsic
def sqrt(typing, x):
    """Return the square root, correctly rounded."""
    if x not in (types.float32, types.float64):
        return None
    name = f"llvm.sqrt.f{x.bitwidth}"
    return x(x), lambda context, builder, sig, args: _call(builder, name, args[0].type, args)


def _cast(source, target, llvm_target):
    @intrinsic
    def cast(typing, x):
        if x != source:
            return None
        return target(source), lambda context, builder, sig, args: builder.bitcast(args[0], llvm_target)

    return cast


f32_of_bits = _cast(types.int32, types.float32, ir.FloatType())
bits_of_f32 = _cast(types.float32, types.int32, ir.IntType(32))
f64_of_bits = _cast(types.int64, types.float64, ir.DoubleType())
bits_of_f64 = _cast(types.float64, types.int64, ir.IntType(64))


@intrinsic
def widen(typing, x):
    """Return a stored weight as f32. A uint16 is a bfloat16, which is the upper half of an f32."""
    if x == types.float32:
        return x(x), lambda context, builder, sig, args: args[0]
    if x != types.uint16:
        return None

    def codegen(context, builder, sig, args):
        word = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(x), codegen


@intrinsic
def array_from_address(typing, address, count, like):
    """Return an array of `count` numbers at a memory address, with the dtype of `like`.

    The caller must keep the memory alive.
    """
    kind = types.Array(like.dtype, 1, "C")

    def codegen(context, builder, sig, args):
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(like.dtype)))
        array = context.make_array(kind)(context, builder)
        data = builder.inttoptr(args[0], context.get_data_type(like.dtype).as_pointer())
        populate_array(array, data, [args[1]], [itemsize], itemsize, None)
        return array._getvalue()

    return kind(types.int64, types.int64, like), codegen
