"""The phases of a forward pass. A phase divides its outputs into tiles, and workers claim the tiles from a counter.

    T rows   D model width   H query heads   G key/value heads   E head width   N outputs and K inputs of a matrix

Every sum is computed within one tile. The bits of an output therefore do not depend on the number of workers, on the
size of the tiles, or on the other rows of a tile.

Arguments of a phase: `at` is the index in `model.ops` of the phase's first operation, and `end` is the index of the
next phase's first operation.
"""

import numpy as np

from gemma_py.kernels.attention import attend, attend_columns, columns_of_part, score_keys
from gemma_py.kernels.attention_layout import LANES, QUERY_BLOCK, AttentionParams, Ring
from gemma_py.kernels.decorator import inlined, phase
from gemma_py.kernels.kv_rows import row_size
from gemma_py.models.program import STORE
from gemma_py.runtime import cache as c
from gemma_py.runtime import program as p
from gemma_py.runtime.batch import (
    END_ROW,
    FIRST,
    LONGEST,
    ORIGIN,
    ROWS,
    buffer_of,
    kv_rows_of,
    own_part,
    rows_of_tile,
    tiles_in,
    unpack_buffer_of,
)
from gemma_py.runtime.row_operations import row_operation, trace_operation
from gemma_py.runtime.sync import await_rows, claim, claim_any, last_awaited, publish
from gemma_py.runtime.trace import is_traced, trace_rows, trace_worker

_TILE_ROWS = 8  # rows of a tile in `rows_phase`
_FULL_WINDOW = 1 << 40  # larger than any context; a sliding window of this size makes attention full


# --- operations on rows -----------------------------------------------------------------------------------------------


@phase
def rows_phase(worker, workers, cells, model, scratch, batch, trace, at, end):
    """Run a phase of row operations. A worker takes a tile of rows through all operations of the phase.

    If the phase has STORE, tiles are claimed and published in position order, and a tile has rows of only one sequence.
    """
    last_op = model.ops[end - 1]
    stores, segments = last_op[p.OP] == STORE, batch.segments[last_op[p.ROWS_OF]]
    count, unpacked = batch.counts[last_op[p.ROWS_OF], ROWS], unpack_buffer_of(scratch, worker, workers)
    tiles = tiles_in(segments, _TILE_ROWS) if stores else (count + _TILE_ROWS - 1) // _TILE_ROWS
    while True:
        counter = last_op[p.COUNTER]
        tile = claim(cells, worker, counter, tiles) if stores else claim_any(cells, worker, counter, tiles)
        if tile < 0:
            return True
        sequence, first = np.int64(0), tile * _TILE_ROWS
        last = min(first + _TILE_ROWS, count)
        if stores:
            sequence, first, last = rows_of_tile(segments, tile, _TILE_ROWS)
        for number in range(at, end):
            op = model.ops[number]
            row_operation(worker, model, op, scratch, batch, unpacked, sequence, first, last)
            if is_traced(trace) and op[p.TRACE] >= 0:
                trace_operation(model, op, scratch, batch, trace, first, last)
                trace_worker(worker, trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], first, last)
        if stores:
            watermark = last_op[p.KV] * segments.shape[0] + sequence
            origin = segments[sequence, ORIGIN]
            if not publish(cells, worker, watermark, origin + first, origin + last):
                return False


# --- attention --------------------------------------------------------------------------------------------------------


@inlined
def _ring_of(op, keys, values, capacity):
    G, E = op[p.KV_HEADS], op[p.WIDTH]
    stride = row_size(keys, E)
    return Ring(keys, values, 0, capacity, stride, capacity * stride, G, E)


@inlined
def _params_of(model, op, segment):
    window = op[p.WINDOW] if op[p.WINDOW] > 0 else _FULL_WINDOW
    ahead = op[p.BIDIRECTIONAL] * (window - 1)
    scale, cap = model.numbers[op[p.NUMBER]], model.numbers[op[p.NUMBER] + 1]
    return AttentionParams(op[p.HEADS], window, ahead, segment[ORIGIN] + segment[END_ROW], scale, cap)


@inlined
def _await_keys(cells, worker, op, params, sequences, number, position):
    """Wait until all KV rows that a query at `position` sees are published. number: the index of the query's sequence."""
    last = last_awaited(cells, worker, position, min(position + params.ahead, params.length - 1))
    return await_rows(cells, worker, op[p.KV] * sequences + number, last)


