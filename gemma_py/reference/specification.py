"""The specification: one token, one thread, scalar loops, every sum in the order in which it is written here.

    T tokens   D model width   H query heads   G key/value heads   E head width
    F feed-forward width   V vocabulary   L layers   W window   K inputs and N outputs of a matrix

Any faster path must give these bits. All numbers are float32 unless a name says otherwise; `fma(a, b, c)` is a * b + c,
rounded once. A sum is a chain of fma with its index ascending. Three things are less plain than that:

- A matrix of quantised weights takes its input as 16-bit codes with a scale for every 32 values (`quantise`). The dot
  product of codes inside a group is exact, so the order of that sum does not matter (`matmul_codes`).
- Attention goes through the keys in tiles of TILE positions, aligned to position 0, and rescales what it has summed
  whenever a tile brings a larger maximum (`attend`).
- A group has 32 codes, or 16 where the weight's format has a scale for every 16.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.elementary import exp, exp64, log64, sine_cosine64, tanh
from gemma_py.kernels.intrinsics import bits_of_f32, f32_of_bits, fma, sqrt, widen
from gemma_py.models.config import Config
from gemma_py.weights.tensors import CodeMatrix, FloatMatrix, Weights

BLOCK = 32  # values that share a scale when an input is quantised
TILE = 32  # key positions that share a maximum in attention

_F = np.float32
_ZERO, _ONE, _HALF, _INFINITY = _F(0.0), _F(1.0), _F(0.5), _F(np.inf)
_LARGEST_CODE, _LARGEST_F32 = _F(32767.0), _F(np.finfo(np.float32).max)
_ROUND = _F(12582912.0)  # adding and subtracting it rounds |x| < 2^22 to the nearest even integer
_GELU_SLOPE, _GELU_CUBE = _F(0.7978845608028654), _F(0.044715)  # sqrt(2 / pi)


# --- matrices ---------------------------------------------------------------------------------------------------------


@kernel
def matmul_float(x, w, y):
    """y[n] = sum over k of x[k] * w[n, k].    x: [K]   w: [N, K] f32 or bfloat16   y: [N], written"""
    for n in range(w.shape[0]):
        total = _ZERO
        for k in range(w.shape[1]):
            total = fma(x[k], widen(w[n, k]), total)
        y[n] = total


@kernel
def quantise(x, codes, scales):
    """x is nearly scale * code.    x: [K]   codes: [K] int16, written   scales: [K / 32], written

    The scale is the block's largest magnitude / 32767. A block without any magnitude that a scale can hold has scale 0;
    one with a NaN or an infinity has scale NaN. Codes of both are 0: no such value is cast to an integer.
    """
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


@inlined
def _dot(x, w, n, group):
    """The exact sum of x[group, k] * w[n, group, k]. It fits: 32 * 128 * 32767 < 2^31."""
    total = np.int32(0)
    for k in range(x.shape[1]):
        total = np.int32(total + np.int32(x[group, k]) * np.int32(w[n, group, k]))
    return total


@kernel
def matmul_codes(x, sx, w, sw, minimums, y):
    """y[n] = sum over groups of (sx * sw) * dot(codes) - (sx * minimum) * sum(codes of x).

    x: [groups, width] int16   sx: [K / 32]   w: [N, groups, width] int8   sw: [N, groups]
    minimums: [N, groups] or empty   y: [N], written
    """
    groups, width = x.shape
    for n in range(w.shape[0]):
        total = _ZERO
        for group in range(groups):
            scale = sx[group * width // BLOCK]
            total = fma(scale * sw[n, group], _F(_dot(x, w, n, group)), total)
            if minimums.shape[0] > 0:
                codes = np.int32(0)
                for k in range(width):
                    codes = np.int32(codes + np.int32(x[group, k]))
                total = fma(-(scale * minimums[n, group]), _F(codes), total)
        y[n] = total


@kernel
def widen_row(row, y):
    """y = row as float32.    row: [K] f32 or bfloat16   y: [K], written"""
    for k in range(row.shape[0]):
        y[k] = widen(row[k])


@kernel
def dequantise_row(codes, scales, minimums, y):
    """y[k] = scale * code, then - minimum where there is one, both rounded.    codes: [K] int8   y: [K], written"""
    width = codes.shape[0] // scales.shape[0]
    for k in range(codes.shape[0]):
        y[k] = scales[k // width] * _F(codes[k])
        if minimums.shape[0] > 0:
            y[k] = y[k] - minimums[k // width]


@dataclass
class Input:
    """A row that several matrices read: its values, and the codes made of them once."""

    values: np.ndarray  # [K]
    coded: tuple[np.ndarray, np.ndarray] | None = None

    def codes(self) -> tuple[np.ndarray, np.ndarray]:
        if self.coded is None:
            K = len(self.values)
            self.coded = np.empty(K, np.int16), np.empty(K // BLOCK, np.float32)
            quantise(self.values, *self.coded)
        return self.coded


def matmul(x, matrix):
    """[N] of x: [K] and matrix: [N, K]. The stored format decides the order, nothing else."""
    y = np.empty(matrix.shape[0], np.float32)
    if isinstance(matrix, FloatMatrix):
        matmul_float(x.values, matrix.values, y)
    else:
        (codes, scales), (N, groups) = x.codes(), matrix.scales.shape
        w = matrix.codes.reshape(N, groups, -1)
        matmul_codes(codes.reshape(groups, -1), scales, w, matrix.scales, matrix.minimums, y)
    return y


@kernel
def scale_row(x, factor):
    """x[d] *= factor"""
    for d in range(x.shape[0]):
        x[d] = x[d] * factor


def embed(matrix, token: int) -> np.ndarray:
    """[D]: the token's row times sqrt(D)."""
    D = matrix.shape[1]
    x = np.empty(D, np.float32)
    if isinstance(matrix, CodeMatrix):
        minimums = matrix.minimums[token] if len(matrix.minimums) else matrix.minimums.reshape(-1)
        dequantise_row(matrix.codes[token], matrix.scales[token], minimums, x)
    else:
        widen_row(matrix.values[token], x)
    scale_row(x, _F(math.sqrt(D)))
    return x


