"""The linker, which turns a program and packed weights into the integer tables that the forward pass interprets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gemma_py.kernels.panels import COLUMNS, INPUT_BLOCK
from gemma_py.kernels.rows import rope_frequencies
from gemma_py.models.config import Rope
from gemma_py.models.program import (
    ADD,
    ATTEND,
    EXPERT_MATMUL,
    LOGITS,
    MATMUL,
    NORM,
    QUANTISE,
    SCORES,
    STORE,
    Op,
    Program,
)
from gemma_py.weights.pack import CODES, INPUTS, KIND, ROWS, PackedArrays, PackedWeights
from gemma_py.weights.tensors import RowTable

# Columns of the table `ops`, which has one row per operation. These columns describe the operation's phase:
#   LAYER: the number of the layer.  LABEL: the index of the phase's name in `LinkedProgram.labels`.
#   NEXT: the index of the next phase's first operation.  BARRIER: whether a barrier follows the phase.
#   COUNTER: the number of the phase and of the phase's tile counter.  ROWS_OF: ALL or WANTED.
# TRACE: the row of the trace for the output's hashes, or -1 if a later operation of the phase overwrites the output.
# The remaining columns are the fields of `Op` in models/program.py, with names replaced by numbers:
#   TARGET, SOURCE, SECOND: buffers.  MATRIX, GAIN: indices into the weights' `matrices` and `gains`.
#   NUMBER: an index into `numbers`.  SLOT: in a pass of T rows, the codes of the input begin at scratch.coded.codes[SLOT * T].
(OP, LAYER, LABEL, NEXT, COUNTER, TRACE, BARRIER, ROWS_OF, TARGET, SOURCE, SECOND, MATRIX, GAIN, HEADS, WIDTH, KV_HEADS,
 KV, WINDOW, BIDIRECTIONAL, ROPE_ROW, FIRST_COLUMN, STRIDE, STREAM, EXPERTS, NUMBER, SLOT) = range(26)  # fmt: skip
_COLUMNS = 26
NO_BUFFER = -1


class ModelTables(NamedTuple):
    """The arrays that every pass reads.

    The arrays are read-only. numba treats writable arrays as another type, for which it would compile the forward pass
    again.
    """

    weights: PackedArrays  # `gains` ends with a vector of ones, for norms without a gain
    frequencies: np.ndarray  # f32 [ropes, widest E / 2]
    numbers: np.ndarray  # f32: the epsilons, scales, caps and factors of the operations
    ops: np.ndarray  # int64 [operations, 26]
    # int64 [buffers]: in a pass of T rows, buffer b begins at scratch.floats[offsets[b] * T]. The number of the logits, which
    # have memory of their own, follows the numbers of these buffers.
    offsets: np.ndarray


@dataclass(frozen=True)
class Sizes:
    """The scratch memory that a pass needs."""

    floats: int  # the width of a row, summed over buffers
    codes: int  # the number of codes per row, summed over the slots of `_slots`
    widest_input: int  # K of the widest quantised matrix
    widest_head: int
    experts: int  # the most experts of an operation; this and the following fields are 0 in models without experts
    routes: int  # the most experts that are chosen for a row
    expert_inputs: int  # K of the widest matrix of an expert
    expert_outputs: int  # N of the widest matrix of an expert


class Gather(NamedTuple):
    """A table that stays in the checkpoint's file.

    Before a pass, the rows of the pass's tokens are copied from the table to a buffer.

    offset: the buffer's entry in `ModelTables.offsets`. width: the width of a row.
    """

    table: RowTable
    offset: int
    width: int


@dataclass(frozen=True)
class LinkedProgram:
    """A program that is linked to weights and ready to run.

    labels: the names of phases; the column LABEL of the table `ops` has indices into `labels`
    """

    model: ModelTables
    sizes: Sizes
    gathers: tuple[Gather, ...]
    labels: tuple[str, ...]
    layers: int  # the number of layers plus one, because errors and traces count the head as a layer
    outputs: int  # the width of a row of logits, or of an embedding
    phases: int  # the number of phases, each of which has one tile counter
    buffers: Mapping[str, tuple[int, int]]  # the entry in `ModelTables.offsets` and the largest width of each buffer
    hidden: str  # the buffer from which the logits are computed
    stores: bool  # whether a pass stores KV rows

    @property
    def store_label(self) -> int:
        return int(self.model.ops[self.model.ops[:, OP] == STORE, LABEL][0])

    def label(self, name: str) -> int:
        return self.labels.index(name)


def link(program: Program, weights: PackedWeights) -> LinkedProgram:
    """Link a program to packed weights: replace names by numbers, and drop QUANTISE operations that no product needs."""
    ops = _needed(program, weights)
    names = [name for name in program.widths if name != LOGITS]
    offsets, floats = _offsets([program.widths[name] for name in names], COLUMNS)
    buffers = {name: number for number, name in enumerate([*names, LOGITS])}
    slots, codes = _slots(ops)
    ones = len(weights.arrays.gains)  # the index of the vector of ones that `_with_ones` appends to `gains`
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
        row[MATRIX] = weights.matrices.get(op.first_matrix, -1)
        row[GAIN] = ones if op.kind == NORM and not op.tensor else weights.gains.get(op.tensor, -1)
        row[[HEADS, WIDTH, KV_HEADS, KV, WINDOW, BIDIRECTIONAL, ROPE_ROW, FIRST_COLUMN, STRIDE, STREAM, EXPERTS]] = (
            op.heads, op.width, op.kv_heads, op.kv, op.window, op.bidirectional, op.rope, op.first, op.stride, op.stream, op.experts,
        )  # fmt: skip
        row[NUMBER] = 2 * numbers.setdefault(pair, len(numbers))
        row[SLOT] = slots.get(id(op if op.kind == QUANTISE else op.codes), 0)
    _fill_phase_columns(table, ops)

    model = ModelTables(
        weights.arrays._replace(gains=_read_only(_with_ones(program, weights.arrays))),
        frequencies, _read_only(np.array(list(numbers), np.float32).reshape(-1)), _read_only(table),
        _read_only(np.array(offsets, np.int64)),
    )  # fmt: skip
    sizes = Sizes(floats, codes, *_widest(table, weights.arrays.matrices))
    gathers = tuple(
        Gather(weights.tables[tensor], offsets[buffers[target]], program.tensors[tensor].shape[1])
        for tensor, target in program.gathers
    )
    outputs, phases = program.widths[LOGITS], int(table[:, COUNTER].max()) + 1
    places = {name: (offsets[buffers[name]], program.widths[name]) for name in names}
    hidden = next((op.source for op in ops if op.target == LOGITS), "")
    stores = any(op.kind == STORE for op in ops)
    return LinkedProgram(model, sizes, gathers, labels, layers, outputs, phases, places, hidden, stores)


def _widest(table: np.ndarray, matrices: np.ndarray) -> tuple[int, int, int, int, int, int]:
    def largest(values: np.ndarray) -> int:
        return int(values.max(initial=0))

    heads, products = table[table[:, OP] == ATTEND], table[table[:, OP] == EXPERT_MATMUL]
    of_experts = matrices[products[:, MATRIX]]
    return (
        largest(matrices[matrices[:, KIND] == CODES, INPUTS]), largest(heads[:, WIDTH]), largest(products[:, EXPERTS]),
        largest(products[:, HEADS]), largest(of_experts[:, INPUTS]), largest(of_experts[:, ROWS]),
    )  # fmt: skip


def _needed(program: Program, weights: PackedWeights) -> list[Op]:
    """Return the program's operations. Leave out a QUANTISE operation if only float matrices read its buffer."""
    matrices = weights.arrays.matrices
    reading = [op for op in program.ops if op.codes and matrices[weights.matrices[op.first_matrix], KIND] == CODES]
    wanted = {id(op.codes) for op in reading}
    return [op for op in program.ops if op.kind != QUANTISE or id(op) in wanted]


