"""Spans. A span is a run of consecutive layers, and a slice of the linked program.

Every span but the first needs buffers that an earlier span writes, such as the residual stream. Some buffers are cheap to
compute from others: the output of a norm, the codes of a buffer, and the rope tables. A span computes these buffers again,
so that they are not sent between processes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from gemma_py.errors import InputError
from gemma_py.models import program as o
from gemma_py.models.config import Config
from gemma_py.runtime import program as p
from gemma_py.runtime.cache import bytes_needed
from gemma_py.runtime.program import LinkedProgram
from gemma_py.runtime.runner import CHUNK
from gemma_py.weights.pack import CODES, KIND, matrix_bytes

# Operations that overwrite their target without reading it. Every other operation also reads its target.
_OVERWRITES = (o.EMBED, o.ROPE_TABLE, o.NORM, o.TAKE, o.MEAN, o.TAKE_COLUMNS, o.PREDICT, o.MIX, o.MATMUL, o.EXPERT_MATMUL,
               o.SCORES, o.ATTEND, o.ROUTE)  # fmt: skip
_PRODUCTS = (o.MATMUL, o.EXPERT_MATMUL)
_UNTRACED_ROW = -1


@dataclass(frozen=True)
class Span:
    """Layers first .. end - 1.

    reads: the buffers that the previous span sends, for this span or a later one. writes: the buffers for the next span.
    A buffer is given by its entry in `ModelTables.offsets` and its width.
    """

    first: int
    end: int
    config: Config
    program: LinkedProgram
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"layer {self.first}" if self.end == self.first + 1 else f"layers {self.first} to {self.end - 1}"


def allowed_cuts(config: Config) -> list[int]:
    """Return the layers at which a span may begin, in ascending order. Layer 0 is one of them.

    A layer that reads the KV rows of another layer must be in that layer's span. Otherwise, KV rows would have to be copied
    to another process in every pass.
    """
    count = len(config.layers)
    return [cut for cut in range(count) if all(layer.kv_source >= cut for layer in config.layers[cut:])]


def check_shards(config: Config, shards: int) -> None:
    """Raise InputError if a model cannot be divided into this number of shards."""
    if type(shards) is not int or shards < 1:
        raise InputError(f"shards should be at least 1, found {shards!r:.40}")
    if config.embedding is not None:
        raise InputError("an embedding model cannot be divided into shards")
    allowed, layers = allowed_cuts(config), len(config.layers)
    if shards <= len(allowed):
        return
    if len(allowed) == layers:
        raise InputError(f"the model has {layers} layers, so at most {layers} shards, found {shards}")
    places = ", ".join(map(str, allowed[1:]))
    where = f"after layer 0 only at layers {places}" if places else "only at layer 0"
    raise InputError(
        f"the model can be divided into at most {len(allowed)} shards, found {shards}; a shard can begin {where}, "
        "because layers that share KV rows must stay together"
    )


def choose_cuts(
    config: Config, program: LinkedProgram, shards: int, kv: str, tokens: int, room: Sequence[int] | None = None
) -> list[int]:
    """Return the first layer of each span, and then the number of layers.

    The spans take about equally long to prefill. If a span then needs more memory than its host has, each span needs about the
    same share of its host's memory instead.

    tokens: the number of tokens whose KV rows count as memory. room: the memory of each span's host in bytes
    """
    check_shards(config, shards)
    allowed = allowed_cuts(config)
    cuts = _balanced(allowed, layer_bytes(config, program, kv, 0, output=False), [1] * shards)
    if room is not None:
        sizes = layer_bytes(config, program, kv, tokens)
        if any(sum(sizes[first:end]) > free for (first, end), free in zip(pairwise(cuts), room, strict=True)):
            cuts = _balanced(allowed, sizes, [max(1, free) for free in room])
    return cuts


def _balanced(allowed: Sequence[int], layers: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Return the cuts with which the largest size of a span, divided by the span's room, is as small as possible.

    layers: the size of each layer
    """
    sizes = np.cumsum([0, *layers])
    ends = [*allowed[1:], len(layers)]
    # largest[i][n]: if n spans end at ends[i], the share of the largest span, and the first layer of the last span.
    largest: list[dict[int, tuple[float, int]]] = []
    for number, end in enumerate(ends):
        best = {1: (float(sizes[end]) / rooms[0], 0)}
        for parts in range(2, len(rooms) + 1):
            options = [
                (
                    max(largest[before][parts - 1][0], float(sizes[end] - sizes[ends[before]]) / rooms[parts - 1]),
                    ends[before],
                )
                for before in range(number)
                if parts - 1 in largest[before]
            ]
            if options:
                best[parts] = min(options)
        largest.append(best)
    cuts = [len(layers)]
    for parts in range(len(rooms), 0, -1):
        cuts.insert(0, largest[ends.index(cuts[0])][parts][1])
    return cuts


