"""SIMD values as numba types: every operation is one explicit LLVM instruction on 16 lanes.

    f32x16   sixteen floats          i32x16   sixteen integers
    i16x32   sixteen pairs of int16  b1x16    sixteen truths, what a comparison gives

Tiles are tuples of such values, row after row: an operation on a tile is one instruction for each of its vectors.

LLVM cuts 16 lanes into one AVX-512 register, two of AVX2 or four of NEON: neither the optimiser nor the machine's
width decides the order of a sum. Nothing here adds floats across lanes; `sum_lanes` and `largest_lane` are of integers,
exact. Loads and stores take an array of one dimension and an index that is not tested: numba's own test for negative
indices halves the speed of an inner loop.
"""

from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

LANES = 16
_B1, _I8, _I16, _I32, _F32 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


class Vector(types.Type):
    """A fixed-width LLVM vector."""

    def __init__(self, element, lanes, name):
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, kind.llvm)


f32x16 = Vector(_F32, 16, "f32x16")
i32x16 = Vector(_I32, 16, "i32x16")
i16x32 = Vector(_I16, 32, "i16x32")
b1x16 = Vector(_B1, 16, "b1x16")


# --- memory -----------------------------------------------------------------------------------------------------------


def _address(context, builder, array_type, array, index, kind):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def _load(context, builder, sig, args, kind, align):
    return _load_at(context, builder, sig.args[0], args[0], args[1], kind, align)


def _load_at(context, builder, array_type, array, index, kind, align):
    value = builder.load(_address(context, builder, array_type, array, index, kind))
    value.align = align
    return value


def _is_flat(array, *dtypes):
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype in dtypes


def _constant(kind, values):
    return ir.Constant(kind, list(values))


def _shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, _constant(ir.VectorType(_I32, len(lanes)), lanes))


def _splat(builder, scalar, kind):
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return _shuffle(builder, one, undefined, [0] * kind.count)


def _call(builder, name, result, operands):
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


def _widened(builder, halves, lanes):
    """16-bit lanes as the upper halves of f32 ones: what bfloat16 is."""
    words, floats = ir.VectorType(_I32, lanes), ir.VectorType(_F32, lanes)
    return builder.bitcast(builder.shl(builder.zext(halves, words), _constant(words, [16] * lanes)), floats)


def _load_scalar(context, builder, sig, args):
    """array[index] as f32."""
    if sig.args[0].dtype == types.float32:
        return _load(context, builder, sig, args, _F32, 4)
    word = builder.zext(_load(context, builder, sig, args, _I16, 2), _I32)
    return builder.bitcast(builder.shl(word, ir.Constant(_I32, 16)), _F32)


def _load_vector(context, builder, sig, args):
    """array[index : index + 16] as f32."""
    if sig.args[0].dtype == types.float32:
        return _load(context, builder, sig, args, f32x16.llvm, 4)
    return _widened(builder, _load(context, builder, sig, args, ir.VectorType(_I16, 16), 2), 16)


@intrinsic
def load(typing, array, index):
    """array[index : index + 16] as f32: of f32, or of uint16 that hold bfloat16."""
    if not _is_flat(array, types.float32, types.uint16):
        return None

    return f32x16(array, types.intp), _load_vector


@intrinsic
def store(typing, array, index, value):
    """array[index : index + 16] = value: f32 as it is, i32 into int16 by its low half."""
    if not _is_flat(array, {f32x16: types.float32, i32x16: types.int16}.get(value)):
        return None

    def codegen(context, builder, sig, args):
        value, align = args[2], 4
        if sig.args[2] == i32x16:
            value, align = builder.trunc(value, ir.VectorType(_I16, 16)), 2
        builder.store(value, _address(context, builder, sig.args[0], args[0], args[1], value.type)).align = align
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


def _first_lanes(builder, count):
    lanes = _constant(i32x16.llvm, range(16))
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _I32), i32x16.llvm))


@intrinsic
def load_first(typing, array, index, count):
    """The same of the first count <= 16 floats, zero in the other lanes, whose memory is not touched."""
    if not _is_flat(array, types.float32):
        return None

    def codegen(context, builder, sig, args):
        place = _address(context, builder, sig.args[0], args[0], args[1], f32x16.llvm)
        kind = ir.FunctionType(f32x16.llvm, [place.type, _I32, b1x16.llvm, f32x16.llvm])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v16f32.p0")
        zeros = _constant(f32x16.llvm, [0.0] * 16)
        return builder.call(function, [place, ir.Constant(_I32, 4), _first_lanes(builder, args[2]), zeros])

    return f32x16(array, types.intp, types.intp), codegen


