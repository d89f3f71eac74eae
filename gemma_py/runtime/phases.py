"""The phases of a pass: each divides the outputs of one or more operations among tiles that workers claim from a counter.

    T rows   D model width   H query heads   G key/value heads   E head width   N outputs and K inputs of a matrix

A tile is never a part of a sum, so who computes it does not matter, nor how large it is, nor whose rows stand beside.
`at` is the number of a phase's first operation in `m.ops`, `end` that of the next phase's first one.
"""

import numpy as np

from gemma_py.kernels.attention import attend, attend_columns, columns_of_part, score_keys
from gemma_py.kernels.attention_layout import LANES, QUERY_BLOCK, AttentionParams, Ring
from gemma_py.kernels.decorator import inlined, phase
from gemma_py.kernels.intrinsics import array_from_address
from gemma_py.kernels.matmul import (
    FEW_ROWS,
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    TILE_ROWS_MULTIPLE,
    FloatPanels,
    matmul_codes,
    matmul_floats,
)
from gemma_py.kernels.panels import COLUMNS, CodePanels
from gemma_py.kernels.rows import (
    add_to,
    embed_codes,
    embed_floats,
    gelu_gate,
    quantise_rows,
    rms_norm_rows,
    rope_rows,
    rope_table,
    scale_rows,
    soft_cap,
)
from gemma_py.kernels.simd.vectors import store_scalar
from gemma_py.models.program import ADD, EMBED, GELU_GATE, NORM, QUANTISE, ROPE, ROPE_TABLE, SCALE, STORE, TAKE
from gemma_py.runtime import cache as c
from gemma_py.runtime import program as p
from gemma_py.runtime.batch import (
    END_ROW,
    FIRST,
    LONGEST,
    ORIGIN,
    ROWS,
    codes_of,
    kv_rows_of,
    own_part,
    rows_of_tile,
    tiles_in,
    unpack_buffer_of,
)
from gemma_py.runtime.sync import await_rows, claim, claim_any, publish
from gemma_py.runtime.trace import is_traced, trace_codes, trace_rows, trace_worker
from gemma_py.weights import pack as w

_TILE_ROWS = 8  # of operations on rows
_EVERYTHING = 1 << 40  # a window that never ends


# --- operations on rows -----------------------------------------------------------------------------------------------


@inlined
def _panels_of_codes(m, number):
    row = m.weights.matrices[number]
    return CodePanels(
        m.weights.codes, row[w.AT], row[w.ROWS], row[w.INPUTS], row[w.WIDTH], row[w.OFFSET], row[w.GROUP], row[w.BLOCK],
        row[w.MINIMUMS], row[w.BYTES], row[w.QUADS],
    )  # fmt: skip


@inlined
def _embed(m, op, token, y, at, unpacked):
    """y[at .. at + D - 1] = the token's row times the operation's number."""
    number, factor = op[p.MATRIX], m.numbers[op[p.NUMBER]]
    row = m.weights.matrices[number]
    N, K = row[w.ROWS], row[w.INPUTS]
    if row[w.KIND] == w.CODES:
        embed_codes(_panels_of_codes(m, number), token, factor, y, at, unpacked)
    elif row[w.KIND] == w.BF16_FLOATS:
        embed_floats(FloatPanels(m.weights.bf16, row[w.AT], N, K), token, factor, y, at)
    else:
        embed_floats(FloatPanels(m.weights.floats, row[w.AT], N, K), token, factor, y, at)


@inlined
def _store_row(op, keys, values, capacity, position, k, v, t):
    """Row t of k and v: [T, G, E] into the ring, where a head's rows are neighbours."""
    G, E = op[p.KV_HEADS], op[p.WIDTH]
    for g in range(G):
        to, source = (g * capacity + position % capacity) * E, (t * G + g) * E
        for e in range(E):
            store_scalar(keys, to + e, k[source + e])
            store_scalar(values, to + e, v[source + e])


@inlined
def _buffer(batch, s, number, width):
    """(the rows of a buffer,) of this width each; in a tuple, as no compiled function here may return an array."""
    return (array_from_address(batch.buffers[number], batch.tokens.shape[0] * width, s.floats),)


