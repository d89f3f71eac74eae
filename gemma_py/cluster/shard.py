"""A shard: the runner of a span, with the KV caches and the prefix cache of the span's layers.

A shard knows neither the other shards nor the link that carries its orders. All shards of a model apply equal orders in an
equal sequence, so their caches hold equal tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from gemma_py.cluster.spans import Span
from gemma_py.errors import InputError
from gemma_py.runtime.cache import Cache, bytes_needed
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS, PrefixCache
from gemma_py.runtime.program import Gather
from gemma_py.runtime.runner import Runner, SequenceInput, SharedTeam
from gemma_py.runtime.trace import Trace

Rows = tuple[np.ndarray, ...]  # for each buffer that travels between two spans, f32 [T, width]


class Begin(NamedTuple):
    """Create an empty cache."""

    cache: int
    keep: int
    poison: bool


class Prepare(NamedTuple):
    """Allocate the memory of a cache."""

    cache: int
    tokens: int
    chunk: int


class Accept(NamedTuple):
    """Commit the first guesses of the last pass."""

    cache: int
    tokens: Sequence[int]


class Rewind(NamedTuple):
    cache: int
    position: int


class Drop(NamedTuple):
    cache: int


class Reset(NamedTuple):
    """Free all caches, and create an empty prefix cache of `blocks` blocks."""

    blocks: int


class Insert(NamedTuple):
    """Copy to the prefix cache the blocks that the last pass completed. since: the position at which the pass began."""

    cache: int
    since: int


class FindPrefix(NamedTuple):
    """Copy the longest cached prefix to an empty cache. The result is the number of copied tokens."""

    cache: int
    ids: Sequence[int]


class Restore(NamedTuple):
    """Fill an empty cache with tokens and the KV rows of the span's layers."""

    cache: int
    ids: Sequence[int]
    kv_rows: Sequence[tuple[np.ndarray, np.ndarray]]


class Read(NamedTuple):
    """Call a method that does not change the cache. The result is the method's return value."""

    cache: int
    method: str
    arguments: tuple[int, ...]


class SetThreads(NamedTuple):
    threads: int


class SequencePart(NamedTuple):
    """The tokens of one sequence in a pass. See `SequenceInput`.

    reserved: the number of these tokens, and of the sequence's tokens in the later pieces of the pass
    """

    cache: int
    tokens: list[int]
    logits: int
    guesses: int
    reserved: int


class Run(NamedTuple):
    """Run a pass. The result is a `PassResult`. ahead: see `Runner.run`. traced: whether the result has a trace."""

    parts: Sequence[SequencePart]
    ahead: int
    poison: bool
    traced: bool


Order = Begin | Prepare | Accept | Rewind | Drop | Reset | Insert | FindPrefix | Restore | Read | SetThreads | Run


@dataclass(frozen=True)
class PassResult:
    """rows: the buffers for the next span. logits: one array per sequence, which has columns only in the last span."""

    rows: Rows
    logits: Sequence[np.ndarray]
    trace: Trace | None


class _ReceivedRows:
    """The rows of a buffer, received from the previous span. A pass copies them like rows of an embedding table."""

    def __init__(self) -> None:
        self.rows = np.empty((0, 0), np.float32)

    def gather(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Copy all received rows. The ids are ignored.    rows: f32 [T, width], written"""
        rows[:] = self.rows


class SpanRunner(Runner):
    """Runs the passes of a span. Only one thread may use it at a time."""

    def __init__(self, span: Span, shared: SharedTeam, kv: str) -> None:
        self.span = span
        self._received = [_ReceivedRows() for _ in span.reads]
        received = zip(self._received, span.reads, strict=True)
        gathers = tuple(Gather(table, offset, width) for table, (offset, width) in received)
        program = replace(span.program, gathers=span.program.gathers + gathers)
        super().__init__(program, span.config, shared, kv)

    def run_span(self, inputs: Sequence[SequenceInput], rows: Rows) -> tuple[Rows, list[np.ndarray]]:
        """Run a pass. Return the rows for the next span, and the logits of each sequence.

        rows: the rows that the previous span returned
        """
        if len(rows) != len(self._received):
            raise InputError(f"{self.span} needs rows of {len(self._received)} buffers, found {len(rows)}")
        for table, received in zip(self._received, rows, strict=True):
            table.rows = received
        logits = self._pass(inputs)
        T, scratch = sum(len(entry.tokens) for entry in inputs), self._scratch
        assert scratch is not None
        made = (
            scratch.floats[offset * T : (offset + width) * T].reshape(T, width) for offset, width in self.span.writes
        )
        return tuple(part.copy() for part in made), logits


class Shard:
    """A span's runner and caches. caches: by the number in the order `Begin`."""

    def __init__(self, runner: SpanRunner) -> None:
        self.runner = runner
        self.caches: dict[int, Cache] = {}
        self.prefixes = self._prefix_cache(0)

    def apply(self, orders: Sequence[Order], rows: Rows) -> list[Any]:
        """Carry out orders, and return one result per order. rows: for a `Run`, the rows from the previous span."""
        return [self._apply(order, rows) for order in orders]

    def _apply(self, order: Order, rows: Rows) -> Any:
        match order:
            case Run():
                return self._run(order, rows)
            case Begin(number, keep, poison):
                self.caches[number] = Cache(self.runner.config, poison, self.runner.kv, keep)
            case Prepare(number, tokens, chunk):
                self.caches[number].prepare(tokens, chunk)
            case Accept(number, tokens):
                self.caches[number].accept(tokens)
            case Rewind(number, position):
                self.caches[number].rewind(position)
            case Drop(number):
                del self.caches[number]
            case Reset(blocks):
                self.caches, self.prefixes = {}, self._prefix_cache(blocks)
            case Insert(number, since):
                self.prefixes.insert(self.caches[number], since)
            case FindPrefix(number, ids):
                return self.prefixes.restore(self.caches[number], ids)
            case Restore(number, ids, kv_rows):
                self.caches[number].restore(list(ids), kv_rows)
            case Read(number, method, arguments):
                return getattr(self.caches[number], method)(*arguments)
            case SetThreads(threads):
                self.runner.set_workers(threads)
        return None

    def _run(self, order: Run, rows: Rows) -> PassResult:
        inputs = [
            SequenceInput(self.caches[part.cache], part.tokens, part.logits, part.guesses) for part in order.parts
        ]
        for entry, part in zip(inputs, order.parts, strict=True):
            entry.cache.reserve(part.reserved, order.ahead)
        instruments = self.runner.instruments
        traces: list[Trace] = []
        instruments.poison, instruments.traces = order.poison, traces if order.traced else None
        made, logits = self.runner.run_span(inputs, rows)
        return PassResult(made, logits, traces[0] if traces else None)

    def _prefix_cache(self, blocks: int) -> PrefixCache:
        config, kv = self.runner.config, self.runner.kv
        return PrefixCache(config, kv, blocks * bytes_needed(config, kv, BLOCK_TOKENS, BLOCK_TOKENS))
