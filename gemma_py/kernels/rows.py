"""The operations between matrix products, on flat arrays in which row t of width D is x[t * D : (t + 1) * D].

Each function computes the operations of `reference.operations` in the order used there, on sixteen numbers at a time.
One call computes rows first .. last - 1, or elements first .. last - 1 in elementwise functions. Rows are independent.
"""

import numpy as np

from gemma_py.kernels import vector_math
from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.elementary import exp64, log64, sine_cosine64
from gemma_py.kernels.intrinsics import fma, sqrt, widen
from gemma_py.kernels.panels import COLUMNS, INPUT_BLOCK, unpack_panel
from gemma_py.kernels.simd.codes import store_byte_planes, store_codes
from gemma_py.kernels.simd.target import FLIPS_LOW
from gemma_py.kernels.simd.vectors import (
    add,
    bit_and,
    bitcast,
    div,
    interleave,
    less,
    load,
    load_scalar,
    max_of_four,
    mul,
    neg,
    select,
    shift_right,
    splat,
    splat_first_four,
    store_partial,
    sub,
    sums_of_four,
    to_f32,
    to_i32,
)
from gemma_py.kernels.simd.vectors import fma as vector_fma
from gemma_py.kernels.vector_math import load_up_to, store_up_to

_F = np.float32
_ZERO, _ONE, _HALF, _NAN = _F(0.0), _F(1.0), _F(0.5), _F(np.nan)
_LARGEST_CODE, _ROUND = _F(32767.0), _F(12582912.0)
_SMALLEST_CODE = _F(-32767.0)
_BYTE_BITS, _LOW_BYTE, _LEAST_BYTE = np.int32(8), np.int32(255), _F(-128.0)
_MAGNITUDE, _LARGEST_F32_BITS = np.int32(0x7FFFFFFF), np.int32(0x7F7FFFFF)
_GELU_SLOPE, _GELU_CUBE = _F(0.7978845608028654), _F(0.044715)


# --- codes ------------------------------------------------------------------------------------------------------------


@inlined
def _larger_magnitude(a, b):
    """Return the bits of the larger of the magnitudes of a and b, in each lane.

    The bits are compared as integers, which have the order of the floats. NaN is above infinity, and infinity above all
    finite numbers.
    """
    mask = splat(_MAGNITUDE)
    low, high = bit_and(bitcast(a), mask), bit_and(bitcast(b), mask)
    return select(less(low, high), high, low)


@inlined
def _codes_of(x, scale):
    """Return x / scale rounded to the nearest integer, ties to even, or 0 where scale is not positive."""
    valid = less(splat(_ZERO), scale)
    code = div(x, select(valid, scale, splat(_ONE)))
    code = sub(add(code, splat(_ROUND)), splat(_ROUND))
    code = select(less(code, splat(_SMALLEST_CODE)), splat(_SMALLEST_CODE), code)
    code = select(less(splat(_LARGEST_CODE), code), splat(_LARGEST_CODE), code)
    return to_i32(select(valid, code, splat(_ZERO)))


@inlined
def _block_offset(block, number, blocks):
    """Return the offset of block number `block + number`. If there is no such block, return the offset of the last block.

    The caller processes four blocks at a time. Where fewer than four are left, it processes the last block again in place of
    each missing block.
    """
    return min(block + number, blocks - 1) * INPUT_BLOCK


@inlined
def _load_four(x, at, offsets):
    a, b, c, d = offsets
    return load(x, at + a), load(x, at + b), load(x, at + c), load(x, at + d)


@inlined
def _store_block(coded, at, low, high):
    """Store the 32 codes of a block, as int16 and as byte planes.

    coded: CodedRows, written   low: the first sixteen codes   high: the last sixteen codes
    """
    store_codes(coded.codes, at, low)
    store_codes(coded.codes, at + COLUMNS, high)
    store_byte_planes(coded.byte_planes, 2 * at, low)
    store_byte_planes(coded.byte_planes, 2 * at + INPUT_BLOCK, high)


