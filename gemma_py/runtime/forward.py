"""The forward pass: one kernel call on each worker, which interprets the program phase by phase.

Keys and values become visible in position order only (`publish`), and attention waits for the last row that its tile
reads (`await_rows`), so there is no barrier between the two phases. Every other phase ends with a barrier.
"""

import numpy as np

from gemma_py.kernels.decorator import kernel
from gemma_py.models.program import ATTEND, MATMUL, SCORES
from gemma_py.runtime import program as p
from gemma_py.runtime.phases import (
    attention_phase,
    matmul_phase,
    rows_phase,
    scores_phase,
    trace_phase,
    workers_a_position,
)
from gemma_py.runtime.sync import barrier, enter
from gemma_py.runtime.trace import is_traced


@kernel
def forward(worker, workers, cells, model, scratch, batch, trace):
    """Compute the logits of a batch. Returns False where the run is broken, by this worker or by another.

    model: ModelTables   scratch: Scratch   batch: Batch   trace: Trace
    """
    at = np.int64(0)
    while at < model.ops.shape[0]:
        op, end, done = model.ops[at], model.ops[at, p.NEXT], True
        if op[p.OP] == SCORES and workers_a_position(op, batch, workers) == 1:
            at = end
            continue
        if not enter(cells, worker, op[p.LAYER], op[p.LABEL]):
            return False
        if op[p.OP] == MATMUL:
            done = matmul_phase(worker, workers, cells, model, scratch, batch, trace, at, end)
        elif op[p.OP] == SCORES:
            done = scores_phase(worker, workers, cells, model, scratch, batch, trace, at, end)
        elif op[p.OP] == ATTEND:
            done = attention_phase(worker, workers, cells, model, scratch, batch, trace, at, end)
        else:
            done = rows_phase(worker, workers, cells, model, scratch, batch, trace, at, end)
        if not done:
            return False
        if op[p.BARRIER] and not barrier(cells, worker, workers):
            return False
        if is_traced(trace) and (op[p.OP] == MATMUL or op[p.OP] == ATTEND):
            trace_phase(worker, workers, cells, model, scratch, batch, trace, at, end)
            if not barrier(cells, worker, workers):  # the next phase may overwrite what is being traced
                return False
        at = end
    return True