def layer_bytes(config: Config, program: LinkedProgram, kv: str, tokens: int, output: bool = True) -> list[int]:
    """Return the bytes of each layer's matrices and KV rows.

    output: whether the last layer includes the output matrix, with which a pass multiplies only the rows of wanted logits
    """
    count = len(config.layers)
    sizes = [0] * count
    table = program.model.ops
    for matrix in np.unique(table[np.isin(table[:, p.OP], _PRODUCTS), p.MATRIX]):
        using = table[np.isin(table[:, p.OP], _PRODUCTS) & (table[:, p.MATRIX] == matrix)][0]
        experts = max(1, int(using[p.EXPERTS]))
        layer = int(using[p.LAYER])
        if layer >= count and not output:
            continue
        sizes[min(layer, count - 1)] += sum(
            matrix_bytes(program.model.weights, int(matrix) + expert) for expert in range(experts)
        )
    for owner, stored in zip(config.kv_owners, config.kv_layers, strict=True) if tokens else ():
        alone = replace(config, layers=(replace(stored, kv_source=0),))
        sizes[owner] += bytes_needed(alone, kv, tokens, CHUNK)
    return sizes


def make_spans(config: Config, program: LinkedProgram, cuts: Sequence[int]) -> list[Span]:
    """Divide a linked program. cuts: the first layer of each span, and then the number of layers."""
    starts = [_first_operation(program, cut) for cut in cuts[:-1]]
    ends = [*starts[1:], len(program.model.ops)]
    needs = [_needs(program, start) if start else ([], []) for start in starts]
    widths = _widths(program)
    spans = []
    for number, ((first, end), start, stop) in enumerate(zip(pairwise(cuts), starts, ends, strict=True)):
        again, reads = needs[number]
        writes = needs[number + 1][1] if stop < len(program.model.ops) else []
        layers = tuple(replace(layer, kv_source=layer.kv_source - first) for layer in config.layers[first:end])
        own = replace(config, layers=layers)
        earlier = sum(owner < first for owner in config.kv_owners)
        made = _slice(program, start, stop, again, earlier)
        spans.append(Span(first, end, own, made, _places(program, reads, widths), _places(program, writes, widths)))
    return spans


def _first_operation(program: LinkedProgram, layer: int) -> int:
    """Return the index of the layer's first operation. Operations before layer 0 count as operations of layer 0."""
    layers = program.model.ops[:, p.LAYER]
    if (np.diff(layers) < 0).any():
        raise InputError("the layers of this model cannot be divided, because operations of several layers are mixed")
    return 0 if layer == 0 else int(np.argmax(layers >= layer))


def _buffers_read(op: np.ndarray) -> list[int]:
    buffers = [op[p.SOURCE]] + ([] if op[p.OP] == o.ROPE_TABLE else [op[p.SECOND]])
    if op[p.OP] not in _OVERWRITES and not (op[p.OP] == o.PUT_COLUMNS and op[p.FIRST_COLUMN] == 0):
        buffers.append(op[p.TARGET])
    return [int(buffer) for buffer in buffers if buffer != p.NO_BUFFER]


def _buffers_written(op: np.ndarray) -> list[int]:
    buffers = [op[p.TARGET]]
    if op[p.OP] == o.ROPE_TABLE:
        buffers.append(op[p.SECOND])
    if op[p.OP] in (o.ADD, o.ROUTE):
        buffers.append(op[p.SOURCE])
    return [int(buffer) for buffer in buffers if buffer != p.NO_BUFFER]


