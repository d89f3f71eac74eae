"""The arithmetic of one number: how the specification is compiled, and the two operations that numpy does not have.

The specification is Python that numba compiles, because plain Python would take hours. It is compiled as it is written:
numba reorders no float operation and fuses none unless it is asked to, and nothing here asks.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called. Dividing by zero gives what IEEE says, an infinity or a NaN."""
    return numba.njit(error_model="numpy")(function)


@intrinsic
def fma(typing, a, b, c):
    """a * b + c, rounded once. All three are float32, or all three are float64."""
    if not (a == b == c and a in (types.float32, types.float64)):
        return None

    def codegen(context, builder, signature, arguments):
        number = arguments[0].type
        kind = ir.FunctionType(number, [number, number, number])
        instruction = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.f{a.bitwidth}")
        return builder.call(instruction, arguments)

    return a(a, b, c), codegen


def float32_of(number):
    """A stored float weight as float32: a float32 as it is, and a uint16 as the upper half of a float32 (bfloat16)."""
    raise NotImplementedError("only compiled functions can call this")


@overload(float32_of)
def _float32_of(number):
    if number == types.float32:
        return lambda number: number
    if number == types.uint16:
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return None


@jit
def bfloat16_of(number):
    """The float32 rounded to the nearest number whose lower 16 bits are zero, ties to even. A NaN becomes a quiet NaN."""
    bits = np.float32(number).view(np.uint32)
    if number == number:
        bits = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    else:
        bits = np.uint32(bits | np.uint32(0x00400000))
    return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)


def is_ieee() -> bool:
    """Whether the calling thread keeps subnormal numbers and rounds to the nearest, ties to even.

    Both are switches of a thread, and some libraries change them for speed. The results are read as bits, because a
    thread that flushes subnormals to zero also compares them as zeros.
    """
    ulp = np.float32(2.0**-23)  # of 1
    subnormal = np.array([2.0**-140, 2.0**-126], np.float32) * np.array([1.0, 0.5], np.float32)
    steps = np.array([0.25, 0.5, 0.75], np.float32) * ulp  # less than halfway to the next number, halfway, and more
    sums = np.concatenate([np.float32(1.0) + steps, np.float32(-1.0) - steps])
    nearest = np.array([1.0, 1.0, 1.0 + 2.0**-23, -1.0, -1.0, -1.0 - 2.0**-23], np.float32)
    return bool(subnormal.view(np.uint32).all() and (sums.view(np.uint32) == nearest.view(np.uint32)).all())
