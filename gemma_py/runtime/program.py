"""Linking: a family's program and its packed weights become the tables of integers that the forward pass interprets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gemma_py.kernels.panels import COLUMNS, INPUT_BLOCK
from gemma_py.kernels.rows import rope_frequencies
from gemma_py.models.config import Rope
from gemma_py.models.program import ADD, ATTEND, LOGITS, MATMUL, NORM, QUANTISE, SCORES, STORE, Op, Program
from gemma_py.weights.pack import CODES, KIND, PackedArrays, PackedWeights
from gemma_py.weights.tensors import GatheredTable

# Columns of `ops`. The first ones place an operation in the pass:
#   NEXT: the first operation of the next phase. COUNTER: the number of the phase, whose counter tiles are claimed from.
#   TRACE: the row of the trace that takes the hash of its output, or -1 where a later operation of the phase overwrites
#   that output. BARRIER: whether a barrier follows the phase. ROWS_OF: ALL or WANTED.
# The others are the operation's own; see models/program.py. TARGET, SOURCE and SECOND are numbers of buffers; GAIN is an
# index into `gains`, NUMBER one into `numbers`, and SLOT is where its codes begin in a row of codes.
(OP, LAYER, LABEL, NEXT, COUNTER, TRACE, BARRIER, ROWS_OF, TARGET, SOURCE, SECOND, MATRIX, GAIN, HEADS, WIDTH, KV_HEADS,
 KV, WINDOW, ROPE_ROW, FIRST_COLUMN, STRIDE, NUMBER, SLOT) = range(23)  # fmt: skip
_COLUMNS = 23
NO_BUFFER = -1


class ModelTables(NamedTuple):
    """What every pass reads. All arrays are read-only: for writable ones, numba would compile the pass again."""

    weights: PackedArrays  # its gains are followed by ones, for norms without a gain
    frequencies: np.ndarray  # f32 [ropes, widest E / 2]
    numbers: np.ndarray  # f32: epsilons, scales, caps and factors
    ops: np.ndarray  # int64 [operations, 23]


@dataclass(frozen=True)
class Sizes:
    """How much scratch memory a pass needs. Buffer b of a pass of T rows begins at offsets[b] * T."""

    offsets: np.ndarray  # int64 [buffers]
    floats: int  # in all buffers together, for each row
    codes: int  # in all slots together, for each row
    widest_input: int  # K of the widest matrix of codes
    widest_head: int


class Gather(NamedTuple):
    """Before a pass, the table's rows of its tokens are put into the buffer, whose rows have this width."""

    table: GatheredTable
    buffer: int
    width: int


@dataclass(frozen=True)
class LinkedProgram:
    """A program that can be run. labels: the names of phases; the column LABEL has their numbers."""

    model: ModelTables
    sizes: Sizes
    gathers: tuple[Gather, ...]
    labels: tuple[str, ...]
    layers: int  # how many layer numbers there are in errors and traces: the model's layers, and one more for the head
    phases: int  # the number of phases, which is also the number of tile counters

    @property
    def store_label(self) -> int:
        """The label of the phases that store KV rows."""
        return int(self.model.ops[self.model.ops[:, OP] == STORE, LABEL][0])

    def label(self, name: str) -> int:
        return self.labels.index(name)


def link(program: Program, weights: PackedWeights) -> LinkedProgram:
    """Replace names by numbers, and leave out QUANTISE operations whose codes no matrix reads."""
    ops = _needed(program, weights)
    names = [name for name in program.widths if name != LOGITS]
    offsets, floats = _offsets([program.widths[name] for name in names], COLUMNS)
    buffers = {name: number for number, name in enumerate([*names, LOGITS])}
    slots, codes = _slots(ops)
    ones = len(weights.arrays.gains)  # where the gain of ones begins
    frequencies = _frequencies(program.ropes)
    numbers: dict[tuple[float, float], int] = {}
    labels = tuple(dict.fromkeys(op.phase.name for op in ops))
    layers = max(op.phase.layer for op in ops) + 1

    table = np.zeros((len(ops), _COLUMNS), np.int64)
    for row, op in zip(table, ops, strict=True):
        phase = op.phase
        label = labels.index(phase.name)
        pair = (program.config.rms_norm_eps, 0.0) if op.kind in (NORM, ADD) else op.numbers
        row[[OP, LAYER, LABEL, ROWS_OF]] = op.kind, phase.layer, label, phase.rows
        row[TRACE] = phase.layer * len(labels) + label
        row[[TARGET, SOURCE, SECOND]] = [buffers.get(name, NO_BUFFER) for name in (op.target, op.source, op.second)]
        row[MATRIX] = weights.matrices.get(op.tensor, -1)
        row[GAIN] = ones if op.kind == NORM and not op.tensor else weights.gains.get(op.tensor, -1)
        row[[HEADS, WIDTH, KV_HEADS, KV, WINDOW, ROPE_ROW, FIRST_COLUMN, STRIDE]] = (
            op.heads, op.width, op.kv_heads, op.kv, op.window, op.rope, op.first, op.stride,
        )  # fmt: skip
        row[NUMBER] = 2 * numbers.setdefault(pair, len(numbers))
        row[SLOT] = slots.get(id(op if op.kind == QUANTISE else op.codes), 0)
    _fill_phase_columns(table, ops)

    model = ModelTables(
        weights.arrays._replace(gains=_read_only(_with_ones(program, weights.arrays))),
        frequencies, _read_only(np.array(list(numbers), np.float32).reshape(-1)), _read_only(table),
    )  # fmt: skip
    widest = max((op.width for op in ops if op.kind == QUANTISE), default=0)
    heads = max((op.width for op in ops if op.kind == ATTEND), default=0)
    sizes = Sizes(np.array(offsets, np.int64), floats, codes, widest, heads)
    gathers = tuple(
        Gather(weights.tables[tensor], buffers[target], program.tensors[tensor].shape[1])
        for tensor, target in program.gathers
    )
    return LinkedProgram(model, sizes, gathers, labels, layers, phases=int(table[:, COUNTER].max()) + 1)


