"""The operations of Gemma models, in scalar loops.

    T tokens   D model width   H query heads   G key/value heads   E head width
    F feed-forward width   V vocabulary   L layers   W window   K inputs and N outputs of a matrix

These functions define the bits of every result. Numbers are float32 unless noted otherwise. `fma(a, b, c)` is a * b + c,
rounded once. A sum is a chain of fma over ascending indices. Functions return new arrays and do not change their arguments.

Two operations need an explanation:
- The input of a product with a quantised matrix is quantised to 16-bit codes, with one scale per 32 values (`quantise`).
  The sum over a group of 16 or 32 weights that share a scale is computed exactly in integers. Only the sum over groups is
  rounded (`matmul_codes`).
- Attention processes the keys in tiles of TILE positions, with a running maximum as in online softmax (`attend`).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gemma_py.reference.arithmetic import bfloat16_above, bfloat16_of, float32_of, fma, jit
from gemma_py.reference.elementary import exp, exp64, log64, sine_cosine64, tanh
from gemma_py.weights.tensors import FloatMatrix, Matrix, StoredMatrix

BLOCK = 32  # the number of input values that share a scale in `quantise`
TILE = 32  # the number of keys in a tile of `attend`

_F = np.float32
_ZERO, _ONE, _HALF, _INFINITY = _F(0.0), _F(1.0), _F(0.5), _F(np.inf)
_LARGEST_CODE, _LARGEST_F32 = _F(32767.0), _F(np.finfo(np.float32).max)
_ROUND = _F(12582912.0)  # (x + _ROUND) - _ROUND rounds |x| < 2^22 to the nearest integer, ties to even
_GELU_SLOPE, _GELU_CUBE = _F(0.7978845608028654), _F(0.044715)  # _GELU_SLOPE is sqrt(2 / pi)


def of_layer(weights: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the weights of layer `number`, by name without the prefix "layers.NUMBER."."""
    prefix = f"layers.{number}."
    return {name.removeprefix(prefix): part for name, part in weights.items() if name.startswith(prefix)}


# --- matrices ---------------------------------------------------------------------------------------------------------