# --- everything between matrices --------------------------------------------------------------------------------------


@kernel
def rms_norm(x, gain, eps, y):
    """y[d] = x[d] / sqrt(mean(x^2) + eps) * gain[d].    x, gain: [D]   y: [D], written"""
    total = _ZERO
    for d in range(x.shape[0]):
        total = fma(x[d], x[d], total)
    factor = _ONE / sqrt(total / _F(x.shape[0]) + eps)
    for d in range(x.shape[0]):
        y[d] = x[d] * factor * gain[d]


@kernel
def rms_norm_heads(x, gain, eps):
    """Each head normalised by itself, in place.    x: [heads, E]   gain: [E]"""
    for head in range(x.shape[0]):
        rms_norm(x[head], gain, eps, x[head])


@kernel
def rope_frequencies(theta, factor, frequencies):
    """theta^(-2i / E) / factor, rounded to f32 before and after the division.    frequencies: [E / 2], written"""
    half = frequencies.shape[0]
    for i in range(half):
        frequencies[i] = _F(exp64(-(np.float64(i) / np.float64(half)) * log64(theta))) / factor


@kernel
def rope(x, position, frequencies):
    """Turn the pair (x[e], x[e + E/2]) of each head by position * frequency, in place.    x: [heads, E]"""
    half = frequencies.shape[0]
    for i in range(half):
        angle = _F(position) * frequencies[i]
        sine64, cosine64 = sine_cosine64(np.float64(angle))
        sine, cosine = _F(sine64), _F(cosine64)
        for head in range(x.shape[0]):
            a, b = x[head, i], x[head, i + half]
            x[head, i] = fma(a, cosine, -(b * sine))
            x[head, i + half] = fma(b, cosine, a * sine)


@inlined
def soft_cap(value, cap):
    """cap * tanh(value / cap); a cap of 0 is none."""
    return cap * tanh(value / cap) if cap > _ZERO else value


@kernel
def attend(q, keys, values, first, scale, cap, scores, out):
    """Attention of one position to the keys first .. last, where last is its own position.

    q: [H, E]   keys, values: [last + 1, G, E]   scores: [TILE], scratch   out: [H, E], written

    Tiles begin at multiples of TILE. A tile's own maximum is taken before any exponential of it, and what was summed
    before is multiplied by exp(old maximum - new maximum).
    """
    H, E = q.shape
    last = keys.shape[0] - 1
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


@kernel
def round_to_bfloat16(x):
    """The upper 16 bits of each x, to the nearest, ties to even, in place; NaN becomes a quiet one."""
    for i in range(x.shape[0]):
        word = bits_of_f32(x[i])
        if x[i] == x[i]:
            word = np.int32(word + np.int32(0x7FFF) + ((word >> np.int32(16)) & np.int32(1)))
        else:
            word = np.int32(word | np.int32(0x400000))
        x[i] = f32_of_bits(np.int32(word & np.int32(-65536)))


@kernel
def gelu_gate(gate, up):
    """gate[f] = gelu(gate[f]) * up[f], with gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).    [F]"""
    for f in range(gate.shape[0]):
        x = gate[f]
        inner = _GELU_SLOPE * fma(_GELU_CUBE * x * x, x, x)
        gate[f] = _HALF * x * (_ONE + tanh(inner)) * up[f]


