"""Attention of a block of queries to a ring of keys, in the order of `model.reference.attend`.

A query is one head at one position. The heads that share a key/value head make, with some neighbouring positions, a
block of queries, each with its own range of keys. Lanes divide queries while scores are made, and the head's width while
values are added; every sum stays one chain, e or t ascending.

Position t is row t % capacity of the ring. A key outside a query's range never enters its sums: scores of such keys are
thrown away by a choice, never multiplied by 0, for the row may hold anything, NaN too. Rows that no query of a block
asks for are not read.
"""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels import vector_math
from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.intrinsics import f32_of_bits, fma
from gemma_py.kernels.simd.target import USES_ZMM
from gemma_py.kernels.simd.tiles import add_products, load_totals, row_offsets, scale_totals, store_totals, zero_totals
from gemma_py.kernels.simd.vectors import (
    add,
    bitcast,
    div,
    less,
    load,
    load_columns,
    load_scalar,
    load_splat,
    mask_and,
    mul,
    prefetch,
    select,
    splat,
    store,
    sub,
    zero,
)
from gemma_py.kernels.simd.vectors import fma as vector_fma

TILE = 32  # key positions that share a maximum
LANES = 16
QUERY_BLOCK = 64  # of a block
FEW_QUERIES = 8  # queries that take keys for lanes
ROWS, VECTORS = (8, 2) if USES_ZMM else (4, 1)  # of a tile of totals: as many chains as there are registers for
COLUMNS = VECTORS * LANES

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


class AttentionParams(NamedTuple):
    """What turns a dot product q * k into a score, and which keys a query sees."""

    H: int  # query heads
    window: int  # keys that a query sees, its own included; a huge number: all
    scale: np.float32
    cap: np.float32  # soft cap of scores, 0 for none


class ScratchLayout(NamedTuple):
    """Where the parts of a worker's scratch begin."""

    q: int  # [QUERY_BLOCK / COLUMNS, E, COLUMNS]
    o: int  # [QUERY_BLOCK, E], what has been added up so far
    s: int  # [TILE + ROWS, QUERY_BLOCK], scores and then weights of a tile of keys; the last rows hold nothing
    starts: int  # [QUERY_BLOCK] each from here: first key of a query, as bits
    positions: int  # its own position, as bits
    maximum: int
    weight_sum: int
    shrink: int
    end: int


@inlined
def scratch_layout(E):
    o = QUERY_BLOCK * E
    s = 2 * o
    rest = s + (TILE + ROWS) * QUERY_BLOCK
    return ScratchLayout(
        0,
        o,
        s,
        rest,
        rest + QUERY_BLOCK,
        rest + 2 * QUERY_BLOCK,
        rest + 3 * QUERY_BLOCK,
        rest + 4 * QUERY_BLOCK,
        rest + 5 * QUERY_BLOCK,
    )


def scratch_size(E: int) -> int:
    """Floats of scratch that a worker needs for heads up to this width."""
    return scratch_layout.py_func(E).end


class Block(NamedTuple):
    """Queries first .. first + used - 1 of a chunk: number n is head n % heads at position origin + n // heads.

    Of the heads' width, the columns left .. right - 1 are done.
    """

    first: int
    used: int
    heads: int
    origin: int
    window: int
    left: int
    right: int


@inlined
def _keys_of_all(block, lane, end):
    """(first, last + 1) of the keys that all the queries from `lane` to end - 1 see; last + 1 <= first: none."""
    first = block.origin + (block.first + lane) // block.heads
    last = block.origin + (block.first + end - 1) // block.heads
    return max(np.int64(0), last - block.window + 1), first + 1


@inlined
def _keys_of_any(block, lane, end):
    """(first, last + 1) of the keys that any of them sees, of which there is one"""
    first = block.origin + (block.first + lane) // block.heads
    last = block.origin + (block.first + end - 1) // block.heads
    return max(np.int64(0), first - block.window + 1), last + 1


