"""exp, tanh and the soft cap on sixteen lanes: the operations of elementary.py, with selects instead of branches."""

import numpy as np

from gemma_py.kernels import elementary as scalar
from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.simd.vectors import (
    add,
    bitcast,
    div,
    fma,
    less,
    load,
    load_partial,
    mul,
    neg,
    select,
    shift_left,
    splat,
    store,
    store_partial,
    sub,
    zero,
)

_F = np.float32
_BIAS, _MANTISSA = np.int32(127), np.int32(23)
_MINUS_LN2_HIGH, _MINUS_LN2_LOW = _F(-scalar._LN2_HIGH), _F(-scalar._LN2_LOW)
_ROUND, _ROUND_BITS, _LOG2E = scalar._ROUND32, scalar._ROUND32_BITS, scalar._LOG2E
_E5, _E4, _E3, _E2, _E1 = scalar._E5, scalar._E4, scalar._E3, scalar._E2, scalar._E1
_T4, _T3, _T2, _T1, _T0 = scalar._T4, scalar._T3, scalar._T2, scalar._T1, scalar._T0
_ONE, _TWO, _HALF, _SMALL = scalar._ONE, scalar._TWO, scalar._HALF, scalar._SMALL
_LEAST, _MOST, _INFINITY = scalar._LEAST, scalar._MOST, scalar._INFINITY


@inlined
def exp(x):
    """Return e^x in every lane. The result is 0 for x below -87, and infinity for x above 88."""
    shifted = fma(x, splat(_LOG2E), splat(_ROUND))
    n = sub(shifted, splat(_ROUND))
    r = fma(n, splat(_MINUS_LN2_LOW), fma(n, splat(_MINUS_LN2_HIGH), x))
    p = fma(splat(_E5), r, splat(_E4))
    p = fma(p, r, splat(_E3))
    p = fma(p, r, splat(_E2))
    p = fma(p, r, splat(_E1))
    p = fma(p, r, splat(_HALF))
    p = add(fma(mul(p, r), r, r), splat(_ONE))
    power = sub(bitcast(shifted), splat(_ROUND_BITS))
    result = mul(p, bitcast(shift_left(add(power, splat(_BIAS)), splat(_MANTISSA))))
    result = select(less(splat(_MOST), x), splat(_INFINITY), result)
    return select(less(x, splat(_LEAST)), zero(), result)


@inlined
def tanh(x):
    negative = less(x, zero())
    a = select(negative, neg(x), x)
    s = mul(a, a)
    p = fma(splat(_T4), s, splat(_T3))
    p = fma(p, s, splat(_T2))
    p = fma(p, s, splat(_T1))
    p = fma(p, s, splat(_T0))
    small = fma(mul(p, s), a, a)
    large = sub(splat(_ONE), div(splat(_TWO), add(exp(mul(splat(_TWO), a)), splat(_ONE))))
    result = select(less(a, splat(_SMALL)), small, large)
    return select(negative, neg(result), result)


@inlined
def soft_cap(x, cap):
    """Return cap * tanh(x / cap) in every lane, for cap > 0."""
    return mul(splat(cap), tanh(div(x, splat(cap))))


@inlined
def load_up_to(x, at, end):
    """Load x[at : at + 16]. Where an index is `end` or more, memory is not read, and the lane is zero."""
    if at + 16 <= end:
        return load(x, at)
    return load_partial(x, at, end - at)


@inlined
def store_up_to(x, at, end, value):
    """Store value to x[at : at + 16]. Where an index is `end` or more, memory is not written."""
    if at + 16 <= end:
        store(x, at, value)
    else:
        store_partial(x, at, value, end - at)
