"""Atomic access to int64 cells, a spin-loop hint, a clock, and a check for IEEE arithmetic.

A cell is one element of a contiguous int64 array. Loads have acquire ordering and stores have release ordering: if thread B
loads a value that thread A stored, then B sees everything that A wrote before the store. So A can fill a plain array and
then store to a cell, and B can read the array after loading that value. The runtime relies on no other memory ordering.
"""

import time

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.intrinsics import bits_of_f32

_WORD = 8  # bytes of a cell; atomic access needs alignment to this size, and numpy aligns to 16


def _is_cells(array):
    return isinstance(array, types.Array) and array.dtype == types.int64 and array.ndim == 1 and array.layout == "C"


def _pointer(context, builder, sig, args):
    data = context.make_array(sig.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def load_acquire(typing, array, index):
    """Return a cell's value. Everything that was written before the `store_release` of this value is then visible."""
    if not _is_cells(array):
        return None

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_pointer(context, builder, sig, args), "acquire", _WORD)

    return types.int64(array, types.intp), codegen


@intrinsic
def store_release(typing, array, index, value):
    """Set a cell. A thread that loads this value sees everything that the calling thread wrote before."""
    if not _is_cells(array):
        return None

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[2], _pointer(context, builder, sig, args), "release", _WORD)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), codegen


@intrinsic
def fetch_add(typing, array, index, value):
    """Add `value` to a cell atomically, and return the cell's previous value. The ordering is acquire and release."""
    if not _is_cells(array):
        return None

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _pointer(context, builder, sig, args), args[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def compare_exchange(typing, array, index, expected, value):
    """If the cell holds `expected`, set it to `value`, atomically. Return the cell's previous value."""
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
    """Call POSIX `sched_yield`, which lets another thread run on this core."""
    return types.int32(), lambda context, builder, sig, args: _call_libc(builder, "sched_yield", args)


@intrinsic
def sleep_microseconds(typing, duration):
    """Call POSIX `usleep` for less than a second. Only fault injection and tests call this function."""
    return types.int32(types.uint32), lambda context, builder, sig, args: _call_libc(builder, "usleep", args)


@intrinsic
def nanoseconds(typing):
    """Return libc's monotonic clock in nanoseconds.

    The processor's cycle counter is no alternative: its rate differs between machines, and some machines forbid reading
    it.
    """

    def codegen(context, builder, sig, args):
        second_and_rest = cgutils.alloca_once(builder, ir.LiteralStructType([ir.IntType(64), ir.IntType(64)]))
        _call_libc(builder, "clock_gettime", [ir.Constant(ir.IntType(32), time.CLOCK_MONOTONIC), second_and_rest])
        second, rest = (builder.load(cgutils.gep_inbounds(builder, second_and_rest, 0, part)) for part in (0, 1))
        return builder.add(builder.mul(second, ir.Constant(ir.IntType(64), 1_000_000_000)), rest)

    return types.int64(), codegen


@intrinsic
def spin_hint(typing):
    """Tell the core that this thread is in a spin loop. The instruction is `pause` on x86, `isb` on ARM, none elsewhere.

    ARM's `yield` takes no time on most cores, so a wait of `yield`s would reach its limit of spins too early. `isb` empties
    the core's pipeline, which takes about as long as `pause`.
    """

    def codegen(context, builder, sig, args):
        machine = binding.get_process_triple().split("-")[0]
        if machine in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            barrier = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.isb")
            builder.call(
                barrier, [ir.Constant(ir.IntType(32), 15)]
            )  # 15: the whole system, the only domain that isb has
        return context.get_dummy_value()

    return types.void(), codegen


# The operands of `_is_ieee` are in an array, so that the compiler cannot compute the results in advance.
_PROBE = np.array([2.0**-140, 1.0, 2.0**-126, 0.5, 2.0**-24, 1.5 * 2.0**-24, 0.5 * 2.0**-24], np.float32)


@inlined
def _product_is_not_zero(a, b):
    """Return whether a * b is nonzero. The bits are tested, because a float comparison may treat a subnormal as zero."""
    return bits_of_f32(a * b) != 0


@kernel
def _is_ieee(probe):
    small, one, least, half, tie, above, below = probe[0], probe[1], probe[2], probe[3], probe[4], probe[5], probe[6]
    # The operand `small` is subnormal in the first product, and the result is subnormal in the second one.
    subnormal = _product_is_not_zero(small, one) and _product_is_not_zero(least, half)
    up = bits_of_f32(one + above) == bits_of_f32(one) + 1 and bits_of_f32(-one - above) == bits_of_f32(-one) + 1
    down = bits_of_f32(one + below) == bits_of_f32(one) and bits_of_f32(-one - below) == bits_of_f32(-one)
    return subnormal and up and down and bits_of_f32(one + tie) == bits_of_f32(one)


def is_ieee() -> bool:
    """Return whether the calling thread keeps subnormal floats and rounds to nearest even.

    Libraries can change these modes of a thread: those compiled with -ffast-math do so when they are loaded, and
    torch.set_flush_denormal does so on request. New threads inherit the modes. Without this check, the computed bits would
    depend on the libraries that a program has loaded.
    """
    return bool(_is_ieee(_PROBE))