@inlined
def row_operation(worker, m, op, s, batch, unpacked, sequence, first, last):
    """One operation on rows first .. last - 1, which are of one sequence where the operation stores KV rows."""
    kind, heads, width = op[p.OP], op[p.HEADS], op[p.WIDTH]
    rows, positions = batch.rows[op[p.ROWS_OF]], batch.positions[op[p.ROWS_OF]]
    (x,) = _buffer(batch, s, op[p.SOURCE], heads * width)
    (second,) = _buffer(batch, s, op[p.SECOND], heads * width)
    (y,) = _buffer(batch, s, op[p.TARGET], heads * width)
    if kind == EMBED:
        for t in range(first, last):
            _embed(m, op, batch.tokens[rows[t]], y, t * width, unpacked)
    elif kind == ROPE_TABLE:
        for t in range(first, last):
            rope_table(m.frequencies[op[p.ROPE_ROW], :width], positions[t] - t, y, second, t, t + 1)
    elif kind in (NORM, ADD):
        gain = op[p.GAIN]
        if gain >= 0:
            to = y if kind == NORM else x
            eps = m.numbers[op[p.NUMBER]]
            rms_norm_rows(x, m.weights.gains[gain : gain + width], width, eps, to, first * heads, last * heads)
        if kind == ADD:
            add_to(y, x, first * width, last * width)
    elif kind == SCALE:
        scale_rows(y, m.weights.gains[op[p.GAIN]], first * width, last * width)
    elif kind == GELU_GATE:
        gelu_gate(y, x, first * width, last * width)
    elif kind == QUANTISE:
        quantise_rows(x, width, codes_of(s, batch, op[p.SLOT]), first, last, 0)
    elif kind == TAKE:
        for t in range(first, last):
            for d in range(width):
                y[t * width + d] = x[rows[t] * width + d]
    elif kind == ROPE:
        rope_rows(y, heads, width, x, second, first, last)
    elif kind == STORE:
        place = batch.tables[sequence, op[p.KV]]
        keys, values = kv_rows_of(op, place, batch.stored)
        for t in range(first, last):
            _store_row(op, keys, values, place[c.ROWS], positions[t], x, second, t)


@inlined
def _trace_operation(op, s, batch, trace, first, last):
    """What the operation wrote. Of STORE, the values: its keys were traced when they were turned."""
    rows, width = batch.rows[op[p.ROWS_OF]], op[p.HEADS] * op[p.WIDTH]
    if op[p.OP] == QUANTISE:
        trace_codes(trace, op[p.TRACE], rows, codes_of(s, batch, op[p.SLOT]), op[p.WIDTH], first, last)
    elif op[p.OP] == STORE:
        (values,) = _buffer(batch, s, op[p.SECOND], op[p.KV_HEADS] * op[p.WIDTH])
        trace_rows(trace, op[p.TRACE], rows, values, op[p.KV_HEADS] * op[p.WIDTH], first, last)
    elif op[p.OP] != ROPE_TABLE and op[p.OP] != TAKE:  # angles follow from positions; taken rows are traced already
        (made,) = _buffer(batch, s, op[p.TARGET], width)
        trace_rows(trace, op[p.TRACE], rows, made, width, first, last)


@phase
def rows_phase(worker, workers, cells, m, s, batch, trace, at, end):
    """Some rows at a time through all operations of the phase. Where one of them stores KV rows, tiles are claimed and
    published in position order, and none has rows of two sequences."""
    last_op = m.ops[end - 1]
    stores, segments = last_op[p.OP] == STORE, batch.segments[last_op[p.ROWS_OF]]
    count, unpacked = batch.counts[last_op[p.ROWS_OF], ROWS], unpack_buffer_of(s, worker, workers)
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
            op = m.ops[number]
            row_operation(worker, m, op, s, batch, unpacked, sequence, first, last)
            if is_traced(trace) and op[p.TRACE] >= 0:
                _trace_operation(op, s, batch, trace, first, last)
                trace_worker(worker, trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], first, last)
        if stores:
            mark = last_op[p.KV] * segments.shape[0] + sequence
            origin = segments[sequence, ORIGIN]
            if not publish(cells, worker, mark, origin + first, origin + last):
                return False


# --- products with matrices -------------------------------------------------------------------------------------------


@inlined
def _matmul(m, op, s, batch, unpacked, first_row, last_row, first_panel, last_panel):
    """target[t, n] of rows t and panels of n; the matrix's format decides the order."""
    row = m.weights.matrices[op[p.MATRIX]]
    N, K = row[w.ROWS], row[w.INPUTS]
    (x,) = _buffer(batch, s, op[p.SOURCE], K)
    (y,) = _buffer(batch, s, op[p.TARGET], N)
    if row[w.KIND] == w.CODES:
        coded = codes_of(s, batch, op[p.SLOT])
        matmul_codes(
            coded, _panels_of_codes(m, op[p.MATRIX]), y, first_row, last_row, first_panel, last_panel, unpacked
        )
    elif row[w.KIND] == w.BF16_FLOATS:
        matmul_floats(x, FloatPanels(m.weights.bf16, row[w.AT], N, K), y, first_row, last_row, first_panel, last_panel)
    else:
        matmul_floats(
            x, FloatPanels(m.weights.floats, row[w.AT], N, K), y, first_row, last_row, first_panel, last_panel
        )
    cap = m.numbers[op[p.NUMBER]]
    if cap > 0:
        for t in range(first_row, last_row):
            soft_cap(y, cap, t * N + first_panel * COLUMNS, t * N + min(last_panel * COLUMNS, N))