@inlined
def _prefetch_rows(array, ring, base, t, stop, left, right):
    """Ask early for columns of some rows. A few queries do little with a row, so the machine's own asking comes late."""
    for position in range(t, stop):
        row = base + position % ring.capacity * ring.stride
        for e in range(left, right, LANES):
            prefetch(array, row + e)


# --- scores -----------------------------------------------------------------------------------------------------------


@inlined
def _scores_in_lanes_of_queries(ring, row, keys, q, q_at, out, at):
    """out[key, query] = sum over e of k[key, e] * q[e, query], for COLUMNS queries and keys of neighbouring rows.

    Rows that fill the last tile are the last key again, and land behind the others.
    """
    for key in range(0, keys, ROWS):
        k = row_offsets(row + key * ring.stride, ring.stride, keys - key, ROWS)
        totals = zero_totals(k, VECTORS)
        for e in range(ring.E):
            totals = add_products(ring.keys, k, e, q, q_at + e * COLUMNS, LANES, totals)
        store_totals(out, row_offsets(at + key * QUERY_BLOCK, QUERY_BLOCK, ROWS, ROWS), 0, totals)


@inlined
def _scores_in_lanes_of_keys(ring, row, q, lane, out, at, spare):
    """The same of sixteen keys, which lie in the lanes here, and the four queries from `lane` on. E is a multiple of 4.

    For the few queries of a decoded token, that would leave most lanes of the other form empty.
    """
    s0, s1, s2, s3 = zero(), zero(), zero(), zero()
    for e in range(0, ring.E, 4):
        from_lane = e * COLUMNS + lane
        for column, k in enumerate(load_columns(ring.keys, row + e, ring.stride)):
            s0 = vector_fma(k, load_splat(q, from_lane + column * COLUMNS), s0)
            s1 = vector_fma(k, load_splat(q, from_lane + column * COLUMNS + 1), s1)
            s2 = vector_fma(k, load_splat(q, from_lane + column * COLUMNS + 2), s2)
            s3 = vector_fma(k, load_splat(q, from_lane + column * COLUMNS + 3), s3)
    for query, s in enumerate((s0, s1, s2, s3)):
        store(out, spare, s)
        for key in range(16):
            out[at + key * QUERY_BLOCK + query] = out[spare + key]


@inlined
def _scores(ring, base, begin, end, block, scratch, at):
    """Of the keys begin .. end - 1 and all queries; what no query of a vector sees may be left out."""
    for lane in range(0, block.used, COLUMNS):
        first, last = _keys_of_any(block, lane, min(lane + COLUMNS, block.used))
        t, stop = max(begin, first), min(end, last)
        while t < stop:
            slot = t % ring.capacity
            keys = min(stop - t, ring.capacity - slot)
            row, to = base + slot * ring.stride, at.s + (t - begin) * QUERY_BLOCK + lane
            if block.used <= FEW_QUERIES and keys >= LANES and ring.E % 4 == 0:
                keys = LANES
                for query in range(0, block.used, 4):
                    _scores_in_lanes_of_keys(ring, row, scratch, at.q + query, scratch, to + query, at.shrink)
            else:
                _scores_in_lanes_of_queries(ring, row, keys, scratch, at.q + lane * ring.E, scratch, to)
            t += keys


# --- values -----------------------------------------------------------------------------------------------------------