def _reads_codes(program: LinkedProgram, op: np.ndarray) -> bool:
    return bool(op[p.OP] in _PRODUCTS and program.model.weights.matrices[op[p.MATRIX], KIND] == CODES)


def _needs(program: LinkedProgram, start: int) -> tuple[list[int], list[int]]:
    """Return the earlier operations to compute again before operation `start`, and the buffers that must be received."""
    table = program.model.ops
    again: set[int] = set()
    received: set[int] = set()
    defined: set[int] = set()
    coded: set[int] = set()
    buffers: list[int] = []
    for op in table[start:]:
        if _reads_codes(program, op) and int(op[p.SLOT]) not in coded:
            coded.add(int(op[p.SLOT]))
            number = _last(table[:start], partial(_quantises, slot=int(op[p.SLOT])))
            source = int(table[number, p.SOURCE])
            if _changed(table[number + 1 : start], source):
                raise InputError(
                    "the layers of this model cannot be divided, because a span reads codes of a buffer that changed later"
                )
            again.add(number)
            buffers.append(source)
        buffers += [buffer for buffer in _buffers_read(op) if buffer not in defined]
        if op[p.OP] == o.QUANTISE:
            coded.add(int(op[p.SLOT]))
        defined.update(_buffers_written(op))
    waiting = sorted(set(buffers))
    while waiting:
        buffer = waiting.pop()
        number = _last(table[:start], partial(_writes, buffer=buffer))
        op = table[number]
        if op[p.ROWS_OF] != o.ALL:
            raise InputError("the layers of this model cannot be divided after an operation that leaves out rows")
        pure = (
            op[p.OP] == o.NORM and op[p.SOURCE] != op[p.TARGET] and not _changed(table[number:start], int(op[p.SOURCE]))
        )
        if op[p.OP] == o.ROPE_TABLE:
            again.add(number)
        elif pure:
            again.add(number)
            if int(op[p.SOURCE]) not in received:
                waiting.append(int(op[p.SOURCE]))
        else:
            received.add(buffer)
    return sorted(again), sorted(received)


def _last(table: np.ndarray, holds: Callable[[np.ndarray], bool]) -> int:
    return next(number for number in range(len(table) - 1, -1, -1) if holds(table[number]))


def _quantises(op: np.ndarray, slot: int) -> bool:
    return bool(op[p.OP] == o.QUANTISE and op[p.SLOT] == slot)


def _writes(op: np.ndarray, buffer: int) -> bool:
    return buffer in _buffers_written(op)


def _changed(table: np.ndarray, buffer: int) -> bool:
    return any(_writes(op, buffer) for op in table)


def _widths(program: LinkedProgram) -> Mapping[int, int]:
    """Return the largest width of each buffer's rows, by the buffer's number."""
    return dict(enumerate(width for _, width in program.buffers.values()))


def _places(program: LinkedProgram, buffers: Sequence[int], widths: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((int(program.model.offsets[buffer]), widths[buffer]) for buffer in buffers)


def _slice(program: LinkedProgram, start: int, stop: int, again: Sequence[int], earlier: int) -> LinkedProgram:
    """Return operations start .. stop - 1, after a phase with the operations `again`.

    earlier: the number of layers with KV rows in earlier spans.
    """
    before = program.model.ops[list(again)].copy()
    own = program.model.ops[start:stop].copy()
    own[:, p.NEXT] += len(before) - start
    own[:, p.COUNTER] += bool(again) - own[0, p.COUNTER]
    own[:, p.KV] -= np.where(own[:, p.KV] >= 0, earlier, 0)
    before[:, [p.NEXT, p.COUNTER, p.BARRIER, p.TRACE]] = len(before), 0, 1, _UNTRACED_ROW
    table = np.concatenate([before, own])
    table.flags.writeable = False
    last = stop == len(program.model.ops)
    return replace(
        program, model=program.model._replace(ops=table), phases=int(table[:, p.COUNTER].max()) + 1,
        outputs=program.outputs if last else 0, gathers=program.gathers if start == 0 else (),
    )  # fmt: skip
