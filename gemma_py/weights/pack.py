"""Packing of a model's weights into the panels that kernels read. A panel holds 16 rows of a matrix (kernels/panels.py).

The panels of all matrices are in three flat arrays, the arenas: float32, bfloat16 and quantised. A table says where each
matrix begins. The array types do not depend on the model, so one compiled forward pass serves every model.

In each arena, the matrices of experts come last and begin at a page boundary. The start of a program then reads only the
pages of the other matrices. The pages of an expert are read when the router first chooses that expert.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gemma_py.formats.blocks import BF16, Minimum
from gemma_py.formats.files import drop_pages
from gemma_py.kernels.panels import COLUMNS, pack_codes, pack_floats, panel_bytes, panel_count
from gemma_py.weights.tensors import (
    FloatMatrix,
    GatheredTable,
    Matrix,
    RowTable,
    StoredMatrix,
    StoredWeights,
    matrices_of,
)

# Columns of `PackedArrays.matrices`. ROWS and INPUTS are N and K of the shape [N, K], and AT is the index in the arena at
# which the matrix begins. The columns from WIDTH on have the fields of `CodePanels`. They are 0 for float matrices.
KIND, ROWS, INPUTS, AT, WIDTH, OFFSET, GROUP, BLOCK, MINIMUMS, BYTES, QUADS = range(11)
FLOATS, BF16_FLOATS, CODES = range(3)  # values of KIND: float32, bfloat16, quantised


class PackedArrays(NamedTuple):
    """The arenas and tables of packed weights.

    The arrays are read-only. numba treats writable arrays as another type, for which it would compile the forward pass
    again.
    """

    floats: np.ndarray  # f32 panels
    bf16: np.ndarray  # bfloat16 panels, as uint16
    codes: np.ndarray  # int8: the bytes of panels of quantised matrices
    gains: np.ndarray  # f32: the gains of all norms, one after another
    matrices: np.ndarray  # int64 [matrices, 11]


@dataclass(frozen=True)
class PackedWeights:
    """Packed weights.

    matrices: for each name of a matrix, the index of the matrix in `arrays.matrices`
    gains: for each name of a gain, the index in `arrays.gains` at which the gain begins
    tables: by name, the matrices that stay unpacked in the checkpoint's file (see `GatheredTable`)
    """

    arrays: PackedArrays
    matrices: Mapping[str, int]
    gains: Mapping[str, int]
    tables: Mapping[str, RowTable]

    def with_tables(self, tables: Mapping[str, RowTable]) -> "PackedWeights":
        return replace(self, tables={**self.tables, **tables})


def drop_weights(arrays: PackedArrays) -> None:
    """Release the memory of mapped weights. A pass then loads only the weights that it reads."""
    for array in arrays:
        drop_pages(array)


def matrix_bytes(arrays: PackedArrays, number: int) -> int:
    """Return the size of a packed matrix. number: the index of the matrix in `arrays.matrices`."""
    row = arrays.matrices[number]
    panels = panel_count(int(row[ROWS]))
    if row[KIND] == CODES:
        return panels * int(row[BYTES])
    return panels * COLUMNS * int(row[INPUTS]) * (arrays.floats if row[KIND] == FLOATS else arrays.bf16).itemsize


# The version of the layout of panels and arenas. Cached files of other versions are ignored.
LAYOUT = 3
_TYPES = tuple(np.dtype(kind) for kind in ("<f4", "<u2", "i1"))  # dtypes of the arenas floats, bf16, codes
PAGE = 4096


class Arena(NamedTuple):
    """The size of an arena. dense, experts: the number of values of dense matrices and of experts' matrices.

    If there are experts, the dense matrices are padded to whole pages.
    """

    kind: np.dtype
    dense: int
    experts: int

    @property
    def size(self) -> int:
        return self.dense + self.experts


class PackingPlan:
    """The tables and arena sizes for a checkpoint, computed from the names, shapes and types of the tensors.

    If two plans have equal tensors, an equal order of matrices and an equal LAYOUT, their arenas have equal bytes.
    """

    def __init__(self, weights: StoredWeights) -> None:
        self.matrices = matrices_of(weights)
        self._dense, self._of_experts = [0] * len(_TYPES), [0] * len(_TYPES)
        self._rows = {id(matrix): (number, self._place(matrix)) for number, matrix in enumerate(self.matrices)}
        for matrix in self.matrices:
            if matrix.of_expert:
                row = self._rows[id(matrix)][1]
                row[AT] += self.arenas[row[KIND]].dense
        self._numbers = {name: self._rows[id(part)][0] for name, part in weights.items() if id(part) in self._rows}
        self._gathered = {name: part for name, part in weights.items() if isinstance(part, GatheredTable)}
        gains = {name: part for name, part in weights.items() if isinstance(part, np.ndarray)}
        offsets = np.cumsum([0, *(len(gain) for gain in gains.values())])
        self._gains = dict(zip(gains, (int(offset) for offset in offsets), strict=False))
        self._tables = (
            np.concatenate([np.zeros(0, np.float32), *gains.values()]),
            np.array([row for _, row in self._rows.values()], np.int64),
        )

    @cached_property
    def arenas(self) -> list[Arena]:
        """The size of each arena. An unused arena has one value, because it must have an address."""
        made = []
        for kind, dense, experts in zip(_TYPES, self._dense, self._of_experts, strict=True):
            step = PAGE // kind.itemsize if experts else 1
            made.append(Arena(kind, -(-dense // step) * step or int(not experts), experts))
        return made

    @property
    def bytes(self) -> int:
        return sum(arena.kind.itemsize * arena.size for arena in self.arenas)

    def fill(self, arenas: Sequence[np.ndarray]) -> Iterator[StoredMatrix]:
        """Pack the matrices into the arenas, and yield each matrix after packing it."""
        for matrix in self.matrices:
            for first, part in matrix.parts():
                _pack(part, first, self._rows[id(matrix)][1], arenas)
            yield matrix

    def packed(self, arenas: Sequence[np.ndarray]) -> PackedWeights:
        for array in (*arenas, *self._tables):
            array.flags.writeable = False
        floats, bf16, codes = arenas
        arrays = PackedArrays(floats, bf16, codes, *self._tables)
        return PackedWeights(arrays, self._numbers, self._gains, self._gathered)

    def _place(self, matrix: StoredMatrix) -> list[int]:
        """Reserve room for a matrix in an arena, and return the matrix's row of the table `matrices`.

        For an expert's matrix, AT counts from the first expert's matrix of the arena.
        """
        kind, (N, K) = matrix.tensor.type, matrix.shape
        arena, panel, row = BF16_FLOATS if kind is BF16 else FLOATS, K * COLUMNS, [0] * 7
        if kind.quantised:
            minimums = int(kind.minimum is not Minimum.NONE)
            arena, panel = CODES, panel_bytes(K, kind.width, kind.group, kind.block, minimums)
            row = [kind.width, kind.offset, kind.group, kind.block, minimums, panel, 4]
        sizes = self._of_experts if matrix.of_expert else self._dense
        at = sizes[arena]
        sizes[arena] += panel_count(N) * panel
        return [arena, N, K, at, *row]


def _pack(part: Matrix, first: int, row: list[int], arenas: Sequence[np.ndarray]) -> None:
    """Pack some rows of a matrix into panels.

    first: the number of the first of these rows, a multiple of 64. row: the matrix's row of the table `matrices`.
    """
    panel = row[BYTES] or row[INPUTS] * COLUMNS
    at = row[AT] + first // COLUMNS * panel
    panels = arenas[row[KIND]][at : at + panel_count(part.shape[0]) * panel]
    if isinstance(part, FloatMatrix):
        pack_floats(part.values, panels)
    else:
        pack_codes(part.codes, part.block_scales, part.sub_scales, part.width, part.offset, panels)
