"""Row operations, which compute some rows of a buffer, and the recording of their outputs in a trace.

Most operations treat each row by itself. STORE and MEAN also need to know to which sequence a row belongs: STORE writes
to the sequence's KV rows, and MEAN reads all rows of the sequence.
"""

import numpy as np

from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.experts import mix_rows, route_rows
from gemma_py.kernels.kv_rows import row_size, store_row
from gemma_py.kernels.matmul import FloatPanels
from gemma_py.kernels.panels import CodePanels
from gemma_py.kernels.pooling import mean_rows
from gemma_py.kernels.rows import (
    add_to,
    add_to_streams,
    copy_columns,
    correct_streams,
    embed_codes,
    embed_floats,
    gelu_gate,
    match_magnitude,
    multiply_by_gain,
    predict_streams,
    put_columns,
    quantise_rows,
    rms_norm_rows,
    rope_rows,
    rope_table,
    scale_rows,
    sparsify_rows,
    tanh_rows,
)
from gemma_py.models import program as o
from gemma_py.runtime import cache as c
from gemma_py.runtime import program as p
from gemma_py.runtime.batch import END_ROW, FIRST, buffer_of, codes_of, kv_rows_of, rows_of_tile
from gemma_py.runtime.trace import trace_codes, trace_rows
from gemma_py.weights import pack as w


@inlined
def panels_of_codes(model, number):
    row = model.weights.matrices[number]
    return CodePanels(
        model.weights.codes, row[w.AT], row[w.ROWS], row[w.INPUTS], row[w.WIDTH], row[w.OFFSET], row[w.GROUP], row[w.BLOCK],
        row[w.MINIMUMS], row[w.BYTES], row[w.QUADS],
    )  # fmt: skip


@inlined
def _embed(model, op, token, y, at, unpacked):
    """Compute y[at : at + D] = factor * (the token's row of the matrix). A token id beyond the last row selects row 0."""
    number, factor = op[p.MATRIX], model.numbers[op[p.NUMBER]]
    row = model.weights.matrices[number]
    N, K = row[w.ROWS], row[w.INPUTS]
    token = token if token < N else np.int64(0)
    if row[w.KIND] == w.CODES:
        embed_codes(panels_of_codes(model, number), token, factor, y, at, unpacked)
    elif row[w.KIND] == w.BF16_FLOATS:
        embed_floats(FloatPanels(model.weights.bf16, row[w.AT], N, K), token, factor, y, at)
    else:
        embed_floats(FloatPanels(model.weights.floats, row[w.AT], N, K), token, factor, y, at)


@inlined
def _store_token(op, keys, values, capacity, position, k, v, t):
    """Store row t of k and v, [T, G, E], as the rows of the token's position in `keys` and `values`, [G, capacity, row]."""
    G, E = op[p.KV_HEADS], op[p.WIDTH]
    for g in range(G):
        to, source = (g * capacity + position % capacity) * row_size(keys, E), (t * G + g) * E
        store_row(keys, to, E, k, source)
        store_row(values, to, E, v, source)


