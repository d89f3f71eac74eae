"""SIMD values as numba types: every operation is one explicit LLVM instruction on 16 lanes.

    f32x16   sixteen floats          i32x16   sixteen integers
    i16x32   sixteen pairs of int16  b1x16    sixteen truths, what a comparison gives

A tile is a tuple of such values, row after row: an operation on a tile is one instruction for each of its vectors.

LLVM cuts 16 lanes into one AVX-512 register, two of AVX2 or four of NEON: neither the optimiser nor the machine's
width decides the order of a sum. Nothing here adds floats across lanes; what adds or compares lanes is of integers,
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

llvm.initialize_native_asmparser()  # of `_fused`

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
    """array[index : index + 16] = value"""
    if not _is_flat(array, types.float32) or value != f32x16:
        return None

    def codegen(context, builder, sig, args):
        place = _address(context, builder, sig.args[0], args[0], args[1], f32x16.llvm)
        builder.store(args[2], place).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


def _first_lanes(builder, count):
    lanes = _constant(i32x16.llvm, range(16))
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _I32), i32x16.llvm))


def _masked_store(builder, value, place, mask):
    kind = ir.FunctionType(ir.VoidType(), [f32x16.llvm, place.type, _I32, b1x16.llvm])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16f32.p0")
    builder.call(function, [value, place, ir.Constant(_I32, 4), mask])


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
        _masked_store(builder, args[2], place, _first_lanes(builder, args[3]))
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


@intrinsic(prefer_literal=True)
def izeros(typing, count):
    """So many vectors of integers, all zero."""
    kind = types.UniTuple(i32x16, count.literal_value)
    value = _constant(i32x16.llvm, [0] * 16)
    return kind(count), lambda context, builder, sig, args: context.make_tuple(builder, kind, [value] * kind.count)


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
shift_right = _operation(None, "ashr")  # keeps the sign


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


def _reduced(builder, vectors, combine):
    """Each vector's lanes combined into one number: lanes 0, 4, 8 and 12 have the first's, the next ones the second's ...

    In any order: for operations that know no rounding. Four vectors at once take a third of the time of four alone.
    """

    def joined(x, y, firsts, seconds):
        """Of every four lanes of both: these places of the pair, and those."""
        lanes = ([place + 4 * part for part in range(4) for place in places] for places in (firsts, seconds))
        return combine(*(_shuffle(builder, x, y, each) for each in lanes))

    a, b, c, d = vectors
    ab, cd = (joined(x, y, (0, 16, 1, 17), (2, 18, 3, 19)) for x, y in ((a, b), (c, d)))
    a = joined(ab, cd, (0, 1, 16, 17), (2, 3, 18, 19))
    for turn in (8, 4):
        a = combine(a, _shuffle(builder, a, a, [(lane + turn) % 16 for lane in range(16)]))
    return a


@intrinsic
def sums_of_four(typing, a, b, c, d):
    """The sum of each one's lanes: a's in lanes 0, 4, 8 and 12, b's in the next ones ..."""
    return i32x16(i32x16, i32x16, i32x16, i32x16), lambda context, builder, sig, args: _reduced(
        builder, args, builder.add
    )


@intrinsic
def largest_of_four(typing, a, b, c, d):
    """The largest of each one's lanes, likewise."""

    def codegen(context, builder, sig, args):
        return _reduced(builder, args, lambda x, y: _call(builder, "llvm.smax.v16i32", i32x16.llvm, [x, y]))

    return i32x16(i32x16, i32x16, i32x16, i32x16), codegen


@intrinsic
def splats_of_four(typing, a):
    """Lanes 0, 1, 2 and 3, each in all 16 lanes."""

    def codegen(context, builder, sig, args):
        splats = [_shuffle(builder, args[0], args[0], [lane] * 16) for lane in range(4)]
        return context.make_tuple(builder, sig.return_type, splats)

    return types.UniTuple(f32x16, 4)(f32x16), codegen


