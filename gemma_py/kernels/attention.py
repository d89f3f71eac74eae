"""Attention of a block of queries to a ring of keys, in the order of `model.reference.attend`.

A query is one head at one position. The heads that share a key/value head make, with some neighbouring positions, a
vector: sixteen queries in the lanes, each with its own range of keys. Lanes divide queries while scores are made, and
the head's width while values are added; every sum stays one chain, e or t ascending.

Position t is row t % capacity of the ring. A key outside a query's range never enters its sums: scores of such keys are
thrown away by a choice, never multiplied by 0, for the row may hold anything, NaN too. Rows that no query of a vector
asks for are not read.
"""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels import lanes
from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.intrinsics import f32_of_bits, fma
from gemma_py.kernels.simd import (
    add,
    bits,
    both,
    div,
    less,
    load,
    load_columns,
    load_one,
    mul,
    select,
    splat,
    splat_value,
    store,
    sub,
    zero,
)
from gemma_py.kernels.simd import fma as fma_lanes

TILE = 32  # key positions that share a maximum
LANES = 16

_F = np.float32
_ZERO, _ONE, _INFINITY = _F(0.0), _F(1.0), _F(np.inf)


class Ring(NamedTuple):
    """The keys and values of a layer: position t, head g, number e at  at + t % capacity * stride + g * head + e.

    [capacity, G, E] has stride = G * E and head = E; [G, capacity, E] has stride = E and head = capacity * E. The
    latter is faster: rows whose distance is a multiple of 4 KiB push one another out of a small cache.
    """

    keys: np.ndarray  # flat arena of f32
    values: np.ndarray  # flat arena of f32, laid out alike
    at: int
    capacity: int
    stride: int
    head: int
    G: int
    E: int


def scratch_size(E: int) -> int:
    """Floats of scratch that a worker needs for heads up to this width."""
    return 2 * LANES * E + TILE * LANES + 3 * LANES


@inlined
def _scores_of_sixteen_queries(ring, row, stride, keys, q, out, out_at):
    """out[key, lane] = sum over e of k[key, e] * q[e, lane], for keys of neighbouring rows of the ring.

    Four keys at a time are eight chains in AVX2's registers. Keys left over are filled with the last again.
    """
    for key in range(0, keys, 4):
        n1, n2, n3 = min(key + 1, keys - 1), min(key + 2, keys - 1), min(key + 3, keys - 1)
        k0, k1, k2, k3 = row + key * stride, row + n1 * stride, row + n2 * stride, row + n3 * stride
        s0, s1, s2, s3 = zero(), zero(), zero(), zero()
        for e in range(ring.E):
            q_e = load(q, e * LANES)
            s0 = fma_lanes(splat(ring.keys, k0 + e), q_e, s0)
            s1 = fma_lanes(splat(ring.keys, k1 + e), q_e, s1)
            s2 = fma_lanes(splat(ring.keys, k2 + e), q_e, s2)
            s3 = fma_lanes(splat(ring.keys, k3 + e), q_e, s3)
        store(out, out_at + key * LANES, s0)
        store(out, out_at + n1 * LANES, s1)
        store(out, out_at + n2 * LANES, s2)
        store(out, out_at + n3 * LANES, s3)


@inlined
def _scores_of_sixteen_keys(ring, row, stride, q, lane, out, out_at, spare):
    """The same of sixteen keys, which lie in the lanes here, and the four queries from `lane` on. E is a multiple of 4.

    For the few queries of a decoded token, that would leave most lanes of the other form empty.
    """
    s0, s1, s2, s3 = zero(), zero(), zero(), zero()
    for e in range(0, ring.E, 4):
        at = e * LANES + lane
        for column, k in enumerate(load_columns(ring.keys, row + e, stride)):
            s0 = fma_lanes(k, splat(q, at + column * LANES), s0)
            s1 = fma_lanes(k, splat(q, at + column * LANES + 1), s1)
            s2 = fma_lanes(k, splat(q, at + column * LANES + 2), s2)
            s3 = fma_lanes(k, splat(q, at + column * LANES + 3), s3)
    for query, s in enumerate((s0, s1, s2, s3)):
        store(out, spare, s)
        for key in range(16):
            out[out_at + key * LANES + lane + query] = out[spare + key]


@inlined
def _add_values(ring, row, stride, keys, scratch, weights, out, a, b):
    """out[query, e] += sum over keys of weight[key, query] * v[key, e], for queries a and b, which may be the same.

    Two queries by 32 columns are eight chains; columns that are left over go one by one.
    """
    E = ring.E
    whole = E // 32 * 32
    for e in range(0, whole, 32):
        at_a, at_b = out + a * E + e, out + b * E + e
        a0, a1, b0, b1 = load(scratch, at_a), load(scratch, at_a + 16), load(scratch, at_b), load(scratch, at_b + 16)
        for key in range(keys):
            v0, v1 = load(ring.values, row + key * stride + e), load(ring.values, row + key * stride + e + 16)
            w_a, w_b = splat(scratch, weights + key * LANES + a), splat(scratch, weights + key * LANES + b)
            a0, a1 = fma_lanes(w_a, v0, a0), fma_lanes(w_a, v1, a1)
            b0, b1 = fma_lanes(w_b, v0, b0), fma_lanes(w_b, v1, b1)
        store(scratch, at_a, a0)
        store(scratch, at_a + 16, a1)
        store(scratch, at_b, b0)
        store(scratch, at_b + 16, b1)
    for e in range(whole, E):
        total_a, total_b = load_one(scratch, out + a * E + e), load_one(scratch, out + b * E + e)
        for key in range(keys):
            v = load_one(ring.values, row + key * stride + e)
            total_a = fma(load_one(scratch, weights + key * LANES + a), v, total_a)
            total_b = fma(load_one(scratch, weights + key * LANES + b), v, total_b)
        scratch[out + a * E + e] = total_a
        scratch[out + b * E + e] = total_b