@inlined
def workers_a_position(op, batch, workers):
    """Return how many workers share the attention of one position to one key/value head.

    The number is 1, except while tokens are decoded with more than S * G workers, for S sequences and G key/value heads.
    """
    S, G, H, E = batch.tables.shape[0], op[p.KV_HEADS], op[p.HEADS], op[p.WIDTH]
    if batch.counts[op[p.ROWS_OF], LONGEST] > 1 or H // G > LANES or workers <= G * S:
        return np.int64(1)
    return max(1, min(E // (2 * LANES), (workers + G * S - 1) // (G * S)))


@inlined
def _scores_of(scratch, workers, pair):
    """Return the slice of scratch.scores for sequence s and key/value head g. pair: s * G + g"""
    size = scratch.scores.shape[0] // (workers - 1) // LANES * LANES
    return slice(pair * size, (pair + 1) * size)


@phase
def scores_phase(worker, workers, cells, model, scratch, batch, trace, at, end):
    """Compute attention scores in a decoding pass in which several workers share a position.

    A tile is the scores of one position for a range of keys. Before a worker computes a tile, it waits until the KV row of
    this position is published. Scores are not traced, because the traced outputs of attention depend on the scores.
    """
    op = model.ops[at]
    H, G, segments = op[p.HEADS], op[p.KV_HEADS], batch.segments[op[p.ROWS_OF]]
    workspace = scratch.attention[own_part(scratch.attention, worker, workers)]
    S, parts = segments.shape[0], workers_a_position(op, batch, workers)
    (q,) = buffer_of(model, batch, scratch, op[p.SOURCE], H * op[p.WIDTH])
    tiles = G * S * parts
    tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    while tile >= 0:
        pair, part = tile // parts, tile % parts
        number, g = pair // G, pair % G
        row, origin = segments[number, FIRST], segments[number, ORIGIN]
        if row < segments[number, END_ROW]:
            kv_entry = batch.tables[number, op[p.KV]]
            keys, values = kv_rows_of(op, kv_entry, batch.kv_type)
            params = _params_of(model, op, segments[number])
            if not _await_keys(cells, worker, op, params, S, number, origin + row):
                return False
            ring, scores = (
                _ring_of(op, keys, values, kv_entry[c.ROWS]),
                scratch.scores[_scores_of(scratch, workers, pair)],
            )
            score_keys(q, ring, params, g, origin, row, part, parts, workspace, scores)
        tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    return True


@inlined
def _columns(worker, workers, cells, model, scratch, batch, trace, op, parts):
    """Compute attention from the scores of `scores_phase`. A tile is a range of output columns of one position."""
    H, G, segments = op[p.HEADS], op[p.KV_HEADS], batch.segments[op[p.ROWS_OF]]
    workspace = scratch.attention[own_part(scratch.attention, worker, workers)]
    (q,) = buffer_of(model, batch, scratch, op[p.SOURCE], H * op[p.WIDTH])
    (out,) = buffer_of(model, batch, scratch, op[p.TARGET], H * op[p.WIDTH])
    tiles = G * segments.shape[0] * parts
    tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    while tile >= 0:
        pair, part = tile // parts, tile % parts
        number, g = pair // G, pair % G
        row, origin = segments[number, FIRST], segments[number, ORIGIN]
        if row < segments[number, END_ROW]:
            kv_entry = batch.tables[number, op[p.KV]]
            keys, values = kv_rows_of(op, kv_entry, batch.kv_type)
            ring, scores = (
                _ring_of(op, keys, values, kv_entry[c.ROWS]),
                scratch.scores[_scores_of(scratch, workers, pair)],
            )
            left, right = columns_of_part(part, parts, op[p.WIDTH])
            params = _params_of(model, op, segments[number])
            attend_columns(q, ring, params, g, origin, row, left, right, scores, workspace, out)
            if is_traced(trace):
                trace_worker(worker, trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], row, row + 1)
        tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    return True


@inlined
def attend_tile(model, op, scratch, batch, workspace, number, g, first, last):
    """Compute attention of rows first .. last - 1 of a sequence for one key/value head.

    The caller has waited for the KV rows that row last - 1 sees.
    """
    H, kv_entry, segment = op[p.HEADS], batch.tables[number, op[p.KV]], batch.segments[op[p.ROWS_OF], number]
    keys, values = kv_rows_of(op, kv_entry, batch.kv_type)
    (q,) = buffer_of(model, batch, scratch, op[p.SOURCE], H * op[p.WIDTH])
    (out,) = buffer_of(model, batch, scratch, op[p.TARGET], H * op[p.WIDTH])
    ring = _ring_of(op, keys, values, kv_entry[c.ROWS])
    origin = segment[ORIGIN]
    attend(q, ring, _params_of(model, op, segment), g, origin, origin + first, origin + last, workspace, out)


@inlined
def _attend_tiles(worker, workers, cells, model, scratch, batch, trace, op):
    """Compute attention in tiles of neighbouring positions and one key/value head.

    If there are few positions, tiles are so small that every worker gets one. Before a tile, the worker waits until the last
    KV row that the tile reads is published.
    """
    H, G, segments = op[p.HEADS], op[p.KV_HEADS], batch.segments[op[p.ROWS_OF]]
    workspace = scratch.attention[own_part(scratch.attention, worker, workers)]
    count = batch.counts[op[p.ROWS_OF], ROWS]
    rows = max(1, min(QUERY_BLOCK // (H // G), (count * G + workers - 1) // workers))
    tiles = G * tiles_in(segments, rows)
    tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    while tile >= 0:
        number, first, last = rows_of_tile(segments, tile // G, rows)
        params, position = _params_of(model, op, segments[number]), segments[number, ORIGIN] + last - 1
        if not _await_keys(cells, worker, op, params, segments.shape[0], number, position):
            return False
        attend_tile(model, op, scratch, batch, workspace, number, tile % G, first, last)
        if is_traced(trace):
            trace_worker(worker, trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], first, last)
        tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    return True


@phase
def attention_phase(worker, workers, cells, model, scratch, batch, trace, at, end):
    """Run an attention phase. If several workers share a position, `scores_phase` has already computed the scores."""
    op = model.ops[at]
    parts = workers_a_position(op, batch, workers)
    if parts > 1:
        return _columns(worker, workers, cells, model, scratch, batch, trace, op, parts)
    return _attend_tiles(worker, workers, cells, model, scratch, batch, trace, op)


# --- traces -----------------------------------------------------------------------------------------------------------


@phase
def trace_phase(worker, workers, cells, model, scratch, batch, trace, at, end):
    """Trace the outputs of a matmul or attention phase, after the phase's barrier. Each worker traces a share of the rows."""
    for number in range(at, end):
        op = model.ops[number]
        count, width = batch.counts[op[p.ROWS_OF], ROWS], op[p.HEADS] * op[p.WIDTH]
        (made,) = buffer_of(model, batch, scratch, op[p.TARGET], width)
        first, last = worker * count // workers, (worker + 1) * count // workers
        trace_rows(trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], made, width, first, last)
    return True
