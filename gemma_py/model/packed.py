"""A model's weights laid out for the kernels: panels in flat arenas, and tables that say where everything is.

Tables of integers and a few arenas have the same types for every model, so one compiled forward pass serves them all.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gemma_py.kernels.panels import COLUMNS, pack_codes, pack_floats, panel_bytes, panels_of
from gemma_py.model.config import Config, Norm
from gemma_py.model.weights import CodeMatrix, Matrix, Weights

# Columns of `matrices`.
KIND, ROWS, INPUTS, AT, WIDTH, OFFSET, GROUP, SPAN, MINIMUMS, BYTES, PAIRS = range(11)  # WIDTH and on: of CODES alone
FLOATS, HALVES, CODES = range(3)  # values of KIND: f32, bfloat16, quantised

# Columns of `layers`. HEADS .. WIDTH describe shapes; Q .. DOWN are numbers of matrices; the rest are places in `gains`,
# negative where the layer has no such norm, and what form of an input the matrices behind it read.
HEADS, KV_HEADS, HEAD_DIM, INNER, WINDOW, KV_SOURCE, ROPE, Q, K, V, O, GATE, UP, DOWN = range(14)  # noqa: E741
IN_GAIN, Q_GAIN, K_GAIN, O_GAIN, FF_GAIN, FF_OUT_GAIN, QKV_INPUT, O_INPUT, GATE_INPUT, DOWN_INPUT = range(14, 24)
INPUT_CODES, INPUT_FLOATS = 1, 2  # bits of the last four: what the matrices behind an input read
_GAINS = {
    Norm.ATTENTION: IN_GAIN, Norm.QUERY: Q_GAIN, Norm.KEY: K_GAIN, Norm.ATTENTION_OUTPUT: O_GAIN,
    Norm.FEED_FORWARD: FF_GAIN, Norm.FEED_FORWARD_OUTPUT: FF_OUT_GAIN,
}  # fmt: skip


class Numbers(NamedTuple):
    """What the forward pass needs to know beside the tables."""

    hidden: int  # D
    vocabulary: int  # V
    embedding: int  # number of a matrix
    head: int
    head_input: int  # INPUT_CODES or INPUT_FLOATS
    final_gain: int  # place in gains
    eps: np.float32
    attention_scale: np.float32
    attention_cap: np.float32  # 0: none
    final_cap: np.float32
    embedding_factor: np.float32


class Packed(NamedTuple):
    floats: np.ndarray  # f32 panels
    halves: np.ndarray  # bfloat16 panels, as uint16
    codes: np.ndarray  # int8: the bytes of code panels
    gains: np.ndarray  # f32
    frequencies: np.ndarray  # f32 [ropes, widest E / 2]
    matrices: np.ndarray  # int64 [matrices, 11]
    layers: np.ndarray  # int64 [L, 24]
    numbers: Numbers


def _kind(matrix: Matrix) -> int:
    if isinstance(matrix, CodeMatrix):
        return CODES
    return HALVES if matrix.values.dtype == np.uint16 else FLOATS


def _panel_size(matrix: Matrix) -> int:
    """Elements of its arena that a panel takes."""
    K = matrix.shape[1]
    if isinstance(matrix, CodeMatrix):
        return panel_bytes(K, matrix.width, matrix.group, matrix.span, len(matrix.factors) - 1)
    return K * COLUMNS


def _row(matrix: Matrix, at: int) -> list[int]:
    """Of the table of matrices."""
    row = [_kind(matrix), *matrix.shape, at]
    if isinstance(matrix, CodeMatrix):
        row += [matrix.width, matrix.offset, matrix.group, matrix.span, len(matrix.factors) - 1, _panel_size(matrix), 8]
    return row + [0] * (11 - len(row))


def _fill(matrix: Matrix, place: np.ndarray) -> None:
    if isinstance(matrix, CodeMatrix):
        pack_codes(matrix.codes, matrix.factors, matrix.steps, matrix.width, matrix.offset, place)
    else:
        pack_floats(matrix.values, place)


class _Packer:
    """Fills arenas of the right size, matrix after matrix."""

    def __init__(self, matrices: Iterable[Matrix]) -> None:
        sizes = [0, 0, 0]
        for matrix in matrices:
            sizes[_kind(matrix)] += panels_of(matrix.shape[0]) * _panel_size(matrix)
        # One value at least: an empty arena is never read, but its address is taken.
        types = (np.float32, np.uint16, np.int8)
        self.arenas = [np.empty(max(1, size), kind) for size, kind in zip(sizes, types, strict=True)]
        self.used = [0, 0, 0]
        self.rows: list[list[int]] = []

    def add(self, matrix: Matrix) -> int:
        """The number of the matrix in the table."""
        kind, size = _kind(matrix), panels_of(matrix.shape[0]) * _panel_size(matrix)
        at = self.used[kind]
        self.used[kind] += size
        _fill(matrix, self.arenas[kind][at : at + size])
        self.rows.append(_row(matrix, at))
        return len(self.rows) - 1


def _input(matrices: Iterable[Matrix]) -> int:
    forms = 0
    for matrix in matrices:
        forms |= INPUT_CODES if isinstance(matrix, CodeMatrix) else INPUT_FLOATS
    return forms


def pack(weights: Weights, config: Config, frequencies: np.ndarray, ropes: list[int]) -> Packed:
    """frequencies: f32 [ropes, widest E / 2]; ropes: which of them each layer turns by."""
    parts = [[w.q, w.k, w.v, w.o, w.gate, w.up, w.down] for w in weights.layers]
    tied = weights.head is weights.embedding
    ends = [weights.embedding] if tied else [weights.embedding, weights.head]
    packer = _Packer([*ends, *(matrix for layer in parts for matrix in layer)])
    embedding = packer.add(weights.embedding)
    head = embedding if tied else packer.add(weights.head)
    gains = [weights.final_gain]
    place = len(weights.final_gain)
    table = np.full((len(config.layers), 24), -1, np.int64)
    for number, (layer, w) in enumerate(zip(config.layers, weights.layers, strict=True)):
        row = table[number]
        row[HEADS : ROPE + 1] = (
            layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim, layer.intermediate_size,
            layer.sliding_window or 0, layer.kv_source, ropes[number],
        )  # fmt: skip
        row[Q : DOWN + 1] = [packer.add(matrix) for matrix in parts[number]]
        for norm, column in _GAINS.items():
            if norm in w.gains:
                row[column] = place
                gains.append(w.gains[norm])
                place += len(w.gains[norm])
        inputs = ((w.q, w.k, w.v), (w.o,), (w.gate, w.up), (w.down,))
        row[QKV_INPUT : DOWN_INPUT + 1] = [_input(group) for group in inputs]
    numbers = Numbers(
        config.hidden_size, config.vocab_size, embedding, head, _input([weights.head]), 0,
        np.float32(config.rms_norm_eps), np.float32(config.attention_scale),
        np.float32(config.attn_logit_softcapping or 0.0), np.float32(config.final_logit_softcapping or 0.0),
        np.float32(np.sqrt(np.float64(config.hidden_size))),
    )  # fmt: skip
    floats, halves, codes = packer.arenas
    matrices = np.array(packer.rows, np.int64)
    return Packed(floats, halves, codes, np.concatenate(gains), frequencies, matrices, table, numbers)