def _adder(rows):
    """A kernel of values for so many queries at a time."""

    @inlined
    def add_values(ring, base, t, keys, scratch, weights, shrink, out, used, left, right):
        """out[query, e] = out * shrink[query] + sum over keys of weight[key, query] * v[key, e], for `used` queries.

        The keys are positions t .. t + keys - 1, the columns e left .. right - 1. weights, shrink, out: where those of
        the first query begin. Values of some columns are in the first cache for all queries; columns that are left over
        go one by one.
        """
        E, stride, slot = ring.E, ring.stride, t % ring.capacity
        before_end = min(keys, ring.capacity - slot)  # the ring goes on at its beginning
        first, again = base + slot * stride, base - before_end * stride
        whole = right - (right - left) % COLUMNS
        for e in range(left, whole, COLUMNS):
            for query in range(0, used, rows):
                o = row_offsets(out + query * E, E, rows, rows)
                w = row_offsets(weights + query, 1, rows, rows)
                totals = load_totals(scratch, o, e, VECTORS)
                totals = scale_totals(scratch, row_offsets(shrink + query, 1, rows, rows), totals)
                for key in range(before_end):
                    totals = add_products(
                        scratch, w, key * QUERY_BLOCK, ring.values, first + key * stride + e, LANES, totals
                    )
                for key in range(before_end, keys):
                    totals = add_products(
                        scratch, w, key * QUERY_BLOCK, ring.values, again + key * stride + e, LANES, totals
                    )
                store_totals(scratch, o, e, totals)
        for query in range(used):
            for e in range(whole, right):
                total = load_scalar(scratch, out + query * E + e) * load_scalar(scratch, shrink + query)
                for key in range(keys):
                    row = first if key < before_end else again
                    v = load_scalar(ring.values, row + key * stride + e)
                    total = fma(load_scalar(scratch, weights + key * QUERY_BLOCK + query), v, total)
                scratch[out + query * E + e] = total

    return add_values


_add_values_of_many, _add_values_of_one = _adder(ROWS), _adder(1)


@inlined
def _add_shared(ring, base, begin, t, stop, lane, used, block, scratch, at):
    """Keys t .. stop - 1 of a tile that begins with `begin`, for queries that all see them."""
    weights, out = at.s + (t - begin) * QUERY_BLOCK + lane, at.o + lane * ring.E
    left, right = block.left, block.right
    _add_values_of_many(ring, base, t, stop - t, scratch, weights, at.shrink + lane, out, used, left, right)
    for query in range(lane, lane + used):
        scratch[at.shrink + query] = _ONE


@inlined
def _add_alone(ring, base, begin, t, stop, query, block, scratch, at):
    """The same for one query; there may be no such key."""
    if t < stop:
        weights, out = at.s + (t - begin) * QUERY_BLOCK + query, at.o + query * ring.E
        left, right = block.left, block.right
        _add_values_of_one(ring, base, t, stop - t, scratch, weights, at.shrink + query, out, 1, left, right)
        scratch[at.shrink + query] = _ONE


@inlined
def _values(ring, base, begin, end, block, scratch, at):
    """Of the keys begin .. end - 1, t ascending: all queries at once, or where they see different ones, ROWS at a time.

    Then a query begins with the keys that not all of them see before, and ends with those that not all see after. What
    is added first takes the shrinking with it; a query that sees no key here does not shrink.
    """
    first, last = _keys_of_all(block, 0, block.used)
    if first <= begin and end <= last:
        _add_shared(ring, base, begin, begin, end, 0, block.used, block, scratch, at)
        return
    for lane in range(0, block.used, ROWS):
        lane_end = min(lane + ROWS, block.used)
        first, last = _keys_of_all(block, lane, lane_end)
        first, last = max(begin, first), min(end, last)
        if first >= last:
            first, last = end, end
        for query in range(lane, lane_end):
            t, stop = _keys_of_any(block, query, query + 1)
            _add_alone(ring, base, begin, max(begin, t), min(first, stop), query, block, scratch, at)
        if first < last:
            _add_shared(ring, base, begin, first, last, lane, lane_end - lane, block, scratch, at)
        for query in range(lane, lane_end):
            _, stop = _keys_of_any(block, query, query + 1)
            _add_alone(ring, base, begin, last, min(end, stop), query, block, scratch, at)


# --- weights ----------------------------------------------------------------------------------------------------------


@inlined
def _within(starts, positions, begin, last):
    """Which queries see any key of begin .. last."""
    return mask_and(
        less(splat(np.int32(begin - 1)), positions),
        less(starts, splat(np.int32(last + 1))),
    )


