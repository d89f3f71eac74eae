"""The operations that every Gemma is made of, one function each, in scalar loops.

    T tokens   D model width   H query heads   G key/value heads   E head width
    F feed-forward width   V vocabulary   L layers   W window   K inputs and N outputs of a matrix

This is the specification: any faster way must give these bits. All numbers are float32 unless a name says otherwise.
`fma(a, b, c)` is a * b + c, rounded once. A sum is a chain of fma in which the index ascends. Every function returns new
arrays and leaves its arguments as they are. Two operations are less plain than the others:

- A matrix of quantised weights takes its input as 16-bit codes with one scale for every 32 values (`quantise`). Codes are
  multiplied group by group: a group is 32 weights that share a scale, or 16 where the weights' format says so. The dot
  product inside a group is exact, so the order of that sum does not matter (`matmul_codes`).
- Attention goes through the keys in tiles of TILE positions, and rescales what it has summed so far whenever a tile has a
  larger maximum (`attend`).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gemma_py.reference.arithmetic import bfloat16_of, float32_of, fma, jit
from gemma_py.reference.elementary import exp, exp64, log64, sine_cosine64, tanh
from gemma_py.weights.tensors import FloatMatrix, Matrix, StoredMatrix

BLOCK = 32  # values that share a scale when an input is quantised
TILE = 32  # key positions that share a maximum in attention

_F = np.float32
_ZERO, _ONE, _HALF, _INFINITY = _F(0.0), _F(1.0), _F(0.5), _F(np.inf)
_LARGEST_CODE, _LARGEST_F32 = _F(32767.0), _F(np.finfo(np.float32).max)
_ROUND = _F(12582912.0)  # adding and subtracting it rounds |x| < 2^22 to the nearest whole number, ties to even
_GELU_SLOPE, _GELU_CUBE = _F(0.7978845608028654), _F(0.044715)  # the first is sqrt(2 / pi)


def of_layer(weights: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The weights whose names begin with layers.NUMBER, by the rest of their names."""
    prefix = f"layers.{number}."
    return {name.removeprefix(prefix): part for name, part in weights.items() if name.startswith(prefix)}


# --- matrices ---------------------------------------------------------------------------------------------------------


def matmul(x: np.ndarray, matrix: Matrix) -> np.ndarray:
    """y[n] = sum over k of x[k] * matrix[n, k].    x: [K]   matrix: [N, K]   y: [N]

    The format in which the matrix is stored decides the order of the sum, and nothing else does.
    """
    y: np.ndarray
    if isinstance(matrix, FloatMatrix):
        y = matmul_float(x, matrix.values)
    else:
        codes, scales = quantise(x)
        N, groups = matrix.scales.shape
        w = matrix.codes.reshape(N, groups, -1)
        y = matmul_codes(codes.reshape(groups, -1), scales, w, matrix.scales, matrix.minimums)
    return y


@jit
def matmul_float(x, w):
    """y[n] = sum over k of x[k] * w[n, k].    x: [K]   w: [N, K] float32, or uint16 that holds bfloat16   y: [N]"""
    y = np.empty(w.shape[0], np.float32)
    for n in range(w.shape[0]):
        total = _ZERO
        for k in range(w.shape[1]):
            total = fma(x[k], float32_of(w[n, k]), total)
        y[n] = total
    return y


