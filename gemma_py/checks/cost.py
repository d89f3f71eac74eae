"""The cost of a forward pass in multiply-adds and bytes, computed from the program of the model.

    T tokens of the pass   N outputs and K inputs of a matrix   H query heads   G key/value heads   E head width
    W the sliding window, 0 for full attention

Only matrix products and attention are counted. Norms, rope and activations cost little in comparison.
"""

from collections.abc import Sequence

import numpy as np

from gemma_py.models.program import ALL, ATTEND, EXPERT_MATMUL, MATMUL
from gemma_py.runtime import program as p
from gemma_py.runtime.kv_types import KvType
from gemma_py.runtime.program import LinkedProgram
from gemma_py.weights.pack import INPUTS, ROWS, matrix_bytes

FLOP, BYTES = 0, 1


def pass_cost(program: LinkedProgram, kv: KvType, position: int, T: int) -> np.ndarray:
    """Return the cost of a pass of T tokens after `position` earlier tokens: int64 [names of phases, 2].

    Column FLOP has the floating-point operations, two per multiply-add. Column BYTES has the bytes read from memory.

    Each matrix, key and value counts once per pass, because repeated reads come from the processor's cache. A mixture of
    experts is assumed to choose as many different experts as possible. Logits are computed for the last token only.
    """
    cost = np.zeros((len(program.labels), 2), np.int64)
    for op in program.model.ops:
        kind, label, rows = op[p.OP], op[p.LABEL], T if op[p.ROWS_OF] == ALL else 1
        if kind == MATMUL:
            N, K = (int(value) for value in program.model.weights.matrices[op[p.MATRIX], [ROWS, INPUTS]])
            cost[label] += (2 * N * K * rows, matrix_bytes(program.model.weights, int(op[p.MATRIX])))
        elif kind == EXPERT_MATMUL:
            N, K = (int(value) for value in program.model.weights.matrices[op[p.MATRIX], [ROWS, INPUTS]])
            products, experts = rows * int(op[p.HEADS]), int(op[p.EXPERTS])
            read = min(products, experts) * matrix_bytes(program.model.weights, int(op[p.MATRIX]))
            cost[label] += (2 * N * K * products, read)
        elif kind == ATTEND:
            H, G, E, W = (int(value) for value in op[[p.HEADS, p.KV_HEADS, p.WIDTH, p.WINDOW]])
            before = position + T - rows
            read = min(before + rows, W + rows - 1) if W else before + rows
            cost[label] += (4 * H * E * _keys(before, rows, W), 2 * G * read * kv.row_bytes(E))
    return cost


def _keys(position: int, T: int, W: int) -> int:
    """Count the pairs of query and key in the attention of T queries after `position` tokens.

    A query attends to the last W tokens, its own token included, or to all tokens if W is 0.
    """
    first, last = position + 1, position + T
    if W == 0 or last <= W:
        return (first + last) * T // 2
    if first > W:
        return W * T
    return _keys(position, W - position, 0) + W * (last - W)


def run_cost(program: LinkedProgram, kv: KvType, position: int, passes: Sequence[int]) -> np.ndarray:
    total = np.zeros((len(program.labels), 2), np.int64)
    for T in passes:
        total += pass_cost(program, kv, position, T)
        position += T
    return total