@intrinsic
def store_first(typing, array, index, value, count):
    """Only the first count <= 16 lanes are written."""
    if not _is_flat(array, types.float32):
        return None

    def codegen(context, builder, sig, args):
        place = _address(context, builder, sig.args[0], args[0], args[1], f32x16.llvm)
        kind = ir.FunctionType(ir.VoidType(), [f32x16.llvm, place.type, _I32, b1x16.llvm])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16f32.p0")
        builder.call(function, [args[2], place, ir.Constant(_I32, 4), _first_lanes(builder, args[3])])
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16, types.intp), codegen


@intrinsic
def load_one(typing, array, index):
    """array[index] as f32: of f32, or of uint16 that hold bfloat16"""
    if not _is_flat(array, types.float32, types.uint16):
        return None
    return types.float32(array, types.intp), _load_scalar


@intrinsic
def store_one(typing, array, index, value):
    """array[index] = value: f32 as it is; into uint16 as bfloat16, to the nearest, ties to even, NaN to a quiet one."""
    if not _is_flat(array, types.float32, types.uint16) or value != types.float32:
        return None

    def codegen(context, builder, sig, args):
        value = args[2]
        if sig.args[0].dtype == types.uint16:
            word = builder.bitcast(value, _I32)
            half = builder.lshr(word, ir.Constant(_I32, 16))
            odd = builder.and_(half, ir.Constant(_I32, 1))
            rounded = builder.lshr(
                builder.add(builder.add(word, ir.Constant(_I32, 0x7FFF)), odd), ir.Constant(_I32, 16)
            )
            quiet = builder.or_(half, ir.Constant(_I32, 0x40))
            value = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
            value = builder.trunc(value, _I16)
        place = _address(context, builder, sig.args[0], args[0], args[1], value.type)
        builder.store(value, place).align = 4 if value.type == _F32 else 2
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


