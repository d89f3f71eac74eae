"""What a pass has to do: multiply-adds and bytes, from the tables that the forward pass works by.

    T tokens of the pass   N outputs and K inputs of a matrix   H query heads   G key/value heads   E head width   W window

Counted are the matrices and attention. Norms, rope and the like are a few operations a number, and are not.
"""

from collections.abc import Sequence

import numpy as np

from gemma_py.runtime.forward import ATTENTION, DOWN, GATE_UP, HEAD, OUT, PHASES, QKV
from gemma_py.weights import pack as p
from gemma_py.weights.pack import Packed, matrix_bytes

FLOP, BYTES = 0, 1
_MATRICES = {QKV: (p.Q, p.K, p.V), OUT: (p.O,), GATE_UP: (p.GATE, p.UP), DOWN: (p.DOWN,)}


def pass_cost(packed: Packed, kv_bytes: int, position: int, T: int) -> np.ndarray:
    """int64 [phases, 2]: FLOP (two a multiply-add) and BYTES of a pass of T tokens after `position` others.

    Every matrix, and every key and value that is within a window, counts once a pass, however often it comes from a cache.
    The head is for the last token alone. kv_bytes: of one number in the KV cache.
    """
    cost = np.zeros((len(PHASES), 2), np.int64)
    for layer in packed.layers:
        for phase, columns in _MATRICES.items():
            for column in columns:
                cost[phase] += _matrix(packed, int(layer[column]), T)
        H, G, E, W = (int(layer[column]) for column in (p.HEADS, p.KV_HEADS, p.HEAD_DIM, p.WINDOW))
        keys = _keys(position, T, W)
        rows = min(position + T, W + T - 1) if W else position + T
        cost[ATTENTION] += (4 * H * E * keys, 2 * G * E * rows * kv_bytes)
    cost[HEAD] += _matrix(packed, packed.numbers.head, 1)
    return cost


def _matrix(packed: Packed, number: int, T: int) -> tuple[int, int]:
    N, K = int(packed.matrices[number, p.ROWS]), int(packed.matrices[number, p.INPUTS])
    return 2 * N * K * T, matrix_bytes(packed, number)


def _keys(position: int, T: int, W: int) -> int:
    """Keys that T queries see together: of all before it and itself, those in the window (0: no window)."""
    first, last = position + 1, position + T
    if W == 0 or last <= W:
        return (first + last) * T // 2
    if first > W:
        return W * T
    return _keys(position, W - position, 0) + W * (last - W)


def run_cost(packed: Packed, kv_bytes: int, position: int, passes: Sequence[int]) -> np.ndarray:
    """The same of several passes, one after the other."""
    total = np.zeros((len(PHASES), 2), np.int64)
    for T in passes:
        total += pass_cost(packed, kv_bytes, position, T)
        position += T
    return total