@intrinsic
def interleaved(typing, a, b):
    """a's first eight lanes, each followed by b's."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: _shuffle(
        builder, args[0], args[1], [lane // 2 + 16 * (lane % 2) for lane in range(16)]
    )


# --- codes of weights -------------------------------------------------------------------------------------------------


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
def store_codes(typing, array, index, value):
    """Sixteen integers as int16 in the order of panels: of each four, numbers 0, 2, 1, 3."""
    if not _is_flat(array, types.int16):
        return None
    order = [4 * quad + number for quad in range(4) for number in (0, 2, 1, 3)]

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(_I16, 16)
        words = builder.trunc(args[2], kind)
        place = _address(context, builder, sig.args[0], args[0], args[1], kind)
        builder.store(_shuffle(builder, words, ir.Constant(kind, ir.Undefined), order), place).align = 2
        return context.get_dummy_value()

    return types.void(array, types.intp, i32x16), codegen


@intrinsic
def store_split(typing, array, index, value):
    """Sixteen integers as bytes: of each four of them the upper halves, then the lower ones."""
    if not _is_flat(array, types.int8):
        return None
    order = [8 * quad + 2 * number + half for quad in range(4) for half in (1, 0) for number in range(4)]

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(_I8, 32)
        halves = builder.bitcast(builder.trunc(args[2], ir.VectorType(_I16, 16)), kind)
        place = _address(context, builder, sig.args[0], args[0], args[1], kind)
        builder.store(_shuffle(builder, halves, ir.Constant(kind, ir.Undefined), order), place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, i32x16), codegen


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


def _hint(builder, place, writing):
    kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [place, *(ir.Constant(_I32, value) for value in (writing, 3, 1))])  # keep it, data


@intrinsic
def fetch(typing, array, index):
    """A hint that array[index] is needed soon; nothing happens where there is no such place."""

    def codegen(context, builder, sig, args):
        _hint(builder, _address(context, builder, sig.args[0], args[0], args[1], _I8), 0)
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
words_signed_right = _on_words("ashr")
words_flip = _on_words("xor")
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


def _assembly(target, source):
    """What LLVM makes of it for this target. LLVM alone knows what a target's name implies, so it is asked."""
    triple, cpu, features = target
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    return machine.emit_assembly(llvm.parse_assembly(source))


@cache
def _pair_instruction(triple, cpu, features):
    """(name, lanes) of x86's pmaddwd on the widest register that this target adds integers in; None where it has none."""
    if not triple.startswith("x86_64"):
        return None
    kind = "<LANES x i16>"
    source = f"define {kind} @f({kind} %a, {kind} %b) {{ %c = add {kind} %a, %b\n ret {kind} %c }}"
    for register, lanes, name in (("zmm", 16, "llvm.x86.avx512.pmaddw.d.512"), ("ymm", 8, "llvm.x86.avx2.pmadd.wd")):
        assembly = _assembly((triple, cpu, features), source.replace("LANES", str(2 * lanes)))
        if any("vpaddw" in line and register in line for line in assembly.splitlines()):
            return name, lanes
    return None


@cache
def _is_fused(triple, cpu, features):
    """Whether 512 bits of x86's vpdpwssd and vpdpbusd are there, which multiply and add codes at once (AVX-512 VNNI)."""
    name, lanes = _pair_instruction(triple, cpu, features) or ("", 0)
    if lanes != LANES:
        return False
    source = f"""
        declare <16 x i32> @{name}(<32 x i16>, <32 x i16>)
        define <16 x i32> @f(<16 x i32> %total, <32 x i16> %a, <32 x i16> %b) {{
            %products = call <16 x i32> @{name}(<32 x i16> %a, <32 x i16> %b)
            %sum = add <16 x i32> %total, %products
            ret <16 x i32> %sum
        }}"""
    return "vpdpwssd" in _assembly((triple, cpu, features), source)


@cache
def _is_wide(triple, cpu, features):
    """Whether sixteen floats are one register of this target, which has 32 then."""
    source = "define <16 x float> @f(<16 x float> %a) { %b = fadd <16 x float> %a, %a\n ret <16 x float> %b }"
    return "zmm" in _assembly((triple, cpu, features), source)


_TARGET = cpu_target.target_context.codegen().magic_tuple()
WIDE: bool = _is_wide(*_TARGET)
FUSED: bool = _is_fused(*_TARGET)


def _fused(builder, instruction, a, b, total):
    """total + a * b, as an instruction written out: LLVM replaces a chain of them by twice as many others."""
    kind = ir.FunctionType(i32x16.llvm, [i32x16.llvm] * 3)
    assembly = ir.InlineAsm(kind, f"{instruction} $2, $1, $0", "=v,v,v,0")
    return builder.call(assembly, [builder.bitcast(a, i32x16.llvm), builder.bitcast(b, i32x16.llvm), total])


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
    if _is_fused(*context.codegen().magic_tuple()):
        return _fused(builder, "vpdpwssd", a, b, total)
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