@intrinsic
def splat(typing, array, index):
    """array[index] in all 16 lanes, as f32: of f32, or of uint16 that hold bfloat16."""
    if not _is_flat(array, types.float32, types.uint16):
        return None

    def codegen(context, builder, sig, args):
        return _splat(builder, _load_scalar(context, builder, sig, args), f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def splat_value(typing, value):
    """A float or an int32 in all 16 lanes."""
    result = {types.float32: f32x16, types.int32: i32x16}.get(value)
    if result is None:
        return None
    return result(value), lambda context, builder, sig, args: _splat(builder, args[0], result.llvm)


@intrinsic
def zero(typing):
    return f32x16(), lambda context, builder, sig, args: _constant(f32x16.llvm, [0.0] * 16)


@intrinsic
def load_columns(typing, array, index, stride):
    """Four vectors: array[index + row * stride + column] for 16 rows in the lanes, column 0 .. 3."""
    if not _is_flat(array, types.float32, types.uint16):
        return None
    stored, align = (_F32, 4) if array.dtype == types.float32 else (_I16, 2)

    def codegen(context, builder, sig, args):
        def row(number):
            at = builder.add(args[1], builder.mul(args[2], ir.Constant(args[2].type, number)))
            value = builder.load(_address(context, builder, sig.args[0], args[0], at, ir.VectorType(stored, 4)))
            value.align = align
            return value if stored == _F32 else _widened(builder, value, 4)

        # Rows k and k + 4 share 8 lanes, so that what follows stays within halves of 128 bits.
        halves = []
        for first in (0, 8):
            a, b, c, d = (_shuffle(builder, row(first + k), row(first + k + 4), range(8)) for k in range(4))
            low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
            ab, cd = _shuffle(builder, a, b, low), _shuffle(builder, c, d, low)
            ef, gh = _shuffle(builder, a, b, high), _shuffle(builder, c, d, high)
            left, right = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
            parts = ((ab, cd, left), (ab, cd, right), (ef, gh, left), (ef, gh, right))
            halves.append([_shuffle(builder, *part) for part in parts])
        columns = [_shuffle(builder, a, b, range(16)) for a, b in zip(*halves, strict=True)]
        return context.make_tuple(builder, sig.return_type, columns)

    return types.UniTuple(f32x16, 4)(array, types.intp, types.intp), codegen


# --- arithmetic and choice --------------------------------------------------------------------------------------------


def _operation(float_name, integer_name, arguments=2):
    """An instruction on equal vectors, by the kind of the operands; None where that kind has no such instruction."""

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
band = _operation(None, "and_")
shift_left = _operation(None, "shl")


@intrinsic
def fma(typing, a, b, c):
    """a * b + c, rounded once, in every lane."""
    return f32x16(f32x16, f32x16, f32x16), lambda context, builder, sig, args: _call(
        builder, "llvm.fma.v16f32", f32x16.llvm, args
    )


@intrinsic
def sqrt(typing, x):
    return f32x16(f32x16), lambda context, builder, sig, args: _call(builder, "llvm.sqrt.v16f32", f32x16.llvm, args)


@intrinsic
def less(typing, a, b):
    """a < b, false where one is NaN."""
    if a != b or a not in (f32x16, i32x16):
        return None
    if a == f32x16:
        return b1x16(a, b), lambda context, builder, sig, args: builder.fcmp_ordered("<", *args)
    return b1x16(a, b), lambda context, builder, sig, args: builder.icmp_signed("<", *args)


@intrinsic
def both(typing, a, b):
    return b1x16(b1x16, b1x16), lambda context, builder, sig, args: builder.and_(*args)


@intrinsic
def select(typing, mask, a, b):
    """a where the mask is true, else b."""
    if a != b or a not in (f32x16, i32x16):
        return None
    return a(b1x16, a, b), lambda context, builder, sig, args: builder.select(*args)


@intrinsic
def bits(typing, a):
    """The bits of floats as integers, and of integers as floats."""
    result = {f32x16: i32x16, i32x16: f32x16}.get(a)
    if result is None:
        return None
    return result(a), lambda context, builder, sig, args: builder.bitcast(args[0], result.llvm)


@intrinsic
def to_f32(typing, a):
    return f32x16(i32x16), lambda context, builder, sig, args: builder.sitofp(args[0], f32x16.llvm)


@intrinsic
def to_i32(typing, a):
    """Of floats that are integers within range, nothing else."""
    return i32x16(f32x16), lambda context, builder, sig, args: builder.fptosi(args[0], i32x16.llvm)


@intrinsic
def sum_lanes(typing, a):
    return types.int32(i32x16), lambda context, builder, sig, args: _call(
        builder, "llvm.vector.reduce.add.v16i32", _I32, args
    )


@intrinsic
def largest_lane(typing, a):
    return types.int32(i32x16), lambda context, builder, sig, args: _call(
        builder, "llvm.vector.reduce.smax.v16i32", _I32, args
    )


# --- codes of weights -------------------------------------------------------------------------------------------------


@intrinsic
def load_pairs(typing, array, index):
    """array[index : index + 32] of int8 or int16."""
    if not _is_flat(array, types.int8, types.int16):
        return None

    def codegen(context, builder, sig, args):
        if sig.args[0].dtype == types.int16:
            return _load(context, builder, sig, args, i16x32.llvm, 2)
        return builder.sext(_load(context, builder, sig, args, ir.VectorType(_I8, 32), 1), i16x32.llvm)

    return i16x32(array, types.intp), codegen


@intrinsic
def load_unsigned_pairs(typing, array, index):
    """array[index : index + 32] of bytes, 0 .. 255."""
    if not _is_flat(array, types.int8):
        return None
    return i16x32(array, types.intp), lambda context, builder, sig, args: builder.zext(
        _load(context, builder, sig, args, ir.VectorType(_I8, 32), 1), i16x32.llvm
    )


@intrinsic
def load_words(typing, array, index):
    """The 64 bytes from index on as 32 words."""
    if not _is_flat(array, types.int8):
        return None
    return i16x32(array, types.intp), lambda context, builder, sig, args: _load(
        context, builder, sig, args, i16x32.llvm, 1
    )


@intrinsic
def store_pairs(typing, array, index, value):
    """array[index : index + 32] = value, of int16."""
    if not _is_flat(array, types.int16) or value != i16x32:
        return None

    def codegen(context, builder, sig, args):
        place = _address(context, builder, sig.args[0], args[0], args[1], i16x32.llvm)
        builder.store(args[2], place).align = 2
        return context.get_dummy_value()

    return types.void(array, types.intp, i16x32), codegen


@intrinsic
def scatter_pairs(typing, array, index, stride, low, high):
    """array[index + i * stride : ... + 2] = pair i of 32 integers, of which the low halves are kept, for i below 16."""
    if not _is_flat(array, types.int16):
        return None

    def codegen(context, builder, sig, args):
        words = builder.trunc(_shuffle(builder, args[3], args[4], range(32)), i16x32.llvm)
        pairs = builder.bitcast(words, i32x16.llvm)
        for number in range(LANES):
            at = builder.add(args[1], builder.mul(args[2], ir.Constant(args[2].type, number)))
            pair = builder.extract_element(pairs, ir.Constant(_I32, number))
            builder.store(pair, _address(context, builder, sig.args[0], args[0], at, _I32)).align = 2
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, i32x16, i32x16), codegen


