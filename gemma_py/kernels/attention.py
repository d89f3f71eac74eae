"""Attention of a block of queries to a ring of keys and values, bit-identical to `reference.operations.attend`.

A query is one head at one position. A block consists of the query heads that share one key/value head, at some neighbouring
positions. Each query sees its own range of keys. A lane of a vector computes the score of one query and one key, or one
column of an output. So every sum is one chain of additions: over ascending columns e for a score, and over ascending
positions t for an output.

A tile of keys also prefetches the next tile, a line after every few multiplications. A burst of prefetches would delay the
loads that follow.

Position t is stored in row t % capacity of the ring. The score of a key that a query does not see is discarded by a select.
A multiplication by 0 would be wrong, because a row may hold anything, even NaN. Rows that no query of the block sees are
not read.
"""

import numpy as np

from gemma_py.kernels.attention_layout import (
    COLUMNS,
    FEW_QUERIES,
    KEY_LANE_QUERIES,
    LANES,
    QUERY_BLOCK,
    ROWS,
    TILE,
    VECTORS,
    Block,
    keys_of_all,
    keys_of_any,
    scratch_layout,
)
from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.intrinsics import f32_of_bits, fma
from gemma_py.kernels.kv_rows import readable_tile
from gemma_py.kernels.simd.tiles import (
    add_multiples,
    add_products,
    load_totals,
    row_offsets,
    scale_totals,
    store_totals,
    zero_totals,
)
from gemma_py.kernels.simd.vectors import (
    add,
    bitcast,
    div,
    holds_codes,
    less,
    load,
    load_columns,
    load_scalar,
    load_splat,
    mask_and,
    mul,
    prefetch_to_l2,
    select,
    splat,
    store,
    sub,
    zero,
)
from gemma_py.kernels.vector_math import exp, load_up_to, soft_cap, store_up_to

_F = np.float32
_FEW = 4  # so many queries have functions of their own, because a position often has no more queries
_ZERO, _ONE, _INFINITY = _F(0.0), _F(1.0), _F(np.inf)


# --- tiles of keys ---------------------------------------------------------------------------------------------------


@inlined
def _elements_ahead(ring, last):
    """Return how many elements after a tile the next tile begins, or 0 if no tile is to be prefetched.

    last: whether this is the last tile
    """
    return 0 if last or holds_codes(ring.keys) else TILE * ring.row_stride


# --- scores -----------------------------------------------------------------------------------------------------------


