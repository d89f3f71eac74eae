"""Scalar arithmetic of the specification: the decorator `jit`, and operations that numpy does not have.

numba compiles the specification, because interpreted Python would take hours. Since `fastmath` is off, numba neither
reorders nor fuses floating-point operations.
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
    """Compile a function when it is first called. A division by zero gives infinity or NaN, as in IEEE 754."""
    return numba.njit(error_model="numpy")(function)


@intrinsic
def fma(typing, a, b, c):
    """Return a * b + c, rounded once. The arguments must have one type, float32 or float64."""
    if not (a == b == c and a in (types.float32, types.float64)):
        return None

    def codegen(context, builder, signature, arguments):
        number = arguments[0].type
        kind = ir.FunctionType(number, [number, number, number])
        instruction = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.f{a.bitwidth}")
        return builder.call(instruction, arguments)

    return a(a, b, c), codegen


def float32_of(number):
    """Return a stored weight as float32. A uint16 is a bfloat16, the upper 16 bits of a float32."""
    raise NotImplementedError("only compiled functions can call float32_of")


@overload(float32_of)
def _float32_of(number):
    if number == types.float32:
        return lambda number: number
    if number == types.uint16:
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return None


@jit
def bfloat16_of(number):
    """Return a float32 rounded to bfloat16, to nearest with ties to even, as a float32. A NaN becomes a quiet NaN."""
    bits = np.float32(number).view(np.uint32)
    if number == number:
        bits = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    else:
        bits = np.uint32(bits | np.uint32(0x00400000))
    return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)


@jit
def bfloat16_above(number):
    """Return the smallest bfloat16 that is not smaller than a float32 >= 0, as a float32."""
    bits = np.uint32(np.float32(number).view(np.uint32) + np.uint32(0xFFFF))
    return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)


def is_ieee() -> bool:
    """Return whether the calling thread keeps subnormal numbers and rounds to nearest, ties to even.

    Some libraries change these modes of a thread for speed. The results are compared as bits, because a thread that
    flushes subnormals to zero also treats subnormals as zero in float comparisons.
    """
    ulp = np.float32(2.0**-23)  # the distance from 1 to the next float32
    subnormal = np.array([2.0**-140, 2.0**-126], np.float32) * np.array([1.0, 0.5], np.float32)
    steps = np.array([0.25, 0.5, 0.75], np.float32) * ulp  # below, at and above half an ulp
    sums = np.concatenate([np.float32(1.0) + steps, np.float32(-1.0) - steps])
    nearest = np.array([1.0, 1.0, 1.0 + 2.0**-23, -1.0, -1.0, -1.0 - 2.0**-23], np.float32)
    return bool(subnormal.view(np.uint32).all() and (sums.view(np.uint32) == nearest.view(np.uint32)).all())