@inlined
def _sum_flipped_bytes(a, b, c, d):
    """Return the sums of the bytes that are multiplied with weights plus 128: the low or the high bytes of the codes."""
    if FLIPS_LOW:
        mask = splat(_LOW_BYTE)
        return to_f32(sums_of_four(bit_and(a, mask), bit_and(b, mask), bit_and(c, mask), bit_and(d, mask)))
    bits = splat(_BYTE_BITS)
    return to_f32(sums_of_four(shift_right(a, bits), shift_right(b, bits), shift_right(c, bits), shift_right(d, bits)))


@inlined
def quantise_rows(x, K, coded, first, last, shift):
    """Quantise rows first .. last - 1 in blocks of 32 numbers.

        scale = (largest magnitude of the block) / 32767
        code = round(x / scale)

    Row t of x becomes row t - shift of `coded`. A block with a NaN or an infinity gets the scale NaN.

    x: [T * K] f32, read
    coded: CodedRows, written for these rows

    Four blocks are processed at a time, because then one division gives all four scales, and one reduction all four
    maximums.
    """
    blocks, target = (last - first) * (K // INPUT_BLOCK), (first - shift) * K
    for block in range(0, blocks, 4):
        offsets = (
            _block_offset(block, 0, blocks),
            _block_offset(block, 1, blocks),
            _block_offset(block, 2, blocks),
            _block_offset(block, 3, blocks),
        )
        source, count, at = first * K, min(4, blocks - block), target // INPUT_BLOCK + block
        a0, a1, a2, a3 = _load_four(x, source, offsets)
        b0, b1, b2, b3 = _load_four(x, source + COLUMNS, offsets)
        largest = max_of_four(
            _larger_magnitude(a0, b0), _larger_magnitude(a1, b1), _larger_magnitude(a2, b2), _larger_magnitude(a3, b3)
        )
        scales = div(bitcast(largest), splat(_LARGEST_CODE))
        scales = select(less(splat(_LARGEST_F32_BITS), largest), splat(_NAN), scales)
        s0, s1, s2, s3 = splat_first_four(scales)
        low0, low1, low2, low3 = _codes_of(a0, s0), _codes_of(a1, s1), _codes_of(a2, s2), _codes_of(a3, s3)
        high0, high1, high2, high3 = _codes_of(b0, s0), _codes_of(b1, s1), _codes_of(b2, s2), _codes_of(b3, s3)
        _store_block(coded, target + offsets[0], low0, high0)
        _store_block(coded, target + offsets[1], low1, high1)
        _store_block(coded, target + offsets[2], low2, high2)
        _store_block(coded, target + offsets[3], low3, high3)
        low, high = sums_of_four(low0, low1, low2, low3), sums_of_four(high0, high1, high2, high3)
        flipped = interleave(_sum_flipped_bytes(low0, low1, low2, low3), _sum_flipped_bytes(high0, high1, high2, high3))
        store_partial(coded.scales, at, scales, count)
        store_partial(coded.sums, at, to_f32(add(low, high)), count)
        store_partial(coded.flip_sums, 2 * at, mul(flipped, splat(_LEAST_BYTE)), 2 * count)
        store_partial(coded.sums_of_16, 2 * at, interleave(to_f32(low), to_f32(high)), 2 * count)


# --- norms ------------------------------------------------------------------------------------------------------------


@inlined
def _normalise(x, at, gain, D, total, eps, y):
    factor = splat(_ONE / sqrt(total / _F(D) + eps))
    for d in range(0, D, COLUMNS):
        store_up_to(y, at + d, at + D, mul(mul(load_up_to(x, at + d, at + D), factor), load_up_to(gain, d, D)))


@inlined
def rms_norm_rows(x, gain, D, eps, y, first, last):
    """Compute y[t, d] = (x[t, d] * factor) * gain[d], factor = 1 / sqrt(mean(x[t]^2) + eps). Squares are summed with d ascending.

    x: [T * D] f32, read
    gain: [D] f32, read
    y: [T * D] f32, written; may be x

    Eight rows are summed side by side, because each sum is one chain of dependent additions. To normalise heads, the
    caller passes T * H rows of width E.
    """
    t = first
    while t + 8 <= last:
        a = t * D
        s0, s1, s2, s3, s4, s5, s6, s7 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
        for d in range(a, a + D):
            x0, x1, x2, x3 = (
                load_scalar(x, d),
                load_scalar(x, d + D),
                load_scalar(x, d + 2 * D),
                load_scalar(x, d + 3 * D),
            )
            e = d + 4 * D
            s0, s1, s2, s3 = fma(x0, x0, s0), fma(x1, x1, s1), fma(x2, x2, s2), fma(x3, x3, s3)
            x4, x5, x6, x7 = (
                load_scalar(x, e),
                load_scalar(x, e + D),
                load_scalar(x, e + 2 * D),
                load_scalar(x, e + 3 * D),
            )
            s4, s5, s6, s7 = fma(x4, x4, s4), fma(x5, x5, s5), fma(x6, x6, s6), fma(x7, x7, s7)
        for row, total in enumerate((s0, s1, s2, s3, s4, s5, s6, s7)):
            _normalise(x, a + row * D, gain, D, total, eps, y)
        t += 8
    while t < last:
        total = _ZERO
        for d in range(t * D, t * D + D):
            value = load_scalar(x, d)
            total = fma(value, value, total)
        _normalise(x, t * D, gain, D, total, eps, y)
        t += 1


# --- positions --------------------------------------------------------------------------------------------------------


@kernel
def rope_frequencies(theta, factor, turning, frequencies):
    """Compute frequencies[i] = theta^(-2i / E) / factor for i < turning, and 0 for larger i.

    Each frequency is rounded to f32 before and after the division by `factor`.

    frequencies: [E / 2] f32, written
    """
    half = frequencies.shape[0]
    frequencies[turning:] = _ZERO
    for i in range(turning):
        frequencies[i] = _F(exp64(-(np.float64(i) / np.float64(half)) * log64(theta))) / factor


@inlined
def rope_table(frequencies, first_position, cosines, sines, first, last):
    """Compute cosines[t, i] and sines[t, i] of the angle (first_position + t) * frequencies[i].

    frequencies: [E / 2] f32, read
    cosines, sines: [T * E / 2] f32, written for rows first .. last - 1
    """
    half = frequencies.shape[0]
    for t in range(first, last):
        for i in range(half):
            angle = _F(first_position + t) * frequencies[i]
            sine, cosine = sine_cosine64(np.float64(angle))
            sines[t * half + i] = _F(sine)
            cosines[t * half + i] = _F(cosine)


@inlined
def rope_rows(x, heads, E, cosines, sines, first, last):
    """Rotate each pair (x[t, head, i], x[t, head, i + E / 2]) by the angle of row t and frequency i.

    x: [T * heads * E] f32, read and written
    cosines, sines: [T * E / 2] f32, read
    """
    half = E // 2
    for t in range(first, last):
        for head in range(t * heads, (t + 1) * heads):
            at, end, table = head * E, head * E + half, t * half
            for i in range(0, half, COLUMNS):
                a, b = load_up_to(x, at + i, end), load_up_to(x, at + i + half, end + half)
                cosine, sine = load_up_to(cosines, table + i, table + half), load_up_to(sines, table + i, table + half)
                store_up_to(x, at + i, end, vector_fma(a, cosine, neg(mul(b, sine))))
                store_up_to(x, at + i + half, end + half, vector_fma(b, cosine, mul(a, sine)))


# --- elementwise ------------------------------------------------------------------------------------------------------


@inlined
def gelu_gate(gate, up, first, last):
    """Compute gate[f] = gelu(gate[f]) * up[f], where gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    gate: [T * F] f32, read and written
    up: [T * F] f32, read
    """
    for f in range(first, last, COLUMNS):
        x = load_up_to(gate, f, last)
        cube = vector_fma(mul(mul(splat(_GELU_CUBE), x), x), x, x)
        bend = add(splat(_ONE), vector_math.tanh(mul(splat(_GELU_SLOPE), cube)))
        store_up_to(gate, f, last, mul(mul(mul(splat(_HALF), x), bend), load_up_to(up, f, last)))


@inlined
def add_to(x, y, first, last):
    for d in range(first, last, COLUMNS):
        store_up_to(x, d, last, add(load_up_to(x, d, last), load_up_to(y, d, last)))


@inlined
def scale_rows(x, factor, first, last):
    for d in range(first, last, COLUMNS):
        store_up_to(x, d, last, mul(load_up_to(x, d, last), splat(factor)))


@inlined
def copy_columns(x, stride, column, y, width, first, last):
    """Compute y[t, d] = x[t, column + d].    x: [T * stride] f32, read   y: [T * width] f32, written"""
    for t in range(first, last):
        source, to, end = t * stride + column, t * width, (t + 1) * width
        for d in range(0, width, COLUMNS):
            store_up_to(y, to + d, end, load_up_to(x, source + d, source + width))


@inlined
def soft_cap(x, cap, first, last):
    """Compute x[n] = cap * tanh(x[n] / cap), for cap > 0."""
    for n in range(first, last, COLUMNS):
        store_up_to(x, n, last, vector_math.soft_cap(load_up_to(x, n, last), cap))


@inlined
def tanh_rows(x, first, last):
    for d in range(first, last, COLUMNS):
        store_up_to(x, d, last, vector_math.tanh(load_up_to(x, d, last)))


@inlined
def multiply_by_gain(x, gain, D, first, last):
    """Compute x[t, d] = x[t, d] * gain[d].

    x: [T * D] f32, read and written
    gain: [D] f32, read
    """
    for t in range(first, last):
        at, end = t * D, (t + 1) * D
        for d in range(0, D, COLUMNS):
            store_up_to(x, at + d, end, mul(load_up_to(x, at + d, end), load_up_to(gain, d, D)))


@inlined
def put_columns(x, D, y, width, column, first, last):
    """Compute y[t, column + d] = x[t, d].

    x: [T * D] f32, read
    y: [T * width] f32, written in columns column .. column + D - 1
    """
    for t in range(first, last):
        source, end, to = t * D, (t + 1) * D, t * width + column
        for d in range(0, D, COLUMNS):
            store_up_to(y, to + d, to + D, load_up_to(x, source + d, end))


# --- sparsity ---------------------------------------------------------------------------------------------------------


@inlined
def _mean(x, at, D):
    """Return the mean of x[at .. at + D - 1], summed with d ascending."""
    total = _ZERO
    for d in range(at, at + D):
        total = total + load_scalar(x, d)
    return total / _F(D)


@inlined
def sparsify_rows(x, D, deviations, first, last):
    """Compute x[t, d] = max(x[t, d] - cutoff, 0), where cutoff = mean(x[t]) + deviations * deviation(x[t]).

    deviation(x[t])^2 is the sum of the squared differences from the mean, d ascending, divided by D (not D - 1). A NaN
    stays NaN.

    x: [T * D] f32, read and written
    """
    for t in range(first, last):
        at, end = t * D, (t + 1) * D
        mean, total = _mean(x, at, D), _ZERO
        for d in range(at, end):
            difference = load_scalar(x, d) - mean
            total = fma(difference, difference, total)
        cutoff = splat(fma(sqrt(total / _F(D)), deviations, mean))
        for d in range(at, end, COLUMNS):
            value = sub(load_up_to(x, d, end), cutoff)
            store_up_to(x, d, end, select(less(value, splat(_ZERO)), splat(_ZERO), value))


# Functions for Gemma 3n's AltUp, in which a row holds n streams of width D.


@inlined
def _mean_square(x, at, D):
    """Return the mean of the squares of x[at .. at + D - 1], summed by fma with d ascending."""
    total = _ZERO
    for d in range(at, at + D):
        value = load_scalar(x, d)
        total = fma(value, value, total)
    return total / _F(D)


@inlined
def match_magnitude(x, like, D, least, first, last):
    """Multiply each row of x by a factor, so that its root mean square becomes that of the same row of `like`.

        factor = sqrt(mean(like[t]^2)) / sqrt(max(mean(x[t]^2), least))

    x: [T * D] f32, read and written
    like: [T * D] f32, read
    """
    for t in range(first, last):
        at, end = t * D, (t + 1) * D
        square = _mean_square(x, at, D)
        if square < least:
            square = least
        factor = splat(sqrt(_mean_square(like, at, D)) / sqrt(square))
        for d in range(at, end, COLUMNS):
            store_up_to(x, d, end, mul(load_up_to(x, d, end), factor))


@inlined
def predict_streams(x, coefficients, n, D, y, first, last):
    """Compute y[t, i, d] = x[t, i, d] + sum over p of coefficients[t, i, p] * x[t, p, d], with p ascending.

    x: [T * n * D] f32, read
    coefficients: [T * n * n] f32, read
    y: [T * n * D] f32, written; must not be x, because every stream of y is computed from all streams of x
    """
    for t in range(first, last):
        row = t * n * D
        for i in range(n):
            to, end = row + i * D, row + (i + 1) * D
            for d in range(0, D, COLUMNS):
                total = load_up_to(x, to + d, end)
                for p in range(n):
                    at, last_of_p = row + p * D + d, row + (p + 1) * D
                    weight = splat(load_scalar(coefficients, (t * n + i) * n + p))
                    total = vector_fma(weight, load_up_to(x, at, last_of_p), total)
                store_up_to(y, to + d, end, total)


@inlined
def correct_streams(x, activated, coefficients, n, D, active, first, last):
    """Compute x[t, i, d] = x[t, i, d] + (1 + coefficients[t, i]) * (activated[t, d] - x[t, active, d]).

    x[t, active, d] is read before any stream is corrected.

    x: [T * n * D] f32, read and written
    activated: [T * D] f32, read
    coefficients: [T * n] f32, read
    """
    for t in range(first, last):
        row, own, end = t * n * D, t * D, (t + 1) * D
        for d in range(0, D, COLUMNS):
            predicted = load_up_to(x, row + active * D + d, row + (active + 1) * D)
            difference = sub(load_up_to(activated, own + d, end), predicted)
            for i in range(n):
                at, stop = row + i * D + d, row + (i + 1) * D
                weight = splat(_ONE + load_scalar(coefficients, t * n + i))
                store_up_to(x, at, stop, vector_fma(weight, difference, load_up_to(x, at, stop)))


@inlined
def add_to_streams(x, y, n, D, since, first, last):
    """Compute x[t, i, d] = x[t, i, d] + y[t, d] for the streams i >= since.

    x: [T * n * D] f32, read and written
    y: [T * D] f32, read
    """
    for t in range(first, last):
        for i in range(since, n):
            at, stop = (t * n + i) * D, (t * n + i + 1) * D
            for d in range(0, D, COLUMNS):
                value = add(load_up_to(x, at + d, stop), load_up_to(y, t * D + d, (t + 1) * D))
                store_up_to(x, at + d, stop, value)


# --- embeddings: rows of a matrix in panels ---------------------------------------------------------------------------


@inlined
def embed_floats(w, token, factor, y, at):
    """Compute y[at + k] = w[token, k] * factor.

    w: FloatPanels, read
    y: f32, written from y[at] to y[at + K - 1]
    """
    column = w.start + token // COLUMNS * w.K * COLUMNS + token % COLUMNS
    for k in range(w.K):
        y[at + k] = widen(w.arena[column + k * COLUMNS]) * factor


@inlined
def embed_codes(w, token, factor, y, at, unpacked):
    """Compute y[at + k] = (scale * code - minimum) * factor for row `token` of w. Each operation is rounded.

    w: CodePanels, read
    y: f32, written from y[at] to y[at + K - 1]
    unpacked: UnpackBuffer, the worker's own scratch
    """
    unpack_panel(w, token // COLUMNS, unpacked, np.int64(0), np.int64(1))
    lane = token % COLUMNS
    for k in range(w.K):
        group = k // w.group * COLUMNS + lane
        code = unpacked.codes[((k // 4 * 2 + k % 2) * COLUMNS + lane) * 2 + k % 4 // 2]
        value = unpacked.scales[group] * _F(code)
        if w.minimums:
            value = value - unpacked.minimums[group]
        y[at + k] = value * factor
