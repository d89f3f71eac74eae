"""The forward pass: a kernel that every worker runs once, and that interprets the program phase by phase.

A barrier follows every phase, with one exception: no barrier separates a phase that stores KV rows from the attention
to these rows. Instead, KV rows are published in position order (`publish`), and an attention tile waits for the last KV
row that it reads (`await_rows`).
"""

import numpy as np

from gemma_py.kernels.decorator import kernel
from gemma_py.models.program import ATTEND, EXPERT_MATMUL, MATMUL, SCORES
from gemma_py.runtime import program as p
from gemma_py.runtime.phases import (
    attention_phase,
    rows_phase,
    scores_phase,
    trace_phase,
    workers_a_position,
)
from gemma_py.runtime.products import matmul_phase
from gemma_py.runtime.sync import barrier, enter
from gemma_py.runtime.trace import is_traced


@kernel
def forward(worker, workers, cells, model, scratch, batch, trace):
    """Compute the logits of a batch. Return False if any worker has broken the run.

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
        multiplies = op[p.OP] == MATMUL or op[p.OP] == EXPERT_MATMUL
        if multiplies:
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
        if is_traced(trace) and (multiplies or op[p.OP] == ATTEND):
            trace_phase(worker, workers, cells, model, scratch, batch, trace, at, end)
            # Wait, because the next phase may overwrite rows that other workers are still tracing.
            if not barrier(cells, worker, workers):
                return False
        at = end
    return True