@jit
def quantise(x):
    """Codes and scales such that scale * code is nearly x.    x: [K]   codes: [K] int16   scales: [K / 32]

    The scale is the block's largest magnitude / 32767. A block whose largest magnitude is too small for such a scale has
    scale 0. A block that holds a NaN or an infinity has scale NaN. The codes of both are 0, so that no NaN and no infinity
    is ever cast to an integer.
    """
    codes, scales = np.empty(x.shape[0], np.int16), np.empty(x.shape[0] // BLOCK, np.float32)
    for block in range(scales.shape[0]):
        first = block * BLOCK
        largest, finite = _ZERO, True
        for k in range(first, first + BLOCK):
            magnitude = abs(x[k])
            if not magnitude <= _LARGEST_F32:
                finite = False
            elif magnitude > largest:
                largest = magnitude
        scale = largest / _LARGEST_CODE if finite else _F(np.nan)
        scales[block] = scale
        for k in range(first, first + BLOCK):
            code = _ZERO
            if scale > _ZERO:
                code = (x[k] / scale + _ROUND) - _ROUND
                code = min(max(code, -_LARGEST_CODE), _LARGEST_CODE)
            codes[k] = np.int16(code)
    return codes, scales


@jit
def matmul_codes(x, sx, w, sw, minimums):
    """y[n] = sum over groups of (sx * sw) * dot(codes) - (sx * minimum) * sum(codes of x).

    x: [groups, width] int16   sx: [K / 32]   w: [N, groups, width] int8   sw: [N, groups]
    minimums: [N, groups], or empty where the format has none   y: [N]
    """
    groups, width = x.shape
    y = np.empty(w.shape[0], np.float32)
    for n in range(w.shape[0]):
        total = _ZERO
        for group in range(groups):
            scale = sx[group * width // BLOCK]
            total = fma(scale * sw[n, group], _F(_exact_dot(x, w, n, group)), total)
            if minimums.shape[0] > 0:
                total = fma(-(scale * minimums[n, group]), _F(_exact_sum(x, group)), total)
        y[n] = total
    return y


@jit
def _exact_dot(x, w, n, group):
    """The sum of x[group, k] * w[n, group, k]. It fits into int32, since 32 * 128 * 32767 < 2^31."""
    total = np.int32(0)
    for k in range(x.shape[1]):
        total = np.int32(total + np.int32(x[group, k]) * np.int32(w[n, group, k]))
    return total


@jit
def _exact_sum(x, group):
    """The sum of x[group, k], as an int32."""
    total = np.int32(0)
    for k in range(x.shape[1]):
        total = np.int32(total + np.int32(x[group, k]))
    return total


def matrix_row(matrix: Matrix | StoredMatrix, n: int) -> np.ndarray:
    """The weights matrix[n], as float32. Of a matrix that stays in its file, only this row is read.    [K]"""
    row: np.ndarray
    if isinstance(matrix, StoredMatrix):
        matrix, n = matrix.rows(n, n + 1), 0
    if isinstance(matrix, FloatMatrix):
        row = widen_row(matrix.values[n])
    else:
        minimums = matrix.minimums[n] if len(matrix.minimums) else matrix.minimums.reshape(-1)
        row = dequantise_row(matrix.codes[n], matrix.scales[n], minimums)
    return row


@jit
def widen_row(row):
    """y[k] = row[k] as float32.    row: [K] float32, or uint16 that holds bfloat16"""
    y = np.empty(row.shape[0], np.float32)
    for k in range(row.shape[0]):
        y[k] = float32_of(row[k])
    return y


@jit
def dequantise_row(codes, scales, minimums):
    """y[k] = scale * code, rounded to float32. Where the format has minimums, the minimum is subtracted and the
    result rounded again.    codes: [K] int8"""
    width = codes.shape[0] // scales.shape[0]
    y = np.empty(codes.shape[0], np.float32)
    for k in range(codes.shape[0]):
        y[k] = scales[k // width] * _F(codes[k])
        if minimums.shape[0] > 0:
            y[k] = y[k] - minimums[k // width]
    return y


def embed(matrix: Matrix | StoredMatrix, token: int, factor: float | None = None) -> np.ndarray:
    """The token's row of the matrix, or row 0 where it has no such row, times the factor, which is sqrt(D) where none is
    given.    [D]"""
    rows, D = matrix.shape
    row = matrix_row(matrix, token if token < rows else 0)
    x: np.ndarray = scale_row(row, _F(math.sqrt(D) if factor is None else factor))
    return x


# --- rows -------------------------------------------------------------------------------------------------------------


@jit
def scale_row(x, factor):
    """y[d] = x[d] * factor"""
    y = np.empty_like(x)
    for d in range(x.shape[0]):
        y[d] = x[d] * factor
    return y


def columns(x: np.ndarray, first: int, width: int) -> np.ndarray:
    """y[d] = x[first + d]    [width]"""
    return x[first : first + width].copy()


@jit
def add(x, y):
    """z[d] = x[d] + y[d]"""
    z = np.empty_like(x)
    for d in range(x.shape[0]):
        z[d] = x[d] + y[d]
    return z


@jit
def rms_norm(x, eps, gain=None):
    """y[d] = x[d] / sqrt(mean(x^2) + eps) * gain[d], or without the gain where there is none.    x, gain: [D]"""
    total = _ZERO
    for d in range(x.shape[0]):
        total = fma(x[d], x[d], total)
    factor = _ONE / np.sqrt(total / _F(x.shape[0]) + eps)
    y = np.empty(x.shape[0], np.float32)
    for d in range(x.shape[0]):
        y[d] = x[d] * factor
        if gain is not None:
            y[d] = y[d] * gain[d]
    return y


def rms_norm_heads(x: np.ndarray, eps: np.float32, gain: np.ndarray | None = None) -> np.ndarray:
    """Each head normalised by itself, all with the same gain.    x: [heads, E]   gain: [E]"""
    return np.stack([rms_norm(head, eps, gain) for head in x])


@jit
def gelu_gate(gate, up):
    """y[f] = gelu(gate[f]) * up[f], with gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).    [F]"""
    y = np.empty_like(gate)
    for f in range(gate.shape[0]):
        x = gate[f]
        inner = _GELU_SLOPE * fma(_GELU_CUBE * x * x, x, x)
        y[f] = _HALF * x * (_ONE + tanh(inner)) * up[f]
    return y


@jit
def tanh_row(x):
    """y[d] = tanh(x[d])"""
    y = np.empty_like(x)
    for d in range(x.shape[0]):
        y[d] = tanh(x[d])
    return y


@jit
def multiply_row(x, gain):
    """y[d] = x[d] * gain[d]"""
    y = np.empty_like(x)
    for d in range(x.shape[0]):
        y[d] = x[d] * gain[d]
    return y


@jit
def soft_cap(value, cap):
    """cap * tanh(value / cap). A cap of 0 means that there is none."""
    return cap * tanh(value / cap) if cap > _ZERO else value


@jit
def soft_cap_row(x, cap):
    """y[n] = soft_cap(x[n], cap)"""
    y = np.empty_like(x)
    for n in range(x.shape[0]):
        y[n] = soft_cap(x[n], cap)
    return y


@jit
def round_to_bfloat16(x):
    """Each number rounded to bfloat16, and still stored as float32.    x: [heads, E]"""
    y = np.empty_like(x)
    for head in range(x.shape[0]):
        for e in range(x.shape[1]):
            y[head, e] = bfloat16_of(x[head, e])
    return y


# --- positions --------------------------------------------------------------------------------------------------------


@jit
def rope_frequencies(width, theta, factor, share=1.0):
    """y[i] = theta^(-2i / E) / factor, rounded to float32 before and after the division, for the first share * E / 2
    pairs, and 0 for the others.    E = width   y: [E / 2]"""
    half, turning = width // 2, int(share * width // 2)
    y = np.zeros(half, np.float32)
    for i in range(turning):
        y[i] = _F(exp64(-(np.float64(i) / np.float64(half)) * log64(theta))) / factor
    return y


@jit
def rope(x, position, frequencies):
    """Each pair (x[e], x[e + E/2]) of each head, turned by the angle position * frequencies[e].

    x: [heads, E]   frequencies: [E / 2]
    """
    half = frequencies.shape[0]
    y = np.empty_like(x)
    for i in range(half):
        angle = _F(position) * frequencies[i]
        sine64, cosine64 = sine_cosine64(np.float64(angle))
        sine, cosine = _F(sine64), _F(cosine64)
        for head in range(x.shape[0]):
            a, b = x[head, i], x[head, i + half]
            y[head, i] = fma(a, cosine, -(b * sine))
            y[head, i + half] = fma(b, cosine, a * sine)
    return y


@jit
def attend(q, keys, values, first, scale, cap):
    """Attention of one position to the keys of the positions first .. last, where last is its own position.

    out[h] = sum over t of softmax(soft_cap(q[h] . keys[t, g] * scale, cap))[t] * values[t, g],    g = h // (H / G)

    q: [H, E]   keys, values: [last + 1, G, E]   out: [H, E]

    Tiles begin at multiples of TILE. The maximum is brought up to date with all scores of a tile before any exponential
    of that tile is taken, and all that was summed before is multiplied by exp(old maximum - new maximum).
    """
    H, E = q.shape
    last = keys.shape[0] - 1
    out, scores = np.empty((H, E), np.float32), np.empty(TILE, np.float32)
    for h in range(H):
        g = h // (H // keys.shape[1])
        maximum, weight_sum = -_INFINITY, _ZERO
        for e in range(E):
            out[h, e] = _ZERO
        for tile in range(first // TILE, last // TILE + 1):
            begin, end = max(first, tile * TILE), min(last + 1, (tile + 1) * TILE)
            before = maximum
            for t in range(begin, end):
                dot = _ZERO
                for e in range(E):
                    dot = fma(q[h, e], keys[t, g, e], dot)
                scores[t - begin] = soft_cap(dot * scale, cap)
                if scores[t - begin] > maximum:
                    maximum = scores[t - begin]
            shrink = exp(before - maximum)
            weight_sum = weight_sum * shrink
            for e in range(E):
                out[h, e] = out[h, e] * shrink
            for t in range(begin, end):
                weight = exp(scores[t - begin] - maximum)
                weight_sum = weight_sum + weight
                for e in range(E):
                    out[h, e] = fma(weight, values[t, g, e], out[h, e])
        for e in range(E):
            out[h, e] = out[h, e] / weight_sum
    return out
