"""The forward pass: one kernel call a worker, phases separated by barriers, tiles claimed from counters.

    T rows of the pass   D model width   H query heads   G key/value heads   E head width   F feed-forward width
    S sequences that they belong to   R rows whose logits are wanted

Reads from top to bottom like the paper. Every phase divides outputs among tiles, never a sum, so who computes a tile does
not matter, nor how large it is, nor whose rows stand beside. Most phases do not know of sequences. Each has its segment of
the rows, its cache and its marks: keys and values become visible in position order only (`publish`), and attention waits
for the last row that its tile needs (`await_rows`): between ROPE_KV and ATTENTION there is no other barrier.
"""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels.attention import (
    LANES,
    QUERY_BLOCK,
    AttentionParams,
    Ring,
    attend,
    attend_columns,
    columns_of_part,
    score_keys,
)
from gemma_py.kernels.decorator import inlined, kernel, phase
from gemma_py.kernels.intrinsics import array_from_address, bits_of_f32
from gemma_py.kernels.matmul import (
    FEW_ROWS,
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    TILE_ROWS_MULTIPLE,
    CodedRows,
    FloatPanels,
    matmul_codes,
    matmul_floats,
)
from gemma_py.kernels.panels import COLUMNS, INPUT_BLOCK, CodePanels, UnpackBuffer
from gemma_py.kernels.rows import (
    add_to,
    embed_codes,
    embed_floats,
    gelu_gate,
    quantise_rows,
    rms_norm_rows,
    rope_rows,
    rope_table,
    soft_cap,
)
from gemma_py.kernels.simd.vectors import store_scalar
from gemma_py.runtime import cache as c
from gemma_py.runtime.sync import await_rows, barrier, claim, claim_any, enter, publish
from gemma_py.weights import pack as p

# Phases, in order, with the names that errors and traces use. START comes before the first layer, HEAD after the last.
PHASES = (
    "embedding",
    "query, key and value",
    "rope and kv",
    "scores",
    "attention",
    "output input",
    "output",
    "middle",
    "gate and up",
    "down input",
    "down",
    "end",
    "head",
)
EMBED, QKV, ROPE_KV, SCORES, ATTENTION, OUT_INPUT, OUT, MIDDLE, GATE_UP, DOWN_INPUT, DOWN, END, HEAD = range(13)
COUNTERS = len(PHASES)  # a layer

_FEW_ROWS = 8  # of a tile of norms
_EVERYTHING = 1 << 40  # a window that never ends
UNTRACED = -3750763034362895579  # FNV-1a's first value, as a signed number


FIRST, END_ROW, ORIGIN = range(3)  # columns of the segments


class Batch(NamedTuple):
    """What a pass computes: tokens of one sequence or of several, one after the other."""

    tokens: np.ndarray  # int64 [T]
    segments: np.ndarray  # int64 [S, 3]: first row, last row + 1, and the position that row 0 would have
    tables: np.ndarray  # int64 [S, L, 3]: where each sequence's keys and values are, see cache.py
    wanted: np.ndarray  # int64 [T]: the row of the logits that a row makes, -1 for none; ascending
    stored: np.ndarray  # [0], of the type that keys and values are stored as


class Scratch(NamedTuple):
    """What a pass writes beside caches and logits; by row of the pass. Shared by all workers but for `attention` and `unpacked`."""

    x: np.ndarray  # [T * D], the residual stream
    n: np.ndarray  # [T * D], normalised
    chosen: np.ndarray  # [T * D], of these the rows that logits are made of
    q: np.ndarray  # [T * H * E]
    k: np.ndarray  # [T * G * E]
    v: np.ndarray  # [T * G * E]
    a: np.ndarray  # [T * H * E], what attention gives
    y: np.ndarray  # [T * D], what a half of a layer gives
    gate: np.ndarray  # [T * F]
    up: np.ndarray  # [T * F]
    coded: CodedRows  # whichever input is next, if a matrix reads codes
    unpacked: UnpackBuffer  # [workers * unpack_buffer_sizes(widest)]
    cosines: np.ndarray  # [ropes * T * widest E / 2]
    sines: np.ndarray
    attention: np.ndarray  # [workers * scratch_size(E)]
    scores: np.ndarray  # [(workers - 1) * keys * 16], of single positions that several workers share