@inlined
def _panels_for(m, op):
    return (m.weights.matrices[op[p.MATRIX], w.ROWS] + COLUMNS - 1) // COLUMNS


@inlined
def _rows_together(panels, T, workers):
    """Rows of a tile: as many as can be, for panels are spread out for each tile anew, but some tiles a worker."""
    blocks = max((T + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS, (32 * workers + panels - 1) // panels)
    rows = (T + blocks - 1) // blocks
    return max(MIN_TILE_ROWS, (rows + TILE_ROWS_MULTIPLE - 1) // TILE_ROWS_MULTIPLE * TILE_ROWS_MULTIPLE)


@inlined
def _panels_together(panels, blocks, T, workers):
    """Panels of a tile, a multiple of 4, where the matrices of a phase have so many in all, and tiles so many rows.

    Many rows: some tiles a worker, however small the matrices. A few are done with a panel as fast as memory gives it, so
    what counts is long runs of memory: a tile has at least 16, and a small matrix as many tiles as there are workers.
    """
    if T > FEW_ROWS:
        return max(4, min(64, panels * blocks // (8 * workers) // 4 * 4))
    tiles = workers * max(1, min(8, panels // (16 * workers)))
    return min(64, (panels + 4 * tiles - 1) // (4 * tiles) * 4)


@phase
def matmul_phase(worker, workers, cells, m, s, batch, trace, at, end):
    """Products of one input or of several with as many matrices, whose tiles are numbered one after the other."""
    counter, T, unpacked = (
        m.ops[at, p.COUNTER],
        batch.counts[m.ops[at, p.ROWS_OF], ROWS],
        unpack_buffer_of(s, worker, workers),
    )
    panels = tiles = np.int64(0)
    for number in range(at, end):
        panels += _panels_for(m, m.ops[number])
    together = _rows_together(panels, T, workers)
    blocks = (T + together - 1) // together
    width = _panels_together(panels, blocks, T, workers)
    for number in range(at, end):
        tiles += blocks * ((_panels_for(m, m.ops[number]) + width - 1) // width)
    tile = claim_any(cells, worker, counter, tiles)
    while tile >= 0:
        number, local = at, tile
        columns = (_panels_for(m, m.ops[number]) + width - 1) // width
        while local >= blocks * columns:
            local -= blocks * columns
            number += 1
            columns = (_panels_for(m, m.ops[number]) + width - 1) // width
        op = m.ops[number]
        row, panel = local % blocks * together, local // blocks * width
        row_end, panel_end = min(row + together, T), min(panel + width, _panels_for(m, op))
        _matmul(m, op, s, batch, unpacked, row, row_end, panel, panel_end)
        if is_traced(trace):
            trace_worker(worker, trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], row, row_end)
        tile = claim_any(cells, worker, counter, tiles)
    return True


# --- attention --------------------------------------------------------------------------------------------------------


@inlined
def _ring_of(op, keys, values, capacity):
    G, E = op[p.KV_HEADS], op[p.WIDTH]
    return Ring(keys, values, 0, capacity, E, capacity * E, G, E)


@inlined
def _params_of(m, op):
    window = op[p.WINDOW] if op[p.WINDOW] > 0 else _EVERYTHING
    return AttentionParams(op[p.HEADS], window, m.numbers[op[p.NUMBER]], m.numbers[op[p.NUMBER] + 1])


@inlined
def workers_a_position(op, batch, workers):
    """Workers that share a position and its key/value head: where tokens are decoded, and are fewer than workers."""
    S, G, H, E = batch.tables.shape[0], op[p.KV_HEADS], op[p.HEADS], op[p.WIDTH]
    if batch.counts[op[p.ROWS_OF], LONGEST] > 1 or H // G > LANES or workers <= G * S:
        return np.int64(1)
    return max(1, min(E // (2 * LANES), (workers + G * S - 1) // (G * S)))


@inlined
def _scores_of(s, workers, pair):
    """Which of s.scores are those of one position and key/value head, which are numbered."""
    size = s.scores.shape[0] // (workers - 1) // LANES * LANES
    return slice(pair * size, (pair + 1) * size)


@phase
def scores_phase(worker, workers, cells, m, s, batch, trace, at, end):
    """Scores of single positions, some of the keys each; each waits for the row of its own position.

    They leave no trace: the attention that is made of them does.
    """
    op = m.ops[at]
    H, G, segments = op[p.HEADS], op[p.KV_HEADS], batch.segments[op[p.ROWS_OF]]
    scratch = s.attention[own_part(s.attention, worker, workers)]
    S, parts = segments.shape[0], workers_a_position(op, batch, workers)
    (q,) = _buffer(batch, s, op[p.SOURCE], H * op[p.WIDTH])
    tiles = G * S * parts
    tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    while tile >= 0:
        pair, part = tile // parts, tile % parts
        number, g = pair // G, pair % G
        row, origin = segments[number, FIRST], segments[number, ORIGIN]
        if row < segments[number, END_ROW]:
            place = batch.tables[number, op[p.KV]]
            keys, values = kv_rows_of(op, place, batch.stored)
            if not await_rows(cells, worker, op[p.KV] * S + number, origin + row):
                return False
            ring, scores = _ring_of(op, keys, values, place[c.ROWS]), s.scores[_scores_of(s, workers, pair)]
            score_keys(q, ring, _params_of(m, op), g, origin, row, part, parts, scratch, scores)
        tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    return True


@inlined
def _columns(worker, workers, cells, m, s, batch, trace, op, parts):
    """Values of single positions whose scores are made, some columns each."""
    H, G, segments = op[p.HEADS], op[p.KV_HEADS], batch.segments[op[p.ROWS_OF]]
    scratch = s.attention[own_part(s.attention, worker, workers)]
    (q,) = _buffer(batch, s, op[p.SOURCE], H * op[p.WIDTH])
    (out,) = _buffer(batch, s, op[p.TARGET], H * op[p.WIDTH])
    tiles = G * segments.shape[0] * parts
    tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    while tile >= 0:
        pair, part = tile // parts, tile % parts
        number, g = pair // G, pair % G
        row, origin = segments[number, FIRST], segments[number, ORIGIN]
        if row < segments[number, END_ROW]:
            place = batch.tables[number, op[p.KV]]
            keys, values = kv_rows_of(op, place, batch.stored)
            ring, scores = _ring_of(op, keys, values, place[c.ROWS]), s.scores[_scores_of(s, workers, pair)]
            left, right = columns_of_part(part, parts, op[p.WIDTH])
            attend_columns(q, ring, _params_of(m, op), g, origin, row, left, right, scores, scratch, out)
            if is_traced(trace):
                trace_worker(worker, trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], row, row + 1)
        tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    return True


@inlined
def attend_tile(m, op, s, batch, scratch, number, g, first, last):
    """Attention of a sequence's rows first .. last - 1 to one key/value head; the keys up to the last row's are there."""
    H, place, origin = op[p.HEADS], batch.tables[number, op[p.KV]], batch.segments[op[p.ROWS_OF], number, ORIGIN]
    keys, values = kv_rows_of(op, place, batch.stored)
    (q,) = _buffer(batch, s, op[p.SOURCE], H * op[p.WIDTH])
    (out,) = _buffer(batch, s, op[p.TARGET], H * op[p.WIDTH])
    ring = _ring_of(op, keys, values, place[c.ROWS])
    attend(q, ring, _params_of(m, op), g, origin, origin + first, origin + last, scratch, out)


@inlined
def _attend_tiles(worker, workers, cells, m, s, batch, trace, op):
    """Tiles of neighbouring positions and one key/value head; each waits for the last row that it reads."""
    H, G, segments = op[p.HEADS], op[p.KV_HEADS], batch.segments[op[p.ROWS_OF]]
    scratch = s.attention[own_part(s.attention, worker, workers)]
    rows = max(1, QUERY_BLOCK // (H // G))
    tiles = G * tiles_in(segments, rows)
    tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    while tile >= 0:
        number, first, last = rows_of_tile(segments, tile // G, rows)
        if not await_rows(cells, worker, op[p.KV] * segments.shape[0] + number, segments[number, ORIGIN] + last - 1):
            return False
        attend_tile(m, op, s, batch, scratch, number, tile % G, first, last)
        if is_traced(trace):
            trace_worker(worker, trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], first, last)
        tile = claim_any(cells, worker, op[p.COUNTER], tiles)
    return True


@phase
def attention_phase(worker, workers, cells, m, s, batch, trace, at, end):
    """Attention of all rows, or where workers share a position, its second half."""
    op = m.ops[at]
    parts = workers_a_position(op, batch, workers)
    if parts > 1:
        return _columns(worker, workers, cells, m, s, batch, trace, op, parts)
    return _attend_tiles(worker, workers, cells, m, s, batch, trace, op)


# --- traces -----------------------------------------------------------------------------------------------------------


@phase
def trace_phase(worker, workers, cells, m, s, batch, trace, at, end):
    """Trace what phases other than those on rows wrote: after their barrier, every worker takes a share of the rows."""
    for number in range(at, end):
        op = m.ops[number]
        count, width = batch.counts[op[p.ROWS_OF], ROWS], op[p.HEADS] * op[p.WIDTH]
        (made,) = _buffer(batch, s, op[p.TARGET], width)
        first, last = worker * count // workers, (worker + 1) * count // workers
        trace_rows(trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], made, width, first, last)
    return True
