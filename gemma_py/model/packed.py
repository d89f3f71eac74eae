"""A model's weights laid out for the kernels: panels in flat arenas, and tables that say where everything is.

Tables of integers and a few arenas have the same types for every model, so one compiled forward pass serves them all.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gemma_py.kernels.matmul import COLUMNS, pack_codes, pack_floats, panels_of
from gemma_py.model.config import Config, Norm
from gemma_py.model.weights import CodeMatrix, FloatMatrix, Matrix, Weights

# Columns of `matrices`.
KIND, ROWS, INPUTS, AT, SCALES_AT, MINIMUMS_AT, GROUP = range(7)
FLOATS, HALVES, CODES = range(3)  # values of KIND: f32, bfloat16, quantised

# Columns of `layers`. HEADS .. WIDTH describe shapes; Q .. DOWN are numbers of matrices; the rest are places in `gains`,
# negative where the layer has no such norm, and whether the matrices behind an input take codes.
HEADS, KV_HEADS, HEAD_DIM, INNER, WINDOW, KV_SOURCE, ROPE, Q, K, V, O, GATE, UP, DOWN = range(14)  # noqa: E741
IN_GAIN, Q_GAIN, K_GAIN, O_GAIN, FF_GAIN, FF_OUT_GAIN, QKV_CODES, O_CODES, GATE_CODES, DOWN_CODES = range(14, 24)
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
    head_codes: int  # 1 if the head takes codes
    final_gain: int  # place in gains
    eps: np.float32
    attention_scale: np.float32
    attention_cap: np.float32  # 0: none
    final_cap: np.float32
    embedding_factor: np.float32


class Packed(NamedTuple):
    floats: np.ndarray  # f32 panels
    halves: np.ndarray  # bfloat16 panels, as uint16
    codes: np.ndarray  # int8 panels
    scales: np.ndarray  # f32: scales and minimums of the code panels
    gains: np.ndarray  # f32
    frequencies: np.ndarray  # f32 [ropes, widest E / 2]
    matrices: np.ndarray  # int64 [matrices, 7]
    layers: np.ndarray  # int64 [L, 24]
    numbers: Numbers


def _size(matrix: Matrix) -> int:
    N, K = matrix.shape
    return panels_of(N) * COLUMNS * K


def _kind(matrix: Matrix) -> int:
    if isinstance(matrix, CodeMatrix):
        return CODES
    return HALVES if matrix.values.dtype == np.uint16 else FLOATS


def _scale_sizes(matrix: CodeMatrix) -> tuple[int, int]:
    size = panels_of(matrix.shape[0]) * COLUMNS * matrix.scales.shape[1]
    return size, size if len(matrix.minimums) else 0


_ARENAS = (np.float32, np.uint16, np.int8, np.float32)  # floats, halves, codes, scales


def _sizes(matrices: Iterable[Matrix]) -> list[int]:
    """Values in each arena."""
    sizes = [0, 0, 0, 0]
    for matrix in matrices:
        sizes[_kind(matrix)] += _size(matrix)
        if isinstance(matrix, CodeMatrix):
            sizes[3] += sum(_scale_sizes(matrix))
    return sizes


def packed_bytes(matrices: Iterable[Matrix]) -> int:
    """What these will take when they are packed."""
    return sum(size * np.dtype(kind).itemsize for size, kind in zip(_sizes(matrices), _ARENAS, strict=True))


def matrix_bytes(packed: "Packed", number: int) -> int:
    """What a pass reads of a packed matrix: all of it, once."""
    row = packed.matrices[number]
    values = panels_of(int(row[ROWS])) * COLUMNS * int(row[INPUTS])
    if row[KIND] != CODES:
        return values * (packed.floats if row[KIND] == FLOATS else packed.halves).itemsize
    scales = values // int(row[GROUP]) * (2 if row[MINIMUMS_AT] >= 0 else 1)
    return values * packed.codes.itemsize + scales * packed.scales.itemsize


class _Packer:
    """Fills arenas of the right size, matrix after matrix."""

    def __init__(self, matrices: Iterable[Matrix]) -> None:
        # One value at least: an empty arena is never read, but its address is taken.
        self.arenas = [np.empty(max(1, size), kind) for size, kind in zip(_sizes(matrices), _ARENAS, strict=True)]
        self.used = [0, 0, 0, 0]
        self.rows: list[list[int]] = []

    def take(self, arena: int, size: int) -> tuple[int, np.ndarray]:
        at = self.used[arena]
        self.used[arena] += size
        return at, self.arenas[arena][at : at + size]

    def add(self, matrix: Matrix) -> int:
        """The number of the matrix in the table."""
        kind, (N, K) = _kind(matrix), matrix.shape
        at, place = self.take(kind, _size(matrix))
        row = [kind, N, K, at, -1, -1, 32]
        if isinstance(matrix, FloatMatrix):
            pack_floats(matrix.values, place)
        else:
            pack_codes(matrix.codes, place)
            scales, minimums = _scale_sizes(matrix)
            row[SCALES_AT], place = self.take(3, scales)
            pack_floats(matrix.scales, place)
            if minimums:
                row[MINIMUMS_AT], place = self.take(3, minimums)
                pack_floats(matrix.minimums, place)
            row[GROUP] = K // matrix.scales.shape[1]
        self.rows.append(row)
        return len(self.rows) - 1


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
        row[QKV_CODES : DOWN_CODES + 1] = [any(isinstance(m, CodeMatrix) for m in group) for group in inputs]
    numbers = Numbers(
        config.hidden_size, config.vocab_size, embedding, head, int(isinstance(weights.head, CodeMatrix)), 0,
        np.float32(config.rms_norm_eps), np.float32(config.attention_scale),
        np.float32(config.attn_logit_softcapping or 0.0), np.float32(config.final_logit_softcapping or 0.0),
        np.float32(np.sqrt(np.float64(config.hidden_size))),
    )  # fmt: skip
    floats, halves, codes, scales = packer.arenas
    matrices = np.array(packer.rows, np.int64)
    return Packed(floats, halves, codes, scales, np.concatenate(gains), frequencies, matrices, table, numbers)