class Trace(NamedTuple):
    """When a difference is looked for: a hash of each row that each phase wrote, and who wrote it. Empty arrays: off.

    The first index is layer * COUNTERS + phase, as that of the counters that tiles are claimed from. A row of a matmul or
    of attention has several tiles; the worker named is whoever claimed one of them last.
    """

    hashes: np.ndarray  # int64 [(L + 1) * COUNTERS, T], UNTRACED before the pass
    workers: np.ndarray  # int64, the same shape


@inlined
def tiles_of(segments, number, rows):
    """Tiles of so many rows in a segment; no tile has rows of two."""
    return (segments[number, END_ROW] - segments[number, FIRST] + rows - 1) // rows


@inlined
def tiles_in(segments, rows):
    tiles = 0
    for number in range(segments.shape[0]):
        tiles += tiles_of(segments, number, rows)
    return tiles


@inlined
def rows_of_tile(segments, tile, rows):
    """(segment, first row, last row + 1)"""
    number = 0
    while tile >= tiles_of(segments, number, rows):
        tile -= tiles_of(segments, number, rows)
        number += 1
    first = segments[number, FIRST] + tile * rows
    return number, first, min(first + rows, segments[number, END_ROW])


@inlined
def arenas_of(layer, place, stored):
    """A layer's keys and values of one sequence: [G * capacity * E] each."""
    size = layer[p.KV_HEADS] * place[c.ROWS] * layer[p.HEAD_DIM]
    return array_from_address(place[c.KEYS], size, stored), array_from_address(place[c.VALUES], size, stored)


@inlined
def panels_for(N):
    return (N + COLUMNS - 1) // COLUMNS


@inlined
def hash_word(digest, word):
    """FNV-1a, 32 bits at a time: every step is a bijection, so rows that differ in one word never hash alike."""
    return np.int64((np.uint64(digest) ^ np.uint64(np.uint32(word))) * np.uint64(1099511628211))


@inlined
def trace_rows(trace, at, x, width, first, last):
    """Add the bits of rows first .. last - 1 of x to their hashes. Rows are traced by one worker at a time."""
    if trace.hashes.shape[0] > 0:
        for t in range(first, last):
            for i in range(t * width, (t + 1) * width):
                trace.hashes[at, t] = hash_word(trace.hashes[at, t], bits_of_f32(x[i]))


@inlined
def unpack_buffer_of(s, worker, workers):
    codes, scales = s.unpacked.codes.shape[0] // workers, s.unpacked.scales.shape[0] // workers
    return UnpackBuffer(
        s.unpacked.codes[worker * codes : (worker + 1) * codes],
        s.unpacked.scales[worker * scales : (worker + 1) * scales],
        s.unpacked.minimums[worker * scales : (worker + 1) * scales],
    )


@inlined
def make_input(s, x, K, coded, trace, at, first, last, shift):
    """Rows first .. last - 1 of x: [T * K], as codes of rows first - shift .., if a matrix reads such."""
    if coded:
        quantise_rows(x, K, s.coded, first, last, shift)
        trace_codes(trace, at, s.coded, K, first, last, shift)