@intrinsic
def splat_quad(typing, array, index):
    """The four bytes from array[index] on, sixteen times."""
    if not _is_flat(array, types.int8):
        return None

    def codegen(context, builder, sig, args):
        quad = _load(context, builder, sig, args, _I32, 4)
        return builder.bitcast(_splat(builder, quad, i32x16.llvm), i16x32.llvm)

    return i16x32(array, types.intp), codegen


@intrinsic
def dot_quads(typing, unsigned, signed, total):
    """total[i] + the dot product of four bytes, 0 .. 255 of one and -128 .. 127 of the other. Only where FUSED."""
    return i32x16(i16x32, i16x32, i32x16), lambda context, builder, sig, args: _fused(builder, "vpdpbusd", *args)


# --- tiles ------------------------------------------------------------------------------------------------------------
# Totals of R rows by C vectors, a tuple of R * C vectors; as many as there are registers for. Rows begin at `places`.


def _parts(builder, values):
    return [builder.extract_value(values, number) for number in range(values.type.count)]


def _index(builder, at, offset):
    return builder.add(at, ir.Constant(at.type, offset))


def _vectors_from(context, builder, kind, array, at, count, stride=None):
    """array[at + number * stride : ... + 16] as f32, for so many numbers; one after the other unless told otherwise."""
    stride = ir.Constant(at.type, LANES) if stride is None else stride
    sig = f32x16(kind, types.intp)
    offsets = [builder.mul(stride, ir.Constant(at.type, number)) for number in range(count)]
    return [_load_vector(context, builder, sig, (array, builder.add(at, offset))) for offset in offsets]


def _fma(builder, a, b, total):
    return _call(builder, "llvm.fma.v16f32", f32x16.llvm, [a, b, total])


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


def _zero_tile(kind, name):
    def zero_tile(typing, places, C):
        """All zero: C vectors for each of the places."""
        if not isinstance(C, types.IntegerLiteral):
            return None
        result = types.UniTuple(kind, places.count * C.literal_value)

        def codegen(context, builder, sig, args):
            return context.make_tuple(builder, result, [_constant(kind.llvm, [0] * 16)] * result.count)

        return result(places, C), codegen

    zero_tile.__name__ = name
    return intrinsic(prefer_literal=True)(zero_tile)


zero_totals, zero_dots = _zero_tile(f32x16, "zero_totals"), _zero_tile(i32x16, "zero_dots")


@intrinsic
def add_products(typing, a, places, step, b, at, stride, totals):
    """totals[r, c] += a[places[r] + step] * b[at + c * stride : ... + 16], rounded once."""
    if not (_is_flat(a, types.float32, types.uint16) and _is_flat(b, types.float32, types.uint16)):
        return None

    def codegen(context, builder, sig, args):
        _, places, step, _, at, stride, totals = args
        rows = sig.args[1].count
        vectors = sig.args[6].count // rows
        columns = _vectors_from(context, builder, sig.args[3], args[3], at, vectors, stride)
        made = _parts(builder, totals)
        for r, place in enumerate(_parts(builder, places)):
            factor = _splat_from(context, builder, sig.args[0], args[0], builder.add(place, step))
            for c, column in enumerate(columns):
                made[r * vectors + c] = _fma(builder, factor, column, made[r * vectors + c])
        return context.make_tuple(builder, sig.return_type, made)

    return totals(a, places, types.intp, b, types.intp, types.intp, totals), codegen


@intrinsic
def add_dots(typing, codes, places, step, weights, at, dots):
    """dots[r, c] += the dot products of 16 codes, codes[places[r] + step : ... + 16], and of 8 times C vectors of sixteen
    pairs, weights[at + 32 (c + C pair) : ... + 32].

    Written out: the end of a loop so short is a wrong guess of the machine each time.
    """
    if not (_is_flat(codes, types.int16) and _is_flat(weights, types.int16)):
        return None

    def codegen(context, builder, sig, args):
        _, places, step, _, at, dots = args
        made, places = _parts(builder, dots), _parts(builder, places)
        vectors = len(made) // len(places)
        for pair in range(8):
            columns = [
                _load_at(context, builder, sig.args[3], args[3], _index(builder, at, 32 * c), i16x32.llvm, 2)
                for c in range(vectors * pair, vectors * (pair + 1))
            ]
            for r, place in enumerate(places):
                place = _index(builder, builder.add(place, step), 2 * pair)
                code = _splat_pair(context, builder, sig.args[0], args[0], place)
                for c, column in enumerate(columns):
                    made[r * vectors + c] = _dot_pairs(context, builder, code, column, made[r * vectors + c])
        return context.make_tuple(builder, sig.return_type, made)

    return dots(codes, places, types.intp, weights, types.intp, dots), codegen


