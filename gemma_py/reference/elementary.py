"""exp, tanh, log, sine and cosine, written with additions, multiplications, fma and divisions.

The functions of C libraries differ in the last bit between machines. The functions here give equal bits on every machine
with IEEE 754 arithmetic. Functions whose names end in 64 compute in float64, for the angles of rope. The other functions
compute in float32.

exp, exp64 and sine_cosine64 first write x as n * unit + r, with an integer n and a small remainder r. To find n, they add
_ROUND = 1.5 * 2^23 to x / unit in float32, or _ROUND64 = 1.5 * 2^52 in float64. Floats of this size are integers, so the
addition rounds x / unit to the nearest integer, ties to even. Then sum - _ROUND is n as a float, and the bits of the sum
minus the bits of _ROUND are n as an integer. `unit` is stored as the sum of two floats, so that r is accurate.
"""

import numpy as np

from gemma_py.reference.arithmetic import fma, jit

_F = np.float32
_ZERO, _ONE, _TWO = _F(0.0), _F(1.0), _F(2.0)

_ROUND = _F(12582912.0)  # 1.5 * 2^23
_ROUND64 = 6755399441055744.0  # 1.5 * 2^52

_LOG2_E = _F(1.44269504)
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-0.000212194440)  # _LN2_HIGH + _LN2_LOW is ln 2
# Coefficients of p in e^r = 1 + r + r^2 * p(r), the highest power first. The Taylor series has 1/5040, ..., 1/6, 1/2.
_EXP = (_F(0.00019875691), _F(0.0013981999), _F(0.0083334519), _F(0.041665795), _F(0.16666665), _F(0.5))
# Coefficients of q in tanh(x) = x + x^3 * q(x^2), the highest power first. The Taylor series has ..., 2/15, -1/3.
_TANH = (_F(-0.0057049887), _F(0.020639088), _F(-0.053739715), _F(0.13331442), _F(-0.33333282))


@jit
def exp(x):
    """Return e^x, with an error below 1.1 ulp. The result is 0 for x < -87, infinity for x > 88, and NaN for NaN."""
    if x < _F(-87.0):
        return _ZERO
    if x > _F(88.0):
        return _F(np.inf)
    # x = n * ln 2 + r, with |r| at most ln 2 / 2.
    rounded = fma(x, _LOG2_E, _ROUND)
    n = rounded - _ROUND
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, x))
    # p = e^r, by Horner's rule.
    p = _EXP[0]
    for i in range(1, len(_EXP)):
        p = fma(p, r, _EXP[i])
    p = fma(p * r, r, r) + _ONE
    # e^x = 2^n * e^r. The float32 2^n has n + 127 in the exponent field, which begins at bit 23.
    exponent = np.int32(np.float32(rounded).view(np.int32) - np.float32(_ROUND).view(np.int32) + np.int32(127))
    return p * np.int32(exponent << np.int32(23)).view(np.float32)


@jit
def tanh(x):
    """Return tanh x, with an error below 2 ulp."""
    if x < _ZERO:
        return -_tanh_of_positive(-x)
    return _tanh_of_positive(x)


@jit
def _tanh_of_positive(x):
    """Return tanh x for x >= 0: 1 - 2 / (e^2x + 1), or a polynomial for x < 0.625, where the subtraction loses digits."""
    if x < _F(0.625):
        square = x * x
        q = _TANH[0]
        for i in range(1, len(_TANH)):
            q = fma(q, square, _TANH[i])
        return fma(q * square, x, x)
    return _ONE - _TWO / (exp(_TWO * x) + _ONE)


_LN2_HIGH64, _LN2_LOW64 = 0.6931471805599453, 2.3190468138462996e-17  # _LN2_HIGH64 + _LN2_LOW64 is ln 2
_HALF_PI_HIGH64, _HALF_PI_LOW64 = 1.5707963267948966, 6.123233995736766e-17  # their sum is pi / 2


@jit
def log64(x):
    """Return ln x for a normal number x > 0.

    With x = 2^n * m, ln x = n * ln 2 + ln m, and ln m = 2 * atanh(s) with s = (m - 1) / (m + 1).
    """
    # In a float64, bits 52 and above are n + 1023, and bits 0 to 51 are the fraction of m, where 1 <= m < 2.
    bits = np.float64(x).view(np.int64)
    n = (bits >> np.int64(52)) - np.int64(1023)
    m = np.int64((bits & np.int64(0x000F_FFFF_FFFF_FFFF)) | np.int64(0x3FF0_0000_0000_0000)).view(np.float64)
    if m > 1.4142135623730951:  # above sqrt(2), m / 2 is nearer to 1 than m
        n, m = n + 1, m * 0.5
    # atanh(s) = s + s^3/3 + s^5/5 + ... + s^23/23.
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = 0.0
    for k in range(23, 1, -2):
        series = fma(series, square, 1.0 / np.float64(k))
    ln_m = 2.0 * fma(series * square, s, s)
    return fma(np.float64(n), _LN2_HIGH64, fma(np.float64(n), _LN2_LOW64, ln_m))


@jit
def exp64(x):
    """Return e^x for x <= 700. The result is 0 for x < -700."""
    if x < -700.0:
        return 0.0
    # x = n * ln 2 + r, with |r| at most ln 2 / 2.
    rounded = fma(x, 1.4426950408889634, _ROUND64)
    n = rounded - _ROUND64
    r = fma(n, -_LN2_LOW64, fma(n, -_LN2_HIGH64, x))
    # e^r = 1 + r * (1 + r/2 * (1 + r/3 * ( ... (1 + r/14)))).
    p = 1.0
    for k in range(14, 0, -1):
        p = fma(p, r * (1.0 / np.float64(k)), 1.0)
    # e^x = 2^n * e^r. The float64 2^n has n + 1023 in the exponent field, which begins at bit 52.
    exponent = np.float64(rounded).view(np.int64) - np.float64(_ROUND64).view(np.int64) + np.int64(1023)
    return p * np.int64(exponent << np.int64(52)).view(np.float64)


@jit
def sine_cosine64(x):
    """Return (sin x, cos x) for |x| <= 2^26."""
    # x = n * pi/2 + r, with |r| at most pi/4.
    rounded = fma(x, 0.6366197723675814, _ROUND64)
    n = rounded - _ROUND64
    r = fma(n, -_HALF_PI_LOW64, fma(n, -_HALF_PI_HIGH64, x))
    # sin r = r * (1 - r^2/(2*3) * (1 - r^2/(4*5) * ...)) and cos r = 1 - r^2/(1*2) * (1 - r^2/(3*4) * ...).
    square = r * r
    sine, cosine = 1.0, 1.0
    for k in range(18, 0, -2):
        sine = fma(sine, -square / np.float64(k * (k + 1)), 1.0)
        cosine = fma(cosine, -square / np.float64(k * (k - 1)), 1.0)
    sine = sine * r
    # Adding pi/2 to an angle turns (sine, cosine) into (cosine, -sine). The angle here is r + n * pi/2.
    quarter = np.float64(rounded).view(np.int64) & np.int64(3)
    if quarter == 0:
        return sine, cosine
    if quarter == 1:
        return cosine, -sine
    if quarter == 2:
        return -sine, -cosine
    return -cosine, sine