@intrinsic
def load_halves(typing, array, index):
    """The 32 bytes from index on, sixteen float16, as f32. None of them is infinite or NaN.

    In integers and one exact difference, so that a machine need not know float16, and without subnormal floats on the
    way, which cost it a hundred cycles: factors of blocks are often subnormal as float16.
    """
    if not _is_flat(array, types.int8):
        return None

    def codegen(context, builder, sig, args):
        def constant(value):
            return _constant(i32x16.llvm, [value] * 16)

        words = builder.zext(_load(context, builder, sig, args, ir.VectorType(_I16, 16), 1), i32x16.llvm)
        sign = builder.shl(builder.and_(words, constant(0x8000)), constant(16))
        size = builder.shl(builder.and_(words, constant(0x7FFF)), constant(13))
        normal = builder.add(size, constant(112 << 23))
        small = builder.bitcast(builder.add(size, constant(113 << 23)), f32x16.llvm)
        small = builder.bitcast(builder.fsub(small, _constant(f32x16.llvm, [2.0**-14] * 16)), i32x16.llvm)
        size = builder.select(builder.icmp_signed("<", size, constant(1 << 23)), small, normal)
        return builder.bitcast(builder.or_(size, sign), f32x16.llvm)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_bytes(typing, array, index):
    """array[index : index + 16] of int8, as f32."""
    if not _is_flat(array, types.int8):
        return None
    return f32x16(array, types.intp), lambda context, builder, sig, args: builder.sitofp(
        _load(context, builder, sig, args, ir.VectorType(_I8, 16), 1), f32x16.llvm
    )


@intrinsic
def fetch(typing, array, index):
    """A hint that array[index] is needed soon; nothing happens where there is no such place."""

    def codegen(context, builder, sig, args):
        place = _address(context, builder, sig.args[0], args[0], args[1], _I8)
        kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, *(ir.Constant(_I32, value) for value in (0, 3, 1))])  # to read, keep, data
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


def _on_words(name):
    """An operation of 32 words with one number in all of them."""

    @intrinsic
    def operation(typing, a, number):
        if a != i16x32 or not isinstance(number, types.Integer):
            return None

        def codegen(context, builder, sig, args):
            word = context.cast(builder, args[1], sig.args[1], types.int16)
            return getattr(builder, name)(args[0], _splat(builder, word, i16x32.llvm))

        return i16x32(i16x32, number), codegen

    return operation


words_and = _on_words("and_")
words_left = _on_words("shl")
words_right = _on_words("lshr")
words_less = _on_words("sub")


@intrinsic
def words_or(typing, a, b):
    return i16x32(i16x32, i16x32), lambda context, builder, sig, args: builder.or_(*args)


# --- exact dot products of codes --------------------------------------------------------------------------------------


@intrinsic
def splat_pair(typing, array, index):
    """The int16 pair array[index], array[index + 1], sixteen times."""
    if not _is_flat(array, types.int16):
        return None
    return i16x32(array, types.intp), lambda context, builder, sig, args: _splat_pair(
        context, builder, sig.args[0], args[0], args[1]
    )


def _splat_pair(context, builder, array_type, array, index):
    pair = _load_at(context, builder, array_type, array, index, _I32, 2)
    return builder.bitcast(_splat(builder, pair, i32x16.llvm), i16x32.llvm)