@inlined
def _weigh(scratch, at, lane, begin, keys, all_seen, params):
    """Scores become weights, for sixteen queries; a key that a query does not see is left out of its sums."""
    maximum, s = load(scratch, at.maximum + lane), at.s + lane
    starts, positions = bitcast(load(scratch, at.starts + lane)), bitcast(load(scratch, at.positions + lane))
    before = maximum
    for key in range(keys):
        score = mul(load(scratch, s + key * QUERY_BLOCK), splat(params.scale))
        if params.cap > _ZERO:
            score = vector_math.soft_cap(score, params.cap)
        store(scratch, s + key * QUERY_BLOCK, score)
        larger = less(maximum, score)
        if not all_seen:
            larger = mask_and(larger, _within(starts, positions, begin + key, begin + key))
        maximum = select(larger, score, maximum)
    # A query without a key in this tile keeps what it has.
    asked = _within(starts, positions, begin, begin + keys - 1)
    shrink = select(asked, vector_math.exp(sub(before, maximum)), splat(_ONE))
    weight_sum = mul(load(scratch, at.weight_sum + lane), shrink)
    for key in range(keys):
        weight = vector_math.exp(sub(load(scratch, s + key * QUERY_BLOCK), maximum))
        store(scratch, s + key * QUERY_BLOCK, weight)
        total = add(weight_sum, weight)
        if not all_seen:
            total = select(_within(starts, positions, begin + key, begin + key), total, weight_sum)
        weight_sum = total
    store(scratch, at.maximum + lane, maximum)
    store(scratch, at.weight_sum + lane, weight_sum)
    store(scratch, at.shrink + lane, shrink)


# --- blocks -----------------------------------------------------------------------------------------------------------


