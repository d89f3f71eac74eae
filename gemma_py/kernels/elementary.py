"""exp, tanh, log, sine and cosine made of add, mul, fma and div alone, so that every IEEE machine gives the same bits.

The forward pass uses the f32 functions. RoPE's tables and log probabilities use the f64 functions. A float is rounded to an
integer by adding 1.5 * 2^23 in f32, or 1.5 * 2^52 in f64: the low bits of the sum's mantissa are the integer.
"""

import numpy as np

from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.intrinsics import bits_of_f32, bits_of_f64, f32_of_bits, f64_of_bits, fma

_F = np.float32
_ROUND32 = _F(12582912.0)  # 1.5 * 2^23
_ROUND32_BITS = np.int32(0x4B400000)
_LOG2E = _F(1.44269504)
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
_ONE, _TWO, _ZERO, _HALF = _F(1.0), _F(2.0), _F(0.0), _F(0.5)
_E5, _E4, _E3, _E2, _E1 = _F(1.9875691e-4), _F(1.3981999e-3), _F(8.3334519e-3), _F(4.1665795e-2), _F(1.6666665e-1)
_LEAST, _MOST, _INFINITY = _F(-87.0), _F(88.0), _F(np.inf)


@inlined
def exp(x):
    """Return e^x in f32, with an error below 1.1 ulp. The result is 0 below -87, infinity above 88, and NaN for NaN."""
    if x < _LEAST:
        return _ZERO
    if x > _MOST:
        return _INFINITY
    shifted = fma(x, _LOG2E, _ROUND32)
    n = shifted - _ROUND32
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, x))
    p = fma(_E5, r, _E4)
    p = fma(p, r, _E3)
    p = fma(p, r, _E2)
    p = fma(p, r, _E1)
    p = fma(p, r, _HALF)
    p = fma(p * r, r, r) + _ONE
    power = np.int32(bits_of_f32(shifted) - _ROUND32_BITS)
    return p * f32_of_bits(np.int32((power + np.int32(127)) << np.int32(23)))


_SMALL = _F(0.625)
_T4, _T3, _T2, _T1, _T0 = _F(-5.7049887e-3), _F(2.0639088e-2), _F(-5.3739715e-2), _F(1.3331442e-1), _F(-3.3333282e-1)


@inlined
def tanh(x):
    """Return tanh x in f32, with an error below 2 ulp."""
    if x < _ZERO:
        return -_tanh_of_positive(-x)
    return _tanh_of_positive(x)


@inlined
def _tanh_of_positive(x):
    if x < _SMALL:
        s = x * x
        p = fma(_T4, s, _T3)
        p = fma(p, s, _T2)
        p = fma(p, s, _T1)
        p = fma(p, s, _T0)
        return fma(p * s, x, x)
    return _ONE - _TWO / (exp(_TWO * x) + _ONE)


_ROUND64 = 6755399441055744.0  # 1.5 * 2^52
_ROUND64_BITS = np.int64(0x4338000000000000)
_LN2_64 = 0.6931471805599453
_LN2_64_LOW = 2.3190468138462996e-17
_HALF_PI = 1.5707963267948966
_HALF_PI_LOW = 6.123233995736766e-17


@inlined
def log64(x):
    """Return ln x in f64 for normal x = m * 2^e > 0, computed as e * ln 2 + 2 atanh((m - 1) / (m + 1))."""
    bits = bits_of_f64(x)
    exponent = (bits >> np.int64(52)) - np.int64(1023)
    m = f64_of_bits((bits & np.int64(0x000FFFFFFFFFFFFF)) | np.int64(0x3FF0000000000000))
    if m > 1.4142135623730951:
        m = m * 0.5
        exponent = exponent + 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 0.0
    for k in range(23, 1, -2):
        p = fma(p, z, 1.0 / np.float64(k))
    e = np.float64(exponent)
    return fma(e, _LN2_64, fma(e, _LN2_64_LOW, 2.0 * fma(p * z, s, s)))


@inlined
def exp64(x):
    """Return e^x in f64 for x up to 700. The result is 0 below -700."""
    if x < -700.0:
        return 0.0
    shifted = fma(x, 1.4426950408889634, _ROUND64)
    n = shifted - _ROUND64
    r = fma(n, -_LN2_64_LOW, fma(n, -_LN2_64, x))
    p = 1.0
    for k in range(14, 0, -1):
        p = fma(p, r * (1.0 / np.float64(k)), 1.0)
    power = bits_of_f64(shifted) - _ROUND64_BITS
    return p * f64_of_bits((power + np.int64(1023)) << np.int64(52))


@inlined
def sine_cosine64(x):
    """Return (sin x, cos x) in f64 for x from -2^26 to 2^26.

    The nearest multiple of pi / 2 is subtracted from x, and Taylor series of the remainder give the results. pi / 2 is
    stored as the sum of two floats, because one float is not accurate enough.
    """
    shifted = fma(x, 0.6366197723675814, _ROUND64)
    n = shifted - _ROUND64
    quarter = bits_of_f64(shifted) & np.int64(3)
    r = fma(n, -_HALF_PI_LOW, fma(n, -_HALF_PI, x))
    z = r * r
    s = 1.0
    c = 1.0
    for k in range(18, 0, -2):
        s = fma(s, -z / np.float64(k * (k + 1)), 1.0)
        c = fma(c, -z / np.float64(k * (k - 1)), 1.0)
    s = s * r
    if quarter == 0:
        return s, c
    if quarter == 1:
        return c, -s
    if quarter == 2:
        return -s, -c
    return -c, s