@inlined
def _run(t, end, capacity):
    """(slot of position t, how many positions from t up to end lie behind one another)"""
    slot = t % capacity
    return slot, min(end - t, capacity - slot)


@inlined
def _within(starts, positions, begin, last):
    """Which queries see any key of begin .. last."""
    return both(
        less(splat_value(np.int32(begin - 1)), positions),
        less(starts, splat_value(np.int32(last + 1))),
    )


@inlined
def _range(query, heads, chunk_at, window, begin, end):
    """(first key, last key + 1) of begin .. end - 1 that the query sees"""
    position = chunk_at + query // heads
    return max(begin, position - window + 1), min(end, position + 1)


@kernel
def _attend_lanes(q, ring, H, g, window, scale, cap, chunk_at, first_query, last_query, scratch, out):
    """At most sixteen queries; query number n is head n % heads at position n // heads of the chunk."""
    E, heads = ring.E, H // ring.G
    stride, base = ring.stride, ring.at + g * ring.head
    used = last_query - first_query
    o, s = LANES * E, 2 * LANES * E
    spare = s + TILE * LANES
    first_position, last_position = chunk_at + first_query // heads, chunk_at + (last_query - 1) // heads
    for lane in range(LANES):
        position, start, at = np.int64(-1), np.int64(0), np.int64(0)
        if lane < used:
            number = first_query + lane
            position = chunk_at + number // heads
            start = max(np.int64(0), position - window + 1)
            at = (number // heads * H + g * heads + number % heads) * E
        scratch[spare + lane] = f32_of_bits(np.int32(start))
        scratch[spare + LANES + lane] = f32_of_bits(np.int32(position))
        for e in range(E):
            scratch[e * LANES + lane] = load_one(q, at + e)
            scratch[o + lane * E + e] = _ZERO
    starts, positions = bits(load(scratch, spare)), bits(load(scratch, spare + LANES))
    maximum, weight_sum = splat_value(-_INFINITY), zero()
    begin = max(np.int64(0), first_position - window + 1)
    while begin <= last_position:
        end = min(last_position + 1, (begin // TILE + 1) * TILE)
        t = begin
        while t < end:
            slot, keys = _run(t, end, ring.capacity)
            row, at = base + slot * stride, s + (t - begin) * LANES
            if used <= 8 and keys >= LANES and E % 4 == 0:
                keys = LANES
                for lane in range(0, used, 4):
                    _scores_of_sixteen_keys(ring, row, stride, scratch, lane, scratch, at, spare)
            else:
                _scores_of_sixteen_queries(ring, row, stride, keys, scratch, scratch, at)
            t += keys
        before = maximum
        for key in range(end - begin):
            score = mul(load(scratch, s + key * LANES), splat_value(scale))
            if cap > _ZERO:
                score = lanes.soft_cap(score, cap)
            store(scratch, s + key * LANES, score)
            seen = _within(starts, positions, begin + key, begin + key)
            maximum = select(both(seen, less(maximum, score)), score, maximum)
        # A query without a key in this tile keeps what it has.
        asked = _within(starts, positions, begin, end - 1)
        shrink = select(asked, lanes.exp(sub(before, maximum)), splat_value(_ONE))
        weight_sum = mul(weight_sum, shrink)
        for key in range(end - begin):
            weight = lanes.exp(sub(load(scratch, s + key * LANES), maximum))
            store(scratch, s + key * LANES, weight)
            seen = _within(starts, positions, begin + key, begin + key)
            weight_sum = select(seen, add(weight_sum, weight), weight_sum)
        store(scratch, spare, shrink)
        for lane in range(used):
            factor, at = load_one(scratch, spare + lane), o + lane * E
            if factor != _ONE:
                for e in range(0, E, LANES):
                    value = mul(lanes.take(scratch, at + e, at + E), splat_value(factor))
                    lanes.put(scratch, at + e, at + E, value)
        lane = 0
        while lane < used:
            other = lane
            t, stop = _range(first_query + lane, heads, chunk_at, window, begin, end)
            if lane + 1 < used and _range(first_query + lane + 1, heads, chunk_at, window, begin, end) == (t, stop):
                other = lane + 1
            while t < stop:
                slot, keys = _run(t, stop, ring.capacity)
                weights = s + (t - begin) * LANES
                _add_values(ring, base + slot * stride, stride, keys, scratch, weights, o, lane, other)
                t += keys
            lane = other + 1
        begin = end
    store(scratch, spare, weight_sum)
    for lane in range(used):
        number = first_query + lane
        at, result = o + lane * E, (number // heads * H + g * heads + number % heads) * E
        total = splat(scratch, spare + lane)
        for e in range(0, E, LANES):
            lanes.put(out, result + e, result + E, div(lanes.take(scratch, at + e, at + E), total))


@kernel
def attend(q, ring, H, g, window, scale, cap, chunk_at, first, last, scratch, out):
    """Attention of positions first .. last - 1, all heads that share key/value head g.

    q: [T * H * E], of positions chunk_at ..   ring: Ring, with all keys up to the last position
    window: keys that a query sees, itself included (a huge number: all)   cap: soft cap of scores, 0 for none
    scratch: [scratch_size(E)]   out: [T * H * E], written for these positions and heads
    """
    heads = H // ring.G
    end = (last - chunk_at) * heads
    for query in range((first - chunk_at) * heads, end, LANES):
        _attend_lanes(q, ring, H, g, window, scale, cap, chunk_at, query, min(query + LANES, end), scratch, out)