@inlined
def trace_codes(trace, at, coded, K, first, last, shift):
    """The same as `trace_rows` for an input's codes and scales; the sums follow from the codes."""
    if trace.hashes.shape[0] > 0:
        for t in range(first, last):
            row = t - shift
            for k in range(row * K, (row + 1) * K):
                trace.hashes[at, t] = hash_word(trace.hashes[at, t], coded.codes[k])
            for block in range(row * (K // INPUT_BLOCK), (row + 1) * (K // INPUT_BLOCK)):
                trace.hashes[at, t] = hash_word(trace.hashes[at, t], bits_of_f32(coded.scales[block]))


@inlined
def trace_share(worker, workers, trace, at, x, width, T):
    """`trace_rows` for what phases without rows of their own wrote: after their barrier, every worker takes a share."""
    trace_rows(trace, at, x, width, worker * T // workers, (worker + 1) * T // workers)


@inlined
def trace_tile(worker, trace, at, first, last):
    """Who computes these rows."""
    if trace.workers.shape[0] > 0:
        for t in range(first, last):
            trace.workers[at, t] = worker


@inlined
def code_panels(m, number):
    row = m.matrices[number]
    return CodePanels(
        m.codes, row[p.AT], row[p.ROWS], row[p.INPUTS], row[p.WIDTH], row[p.OFFSET], row[p.GROUP], row[p.BLOCK],
        row[p.MINIMUMS], row[p.BYTES], row[p.QUADS],
    )  # fmt: skip


@inlined
def matmul(m, number, s, x, y, first_row, last_row, first_panel, last_panel, unpacked):
    """y[t, n] of rows t and panels of n, of the input at hand: x, or its codes; the matrix's format decides the order."""
    row = m.matrices[number]
    N, K = row[p.ROWS], row[p.INPUTS]
    if row[p.KIND] == p.CODES:
        matmul_codes(s.coded, code_panels(m, number), y, first_row, last_row, first_panel, last_panel, unpacked)
    elif row[p.KIND] == p.BF16_FLOATS:
        matmul_floats(x, FloatPanels(m.bf16, row[p.AT], N, K), y, first_row, last_row, first_panel, last_panel)
    else:
        matmul_floats(x, FloatPanels(m.floats, row[p.AT], N, K), y, first_row, last_row, first_panel, last_panel)


@inlined
def embed(m, token, y, at, unpacked):
    """y[at .. at + D - 1] = the token's row times sqrt(D)."""
    number, factor = m.numbers.embedding, m.numbers.embedding_factor
    row = m.matrices[number]
    N, K = row[p.ROWS], row[p.INPUTS]
    if row[p.KIND] == p.CODES:
        embed_codes(code_panels(m, number), token, factor, y, at, unpacked)
    elif row[p.KIND] == p.BF16_FLOATS:
        embed_floats(FloatPanels(m.bf16, row[p.AT], N, K), token, factor, y, at)
    else:
        embed_floats(FloatPanels(m.floats, row[p.AT], N, K), token, factor, y, at)


@inlined
def norm(m, gain_at, D, x, y, first, last):
    """y = the rows of x normalised, or x where the layer has no such norm.    y may be x"""
    if gain_at >= 0:
        rms_norm_rows(x, m.gains[gain_at : gain_at + D], D, m.numbers.eps, y, first, last)
    else:
        for i in range(first * D, last * D):
            y[i] = x[i]


@inlined
def next_input(m, s, gain_at, coded, wanted, trace, counter, first, last):
    """The normalised rows, and their codes, if the next matrices read such: of every row of the pass in its place where
    `wanted` is empty, else of those that it gives a place, in which s.chosen holds them.    wanted: [T] or [0]"""
    D = m.numbers.hidden
    trace_rows(trace, counter, s.x, D, first, last)
    norm(m, gain_at, D, s.x, s.n, first, last)
    trace_rows(trace, counter, s.n, D, first, last)
    if wanted.shape[0] == 0:
        make_input(s, s.n, D, coded, trace, counter, first, last, 0)
    else:
        for t in range(first, last):
            if wanted[t] >= 0:
                for d in range(D):
                    s.chosen[wanted[t] * D + d] = s.n[t * D + d]
                make_input(s, s.n, D, coded, trace, counter, t, t + 1, t - wanted[t])


@phase
def embedding_phase(worker, cells, m, s, batch, unpacked, T, trace):
    """Tokens become rows of x, and these the first layer's input; positions become angles."""
    D = m.numbers.hidden
    tiles = (T + _FEW_ROWS - 1) // _FEW_ROWS
    tile = claim_any(cells, worker, EMBED, tiles)
    while tile >= 0:
        first, last = tile * _FEW_ROWS, min(tile * _FEW_ROWS + _FEW_ROWS, T)
        for t in range(first, last):
            embed(m, batch.tokens[t], s.x, t * D, unpacked)
        widest = m.frequencies.shape[1]
        for turn in range(m.frequencies.shape[0]):
            places = slice(turn * T * widest, (turn + 1) * T * widest)
            for number in range(batch.segments.shape[0]):
                begin, end = max(first, batch.segments[number, FIRST]), min(last, batch.segments[number, END_ROW])
                origin = batch.segments[number, ORIGIN]
                rope_table(m.frequencies[turn], origin, s.cosines[places], s.sines[places], begin, end)
        gain, coded = m.layers[0, p.IN_GAIN], m.layers[0, p.QKV_CODED]
        next_input(m, s, gain, coded, batch.wanted[:0], trace, EMBED, first, last)
        trace_tile(worker, trace, EMBED, first, last)
        tile = claim_any(cells, worker, EMBED, tiles)


@inlined
def rows_of(m, number):
    """N of a matrix, 0 of none."""
    return m.matrices[number, p.ROWS] if number >= 0 else 0


@inlined
def rows_together(panels, T, workers):
    """Rows of a tile: as many as can be, for panels are spread out for each tile anew, but some tiles a worker."""
    blocks = max((T + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS, (32 * workers + panels - 1) // panels)
    rows = (T + blocks - 1) // blocks
    return max(MIN_TILE_ROWS, (rows + TILE_ROWS_MULTIPLE - 1) // TILE_ROWS_MULTIPLE * TILE_ROWS_MULTIPLE)


@inlined
def panels_together(panels, blocks, T, workers):
    """Panels of a tile, a multiple of 4, where the matrices of a phase have so many in all, and tiles so many rows.

    Many rows: some tiles a worker, however small the matrices. A few are done with a panel as fast as memory gives it, so
    what counts is long runs of memory: a tile has at least 16, and a small matrix as many tiles as there are workers.
    """
    if T > FEW_ROWS:
        return max(4, min(64, panels * blocks // (8 * workers) // 4 * 4))
    tiles = workers * max(1, min(8, panels // (16 * workers)))
    return min(64, (panels + 4 * tiles - 1) // (4 * tiles) * 4)


@phase
def matmul_phase(worker, workers, cells, counter, m, numbers, x, outputs, s, unpacked, T, cap, trace):
    """outputs = the input at hand times up to three matrices, whose tiles are numbered one after the other.

    numbers: of the matrices, negative for none   x: [T * K], which may be there in codes   outputs: as many arrays
    cap: soft cap of the results, 0 for none
    """
    panels = tiles = 0
    for number in numbers:
        panels += panels_for(rows_of(m, number))
    together = rows_together(panels, T, workers)
    blocks = (T + together - 1) // together
    width = panels_together(panels, blocks, T, workers)
    for number in numbers:
        tiles += blocks * ((panels_for(rows_of(m, number)) + width - 1) // width)
    tile = claim_any(cells, worker, counter, tiles)
    while tile >= 0:
        which, local = 0, tile
        columns = (panels_for(rows_of(m, numbers[0])) + width - 1) // width
        while local >= blocks * columns:
            local -= blocks * columns
            which += 1
            columns = (panels_for(rows_of(m, numbers[which])) + width - 1) // width
        N, y = rows_of(m, numbers[which]), outputs[which]
        row, panel = local % blocks * together, local // blocks * width
        row_end, panel_end = min(row + together, T), min(panel + width, panels_for(N))
        matmul(m, numbers[which], s, x, y, row, row_end, panel, panel_end, unpacked)
        if cap > 0:
            for t in range(row, row_end):
                soft_cap(y, cap, t * N + panel * COLUMNS, t * N + min(panel_end * COLUMNS, N))
        trace_tile(worker, trace, counter, row, row_end)
        tile = claim_any(cells, worker, counter, tiles)


@phase
def input_phase(worker, cells, counter, s, x, K, gated, coded, T, trace):
    """All rows of x: [T * K] become the next input; gated: x = gelu(x) * up comes first."""
    tiles = (T + _FEW_ROWS - 1) // _FEW_ROWS
    tile = claim_any(cells, worker, counter, tiles)
    while tile >= 0:
        first, last = tile * _FEW_ROWS, min(tile * _FEW_ROWS + _FEW_ROWS, T)
        if gated:
            trace_rows(trace, counter - 1, x, K, first, last)
            trace_rows(trace, counter - 1, s.up, K, first, last)
            gelu_gate(x, s.up, first * K, last * K)
            trace_rows(trace, counter, x, K, first, last)
        make_input(s, x, K, coded, trace, counter, first, last, 0)
        trace_tile(worker, trace, counter, first, last)
        tile = claim_any(cells, worker, counter, tiles)


@inlined
def trace_qkv(trace, at, layer, s, first, last):
    """Rows of q, k and v together."""
    trace_rows(trace, at, s.q, layer[p.HEADS] * layer[p.HEAD_DIM], first, last)
    trace_rows(trace, at, s.k, layer[p.KV_HEADS] * layer[p.HEAD_DIM], first, last)
    trace_rows(trace, at, s.v, layer[p.KV_HEADS] * layer[p.HEAD_DIM], first, last)


@inlined
def rope_kv_tile(m, layer, s, keys, values, capacity, origin, T, first, last):
    """Norm and turn rows first .. last - 1 of q and k, and store those of k and v. Row t has position origin + t."""
    H, G, E = layer[p.HEADS], layer[p.KV_HEADS], layer[p.HEAD_DIM]
    widest = m.frequencies.shape[1]
    table = layer[p.ROPE] * T * widest
    cosines, sines = s.cosines[table : table + T * widest], s.sines[table : table + T * widest]
    norm(m, layer[p.Q_GAIN], E, s.q, s.q, first * H, last * H)
    norm(m, layer[p.K_GAIN], E, s.k, s.k, first * G, last * G)
    rope_rows(s.q, H, E, cosines, sines, first, last)
    rope_rows(s.k, G, E, cosines, sines, first, last)
    for t in range(first, last):
        for g in range(G):
            to, source = (g * capacity + (origin + t) % capacity) * E, (t * G + g) * E
            for e in range(E):
                store_scalar(keys, to + e, s.k[source + e])
                store_scalar(values, to + e, s.v[source + e])


@phase
def rope_kv_phase(worker, cells, counter, marks, m, layer, s, batch, T, trace):
    """Tiles of rows are claimed, stored and published in position order.    marks: the first segment's number"""
    tiles = tiles_in(batch.segments, _FEW_ROWS)
    tile = claim(cells, worker, counter, tiles)
    while tile >= 0:
        number, first, last = rows_of_tile(batch.segments, tile, _FEW_ROWS)
        place, origin = batch.tables[number, layer[p.KV_SOURCE]], batch.segments[number, ORIGIN]
        keys, values = arenas_of(layer, place, batch.stored)
        trace_qkv(trace, counter - 1, layer, s, first, last)
        rope_kv_tile(m, layer, s, keys, values, place[c.ROWS], origin, T, first, last)
        trace_qkv(trace, counter, layer, s, first, last)
        trace_tile(worker, trace, counter, first, last)
        if not publish(cells, worker, marks + number, origin + first, origin + last):
            return False
        tile = claim(cells, worker, counter, tiles)
    return True


@inlined
def ring_of(layer, keys, values, capacity):
    G, E = layer[p.KV_HEADS], layer[p.HEAD_DIM]
    return Ring(keys, values, 0, capacity, E, capacity * E, G, E)


@inlined
def attention_params(m, layer):
    window = layer[p.WINDOW] if layer[p.WINDOW] > 0 else _EVERYTHING
    return AttentionParams(layer[p.HEADS], window, m.numbers.attention_scale, m.numbers.attention_cap)


@inlined
def attention_parts(layer, workers, T, S):
    """Workers that share a position and its key/value head: where tokens are decoded, and are fewer than workers."""
    G, H, E = layer[p.KV_HEADS], layer[p.HEADS], layer[p.HEAD_DIM]
    if T > S or H // G > LANES or workers <= G * S:
        return np.int64(1)
    return max(1, min(E // (2 * LANES), (workers + G * S - 1) // (G * S)))


@inlined
def scores_of(s, workers, pair):
    """Which of s.scores are those of one position and key/value head, which are numbered."""
    size = s.scores.shape[0] // (workers - 1) // LANES * LANES
    return slice(pair * size, (pair + 1) * size)


@inlined
def own_part(part, worker, workers):
    """Which numbers are a worker's, of what all of them share."""
    size = part.shape[0] // workers
    return slice(worker * size, (worker + 1) * size)


@phase
def scores_phase(worker, workers, cells, counter, marks, m, layer, s, batch, parts):
    """Scores of single positions, some of the keys each; each waits for the row of its own position.

    They leave no trace: the attention that is made of them does.
    """
    G, scratch = layer[p.KV_HEADS], s.attention[own_part(s.attention, worker, workers)]
    tiles = G * batch.segments.shape[0] * parts
    tile = claim_any(cells, worker, counter, tiles)
    while tile >= 0:
        pair, part = tile // parts, tile % parts
        number, g = pair // G, pair % G
        row, origin = batch.segments[number, FIRST], batch.segments[number, ORIGIN]
        place = batch.tables[number, layer[p.KV_SOURCE]]
        keys, values = arenas_of(layer, place, batch.stored)
        if not await_rows(cells, worker, marks + number, origin + row):
            return False
        ring, scores = ring_of(layer, keys, values, place[c.ROWS]), s.scores[scores_of(s, workers, pair)]
        score_keys(s.q, ring, attention_params(m, layer), g, origin, row, part, parts, scratch, scores)
        tile = claim_any(cells, worker, counter, tiles)
    return True


@phase
def columns_phase(worker, workers, cells, counter, m, layer, s, batch, parts, trace):
    """Values of single positions whose scores are made, some columns each."""
    G, scratch = layer[p.KV_HEADS], s.attention[own_part(s.attention, worker, workers)]
    tiles = G * batch.segments.shape[0] * parts
    tile = claim_any(cells, worker, counter, tiles)
    while tile >= 0:
        pair, part = tile // parts, tile % parts
        number, g = pair // G, pair % G
        row, origin = batch.segments[number, FIRST], batch.segments[number, ORIGIN]
        place = batch.tables[number, layer[p.KV_SOURCE]]
        keys, values = arenas_of(layer, place, batch.stored)
        ring, scores = ring_of(layer, keys, values, place[c.ROWS]), s.scores[scores_of(s, workers, pair)]
        left, right = columns_of_part(part, parts, layer[p.HEAD_DIM])
        attend_columns(s.q, ring, attention_params(m, layer), g, origin, row, left, right, scores, scratch, s.a)
        trace_tile(worker, trace, counter, row, row + 1)
        tile = claim_any(cells, worker, counter, tiles)


@inlined
def attention_tile(m, layer, s, keys, values, capacity, origin, g, first, last, scratch):
    """Attention of rows first .. last - 1 to one key/value head; the keys up to the last one's position are there."""
    ring, params = ring_of(layer, keys, values, capacity), attention_params(m, layer)
    attend(s.q, ring, params, g, origin, origin + first, origin + last, scratch, s.a)


@phase
def attention_phase(worker, workers, cells, counter, marks, m, layer, s, batch, trace):
    """Tiles of neighbouring positions and one key/value head; each waits for the last row that it reads."""
    G, scratch = layer[p.KV_HEADS], s.attention[own_part(s.attention, worker, workers)]
    rows = max(1, QUERY_BLOCK // (layer[p.HEADS] // G))
    tiles = G * tiles_in(batch.segments, rows)
    tile = claim_any(cells, worker, counter, tiles)
    while tile >= 0:
        number, first, last = rows_of_tile(batch.segments, tile // G, rows)
        place, origin = batch.tables[number, layer[p.KV_SOURCE]], batch.segments[number, ORIGIN]
        keys, values = arenas_of(layer, place, batch.stored)
        if not await_rows(cells, worker, marks + number, origin + last - 1):
            return False
        attention_tile(m, layer, s, keys, values, place[c.ROWS], origin, tile % G, first, last, scratch)
        trace_tile(worker, trace, counter, first, last)
        tile = claim_any(cells, worker, counter, tiles)
    return True


@phase
def residual_phase(worker, cells, counter, m, s, out_gain, next_gain, coded, T, wanted, trace):
    """x += the normalised rows of y; then the input of the matrices that come next. The phase before made y."""
    D = m.numbers.hidden
    tiles = (T + _FEW_ROWS - 1) // _FEW_ROWS
    tile = claim_any(cells, worker, counter, tiles)
    while tile >= 0:
        first, last = tile * _FEW_ROWS, min(tile * _FEW_ROWS + _FEW_ROWS, T)
        trace_rows(trace, counter - 1, s.y, D, first, last)
        norm(m, out_gain, D, s.y, s.y, first, last)
        add_to(s.x, s.y, first * D, last * D)
        next_input(m, s, next_gain, coded, wanted, trace, counter, first, last)
        trace_tile(worker, trace, counter, first, last)
        tile = claim_any(cells, worker, counter, tiles)


@kernel
def forward(worker, workers, cells, m, s, batch, logits, trace):
    """Tokens through the model. True when done, False when the run is broken.

    m: Packed   s: Scratch   batch: Batch, with room for its rows in the caches   logits: [R * V], written   trace: Trace
    marks: layer * S + segment, each begins with the position of the segment's first row
    """
    T, L, S = batch.tokens.shape[0], m.layers.shape[0], batch.segments.shape[0]
    R, every = logits.shape[0] // m.numbers.vocabulary, batch.wanted[:0]
    unpacked = unpack_buffer_of(s, worker, workers)
    none, no_cap = np.int64(-1), np.float32(0.0)  # of the types of what stands there elsewhere
    if not enter(cells, worker, 0, EMBED):
        return False
    embedding_phase(worker, cells, m, s, batch, unpacked, T, trace)
    if not barrier(cells, worker, workers):
        return False

    for number in range(L):
        layer = m.layers[number]
        counters = number * COUNTERS
        HE = layer[p.HEADS] * layer[p.HEAD_DIM]

        if not enter(cells, worker, number, QKV):
            return False
        three = (layer[p.Q], layer[p.K], layer[p.V])
        at, outputs = counters + QKV, (s.q, s.k, s.v)
        matmul_phase(worker, workers, cells, at, m, three, s.n, outputs, s, unpacked, T, no_cap, trace)
        if not barrier(cells, worker, workers):
            return False

        if not enter(cells, worker, number, ROPE_KV):
            return False
        if not rope_kv_phase(worker, cells, counters + ROPE_KV, number * S, m, layer, s, batch, T, trace):
            return False

        parts = attention_parts(layer, workers, T, S)
        if parts > 1:
            if not enter(cells, worker, number, SCORES):
                return False
            at = counters + SCORES
            if not scores_phase(worker, workers, cells, at, number * S, m, layer, s, batch, parts):
                return False
            if not barrier(cells, worker, workers):
                return False
        if not enter(cells, worker, number, ATTENTION):
            return False
        at = counters + ATTENTION
        if parts > 1:
            columns_phase(worker, workers, cells, at, m, layer, s, batch, parts, trace)
        elif not attention_phase(worker, workers, cells, at, number * S, m, layer, s, batch, trace):
            return False
        if not barrier(cells, worker, workers):
            return False
        trace_share(worker, workers, trace, counters + ATTENTION, s.a, HE, T)

        if not enter(cells, worker, number, OUT_INPUT):
            return False
        input_phase(worker, cells, counters + OUT_INPUT, s, s.a, HE, 0, layer[p.O_CODED], T, trace)
        if not barrier(cells, worker, workers):
            return False
        if not enter(cells, worker, number, OUT):
            return False
        one = (layer[p.O], none, none)
        at, outputs = counters + OUT, (s.y, s.y, s.y)
        matmul_phase(worker, workers, cells, at, m, one, s.a, outputs, s, unpacked, T, no_cap, trace)
        if not barrier(cells, worker, workers):
            return False

        if not enter(cells, worker, number, MIDDLE):
            return False
        gain, coded = layer[p.FF_GAIN], layer[p.GATE_CODED]
        residual_phase(worker, cells, counters + MIDDLE, m, s, layer[p.O_GAIN], gain, coded, T, every, trace)
        if not barrier(cells, worker, workers):
            return False

        if not enter(cells, worker, number, GATE_UP):
            return False
        two = (layer[p.GATE], layer[p.UP], none)
        at, outputs = counters + GATE_UP, (s.gate, s.up, s.up)
        matmul_phase(worker, workers, cells, at, m, two, s.n, outputs, s, unpacked, T, no_cap, trace)
        if not barrier(cells, worker, workers):
            return False

        if not enter(cells, worker, number, DOWN_INPUT):
            return False
        input_phase(worker, cells, counters + DOWN_INPUT, s, s.gate, layer[p.INNER], 1, layer[p.DOWN_CODED], T, trace)
        if not barrier(cells, worker, workers):
            return False
        if not enter(cells, worker, number, DOWN):
            return False
        one = (layer[p.DOWN], none, none)
        at, outputs = counters + DOWN, (s.y, s.y, s.y)
        matmul_phase(worker, workers, cells, at, m, one, s.gate, outputs, s, unpacked, T, no_cap, trace)
        if not barrier(cells, worker, workers):
            return False

        if not enter(cells, worker, number, END):
            return False
        gain, coded, wanted = m.numbers.final_gain, m.numbers.head_coded, batch.wanted
        if number < L - 1:
            gain, coded, wanted = m.layers[number + 1, p.IN_GAIN], m.layers[number + 1, p.QKV_CODED], every
        residual_phase(worker, cells, counters + END, m, s, layer[p.FF_OUT_GAIN], gain, coded, T, wanted, trace)
        if not barrier(cells, worker, workers):
            return False

    if not enter(cells, worker, L, HEAD):
        return False
    one, cap = (m.numbers.head, none, none), m.numbers.final_cap
    at, outputs = L * COUNTERS + HEAD, (logits, logits, logits)
    matmul_phase(worker, workers, cells, at, m, one, s.chosen, outputs, s, unpacked, R, cap, trace)
    if not barrier(cells, worker, workers):
        return False
    if R == T:
        trace_share(worker, workers, trace, L * COUNTERS + HEAD, logits, m.numbers.vocabulary, T)
    return True