@cache
def _pair_instruction(triple, cpu, features):
    """(name, lanes) of x86's pmaddwd on the widest register that this target adds integers in; None where it has none.

    LLVM alone knows what a target's name implies, so it is asked how it would add.
    """
    if not triple.startswith("x86_64"):
        return None
    kind = "<LANES x i16>"
    source = f"define {kind} @f({kind} %a, {kind} %b) {{ %c = add {kind} %a, %b\n ret {kind} %c }}"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    for register, lanes, name in (("zmm", 16, "llvm.x86.avx512.pmaddw.d.512"), ("ymm", 8, "llvm.x86.avx2.pmadd.wd")):
        assembly = machine.emit_assembly(llvm.parse_assembly(source.replace("LANES", str(2 * lanes))))
        if any("vpaddw" in line and register in line for line in assembly.splitlines()):
            return name, lanes
    return None


@cache
def _is_wide(triple, cpu, features):
    """Whether sixteen floats are one register of this target, which has 32 then; LLVM is asked how it would add them."""
    source = "define <16 x float> @f(<16 x float> %a) { %b = fadd <16 x float> %a, %a\n ret <16 x float> %b }"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    return "zmm" in machine.emit_assembly(llvm.parse_assembly(source))


WIDE: bool = _is_wide(*cpu_target.target_context.codegen().magic_tuple())


def _dot_pairs(context, builder, a, b, total):
    undefined = ir.Constant(i16x32.llvm, ir.Undefined)
    instruction = _pair_instruction(*context.codegen().magic_tuple())
    if instruction is None:
        wide = ir.VectorType(_I32, 32)
        products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
        blank = ir.Constant(wide, ir.Undefined)
        even, odd = (_shuffle(builder, products, blank, range(k, 32, 2)) for k in (0, 1))
        return builder.add(builder.add(total, even), odd)
    name, lanes = instruction
    if lanes == LANES:
        return builder.add(total, _call(builder, name, i32x16.llvm, [a, b]))
    low, high = (
        _call(
            builder,
            name,
            ir.VectorType(_I32, lanes),
            [_shuffle(builder, whole, undefined, range(first, first + 16)) for whole in (a, b)],
        )
        for first in (0, 16)
    )
    return builder.add(total, _shuffle(builder, low, high, range(16)))


@intrinsic
def dot_pairs(typing, a, b, total):
    """total[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]

    x86's pmaddwd where there is one: LLVM does not find it in the plain form, which is four times slower.
    """
    return i32x16(i16x32, i16x32, i32x16), lambda context, builder, sig, args: _dot_pairs(context, builder, *args)


# --- tiles: rows of an input, which lie beside one another, times vectors of weights ----------------------------------


def _tile_operation(one, kind, step):
    """tile[r, c] = one(input[at + r * step], weights[c], tile[r, c]), for all rows and vectors of a tile.

    rows: a constant   inputs: an array   weights: a tuple of vectors, one a column of the tile
    """

    @intrinsic(prefer_literal=True)
    def operation(typing, rows, inputs, at, weights, tile):
        if not isinstance(rows, types.IntegerLiteral):
            return None
        count, columns = rows.literal_value, weights.count

        def codegen(context, builder, sig, args):
            done = []
            for row in range(count):
                place = builder.add(args[2], ir.Constant(args[2].type, row * step))
                x = kind(context, builder, sig.args[1], args[1], place)
                for column in range(columns):
                    w = builder.extract_value(args[3], column)
                    done.append(one(context, builder, x, w, builder.extract_value(args[4], row * columns + column)))
            return context.make_tuple(builder, sig.return_type, done)

        return tile(rows, inputs, types.intp, weights, tile), codegen

    return operation


def _splat_float(context, builder, array_type, array, index):
    value = _load_at(context, builder, array_type, array, index, _F32, 4)
    return _splat(builder, value, f32x16.llvm)


def _fma(context, builder, x, w, total):
    return _call(builder, "llvm.fma.v16f32", f32x16.llvm, [x, w, total])


fma_tile = _tile_operation(_fma, _splat_float, 1)  # floats times floats
dot_tile = _tile_operation(_dot_pairs, _splat_pair, 2)  # pairs of codes times pairs of codes


@intrinsic(prefer_literal=True)
def scale_tile(typing, rows, inputs, at, weights, dots, tile):
    """tile[r, c] + (inputs[at + r] * weights[c]) * dots[r, c]"""
    count, columns = rows.literal_value, weights.count

    def codegen(context, builder, sig, args):
        done = []
        for row in range(count):
            x = _splat_float(
                context, builder, sig.args[1], args[1], builder.add(args[2], ir.Constant(args[2].type, row))
            )
            for column in range(columns):
                number = row * columns + column
                dot = builder.sitofp(builder.extract_value(args[4], number), f32x16.llvm)
                scale = builder.fmul(x, builder.extract_value(args[3], column))
                done.append(_fma(context, builder, scale, dot, builder.extract_value(args[5], number)))
        return context.make_tuple(builder, sig.return_type, done)

    return tile(rows, inputs, types.intp, weights, dots, tile), codegen