def _slots(ops: Sequence[Op]) -> tuple[dict[int, int], int]:
    """Assign to each QUANTISE operation a slot of scratch memory for the codes that the operation writes.

    Return a dict from `id(operation)` to the offset of the slot, and the total size of the slots. A slot is in use until the
    last operation that reads the codes. Then another QUANTISE operation can use the slot.
    """
    last_read = {id(op.codes): number for number, op in enumerate(ops) if op.codes is not None}
    slots: dict[int, int] = {}
    widths: list[int] = []
    busy: list[int] = []  # for each slot, the index of the last operation that reads the slot
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
        # No barrier is needed between STORE and attention to the stored KV rows, because every attention tile waits
        # until the KV rows that it reads are published.
        follows = ops[end].kind if end < len(ops) else -1
        rows[:, BARRIER] = not (STORE in kinds and follows in (SCORES, ATTEND) and ops[end].kv == int(rows[-1, KV]))
        for at in range(first, end):
            later = table[at + 1 : end]
            overwritten = ops[at].kind < MATMUL and table[at, TARGET] in later[:, TARGET]
            if overwritten and table[at, TARGET] != NO_BUFFER:
                table[at, TRACE] = -1


def _offsets(widths: Sequence[int], step: int) -> tuple[list[int], int]:
    """Place parts of these widths one after another. Widths are rounded up to a multiple of `step`.

    Returns the offset of each part, and the total size.
    """
    ends = np.cumsum([0, *(-(-width // step) * step for width in widths)])
    return [int(end) for end in ends[:-1]], int(ends[-1])


def _with_ones(program: Program, arrays: PackedArrays) -> np.ndarray:
    widest = max((op.width for op in program.ops if op.kind == NORM and not op.tensor), default=0)
    return np.concatenate([arrays.gains, np.ones(widest, np.float32)])


def _frequencies(ropes: Sequence[tuple[Rope, int]]) -> np.ndarray:
    """Return the rope frequencies, f32 [ropes, widest E / 2]. A rope of head width E uses the first E / 2 columns."""
    made = np.zeros((len(ropes), max((width // 2 for _, width in ropes), default=0)), np.float32)
    for row, (rope, width) in zip(made, ropes, strict=True):
        rope_frequencies(rope.theta, np.float32(rope.factor), rope.turning(width), row[: width // 2])
    return _read_only(made)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
