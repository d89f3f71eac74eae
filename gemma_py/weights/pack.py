"""A model's weights laid out for the kernels: panels in flat arenas, and tables that say where everything is.

Tables of integers and a few arenas have the same types for every model, so one compiled forward pass serves them all.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gemma_py.errors import UnsupportedError
from gemma_py.formats.blocks import BF16, Minimum
from gemma_py.kernels.panels import COLUMNS, pack_codes, pack_floats, panel_bytes, panel_count
from gemma_py.models.config import Config, Norm
from gemma_py.reference.specification import rope_frequencies
from gemma_py.weights.tensors import FloatMatrix, Matrix, StoredMatrix, Weights

# Columns of `matrices`.
KIND, ROWS, INPUTS, AT, WIDTH, OFFSET, GROUP, BLOCK, MINIMUMS, BYTES, QUADS = range(11)  # WIDTH and on: of CODES alone
FLOATS, BF16_FLOATS, CODES = range(3)  # values of KIND: f32, bfloat16, quantised

# Columns of `layers`. HEADS .. WIDTH describe shapes; Q .. DOWN are numbers of matrices; the rest are places in `gains`,
# negative where the layer has no such norm, and whether a matrix behind an input reads its codes.
HEADS, KV_HEADS, HEAD_DIM, INNER, WINDOW, KV_SOURCE, ROPE, Q, K, V, O, GATE, UP, DOWN = range(14)  # noqa: E741
IN_GAIN, Q_GAIN, K_GAIN, O_GAIN, FF_GAIN, FF_OUT_GAIN, QKV_CODED, O_CODED, GATE_CODED, DOWN_CODED = range(14, 24)
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
    head_coded: int
    final_gain: int  # place in gains
    eps: np.float32
    attention_scale: np.float32
    attention_cap: np.float32  # 0: none
    final_cap: np.float32
    embedding_factor: np.float32


class Packed(NamedTuple):
    """Every array is read-only: numba would compile a second pass for writable ones."""

    floats: np.ndarray  # f32 panels
    bf16: np.ndarray  # bfloat16 panels, as uint16
    codes: np.ndarray  # int8: the bytes of code panels
    gains: np.ndarray  # f32
    frequencies: np.ndarray  # f32 [ropes, widest E / 2]
    matrices: np.ndarray  # int64 [matrices, 11]
    layers: np.ndarray  # int64 [L, 24]
    numbers: Numbers


def matrix_bytes(packed: Packed, number: int) -> int:
    """What a pass reads of a packed matrix: all of it, once."""
    row = packed.matrices[number]
    panels = panel_count(int(row[ROWS]))
    if row[KIND] == CODES:
        return panels * int(row[BYTES])
    return panels * COLUMNS * int(row[INPUTS]) * (packed.floats if row[KIND] == FLOATS else packed.bf16).itemsize


LAYOUT = 3  # of panels and arenas, as files of packed weights hold them; a new number leaves old files behind
_TYPES = tuple(np.dtype(kind) for kind in ("<f4", "<u2", "i1"))  # of the arenas: floats, bf16, codes


class Plan:
    """Where everything will be, from names, shapes and types alone: tables, and the sizes of the arenas.

    What `fill` writes into arenas depends on the checkpoint's values, the order of `matrices`, and LAYOUT.
    """

    def __init__(self, weights: Weights[StoredMatrix], config: Config) -> None:
        self.weights = weights
        self._sizes = [0] * len(_TYPES)
        self._rows = {id(matrix): (number, self._place(matrix)) for number, matrix in enumerate(weights.matrices)}
        frequencies, ropes = _frequencies(config)
        gains = [weights.final_gain]
        place = len(weights.final_gain)
        layers = np.full((len(config.layers), 24), -1, np.int64)
        for row, layer, w, rope in zip(layers, config.layers, weights.layers, ropes, strict=True):
            row[HEADS : ROPE + 1] = (
                layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim, layer.intermediate_size,
                layer.sliding_window or 0, layer.kv_source, rope,
            )  # fmt: skip
            row[Q : DOWN + 1] = [self._number(matrix) for matrix in w.matrices]
            for norm, column in _GAINS.items():
                if norm in w.gains:
                    row[column] = place
                    gains.append(w.gains[norm])
                    place += len(w.gains[norm])
            inputs = ((w.q, w.k, w.v), (w.o,), (w.gate, w.up), (w.down,))
            row[QKV_CODED : DOWN_CODED + 1] = [_coded(group) for group in inputs]
        numbers = Numbers(
            config.hidden_size, config.vocab_size, self._number(weights.embedding), self._number(weights.head),
            int(_coded([weights.head])), 0,
            np.float32(config.rms_norm_eps), np.float32(config.attention_scale),
            np.float32(config.attn_logit_softcapping or 0.0), np.float32(config.final_logit_softcapping or 0.0),
            np.float32(np.sqrt(np.float64(config.hidden_size))),
        )  # fmt: skip
        matrices = np.array([row for _, row in self._rows.values()], np.int64)
        self._tables = (np.concatenate(gains), frequencies, matrices, layers)
        self._numbers = numbers

    @property
    def arenas(self) -> list[tuple[np.dtype, int]]:
        """(type, values) of each. One value at least: an empty arena is never read, but its address is taken."""
        return [(kind, max(1, size)) for kind, size in zip(_TYPES, self._sizes, strict=True)]

    @property
    def bytes(self) -> int:
        """Of all arenas."""
        return sum(kind.itemsize * size for kind, size in self.arenas)

    @property
    def matrices(self) -> tuple[StoredMatrix, ...]:
        return self.weights.matrices

    def fill(self, arenas: Sequence[np.ndarray]) -> Iterator[StoredMatrix]:
        """Pack the matrices into the arenas, one after the other; yields each that is done."""
        for matrix in self.matrices:
            for first, part in matrix.parts():
                _pack(part, first, self._rows[id(matrix)][1], arenas)
            yield matrix

    def packed(self, arenas: Sequence[np.ndarray]) -> Packed:
        """With arenas that have been filled, now or by an earlier process."""
        for array in (*arenas, *self._tables):
            array.flags.writeable = False
        floats, bf16, codes = arenas
        return Packed(floats, bf16, codes, *self._tables, self._numbers)

    def _number(self, matrix: StoredMatrix) -> int:
        return self._rows[id(matrix)][0]

    def _place(self, matrix: StoredMatrix) -> list[int]:
        """Room in its arena; its row of `matrices`."""
        kind, (N, K) = matrix.tensor.type, matrix.shape
        arena, panel, row = BF16_FLOATS if kind is BF16 else FLOATS, K * COLUMNS, [0] * 7
        if kind.quantised:
            minimums = int(kind.minimum is not Minimum.NONE)
            arena, panel = CODES, panel_bytes(K, kind.width, kind.group, kind.block, minimums)
            row = [kind.width, kind.offset, kind.group, kind.block, minimums, panel, 4]
        at = self._sizes[arena]
        self._sizes[arena] += panel_count(N) * panel
        return [arena, N, K, at, *row]


def _coded(matrices: Iterable[StoredMatrix]) -> bool:
    return any(matrix.tensor.type.quantised for matrix in matrices)


def _pack(part: Matrix, first: int, row: list[int], arenas: Sequence[np.ndarray]) -> None:
    """Rows of a matrix from `first` on, a multiple of 64, into their panels."""
    panel = row[BYTES] or row[INPUTS] * COLUMNS
    at = row[AT] + first // COLUMNS * panel
    place = arenas[row[KIND]][at : at + panel_count(part.shape[0]) * panel]
    if isinstance(part, FloatMatrix):
        pack_floats(part.values, place)
    else:
        pack_codes(part.codes, part.block_scales, part.sub_scales, part.width, part.offset, place)


def _frequencies(config: Config) -> tuple[np.ndarray, list[int]]:
    """f32 [ropes, widest E / 2], and which row each layer turns by: layers of the same angles share one."""
    kinds = list(dict.fromkeys((layer.rope, layer.head_dim) for layer in config.layers))
    widest = max(width for _, width in kinds) // 2
    frequencies = np.zeros((len(kinds), widest), np.float32)
    for row, (rope, width) in zip(frequencies, kinds, strict=True):
        if width // 2 != widest:
            raise UnsupportedError("layers with heads of different widths are not supported yet")
        rope_frequencies(rope.theta, np.float32(rope.factor), row)
    return frequencies, [kinds.index((layer.rope, layer.head_dim)) for layer in config.layers]