@inlined
def row_operation(worker, model, op, scratch, batch, unpacked, sequence, first, last):
    """Apply one row operation to rows first .. last - 1. For STORE, all of these rows must be of one sequence, `sequence`."""
    kind, heads, width = op[p.OP], op[p.HEADS], op[p.WIDTH]
    rows, positions = batch.rows[op[p.ROWS_OF]], batch.positions[op[p.ROWS_OF]]
    (x,) = buffer_of(model, batch, scratch, op[p.SOURCE], heads * width)
    (second,) = buffer_of(model, batch, scratch, op[p.SECOND], heads * width)
    (y,) = buffer_of(model, batch, scratch, op[p.TARGET], heads * width)
    if kind == o.EMBED:
        for t in range(first, last):
            _embed(model, op, batch.tokens[rows[t]], y, t * width, unpacked)
    elif kind == o.ROPE_TABLE:
        for t in range(first, last):
            rope_table(model.frequencies[op[p.ROPE_ROW], :width], positions[t] - t, y, second, t, t + 1)
    elif kind in (o.NORM, o.ADD):
        gain = op[p.GAIN]
        if gain >= 0:
            to = y if kind == o.NORM else x
            eps = model.numbers[op[p.NUMBER]]
            rms_norm_rows(x, model.weights.gains[gain : gain + width], width, eps, to, first * heads, last * heads)
        if kind == o.ADD:
            add_to(y, x, first * width, last * width)
    elif kind == o.SCALE:
        scale_rows(y, model.weights.gains[op[p.GAIN]], first * width, last * width)
    elif kind == o.MULTIPLY:
        scale_rows(y, model.numbers[op[p.NUMBER]], first * width, last * width)
    elif kind == o.GELU_GATE:
        gelu_gate(y, x, first * width, last * width)
    elif kind == o.QUANTISE:
        quantise_rows(x, width, codes_of(scratch, batch, op[p.SLOT]), first, last, 0)
    elif kind == o.TAKE:
        for t in range(first, last):
            for d in range(width):
                y[t * width + d] = x[rows[t] * width + d]
    elif kind == o.MEAN:
        for t in range(first, last):
            number, _, _ = rows_of_tile(batch.segments[op[p.ROWS_OF]], t, 1)
            segment = batch.segments[o.ALL, number]
            mean_rows(x, width, segment[FIRST], segment[END_ROW], y, t * width)
    elif kind == o.TAKE_COLUMNS:
        (wide,) = buffer_of(model, batch, scratch, op[p.SOURCE], op[p.STRIDE])
        copy_columns(wide, op[p.STRIDE], op[p.FIRST_COLUMN], y, width, first, last)
    elif kind == o.ROPE:
        rope_rows(y, heads, width, x, second, first, last)
    elif kind == o.ROUTE:
        X, C, gain = op[p.STRIDE], width // 2, op[p.GAIN]
        (logits,) = buffer_of(model, batch, scratch, op[p.SOURCE], X)
        route_rows(logits, X, model.numbers[op[p.NUMBER]], model.weights.gains[gain : gain + X], C, y, first, last)
    elif kind == o.MIX:
        C = op[p.STRIDE] // width
        (parts,) = buffer_of(model, batch, scratch, op[p.SOURCE], op[p.STRIDE])
        (routes,) = buffer_of(model, batch, scratch, op[p.SECOND], 2 * C)
        mix_rows(parts, routes, C, width, y, first, last)
    elif kind == o.PUT_COLUMNS:
        put_columns(x, op[p.STRIDE], y, width, op[p.FIRST_COLUMN], first, last)
    elif kind == o.GAIN:
        multiply_by_gain(y, model.weights.gains[op[p.GAIN] : op[p.GAIN] + width], width, first, last)
    elif kind == o.TANH:
        tanh_rows(y, first * width, last * width)
    elif kind == o.SPARSIFY:
        sparsify_rows(y, width, model.numbers[op[p.NUMBER]], first, last)
    elif kind == o.MATCH:
        match_magnitude(y, x, width, model.numbers[op[p.NUMBER]], first, last)
    elif kind == o.PREDICT:
        predict_streams(x, second, heads, width, y, first, last)
    elif kind == o.CORRECT:
        correct_streams(y, x, second, heads, width, op[p.STREAM], first, last)
    elif kind == o.ADD_TO_STREAMS:
        add_to_streams(y, x, heads, width, op[p.STREAM], first, last)
    elif kind == o.STORE:
        kv_entry = batch.tables[sequence, op[p.KV]]
        keys, values = kv_rows_of(op, kv_entry, batch.kv_type)
        for t in range(first, last):
            _store_token(op, keys, values, kv_entry[c.ROWS], positions[t], x, second, t)


@inlined
def trace_operation(model, op, scratch, batch, trace, first, last):
    """Trace the output of a row operation. STORE traces only the values, because ROPE has already traced the keys."""
    rows, width = batch.rows[op[p.ROWS_OF]], op[p.HEADS] * op[p.WIDTH]
    if op[p.OP] == o.QUANTISE:
        trace_codes(trace, op[p.TRACE], rows, codes_of(scratch, batch, op[p.SLOT]), op[p.WIDTH], first, last)
    elif op[p.OP] == o.STORE:
        (values,) = buffer_of(model, batch, scratch, op[p.SECOND], op[p.KV_HEADS] * op[p.WIDTH])
        trace_rows(trace, op[p.TRACE], rows, values, op[p.KV_HEADS] * op[p.WIDTH], first, last)
    # ROPE_TABLE computes cosines and sines, which are not traced. TAKE copies rows that are already traced.
    elif op[p.OP] != o.ROPE_TABLE and op[p.OP] != o.TAKE:
        (made,) = buffer_of(model, batch, scratch, op[p.TARGET], width)
        trace_rows(trace, op[p.TRACE], rows, made, width, first, last)