@inlined
def _row_of(query, heads, H, g, E):
    """Where a query's row of q and of out begins."""
    return (query // heads * H + g * heads + query % heads) * E


@inlined
def _begin(q, E, H, g, block, scratch, at):
    """Queries into lanes, all sums to nothing. Lanes that fill the last vectors hold zeros and see no key.

    Their scores are zero too where nobody writes them: denormal floats would make all lanes slow.
    """
    if block.used <= FEW_QUERIES:
        for key in range(TILE):
            store(scratch, at.s + key * QUERY_BLOCK, zero())
    for lane in range((block.used + COLUMNS - 1) // COLUMNS * COLUMNS):
        position, start, row = np.int64(-1), np.int64(0), at.o + lane * E
        if lane < block.used:
            position = block.origin + (block.first + lane) // block.heads
            start = max(np.int64(0), position - block.window + 1)
            source = _row_of(block.first + lane, block.heads, H, g, E)
            for e in range(0, E, LANES):
                vector_math.store_up_to(scratch, row + e, row + E, vector_math.load_up_to(q, source + e, source + E))
        else:
            for e in range(0, E, LANES):
                vector_math.store_up_to(scratch, row + e, row + E, zero())
        scratch[at.starts + lane] = f32_of_bits(np.int32(start))
        scratch[at.positions + lane] = f32_of_bits(np.int32(position))
    for lane in range(0, block.used, LANES):
        row, to = at.o + lane * E, at.q + lane // COLUMNS * COLUMNS * E + lane % COLUMNS
        for e in range(0, E // 4 * 4, 4):
            for column, value in enumerate(load_columns(scratch, row + e, E)):
                store(scratch, to + (e + column) * COLUMNS, value)
        for e in range(E // 4 * 4, E):
            for query in range(LANES):
                scratch[to + e * COLUMNS + query] = scratch[row + query * E + e]
        store(scratch, at.maximum + lane, splat(-_INFINITY))
        store(scratch, at.weight_sum + lane, zero())
        for place in range(row, row + LANES * E, LANES):
            store(scratch, place, zero())


@inlined
def _take_scores(scores, source, keys, scratch, at):
    for key in range(keys):
        store(scratch, at.s + key * QUERY_BLOCK, load(scores, source + key * LANES))


@inlined
def _attend_block(q, ring, params, g, block, scores, scratch, out):
    E, H, base, few = ring.E, params.H, ring.at + g * ring.head, block.used <= FEW_QUERIES
    at = scratch_layout(E)
    _begin(q, E, H, g, block, scratch, at)
    begin, stop = _keys_of_any(block, 0, block.used)
    start = begin
    while begin < stop:
        end = min(stop, (begin // TILE + 1) * TILE)
        if few:
            _prefetch_rows(ring.values, ring, base, end, min(stop, end + TILE), block.left, block.right)
        if scores.shape[0] > 0:
            _take_scores(scores, (begin - start) * LANES, end - begin, scratch, at)
        else:
            if few:
                _prefetch_rows(ring.keys, ring, base, end, min(stop, end + TILE), 0, E)
            _scores(ring, base, begin, end, block, scratch, at)
        first, last = _keys_of_all(block, 0, block.used)
        for lane in range(0, block.used, LANES):
            _weigh(scratch, at, lane, begin, end - begin, first <= begin and end <= last, params)
        _values(ring, base, begin, end, block, scratch, at)
        begin = end
    for lane in range(block.used):
        row, result = at.o + lane * E, _row_of(block.first + lane, block.heads, H, g, E)
        total = load_splat(scratch, at.weight_sum + lane)
        for e in range(block.left, block.right, LANES):
            vector_math.store_up_to(
                out, result + e, result + block.right, div(vector_math.load_up_to(scratch, row + e, row + E), total)
            )


@inlined
def attend(q, ring, params, g, origin, first, last, scratch, out):
    """Attention of positions first .. last - 1, all heads that share key/value head g.

    q: [T * H * E] f32, read; row 0 is position `origin`   ring: Ring, read, with all keys up to the last position
    params: AttentionParams   scratch: [scratch_size(E)] f32   out: [T * H * E] f32, written for these positions and heads
    """
    heads = params.H // ring.G
    end = (last - origin) * heads
    for query in range((first - origin) * heads, end, QUERY_BLOCK):
        block = Block(query, min(QUERY_BLOCK, end - query), heads, origin, params.window, 0, ring.E)
        _attend_block(q, ring, params, g, block, scratch[:0], scratch, out)


# --- one position by several workers: first its scores, key by key, then its values, column by column -----------------


@inlined
def _block_of_one(ring, params, origin, row, left, right):
    heads = params.H // ring.G
    return Block(row * heads, heads, heads, origin, params.window, left, right)


@inlined
def columns_of_part(part, parts, E):
    """The first and the last + 1 of a part of E columns; no chain of a tile is in two of them."""
    left, right = E // COLUMNS * part // parts * COLUMNS, E // COLUMNS * (part + 1) // parts * COLUMNS
    return left, right if part < parts - 1 else E


@inlined
def score_keys(q, ring, params, g, origin, row, part, parts, scratch, scores):
    """A part of the raw scores of one position, origin + row; at most sixteen heads share a key/value head.

    q: [T * H * E]   scores: [keys that it sees * 16], those of a part of the keys written
    """
    block, base, at = (
        _block_of_one(ring, params, origin, row, 0, ring.E),
        ring.at + g * ring.head,
        scratch_layout(ring.E),
    )
    _begin(q, ring.E, params.H, g, block, scratch, at)
    start, stop = _keys_of_any(block, 0, block.used)
    first, tiles = start // TILE, (stop + TILE - 1) // TILE - start // TILE
    begin, stop = (
        max(start, (first + tiles * part // parts) * TILE),
        min(stop, (first + tiles * (part + 1) // parts) * TILE),
    )
    while begin < stop:
        end = min(stop, (begin // TILE + 1) * TILE)
        _prefetch_rows(ring.keys, ring, base, end, min(stop, end + TILE), 0, ring.E)
        _scores(ring, base, begin, end, block, scratch, at)
        for key in range(end - begin):
            store(scores, (begin - start + key) * LANES, load(scratch, at.s + key * QUERY_BLOCK))
        begin = end


@inlined
def attend_columns(q, ring, params, g, origin, row, left, right, scores, scratch, out):
    """Attention of this position once all its scores are there, columns left .. right - 1 of the heads that share g.

    out: [T * H * E], written there
    """
    block = _block_of_one(ring, params, origin, row, left, right)
    _attend_block(q, ring, params, g, block, scores, scratch, out)
