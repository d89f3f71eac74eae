"""The vector types, and helpers that build LLVM IR for the other modules of this package.

f32x16   sixteen float32         i32x16   sixteen int32
i16x32   sixteen pairs of int16  b1x16    sixteen booleans, the result of a comparison
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

LANES = 16
B1, I8, I16, I32, F32 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


class Vector(types.Type):
    """The numba type of an LLVM vector of fixed width."""

    def __init__(self, element, lanes, name):
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, kind.llvm)


f32x16 = Vector(F32, 16, "f32x16")
i32x16 = Vector(I32, 16, "i32x16")
i16x32 = Vector(I16, 32, "i16x32")
b1x16 = Vector(B1, 16, "b1x16")


def is_flat(array, *dtypes):
    """Return whether a numba type is a contiguous one-dimensional array with one of these dtypes."""
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype in dtypes


def element_pointer(context, builder, array_type, array, index, kind):
    """Return a pointer to array[index], cast to the LLVM type `kind`. The index is not checked."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def load_value(context, builder, sig, args, kind, align):
    return load_value_at(context, builder, sig.args[0], args[0], args[1], kind, align)


def load_value_at(context, builder, array_type, array, index, kind, align):
    """Return the IR that loads a value of the LLVM type `kind` from array[index]."""
    value = builder.load(element_pointer(context, builder, array_type, array, index, kind))
    value.align = align
    return value


def vector_constant(kind, values):
    return ir.Constant(kind, list(values))


def shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, vector_constant(ir.VectorType(I32, len(lanes)), lanes))


def splat_scalar(builder, scalar, kind):
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return shuffle(builder, one, undefined, [0] * kind.count)


def call_llvm(builder, name, result, operands):
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


def widen_bf16(builder, bf16, lanes):
    """Return bfloat16 lanes converted to f32. A bfloat16 is the high half of an f32."""
    words, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
    return builder.bitcast(builder.shl(builder.zext(bf16, words), vector_constant(words, [16] * lanes)), floats)


def load_f32(context, builder, sig, args):
    if sig.args[0].dtype == types.float32:
        return load_value(context, builder, sig, args, F32, 4)
    if sig.args[0].dtype == types.int8:
        return builder.sitofp(load_value(context, builder, sig, args, I8, 1), F32)
    return load_bf16_as_f32(context, builder, sig, args)


def load_bf16_as_f32(context, builder, sig, args):
    align = 1 if sig.args[0].dtype == types.int8 else 2
    word = builder.zext(load_value(context, builder, sig, args, I16, align), I32)
    return builder.bitcast(builder.shl(word, ir.Constant(I32, 16)), F32)


def load_f32_vector(context, builder, sig, args):
    if sig.args[0].dtype == types.float32:
        return load_value(context, builder, sig, args, f32x16.llvm, 4)
    if sig.args[0].dtype == types.int8:
        codes = load_value(context, builder, sig, args, ir.VectorType(I8, 16), 1)
        return builder.sitofp(builder.sext(codes, i32x16.llvm), f32x16.llvm)
    return widen_bf16(builder, load_value(context, builder, sig, args, ir.VectorType(I16, 16), 2), 16)


def lane_mask(builder, count):
    """Return a mask of the first `count` of 16 lanes."""
    lanes = vector_constant(i32x16.llvm, range(16))
    return builder.icmp_signed("<", lanes, splat_scalar(builder, builder.trunc(count, I32), i32x16.llvm))


def masked_store(builder, value, pointer, mask):
    kind = ir.FunctionType(ir.VoidType(), [f32x16.llvm, pointer.type, I32, b1x16.llvm])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16f32.p0")
    builder.call(function, [value, pointer, ir.Constant(I32, 4), mask])


def prefetch_line(builder, pointer, writing, locality=3):
    """Prefetch the cache line at a pointer. writing: 1 to prefetch for writing, 0 for reading.

    locality: as in llvm.prefetch; 3 to load the line into all caches, 2 to load it into the L2 cache only
    """
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # The last argument of llvm.prefetch, 1, selects the data cache.
    builder.call(function, [pointer, *(ir.Constant(I32, value) for value in (writing, locality, 1))])


def tuple_values(builder, values):
    return [builder.extract_value(values, number) for number in range(values.type.count)]


def add_constant(builder, at, offset):
    return builder.add(at, ir.Constant(at.type, offset))