@kernel
def add(x, y):
    """x += y.    [D]"""
    for d in range(x.shape[0]):
        x[d] = x[d] + y[d]


@kernel
def soft_cap_row(x, cap):
    """x[n] = cap * tanh(x[n] / cap)"""
    for n in range(x.shape[0]):
        x[n] = soft_cap(x[n], cap)


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass
class Cache:
    """The keys and values of every layer, by position; rows at and beyond `position` mean nothing."""

    config: Config
    bfloat16: bool = False  # rows are rounded to bfloat16 when they are stored
    position: int = 0
    keys: list[np.ndarray] = field(default_factory=list)  # L times [capacity, G, E]
    values: list[np.ndarray] = field(default_factory=list)

    def reserve(self, tokens: int) -> None:
        """Room for so many positions in all; grows by doubling."""
        for rows in (self.keys, self.values):
            if not rows:
                rows.extend(np.empty((0, y.num_key_value_heads, y.head_dim), np.float32) for y in self.config.layers)
            for number, old in enumerate(rows):
                if len(old) < tokens:
                    grown = np.empty((max(tokens, 2 * len(old)), *old.shape[1:]), np.float32)
                    grown[: self.position] = old[: self.position]
                    rows[number] = grown


def normalised(x, weights, name, eps):
    """x itself where the layer has no such norm."""
    if name not in weights:
        return x
    y = np.empty_like(x)
    rms_norm(x, weights[name], eps, y)
    return y


def attention(x, number, layer, weights, config, cache):
    """[D] of x: [D], already normalised; writes the row of this position into the cache."""
    H, G, E, eps = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim, _F(config.rms_norm_eps)
    position, row, of = cache.position, Input(x), f"layers.{number}."
    frequencies = np.empty(E // 2, np.float32)
    rope_frequencies(layer.rope.theta, _F(layer.rope.factor), frequencies)
    q = matmul(row, weights[of + "q_proj"]).reshape(H, E)
    if of + "q_norm" in weights:
        rms_norm_heads(q, weights[of + "q_norm"], eps)
    rope(q, position, frequencies)
    keys, values = cache.keys[layer.kv_source], cache.values[layer.kv_source]
    if layer.kv_source == number:
        k, v = matmul(row, weights[of + "k_proj"]).reshape(G, E), matmul(row, weights[of + "v_proj"]).reshape(G, E)
        if of + "k_norm" in weights:
            rms_norm_heads(k, weights[of + "k_norm"], eps)
        rope(k, position, frequencies)
        if cache.bfloat16:
            round_to_bfloat16(k.reshape(G * E))
            round_to_bfloat16(v.reshape(G * E))
        keys[position], values[position] = k, v
    first = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
    out, scores = np.empty((H, E), np.float32), np.empty(TILE, np.float32)
    scale, cap = _F(config.attention_scale), _F(config.attn_logit_softcapping or 0.0)
    attend(q, keys[: position + 1], values[: position + 1], first, scale, cap, scores, out)
    return matmul(Input(out.reshape(H * E)), weights[of + "o_proj"])


def feed_forward(x, weights, of):
    """[D] of x: [D], already normalised."""
    row = Input(x)
    gate, up = matmul(row, weights[of + "gate_proj"]), matmul(row, weights[of + "up_proj"])
    gelu_gate(gate, up)
    return matmul(Input(gate), weights[of + "down_proj"])


def forward(weights: Weights, config: Config, cache: Cache, token: int) -> np.ndarray:
    """One token through all layers: the hidden state [D] before the final norm. The cache gains a position."""
    cache.reserve(cache.position + 1)
    eps = _F(config.rms_norm_eps)
    x = embed(weights["embed_tokens"], token)
    for number, layer in enumerate(config.layers):
        of = f"layers.{number}."
        y = attention(normalised(x, weights, of + "input_norm", eps), number, layer, weights, config, cache)
        add(x, normalised(y, weights, of + "post_attention_norm", eps))
        y = feed_forward(normalised(x, weights, of + "pre_feedforward_norm", eps), weights, of)
        add(x, normalised(y, weights, of + "post_feedforward_norm", eps))
    cache.position += 1
    return x


def head(weights: Weights, config: Config, x: np.ndarray) -> np.ndarray:
    """Logits [V] of a hidden state [D]."""
    y = np.empty_like(x)
    rms_norm(x, weights["norm"], _F(config.rms_norm_eps), y)
    result = matmul(Input(y), weights["lm_head"])
    if config.final_logit_softcapping is not None:
        soft_cap_row(result, _F(config.final_logit_softcapping))
    return result