def _needed(program: Program, weights: PackedWeights) -> list[Op]:
    """The operations without QUANTISE where only matrices of floats would read the codes."""
    matrices = weights.arrays.matrices
    reading = [op for op in program.ops if op.kind == MATMUL and matrices[weights.matrices[op.tensor], KIND] == CODES]
    wanted = {id(op.codes) for op in reading}
    return [op for op in program.ops if op.kind != QUANTISE or id(op) in wanted]


def _slots(ops: Sequence[Op]) -> tuple[dict[int, int], int]:
    """Where in a row of codes each QUANTISE operation's codes begin, by the operation's `id`, and the length of such a row.

    A slot is used again once no later operation reads its codes.
    """
    last_read = {id(op.codes): number for number, op in enumerate(ops) if op.codes is not None}
    slots: dict[int, int] = {}
    widths: list[int] = []
    busy: list[int] = []  # the number of the last operation that reads each slot
    for number, op in enumerate(ops):
        if op.kind == QUANTISE:
            slot = next((slot for slot, until in enumerate(busy) if until < number), len(busy))
            if slot == len(busy):
                busy.append(0)
                widths.append(0)
            busy[slot], widths[slot], slots[id(op)] = last_read[id(op)], max(widths[slot], op.width), slot
    offsets, size = _offsets(widths, INPUT_BLOCK)
    return {made: offsets[slot] for made, slot in slots.items()}, size


def _fill_phase_columns(table: np.ndarray, ops: Sequence[Op]) -> None:
    """Fill the columns NEXT, COUNTER, BARRIER and TRACE."""
    starts = [at for at, op in enumerate(ops) if at == 0 or op.phase is not ops[at - 1].phase]
    for counter, (first, end) in enumerate(zip(starts, [*starts[1:], len(ops)], strict=True)):
        rows, kinds = table[first:end], {op.kind for op in ops[first:end]}
        rows[:, NEXT], rows[:, COUNTER] = end, counter
        # No barrier before attention: it waits for the KV rows that it reads, and so for all that was written before they were published.
        follows = ops[end].kind if end < len(ops) else -1
        rows[:, BARRIER] = not (STORE in kinds and follows in (SCORES, ATTEND) and ops[end].kv == int(rows[-1, KV]))
        for at in range(first, end):
            later = table[at + 1 : end]
            overwritten = ops[at].kind < MATMUL and table[at, TARGET] in later[:, TARGET]
            if overwritten and table[at, TARGET] != NO_BUFFER:
                table[at, TRACE] = -1


def _offsets(widths: Sequence[int], step: int) -> tuple[list[int], int]:
    """The offset of each part when parts of these widths lie one after another, each rounded up to a multiple of `step`;
    and the size of all."""
    ends = np.cumsum([0, *(-(-width // step) * step for width in widths)])
    return [int(end) for end in ends[:-1]], int(ends[-1])


def _with_ones(program: Program, arrays: PackedArrays) -> np.ndarray:
    widest = max((op.width for op in program.ops if op.kind == NORM and not op.tensor), default=0)
    return np.concatenate([arrays.gains, np.ones(widest, np.float32)])


def _frequencies(ropes: Sequence[tuple[Rope, int]]) -> np.ndarray:
    """f32 [ropes, widest E / 2]. Of each row, the first E / 2 are used, where E is the width of the rope's heads."""
    made = np.zeros((len(ropes), max((width // 2 for _, width in ropes), default=0)), np.float32)
    for row, (rope, width) in zip(made, ropes, strict=True):
        rope_frequencies(rope.theta, np.float32(rope.factor), rope.turning(width), row[: width // 2])
    return _read_only(made)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