@intrinsic(prefer_literal=True)
def minimum_tile(typing, rows, inputs, at, sums, sums_at, weights, tile):
    """tile[r, c] - (inputs[at + r] * weights[c]) * sums[sums_at + r]"""
    count, columns = rows.literal_value, weights.count

    def codegen(context, builder, sig, args):
        done = []
        for row in range(count):
            place, sum_place = (builder.add(at, ir.Constant(at.type, row)) for at in (args[2], args[4]))
            x = builder.fneg(_splat_float(context, builder, sig.args[1], args[1], place))
            total = _splat_float(context, builder, sig.args[3], args[3], sum_place)
            for column in range(columns):
                scale = builder.fmul(x, builder.extract_value(args[5], column))
                number = row * columns + column
                done.append(_fma(context, builder, scale, total, builder.extract_value(args[6], number)))
        return context.make_tuple(builder, sig.return_type, done)

    return tile(rows, inputs, types.intp, sums, types.intp, weights, tile), codegen


@intrinsic(prefer_literal=True)
def zeros(typing, count):
    """A tile of so many vectors of floats."""
    kind = types.UniTuple(f32x16, count.literal_value)
    value = _constant(f32x16.llvm, [0.0] * 16)
    return kind(count), lambda context, builder, sig, args: context.make_tuple(builder, kind, [value] * kind.count)


@intrinsic(prefer_literal=True)
def izeros(typing, count):
    """A tile of so many vectors of integers."""
    kind = types.UniTuple(i32x16, count.literal_value)
    value = _constant(i32x16.llvm, [0] * 16)
    return kind(count), lambda context, builder, sig, args: context.make_tuple(builder, kind, [value] * kind.count)