@inlined
def _scores_by_query_lanes(ring, row, keys, q, q_at, out, at, ahead):
    """Compute out[key, query] = sum over e of k[key, e] * q[e, query], e ascending, for COLUMNS queries.

    ahead: the next tile of keys, which is prefetched, begins so many elements later

    A vector has one lane for each query, so that an element of a key is loaded once for all queries. ROWS keys are computed
    at a time. If fewer keys are left, the last key is computed several times, and the surplus results go to padding rows of
    `out`.
    """
    stride = ring.row_stride
    for key in range(0, keys, ROWS):
        k = row_offsets(row + key * stride, stride, keys - key, ROWS)
        totals, later = zero_totals(k, VECTORS), row + key * stride + ahead
        for e in range(ring.E):
            prefetch_to_l2(ring.keys, later + e % ROWS * stride + e // ROWS * ROWS)
            totals = add_products(ring.keys, k, e, q, q_at + e * COLUMNS, LANES, totals)
        store_totals(out, row_offsets(at + key * QUERY_BLOCK, QUERY_BLOCK, ROWS, ROWS), 0, totals)


def _make_scores_by_key_lanes(queries):
    """Return `scores_by_key_lanes`, which computes the scores of `queries` queries at a time."""

    @inlined
    def scores_by_key_lanes(ring, row, q, lane, out, at, spare, ahead):
        """Compute the scores of sixteen keys and some queries, from query `lane` on. E must be a multiple of 4.

        spare: the index in `out` of sixteen numbers that this function may overwrite
        ahead: the next tile of keys, which is prefetched, begins so many elements later

        A vector has one lane for each key. With one lane for each query, most lanes would be unused while a token is
        decoded, because there are few queries then.
        """
        lanes = row_offsets(lane, 1, queries, queries)
        totals = zero_totals(lanes, 1)
        for e in range(0, ring.E, 4):
            for key in range(4):
                prefetch_to_l2(ring.keys, row + ahead + (e + key) % LANES * ring.row_stride + e // LANES * LANES)
            for column, k in enumerate(load_columns(ring.keys, row + e, ring.row_stride)):
                totals = add_multiples(q, lanes, (e + column) * COLUMNS, k, totals)
        for query, total in enumerate(totals):
            store(out, spare, total)
            for key in range(LANES):
                out[at + key * QUERY_BLOCK + query] = out[spare + key]

    return scores_by_key_lanes


_scores_of_four, _scores_of_more = _make_scores_by_key_lanes(_FEW), _make_scores_by_key_lanes(KEY_LANE_QUERIES)


@inlined
def _make_scores(ring, base, begin, end, block, scratch, layout, ahead):
    """Compute the scores of keys begin .. end - 1 of a tile for all queries of the block.

    A key is skipped if none of COLUMNS neighbouring queries sees it.
    """
    for lane in range(0, block.used, COLUMNS):
        first, last = keys_of_any(block, lane, min(lane + COLUMNS, block.used))
        t, stop = max(begin, first), min(end, last)
        while t < stop:
            slot = t % ring.capacity
            keys = min(stop - t, ring.capacity - slot)
            row, to = base + slot * ring.row_stride, layout.scores + (t - begin) * QUERY_BLOCK + lane
            if block.used <= FEW_QUERIES and keys >= LANES and ring.E % 4 == 0:
                keys = LANES
                if block.used <= _FEW:
                    _scores_of_four(ring, row, scratch, layout.q, scratch, to, layout.rescale, ahead)
                else:
                    for query in range(0, block.used, KEY_LANE_QUERIES):
                        _scores_of_more(
                            ring, row, scratch, layout.q + query, scratch, to + query, layout.rescale, ahead
                        )
            else:
                _scores_by_query_lanes(ring, row, keys, scratch, layout.q + lane * ring.E, scratch, to, ahead)
            t += keys


# --- values -----------------------------------------------------------------------------------------------------------


def _make_add_values(rows):
    """Return `add_values`, which computes `rows` queries at a time."""

    @inlined
    def add_values(ring, base, t, keys, scratch, weights, rescale, out, used, left, right, ahead):
        """Compute out[query, e] = out[query, e] * rescale[query] + sum over keys of weight[key, query] * v[key, e].

        The keys are positions t .. t + keys - 1, and the columns e are left .. right - 1. `weights`, `rescale` and `out`
        are indices into `scratch`, at which the numbers of the first query begin. There are `used` queries.

        The outer loop runs over columns, so that the values of a few columns stay in the L1 cache for all queries. Columns
        that do not fill a vector are computed one by one.
        """
        E, stride, slot, values = ring.E, ring.row_stride, t % ring.capacity, ring.values
        until_wrap = min(keys, ring.capacity - slot)
        first, wrapped = base + slot * stride, base - until_wrap * stride
        whole = right - (right - left) % COLUMNS
        for e in range(left, whole, COLUMNS):
            for query in range(0, used, rows):
                o = row_offsets(out + query * E, E, rows, rows)
                w = row_offsets(weights + query, 1, rows, rows)
                totals = load_totals(scratch, o, e, VECTORS)
                totals = scale_totals(scratch, row_offsets(rescale + query, 1, rows, rows), totals)
                next_rows = ahead if query == 0 else 0
                for key in range(until_wrap):
                    row = first + key * stride + e
                    for line in range(0, COLUMNS, LANES):
                        prefetch_to_l2(values, row + next_rows + line)
                    totals = add_products(scratch, w, key * QUERY_BLOCK, values, row, LANES, totals)
                for key in range(until_wrap, keys):
                    row = wrapped + key * stride + e
                    totals = add_products(scratch, w, key * QUERY_BLOCK, values, row, LANES, totals)
                store_totals(scratch, o, e, totals)
        for query in range(used):
            for e in range(whole, right):
                total = load_scalar(scratch, out + query * E + e) * load_scalar(scratch, rescale + query)
                for key in range(keys):
                    row = first if key < until_wrap else wrapped
                    v = load_scalar(values, row + key * stride + e)
                    total = fma(load_scalar(scratch, weights + key * QUERY_BLOCK + query), v, total)
                scratch[out + query * E + e] = total

    return add_values


_add_values_of_many, _add_values_of_few, _add_values_of_one = (
    _make_add_values(ROWS),
    _make_add_values(_FEW),
    _make_add_values(1),
)


@inlined
def _add_values_of_queries(ring, base, begin, t, stop, lane, used, block, scratch, layout, ahead):
    """Add the values of keys t .. stop - 1 to `used` queries that all see these keys.

    begin: the first position of the tile of keys
    """
    weights, out = layout.scores + (t - begin) * QUERY_BLOCK + lane, layout.out + lane * ring.E
    left, right = block.left, block.right
    rescale = layout.rescale + lane
    if used <= _FEW:
        _add_values_of_few(ring, base, t, stop - t, scratch, weights, rescale, out, used, left, right, ahead)
    else:
        _add_values_of_many(ring, base, t, stop - t, scratch, weights, rescale, out, used, left, right, ahead)
    for query in range(lane, lane + used):
        scratch[layout.rescale + query] = _ONE


@inlined
def _add_values_of_query(ring, base, begin, t, stop, query, block, scratch, layout):
    """Add the values of keys t .. stop - 1 to one query. The range of keys may be empty."""
    if t < stop:
        weights, out = layout.scores + (t - begin) * QUERY_BLOCK + query, layout.out + query * ring.E
        left, right = block.left, block.right
        _add_values_of_one(ring, base, t, stop - t, scratch, weights, layout.rescale + query, out, 1, left, right, 0)
        scratch[layout.rescale + query] = _ONE


@inlined
def _add_values(ring, base, begin, end, block, scratch, layout, ahead):
    """Add the values of keys begin .. end - 1 of a tile to the queries that see them, t ascending for each query.

    If every query sees every key, one call adds all values to all queries. Otherwise, ROWS queries at a time are treated
    together: one loop adds the values of the keys that all of these queries see, and the values of the other keys are added
    to one query at a time. Before the first value of this tile is added to a query, the query's earlier sums are multiplied
    by `rescale`. A query that sees no key of this tile is not changed.
    """
    first, last = keys_of_all(block, 0, block.used)
    if first <= begin and end <= last:
        _add_values_of_queries(ring, base, begin, begin, end, 0, block.used, block, scratch, layout, ahead)
        return
    for lane in range(0, block.used, ROWS):
        lane_end = min(lane + ROWS, block.used)
        first, last = keys_of_all(block, lane, lane_end)
        first, last = max(begin, first), min(end, last)
        if first >= last:
            first, last = end, end
        for query in range(lane, lane_end):
            t, stop = keys_of_any(block, query, query + 1)
            _add_values_of_query(ring, base, begin, max(begin, t), min(first, stop), query, block, scratch, layout)
        if first < last:
            _add_values_of_queries(ring, base, begin, first, last, lane, lane_end - lane, block, scratch, layout, ahead)
        for query in range(lane, lane_end):
            _, stop = keys_of_any(block, query, query + 1)
            _add_values_of_query(ring, base, begin, last, min(end, stop), query, block, scratch, layout)


# --- weights ----------------------------------------------------------------------------------------------------------


@inlined
def _sees_any(starts, lasts, begin, last):
    """Return the mask of the queries that see at least one of the keys `begin` to `last`."""
    return mask_and(less(splat(np.int32(begin - 1)), lasts), less(starts, splat(np.int32(last + 1))))


@inlined
def _make_weights(scratch, layout, lane, begin, keys, all_seen, params):
    """Turn the scores of a tile into softmax weights, for the sixteen queries from `lane` on.

        score  = soft_cap(scale * score)
        weight = exp(score - maximum)

    The maximum is that of all scores of a query so far. When it grows, the query's earlier sums have to be multiplied by
    rescale = exp(old maximum - new maximum). Keys that a query does not see affect neither its maximum nor its sum of
    weights.
    """
    maximum, s = load(scratch, layout.maximum + lane), layout.scores + lane
    starts, lasts = bitcast(load(scratch, layout.starts + lane)), bitcast(load(scratch, layout.lasts + lane))
    before = maximum
    for key in range(keys):
        score = mul(load(scratch, s + key * QUERY_BLOCK), splat(params.scale))
        if params.cap > _ZERO:
            score = soft_cap(score, params.cap)
        store(scratch, s + key * QUERY_BLOCK, score)
        larger = less(maximum, score)
        if not all_seen:
            larger = mask_and(larger, _sees_any(starts, lasts, begin + key, begin + key))
        maximum = select(larger, score, maximum)
    # For a query that sees no key of this tile, rescale is 1. The maximum of such a query may still be -infinity, and the
    # formula would then give NaN, the difference of two infinities.
    seen = _sees_any(starts, lasts, begin, begin + keys - 1)
    rescale = select(seen, exp(sub(before, maximum)), splat(_ONE))
    weight_sum = mul(load(scratch, layout.weight_sum + lane), rescale)
    for key in range(keys):
        weight = exp(sub(load(scratch, s + key * QUERY_BLOCK), maximum))
        store(scratch, s + key * QUERY_BLOCK, weight)
        total = add(weight_sum, weight)
        if not all_seen:
            total = select(_sees_any(starts, lasts, begin + key, begin + key), total, weight_sum)
        weight_sum = total
    store(scratch, layout.maximum + lane, maximum)
    store(scratch, layout.weight_sum + lane, weight_sum)
    store(scratch, layout.rescale + lane, rescale)


# --- blocks -----------------------------------------------------------------------------------------------------------


@inlined
def _row_of(query, heads, H, g, E):
    return (query // heads * H + g * heads + query % heads) * E


@inlined
def _load_queries(q, E, H, g, block, scratch, layout):
    """Transpose the queries of a block, so that each query is a lane, and set all sums to zero.

    Each query is first copied to its row of `out` in the scratch, and transposed from there. Lanes after the last query
    hold zeros and see no key.

    In a block of few queries, no function computes the scores of lanes after the last query. These scores are set to zero
    here, because subnormal floats of an earlier call would slow down the vector instructions.
    """
    if block.used <= FEW_QUERIES:
        for key in range(TILE):
            store(scratch, layout.scores + key * QUERY_BLOCK, zero())
    for lane in range((block.used + COLUMNS - 1) // COLUMNS * COLUMNS):
        start, end, row = np.int64(0), np.int64(0), layout.out + lane * E
        if lane < block.used:
            start, end = keys_of_any(block, lane, lane + 1)
            source = _row_of(block.first + lane, block.heads, H, g, E)
            for e in range(0, E, LANES):
                store_up_to(scratch, row + e, row + E, load_up_to(q, source + e, source + E))
        else:
            for e in range(0, E, LANES):
                store_up_to(scratch, row + e, row + E, zero())
        scratch[layout.starts + lane] = f32_of_bits(np.int32(start))
        scratch[layout.lasts + lane] = f32_of_bits(np.int32(end - 1))
    for lane in range(0, block.used, LANES):
        row, to = layout.out + lane * E, layout.q + lane // COLUMNS * COLUMNS * E + lane % COLUMNS
        for e in range(0, E // 4 * 4, 4):
            for column, value in enumerate(load_columns(scratch, row + e, E)):
                store(scratch, to + (e + column) * COLUMNS, value)
        for e in range(E // 4 * 4, E):
            for query in range(LANES):
                scratch[to + e * COLUMNS + query] = scratch[row + query * E + e]
        store(scratch, layout.maximum + lane, splat(-_INFINITY))
        store(scratch, layout.weight_sum + lane, zero())
        for place in range(row, row + LANES * E, LANES):
            store(scratch, place, zero())


@inlined
def _copy_scores(scores, source, keys, scratch, layout):
    """Copy the scores of `keys` keys from `scores`, which `score_keys` wrote, to `scratch`.

    scores: f32, read from index `source` to index source + 16 * keys - 1
    """
    for key in range(keys):
        store(scratch, layout.scores + key * QUERY_BLOCK, load(scores, source + key * LANES))


@inlined
def _attend_block(q, ring, params, g, block, scores, scratch, out):
    """Compute out = softmax(scores) * values for the queries of a block, one tile of keys at a time.

    scores: the result of `score_keys` for a single position; if the array is empty, this function computes the scores
    """
    E, H, base = ring.E, params.H, ring.start + g * ring.head_stride
    layout = scratch_layout(E)
    _load_queries(q, E, H, g, block, scratch, layout)
    begin, stop = keys_of_any(block, 0, block.used)
    start = begin
    while begin < stop:
        end = min(stop, (begin // TILE + 1) * TILE)
        ahead = _elements_ahead(ring, end == stop)
        if scores.shape[0] > 0:
            _copy_scores(scores, (begin - start) * LANES, end - begin, scratch, layout)
        else:
            tile, at = readable_tile(ring, base, ring.keys, begin, end, block, scratch, layout)
            _make_scores(tile, at, begin, end, block, scratch, layout, ahead)
        first, last = keys_of_all(block, 0, block.used)
        for lane in range(0, block.used, LANES):
            _make_weights(scratch, layout, lane, begin, end - begin, first <= begin and end <= last, params)
        tile, at = readable_tile(ring, base, ring.values, begin, end, block, scratch, layout)
        _add_values(tile, at, begin, end, block, scratch, layout, ahead)
        begin = end
    for lane in range(block.used):
        row, result = layout.out + lane * E, _row_of(block.first + lane, block.heads, H, g, E)
        total = load_splat(scratch, layout.weight_sum + lane)
        for e in range(block.left, block.right, LANES):
            store_up_to(out, result + e, result + block.right, div(load_up_to(scratch, row + e, row + E), total))


@inlined
def attend(q, ring, params, g, origin, first, last, scratch, out):
    """Compute out[t, h] = sum over s of softmax(soft_cap(scale * q[t, h] . k[s, g]))[s] * v[s, g], s ascending.

    One call computes positions first .. last - 1 and all query heads h that share key/value head g. The sum runs over
    the positions s that position t sees.

    q: [T * H * E] f32, read; row 0 is position `origin`
    ring: Ring, read; holds all keys and values that these positions see
    params: AttentionParams
    scratch: [scratch_size(E)] f32, written
    out: [T * H * E] f32, written for these positions and heads
    """
    heads = params.H // ring.G
    end = (last - origin) * heads
    for query in range((first - origin) * heads, end, QUERY_BLOCK):
        used = min(QUERY_BLOCK, end - query)
        block = Block(query, used, heads, origin, params.window, params.ahead, params.length, 0, ring.E)
        _attend_block(q, ring, params, g, block, scratch[:0], scratch, out)


# If several workers share a position, each computes the scores of a part of the keys (`score_keys`), and then a part of the
# columns of the output (`attend_columns`).


@inlined
def _block_of_one(ring, params, origin, row, left, right):
    heads = params.H // ring.G
    return Block(row * heads, heads, heads, origin, params.window, params.ahead, params.length, left, right)


@inlined
def columns_of_part(part, parts, E):
    """Divide E columns into `parts` parts that begin at multiples of COLUMNS. Return (first, last + 1) of part `part`."""
    left, right = E // COLUMNS * part // parts * COLUMNS, E // COLUMNS * (part + 1) // parts * COLUMNS
    return left, right if part < parts - 1 else E


@inlined
def score_keys(q, ring, params, g, origin, row, part, parts, scratch, scores):
    """Compute scores[s, h] = q[row, h] . k[s, g] for one of `parts` parts of the keys s.

    `attend_columns` applies scale and soft cap. The query's position is origin + row. At most sixteen query heads h share
    key/value head g.

    q: [T * H * E] f32, read
    ring: Ring, read
    scratch: [scratch_size(E)] f32, written
    scores: [keys that the position sees * 16] f32, written for the keys of this part
    """
    block, layout = _block_of_one(ring, params, origin, row, 0, ring.E), scratch_layout(ring.E)
    base = ring.start + g * ring.head_stride
    _load_queries(q, ring.E, params.H, g, block, scratch, layout)
    start, stop = keys_of_any(block, 0, block.used)
    first, tiles = start // TILE, (stop + TILE - 1) // TILE - start // TILE
    begin = max(start, (first + tiles * part // parts) * TILE)
    stop = min(stop, (first + tiles * (part + 1) // parts) * TILE)
    while begin < stop:
        end = min(stop, (begin // TILE + 1) * TILE)
        tile, at = readable_tile(ring, base, ring.keys, begin, end, block, scratch, layout)
        _make_scores(tile, at, begin, end, block, scratch, layout, _elements_ahead(ring, end == stop))
        for key in range(end - begin):
            store(scores, (begin - start + key) * LANES, load(scratch, layout.scores + key * QUERY_BLOCK))
        begin = end


@inlined
def attend_columns(q, ring, params, g, origin, row, left, right, scores, scratch, out):
    """Compute `attend` for position origin + row and columns left .. right - 1 of each head.

    scores: [keys * 16] f32, read; the results of `score_keys` for all parts of the keys
    out: [T * H * E] f32, written for these columns
    """
    block = _block_of_one(ring, params, origin, row, left, right)
    _attend_block(q, ring, params, g, block, scores, scratch, out)