def matmul(x: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Return y[n] = sum over k of x[k] * matrix[n, k].    x: [K]   matrix: [N, K]   y: [N]"""
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
    """Return y[n] = sum over k of x[k] * w[n, k].    x: [K]   w: [N, K] float32, or bfloat16 as uint16   y: [N]"""
    y = np.empty(w.shape[0], np.float32)
    for n in range(w.shape[0]):
        total = _ZERO
        for k in range(w.shape[1]):
            total = fma(x[k], float32_of(w[n, k]), total)
        y[n] = total
    return y


@jit
def quantise(x):
    """Return codes and scales such that scale * code is close to x.    x: [K]   codes: [K] int16   scales: [K / 32]

    The scale of a block is the block's largest magnitude, divided by 32767. If this quotient underflows, the scale is 0
    and the codes are 0. If the block holds NaN or infinity, the scale is NaN, and the codes are 0, because casting NaN
    or infinity to an integer is undefined.
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
    """Return y[n] = sum over groups of (sx * sw) * dot(codes) - (sx * minimum) * sum(codes of x).

    x: [groups, width] int16   sx: [K / 32]   w: [N, groups, width] int8   sw: [N, groups]
    minimums: [N, groups], or empty if the format has no minimums   y: [N]
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
    """Return the sum over k of x[group, k] * w[n, group, k]. An int32 is enough, because 32 * 128 * 32767 < 2^31."""
    total = np.int32(0)
    for k in range(x.shape[1]):
        total = np.int32(total + np.int32(x[group, k]) * np.int32(w[n, group, k]))
    return total


@jit
def _exact_sum(x, group):
    total = np.int32(0)
    for k in range(x.shape[1]):
        total = np.int32(total + np.int32(x[group, k]))
    return total


def matrix_row(matrix: Matrix | StoredMatrix, n: int) -> np.ndarray:
    """Return row n of the matrix, as float32 [K]. If the matrix is a StoredMatrix, the row is read from the file."""
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
    """Return the row as float32.    row: [K] float32, or bfloat16 as uint16"""
    y = np.empty(row.shape[0], np.float32)
    for k in range(row.shape[0]):
        y[k] = float32_of(row[k])
    return y


@jit
def dequantise_row(codes, scales, minimums):
    """Return y[k] = scale * code, or scale * code - minimum if the format has minimums.    codes: [K] int8

    The product and the difference are each rounded to float32.
    """
    width = codes.shape[0] // scales.shape[0]
    y = np.empty(codes.shape[0], np.float32)
    for k in range(codes.shape[0]):
        y[k] = scales[k // width] * _F(codes[k])
        if minimums.shape[0] > 0:
            y[k] = y[k] - minimums[k // width]
    return y


def embed(matrix: Matrix | StoredMatrix, token: int, factor: float | None = None) -> np.ndarray:
    """Return factor * (the token's row of the matrix).    [D]

    The default factor is sqrt(D). A token id beyond the last row selects row 0.
    """
    rows, D = matrix.shape
    row = matrix_row(matrix, token if token < rows else 0)
    x: np.ndarray = scale_row(row, _F(math.sqrt(D) if factor is None else factor))
    return x


# --- rows -------------------------------------------------------------------------------------------------------------


@jit
def scale_row(x, factor):
    y = np.empty_like(x)
    for d in range(x.shape[0]):
        y[d] = x[d] * factor
    return y


def columns(x: np.ndarray, first: int, width: int) -> np.ndarray:
    return x[first : first + width].copy()


@jit
def add(x, y):
    z = np.empty_like(x)
    for d in range(x.shape[0]):
        z[d] = x[d] + y[d]
    return z


@jit
def rms_norm(x, eps, gain=None):
    """Return y[d] = (x[d] * factor) * gain[d], factor = 1 / sqrt(mean(x^2) + eps). A missing gain counts as 1.    x, gain: [D]"""
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
    """Return `rms_norm` of each head. All heads have one gain.    x: [heads, E]   gain: [E]"""
    return np.stack([rms_norm(head, eps, gain) for head in x])


@jit
def gelu_gate(gate, up):
    """Return y[f] = gelu(gate[f]) * up[f].    gate, up: [F]

    gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    """
    y = np.empty_like(gate)
    for f in range(gate.shape[0]):
        x = gate[f]
        inner = _GELU_SLOPE * fma(_GELU_CUBE * x * x, x, x)
        y[f] = _HALF * x * (_ONE + tanh(inner)) * up[f]
    return y


@jit
def tanh_row(x):
    y = np.empty_like(x)
    for d in range(x.shape[0]):
        y[d] = tanh(x[d])
    return y


@jit
def multiply_row(x, gain):
    y = np.empty_like(x)
    for d in range(x.shape[0]):
        y[d] = x[d] * gain[d]
    return y


@jit
def soft_cap(value, cap):
    """Return cap * tanh(value / cap). If cap is 0, return the value."""
    return cap * tanh(value / cap) if cap > _ZERO else value


@jit
def soft_cap_row(x, cap):
    y = np.empty_like(x)
    for n in range(x.shape[0]):
        y[n] = soft_cap(x[n], cap)
    return y


@jit
def round_to_bfloat16(x):
    """Return x with each number rounded to bfloat16, as float32.    x: [heads, E]"""
    y = np.empty_like(x)
    for head in range(x.shape[0]):
        for e in range(x.shape[1]):
            y[head, e] = bfloat16_of(x[head, e])
    return y


@jit
def round_to_q8_0(x):
    """Return x with each number rounded to scale * code, where each 32 numbers of a head share a scale.    x: [heads, E]

    The scale is the block's largest magnitude, divided by 127 and rounded up to bfloat16. If it is 0, all numbers of the
    block become 0. If the block holds NaN or infinity, all of its numbers become NaN.
    """
    y = np.empty_like(x)
    for head in range(x.shape[0]):
        for first in range(0, x.shape[1], BLOCK):
            last = min(first + BLOCK, x.shape[1])
            largest, finite = _ZERO, True
            for e in range(first, last):
                magnitude = abs(x[head, e])
                if not magnitude <= _LARGEST_F32:
                    finite = False
                elif magnitude > largest:
                    largest = magnitude
            scale = bfloat16_above(largest / _F(127))
            for e in range(first, last):
                if not finite:
                    y[head, e] = _F(np.nan)
                elif scale == _ZERO:
                    y[head, e] = _ZERO
                else:
                    y[head, e] = scale * ((x[head, e] / scale + _ROUND) - _ROUND)
    return y


# --- experts ----------------------------------------------------------------------------------------------------------


@jit
def softmax(x):
    """Return y[i] = exp(x[i] - max(x)) / sum over j of exp(x[j] - max(x))."""
    y = np.empty_like(x)
    largest, total = x[0], _ZERO
    for i in range(x.shape[0]):
        if x[i] > largest:
            largest = x[i]
    for i in range(x.shape[0]):
        y[i] = exp(x[i] - largest)
        total = total + y[i]
    for i in range(x.shape[0]):
        y[i] = y[i] / total
    return y


@jit
def route(logits, scale, gain, count):
    """Return the numbers of the chosen experts, ascending, and these experts' weights.    logits, gain: [X]

    p = softmax(logits * scale). The `count` experts with the largest p are chosen; among experts of equal p, those with lower
    numbers. The weight of an expert is p / (sum of p over the chosen experts) * gain. If p is NaN, the first `count` experts
    are chosen.
    """
    p = softmax(scale_row(logits, scale))
    chosen = np.zeros(p.shape[0], np.bool_)
    for _ in range(count):
        best = -1
        for expert in range(p.shape[0]):
            if not chosen[expert] and (best < 0 or p[expert] > p[best]):
                best = expert
        chosen[best] = True
    experts, weights, total = np.empty(count, np.int64), np.empty(count, np.float32), _ZERO
    number = 0
    for expert in range(p.shape[0]):
        if chosen[expert]:
            experts[number] = expert
            total = total + p[expert]
            number += 1
    for number in range(count):
        weights[number] = p[experts[number]] / total * gain[experts[number]]
    return experts, weights


@jit
def mix(parts, weights):
    """Return y[d] = sum over c of weights[c] * parts[c, d].    parts: [C, D]   weights: [C]   y: [D]"""
    y = np.empty(parts.shape[1], np.float32)
    for d in range(parts.shape[1]):
        total = _ZERO
        for c in range(parts.shape[0]):
            total = fma(weights[c], parts[c, d], total)
        y[d] = total
    return y


@jit
def mean_rows(x):
    """Return y[d] = (sum over t of x[t, d]) / T.    x: [T, D]   y: [D]"""
    y = x[0].copy()
    for d in range(y.shape[0]):
        for t in range(1, x.shape[0]):
            y[d] = y[d] + x[t, d]
        y[d] = y[d] / _F(x.shape[0])
    return y


@jit
def normalise(x):
    """Return y[d] = x[d] / max(|x|, 1e-12), computed in float64 and rounded to float32.    x, y: [D]"""
    total = 0.0
    for d in range(x.shape[0]):
        total = fma(np.float64(x[d]), np.float64(x[d]), total)
    length = max(np.sqrt(total), 1e-12)
    y = np.empty(x.shape[0], np.float32)
    for d in range(x.shape[0]):
        y[d] = _F(np.float64(x[d]) / length)
    return y


# --- positions --------------------------------------------------------------------------------------------------------


@jit
def rope_frequencies(width, theta, factor, share=1.0):
    """Return y[i] = theta^(-2i / E) / factor for i < share * E / 2, and y[i] = 0 for the other i.    E: width   y: [E / 2]

    The power and the quotient are rounded to float32.
    """
    half, turning = width // 2, int(share * width // 2)
    y = np.zeros(half, np.float32)
    for i in range(turning):
        y[i] = _F(exp64(-(np.float64(i) / np.float64(half)) * log64(theta))) / factor
    return y


@jit
def rope(x, position, frequencies):
    """Return x with each pair (x[e], x[e + E/2]) of each head rotated by the angle position * frequencies[e].

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
    """Return the attention of a query to the keys of the positions first .. last.

    out[h] = sum over t of softmax(soft_cap(q[h] . keys[t, g] * scale, cap))[t] * values[t, g],    g = h // (H / G)

    q: [H, E]   keys, values: [last + 1, G, E]   out: [H, E]

    The keys are processed in tiles, which begin at multiples of TILE. A tile first updates the running maximum with its
    scores, and multiplies the sums of the earlier tiles by exp(old maximum - new maximum).
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
