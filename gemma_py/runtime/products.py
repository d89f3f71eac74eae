"""The phases of matrix products, with dense matrices and with the matrices of experts.

    T rows   N outputs and K inputs of a matrix   C chosen experts of a row

Every row is multiplied with the matrices of C experts. Each worker sorts these products by expert (kernels/experts.py), in
an order that depends only on the routes. A tile copies the input rows of some products of one expert side by side, so that
the expert's codes are unpacked once for these rows. Each output is one sum, so the bits do not depend on which rows share a
tile.
"""

import numpy as np

from gemma_py.kernels.decorator import inlined, phase
from gemma_py.kernels.experts import gather_codes, gather_floats, list_products, scatter_floats
from gemma_py.kernels.matmul import (
    FEW_ROWS,
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    TILE_ROWS_MULTIPLE,
    FloatPanels,
    matmul_codes,
    matmul_floats,
)
from gemma_py.kernels.panels import COLUMNS
from gemma_py.kernels.rows import soft_cap
from gemma_py.models.program import EXPERT_MATMUL
from gemma_py.runtime import program as p
from gemma_py.runtime.batch import EXPERT_ROWS, ROWS, buffer_of, codes_of, own_codes, own_part, unpack_buffer_of
from gemma_py.runtime.row_operations import panels_of_codes
from gemma_py.runtime.sync import claim_any
from gemma_py.runtime.trace import is_traced, trace_worker
from gemma_py.weights import pack as w

# The fewest panels in a tile of an expert. Small tiles are slow, because every tile copies the expert's input rows again.
_MIN_EXPERT_PANELS = 16


@inlined
def _multiply(model, number, x, coded, y, unpacked, first_row, last_row, first_panel, last_panel, workers):
    """Compute y[t, n] for rows t in first_row .. last_row - 1 and outputs n in panels first_panel .. last_panel - 1.

    number: the index of the matrix in `matrices`
    x: [rows * K] f32, read if the matrix is a float matrix
    coded: the quantised input, read otherwise
    y: [rows * N] f32, written for these rows and outputs
    """
    row = model.weights.matrices[number]
    N, K = row[w.ROWS], row[w.INPUTS]
    if row[w.KIND] == w.CODES:
        panels, others = panels_of_codes(model, number), (workers - 1) * (last_panel - first_panel)
        matmul_codes(coded, panels, y, first_row, last_row, first_panel, last_panel, others, unpacked)
    elif row[w.KIND] == w.BF16_FLOATS:
        matmul_floats(
            x, FloatPanels(model.weights.bf16, row[w.AT], N, K), y, first_row, last_row, first_panel, last_panel
        )
    else:
        matmul_floats(
            x, FloatPanels(model.weights.floats, row[w.AT], N, K), y, first_row, last_row, first_panel, last_panel
        )


@inlined
def _panels_for(model, op):
    return (model.weights.matrices[op[p.MATRIX], w.ROWS] + COLUMNS - 1) // COLUMNS