@intrinsic(prefer_literal=True)
def load_tile(typing, count, array, index, stride):
    """A tuple of vectors: array[index + c * stride : ... + 16] for c below count; floats as `load`, int16 as pairs."""
    is_pairs = _is_flat(array, types.int16)
    one = i16x32 if is_pairs else f32x16
    if not is_pairs and not _is_flat(array, types.float32, types.uint16):
        return None
    kind = types.UniTuple(one, count.literal_value)

    def codegen(context, builder, sig, args):
        loaded = []
        for number in range(kind.count):
            at = builder.add(args[2], builder.mul(args[3], ir.Constant(args[3].type, number)))
            where = context, builder, sig.args[1], args[1], at
            if is_pairs:
                loaded.append(_load_at(*where, i16x32.llvm, 2))
            elif sig.args[1].dtype == types.float32:
                loaded.append(_load_at(*where, f32x16.llvm, 4))
            else:
                loaded.append(_widened(builder, _load_at(*where, ir.VectorType(_I16, 16), 2), 16))
        return context.make_tuple(builder, kind, loaded)

    return kind(count, array, types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def store_tile(typing, rows, array, index, stride, tile):
    """array[index + r * stride + 16 * c : ... + 16] = tile[r, c]"""
    columns = tile.count // rows.literal_value

    def codegen(context, builder, sig, args):
        for number in range(tile.count):
            row = builder.mul(args[3], ir.Constant(args[3].type, number // columns))
            at = builder.add(builder.add(args[2], row), ir.Constant(args[2].type, number % columns * LANES))
            place = _address(context, builder, sig.args[1], args[1], at, f32x16.llvm)
            builder.store(builder.extract_value(args[4], number), place).align = 4
        return context.get_dummy_value()

    return types.void(rows, array, types.intp, types.intp, tile), codegen


# --- tiles of outer products ------------------------------------------------------------------------------------------
# Totals of R rows by C vectors, a tuple of R * C vectors; as many as there are registers for. Rows begin at `places`.


def _parts(builder, values):
    return [builder.extract_value(values, number) for number in range(values.type.count)]


def _index(builder, at, offset):
    return builder.add(at, ir.Constant(at.type, offset))


def _vectors_from(context, builder, kind, array, at, count):
    sig = f32x16(kind, types.intp)
    return [_load_vector(context, builder, sig, (array, _index(builder, at, 16 * number))) for number in range(count)]


def _splat_from(context, builder, kind, array, at):
    return _splat(builder, _load_scalar(context, builder, types.float32(kind, types.intp), (array, at)), f32x16.llvm)


@intrinsic(prefer_literal=True)
def row_places(typing, at, stride, rows, R):
    """Where R rows begin: at + r * stride. From row number `rows` on, the last one before it again."""
    if not isinstance(R, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        at, stride, rows = args[:3]
        places, last = [], _index(builder, rows, -1)
        for number in range(R.literal_value):
            row = ir.Constant(last.type, number)
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            places.append(builder.add(at, builder.mul(row, stride)))
        return context.make_tuple(builder, sig.return_type, places)

    return types.UniTuple(types.intp, R.literal_value)(types.intp, types.intp, types.intp, R), codegen


@intrinsic(prefer_literal=True)
def zero_totals(typing, places, C):
    """All zero: C vectors for each of the places."""
    if not isinstance(C, types.IntegerLiteral):
        return None
    result = types.UniTuple(f32x16, places.count * C.literal_value)

    def codegen(context, builder, sig, args):
        return context.make_tuple(builder, result, [_constant(f32x16.llvm, [0.0] * 16)] * result.count)

    return result(places, C), codegen


@intrinsic
def add_products(typing, a, places, step, b, at, totals):
    """totals[r, c] += a[places[r] + step] * b[at + 16 c : at + 16 c + 16], rounded once."""
    if not (_is_flat(a, types.float32, types.uint16) and _is_flat(b, types.float32, types.uint16)):
        return None

    def codegen(context, builder, sig, args):
        _, places, step, _, at, totals = args
        rows = sig.args[1].count
        vectors = sig.args[5].count // rows
        columns = _vectors_from(context, builder, sig.args[3], args[3], at, vectors)
        made = _parts(builder, totals)
        for r, place in enumerate(_parts(builder, places)):
            factor = _splat_from(context, builder, sig.args[0], args[0], builder.add(place, step))
            for c, column in enumerate(columns):
                total = made[r * vectors + c]
                made[r * vectors + c] = _call(builder, "llvm.fma.v16f32", f32x16.llvm, [factor, column, total])
        return context.make_tuple(builder, sig.return_type, made)

    return totals(a, places, types.intp, b, types.intp, totals), codegen


@intrinsic
def scale_totals(typing, a, places, totals):
    """totals[r, c] *= a[places[r]]"""
    if not _is_flat(a, types.float32):
        return None

    def codegen(context, builder, sig, args):
        made, vectors = _parts(builder, args[2]), sig.args[2].count // sig.args[1].count
        for r, place in enumerate(_parts(builder, args[1])):
            factor = _splat_from(context, builder, sig.args[0], args[0], place)
            for number in range(r * vectors, (r + 1) * vectors):
                made[number] = builder.fmul(made[number], factor)
        return context.make_tuple(builder, sig.return_type, made)

    return totals(a, places, totals), codegen


@intrinsic(prefer_literal=True)
def load_totals(typing, y, places, step, C):
    """totals[r, c] = y[places[r] + step + 16 c : ... + 16]"""
    if not (_is_flat(y, types.float32) and isinstance(C, types.IntegerLiteral)):
        return None
    result = types.UniTuple(f32x16, places.count * C.literal_value)

    def codegen(context, builder, sig, args):
        made = []
        for place in _parts(builder, args[1]):
            made += _vectors_from(context, builder, y, args[0], builder.add(place, args[2]), C.literal_value)
        return context.make_tuple(builder, result, made)

    return result(y, places, types.intp, C), codegen


@intrinsic
def store_totals(typing, y, places, step, totals):
    """y[places[r] + step + 16 c : ... + 16] = totals[r, c]"""
    if not _is_flat(y, types.float32):
        return None

    def codegen(context, builder, sig, args):
        made, vectors = _parts(builder, args[3]), sig.args[3].count // sig.args[1].count
        for r, place in enumerate(_parts(builder, args[1])):
            for c in range(vectors):
                at = _index(builder, builder.add(place, args[2]), 16 * c)
                address = _address(context, builder, sig.args[0], args[0], at, f32x16.llvm)
                builder.store(made[r * vectors + c], address).align = 4
        return context.get_dummy_value()

    return types.void(y, places, types.intp, totals), codegen