@intrinsic
def add_scaled(typing, scales, places, step, weights, at, dots, totals):
    """totals[r, c] += (scales[places[r] + step] * weights[at + 16 c : ... + 16]) * dots[r, c]"""
    if not (_is_flat(scales, types.float32) and _is_flat(weights, types.float32)):
        return None

    def codegen(context, builder, sig, args):
        _, places, step, _, at, dots, totals = args
        rows = sig.args[1].count
        vectors = sig.args[6].count // rows
        columns = _vectors_from(context, builder, sig.args[3], args[3], at, vectors)
        made, dots = _parts(builder, totals), _parts(builder, dots)
        for r, place in enumerate(_parts(builder, places)):
            scale = _splat_from(context, builder, sig.args[0], args[0], builder.add(place, step))
            for number in range(r * vectors, (r + 1) * vectors):
                factor = builder.fmul(scale, columns[number % vectors])
                made[number] = _fma(builder, factor, builder.sitofp(dots[number], f32x16.llvm), made[number])
        return context.make_tuple(builder, sig.return_type, made)

    return totals(scales, places, types.intp, weights, types.intp, dots, totals), codegen


@intrinsic
def take_minimums(typing, scales, places, step, sums, sum_places, sum_step, weights, at, totals):
    """totals[r, c] -= (scales[places[r] + step] * weights[at + 16 c : ... + 16]) * sums[sum_places[r] + sum_step]"""
    if not (_is_flat(scales, types.float32) and _is_flat(sums, types.float32) and _is_flat(weights, types.float32)):
        return None

    def codegen(context, builder, sig, args):
        _, places, step, _, sum_places, sum_step, _, at, totals = args
        rows = sig.args[1].count
        vectors = sig.args[8].count // rows
        columns = _vectors_from(context, builder, sig.args[6], args[6], at, vectors)
        made = _parts(builder, totals)
        both = zip(_parts(builder, places), _parts(builder, sum_places), strict=True)
        for r, (place, sum_place) in enumerate(both):
            scale = _splat_from(context, builder, sig.args[0], args[0], builder.add(place, step))
            total = _splat_from(context, builder, sig.args[3], args[3], builder.add(sum_place, sum_step))
            for number in range(r * vectors, (r + 1) * vectors):
                factor = builder.fmul(builder.fneg(scale), columns[number % vectors])
                made[number] = _fma(builder, factor, total, made[number])
        return context.make_tuple(builder, sig.return_type, made)

    step = types.intp
    return totals(scales, places, step, sums, sum_places, step, weights, step, totals), codegen


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


@intrinsic(prefer_literal=True)
def fetch_totals(typing, y, places, C):
    """A hint that y[places[r] : ... + 16 C] will be written: a line that is far away takes as long as half a tile."""
    if not isinstance(C, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        for place in _parts(builder, args[1]):
            for c in range(C.literal_value):
                _hint(builder, _address(context, builder, y, args[0], _index(builder, place, 16 * c), _I8), 1)
        return context.get_dummy_value()

    return types.void(y, places, C), codegen


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


@intrinsic
def store_first_totals(typing, y, places, columns, totals):
    """y[places[r] : ... + columns] = the first of totals[r]"""
    if not _is_flat(y, types.float32):
        return None

    def codegen(context, builder, sig, args):
        made, vectors = _parts(builder, args[3]), sig.args[3].count // sig.args[1].count
        masks = [_first_lanes(builder, _index(builder, args[2], -16 * c)) for c in range(vectors)]
        for r, place in enumerate(_parts(builder, args[1])):
            for c in range(vectors):
                address = _address(context, builder, sig.args[0], args[0], _index(builder, place, 16 * c), f32x16.llvm)
                _masked_store(builder, made[r * vectors + c], address, masks[c])
        return context.get_dummy_value()

    return types.void(y, places, types.intp, totals), codegen