@inlined
def _rows_together(panels, T, workers):
    """Return the number of rows of a tile.

    Large tiles are better, because every tile unpacks its panels again. But tiles must be small enough to keep all workers
    busy: blocks * panels >= 32 * workers, so that each worker gets 8 tiles of 4 panels.
    """
    blocks = max((T + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS, (32 * workers + panels - 1) // panels)
    rows = (T + blocks - 1) // blocks
    return max(MIN_TILE_ROWS, (rows + TILE_ROWS_MULTIPLE - 1) // TILE_ROWS_MULTIPLE * TILE_ROWS_MULTIPLE)


@inlined
def _panels_together(panels, blocks, T, workers):
    """Return the number of panels of a tile, a multiple of 4.

    panels: the number of panels of the phase's matrices. blocks: the number of blocks of rows.

    With many rows, each worker gets about 8 tiles, so that all workers finish at about the same time. With few rows, memory
    bandwidth is the limit, and long contiguous reads are faster: each worker gets up to 8 tiles of at least 16 panels, or
    one smaller tile.
    """
    if T > FEW_ROWS:
        return max(4, min(64, panels * blocks // (8 * workers) // 4 * 4))
    tiles = workers * max(1, min(8, panels // (16 * workers)))
    return min(64, (panels + 4 * tiles - 1) // (4 * tiles) * 4)


@inlined
def _blocks_of(lists, expert):
    """Return the number of tiles into which an expert's products are divided."""
    return (lists[expert + 1] - lists[expert] + EXPERT_ROWS - 1) // EXPERT_ROWS


@inlined
def _columns_for(model, op, width):
    """Return the number of tiles of `width` panels into which an expert's matrix is divided."""
    return (_panels_for(model, op) + width - 1) // width


# --- tiles ------------------------------------------------------------------------------------------------------------


@inlined
def _tile_shape(model, scratch, batch, lists, workers, at, end):
    """Return (rows of a block, blocks of all groups, panels of a tile).

    The rows of a dense matrix are one group. With experts, the products of each expert are a group. A group is divided into
    blocks.
    """
    op, panels = model.ops[at], np.int64(0)
    T, X, C = batch.counts[op[p.ROWS_OF], ROWS], op[p.EXPERTS], op[p.HEADS]
    for number in range(at, end):
        panels += _panels_for(model, model.ops[number])
    if op[p.OP] != EXPERT_MATMUL:
        rows = _rows_together(panels, T, workers)
        blocks = (T + rows - 1) // rows
        return rows, blocks, _panels_together(panels, blocks, T, workers)
    (routes,) = buffer_of(model, batch, scratch, op[p.SECOND], 2 * C)
    list_products(routes, T, X, C, lists)
    blocks = np.int64(0)
    for expert in range(X):
        blocks += _blocks_of(lists, expert)
    return np.int64(EXPERT_ROWS), blocks, max(_MIN_EXPERT_PANELS, min(64, panels * blocks // (8 * workers) // 4 * 4))


@inlined
def _find_tile(model, lists, at, tile, blocks, width):
    """Return (operation, expert, block, first panel) of a tile. Tiles are numbered operation by operation.

    expert: 0 for a dense matrix
    block: the number of the block, within the rows of a dense matrix or within the products of the expert
    """
    number, expert, local = at, np.int64(0), tile
    columns = _columns_for(model, model.ops[number], width)
    while local >= blocks * columns:
        local -= blocks * columns
        number += 1
        columns = _columns_for(model, model.ops[number], width)
    if model.ops[number, p.OP] == EXPERT_MATMUL:
        blocks = _blocks_of(lists, expert)
        while local >= blocks * columns:
            local -= blocks * columns
            expert += 1
            blocks = _blocks_of(lists, expert)
    return number, expert, local % blocks, local // blocks * width


@inlined
def _compute_tile(worker, workers, model, op, scratch, batch, lists, expert, first, last, first_panel, last_panel):
    """Compute the outputs of panels first_panel .. last_panel - 1 for one block of rows.

    For a dense matrix, these are rows first .. last - 1. For an expert, these are the products lists[first : last].
    `_multiply` is called at only one place, because LLVM compiles the code for all kinds of matrices again for every call.
    """
    of_expert, number, unpacked = (
        op[p.OP] == EXPERT_MATMUL,
        op[p.MATRIX] + expert,
        unpack_buffer_of(scratch, worker, workers),
    )
    N, K = model.weights.matrices[number, w.ROWS], model.weights.matrices[number, w.INPUTS]
    # The number of neighbouring products that read the same input row.
    share = op[p.HEADS] if op[p.STRIDE] == K else np.int64(1)
    (x,) = buffer_of(model, batch, scratch, op[p.SOURCE], op[p.STRIDE] if of_expert else K)
    (y,) = buffer_of(model, batch, scratch, op[p.TARGET], op[p.HEADS] * N if of_expert else N)
    inputs, coded, outputs, first_row, last_row = x, codes_of(scratch, batch, op[p.SLOT]), y, first, last
    gathers = of_expert and last - first > 1
    if gathers:
        inputs = scratch.experts.floats[own_part(scratch.experts.floats, worker, workers)]
        outputs = scratch.experts.outputs[own_part(scratch.experts.outputs, worker, workers)]
        first_row, last_row = np.int64(0), last - first
        if model.weights.matrices[number, w.KIND] == w.CODES:
            codes = own_codes(scratch.experts.coded, worker, workers)
            gather_codes(coded, lists, first, last, share, K, codes)
            coded = codes
        else:
            gather_floats(x, lists, first, last, share, K, inputs)
    elif of_expert:
        first_row = lists[first] // share
        last_row = first_row + 1
        outputs = y[(lists[first] - first_row) * N :]
    _multiply(model, number, inputs, coded, outputs, unpacked, first_row, last_row, first_panel, last_panel, workers)
    left, right, cap = first_panel * COLUMNS, min(last_panel * COLUMNS, N), model.numbers[op[p.NUMBER]]
    if gathers:
        scatter_floats(outputs, lists, first, last, N, left, right, y)
    elif cap > 0 and not of_expert:
        for t in range(first, last):
            soft_cap(y, cap, t * N + left, t * N + right)


@phase
def matmul_phase(worker, workers, cells, model, scratch, batch, trace, at, end):
    """Run a phase of matrix products. Tiles are numbered matrix by matrix."""
    counter, T, C = model.ops[at, p.COUNTER], batch.counts[model.ops[at, p.ROWS_OF], ROWS], model.ops[at, p.HEADS]
    lists = scratch.experts.lists[own_part(scratch.experts.lists, worker, workers)]
    rows, blocks, width = _tile_shape(model, scratch, batch, lists, workers, at, end)
    tiles = np.int64(0)
    for number in range(at, end):
        tiles += blocks * _columns_for(model, model.ops[number], width)
    tile = claim_any(cells, worker, counter, tiles)
    while tile >= 0:
        number, expert, block, panel = _find_tile(model, lists, at, tile, blocks, width)
        op = model.ops[number]
        of_expert = op[p.OP] == EXPERT_MATMUL
        start, stop = (lists[expert], lists[expert + 1]) if of_expert else (np.int64(0), T)
        first, last = start + block * rows, min(start + (block + 1) * rows, stop)
        panel_end = min(panel + width, _panels_for(model, op))
        _compute_tile(worker, workers, model, op, scratch, batch, lists, expert, first, last, panel, panel_end)
        if is_traced(trace):
            for place in range(first, last):
                row = lists[place] // C if of_expert else place
                trace_worker(worker, trace, op[p.TRACE], batch.rows[op[p.ROWS_OF]], row, row + 1)
        tile = claim_any(cells, worker, counter, tiles)
    return True
