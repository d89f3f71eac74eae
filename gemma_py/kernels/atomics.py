"""What threads need of the machine: atomic access to int64 cells, a spin hint, a clock, and a check for IEEE arithmetic.

A cell is one element of a contiguous int64 array. A load acquires and a store releases: a thread that loads a value sees
everything that was written before that value was stored. So a plain array can be handed from one thread to another; the
runtime relies on nothing else.
"""

import time

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.intrinsics import bits_of_f32

_WORD = 8  # bytes; numpy aligns to 16, so no cell is ever torn


def _is_cells(array):
    return isinstance(array, types.Array) and array.dtype == types.int64 and array.ndim == 1 and array.layout == "C"


def _pointer(context, builder, sig, args):
    data = context.make_array(sig.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def load_acquire(typing, array, index):
    """The cell's value. What its writer wrote before storing it is visible from here on."""
    if not _is_cells(array):
        return None

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_pointer(context, builder, sig, args), "acquire", _WORD)

    return types.int64(array, types.intp), codegen


@intrinsic
def store_release(typing, array, index, value):
    """Set the cell. What this thread wrote before is visible to every thread that loads the value."""
    if not _is_cells(array):
        return None

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[2], _pointer(context, builder, sig, args), "release", _WORD)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), codegen


@intrinsic
def fetch_add(typing, array, index, value):
    """Add to the cell and return its value before, in one atomic step that acquires and releases."""
    if not _is_cells(array):
        return None

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _pointer(context, builder, sig, args), args[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def compare_exchange(typing, array, index, expected, value):
    """Set the cell if it holds `expected`, in one atomic step; return its value before."""
    if not _is_cells(array):
        return None

    def codegen(context, builder, sig, args):
        pair = builder.cmpxchg(_pointer(context, builder, sig, args), args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 0)

    return types.int64(array, types.intp, types.int64, types.int64), codegen


def _call_libc(builder, name, operands):
    kind = ir.FunctionType(ir.IntType(32), [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


@intrinsic
def yield_cpu(typing):
    """Let another thread run on this core, if one is waiting. POSIX, so the same on Linux and macOS."""
    return types.int32(), lambda context, builder, sig, args: _call_libc(builder, "sched_yield", args)


@intrinsic
def sleep_microseconds(typing, duration):
    """Sleep for less than a second. Only tests do: nothing on the normal path sleeps."""
    return types.int32(types.uint32), lambda context, builder, sig, args: _call_libc(builder, "usleep", args)


@intrinsic
def nanoseconds(typing):
    """libc's monotonic clock. (Cycle counters differ between machines, and some machines forbid reading them.)"""

    def codegen(context, builder, sig, args):
        second_and_rest = cgutils.alloca_once(builder, ir.LiteralStructType([ir.IntType(64), ir.IntType(64)]))
        _call_libc(builder, "clock_gettime", [ir.Constant(ir.IntType(32), time.CLOCK_MONOTONIC), second_and_rest])
        second, rest = (builder.load(cgutils.gep_inbounds(builder, second_and_rest, 0, part)) for part in (0, 1))
        return builder.add(builder.mul(second, ir.Constant(ir.IntType(64), 1_000_000_000)), rest)

    return types.int64(), codegen


@intrinsic
def spin_hint(typing):
    """Tell the core that it is in a spin loop: x86's pause, ARM's yield, nothing elsewhere."""

    def codegen(context, builder, sig, args):
        machine = binding.get_process_triple().split("-")[0]
        if machine in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.void(), codegen


# Passed as an array, so that no compiler computes the answers in advance.
_PROBE = np.array([2.0**-140, 1.0, 2.0**-126, 0.5, 2.0**-24, 1.5 * 2.0**-24, 0.5 * 2.0**-24], np.float32)


@inlined
def _product_is_not_zero(a, b):
    """Judged by its bits: a comparison of floats could itself treat a subnormal as zero."""
    return bits_of_f32(a * b) != 0


@kernel
def _is_ieee(probe):
    small, one, least, half, tie, above, below = probe[0], probe[1], probe[2], probe[3], probe[4], probe[5], probe[6]
    subnormal = _product_is_not_zero(small, one) and _product_is_not_zero(least, half)  # as an operand, and as a result
    up = bits_of_f32(one + above) == bits_of_f32(one) + 1 and bits_of_f32(-one - above) == bits_of_f32(-one) + 1
    down = bits_of_f32(one + below) == bits_of_f32(one) and bits_of_f32(-one - below) == bits_of_f32(-one)
    return subnormal and up and down and bits_of_f32(one + tie) == bits_of_f32(one)


def is_ieee() -> bool:
    """Whether the calling thread keeps subnormals and rounds to nearest even.

    Both are switches of a thread, which a new thread inherits. Some libraries flush subnormals to zero for speed
    (those compiled with -ffast-math when they are loaded, and torch.set_flush_denormal); the bits would then depend on
    which libraries a program has loaded.
    """
    return bool(_is_ieee(_PROBE))
