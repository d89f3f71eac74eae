"""The runner, which owns the worker team and the scratch memory and runs forward passes."""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gemma_py.errors import InputError
from gemma_py.kernels.attention_layout import LANES
from gemma_py.kernels.memory import aligned
from gemma_py.models.config import Config
from gemma_py.models.program import ALL, WANTED
from gemma_py.runtime.batch import ORIGIN, Batch, Scratch, new_scratch
from gemma_py.runtime.cache import Cache, HiddenStates, check_context
from gemma_py.runtime.compiling import mark_compiled
from gemma_py.runtime.forward import forward
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.program import LinkedProgram
from gemma_py.runtime.team import Team
from gemma_py.runtime.trace import NO_TRACE, new_trace

if TYPE_CHECKING:
    from gemma_py.runtime.prefix_cache import PrefixCache

CHUNK = 512  # the default number of prompt tokens per pass


class SequenceInput(NamedTuple):
    """The tokens of one sequence in a pass.

    logits: for how many of the last tokens to return logits.
    guesses: how many of the last tokens are guesses. A pass commits only the tokens before the guesses to the cache;
    `Runner.accept` commits guesses.
    """

    cache: Cache
    tokens: list[int]
    logits: int = 1
    guesses: int = 0


class SharedTeam:
    """A worker team, and the lock that lets one pass run at a time. The runners of a model and of its draft model share a
    team, so that the workers of one model never take time from the other model's pass.
    """

    def __init__(self, workers: int, deadline: float = 5.0) -> None:
        self.team, self.lock = Team(workers, deadline), threading.Lock()


class Runner:
    """Runs one forward pass at a time. Several Python threads may call a runner; their passes run one after another.

    chunk: the default number of prompt tokens of a pass
    """

    chunk = CHUNK

    def __init__(self, program: LinkedProgram, config: Config, shared: SharedTeam, kv: str = "float32") -> None:
        self.program, self.config, self.shared, self.kv = program, config, shared, kv
        self.instruments = Instruments()
        self._scratch: Scratch | None = None
        # The name of the buffer whose rows are kept after a pass, for the tokens whose logits are returned; "" for none.
        self.kept = ""
        self.kept_rows = np.empty((0, 0), np.float32)  # of the last pass, [tokens whose logits are returned, width]
        # The number of rows and of workers for which the scratch memory has room.
        self._rows = self._workers = 0
        self._compile()
        _runners.add(self)

    @property
    def team(self) -> Team:
        return self.shared.team

    def run(
        self,
        cache: Cache,
        tokens: list[int],
        all_logits: bool,
        limit: int | None = None,
        ahead: int = 0,
        guesses: int = 0,
    ) -> np.ndarray:
        """Run a pass of one sequence, and return the logits [V] of the last token or [T, V] of all tokens.

        If the pass fails, the tokens are not added to the cache.
        limit: the most tokens in the cache. A pass that would exceed the limit raises ContextError.
        ahead: the number of tokens that the caller will run in later passes. The cache reserves room for these tokens too.
        guesses: how many of the last tokens are guesses, which only `accept` adds to the cache.
        """
        T = len(tokens)
        with self.shared.lock:
            if limit is not None:
                check_context(limit, T, after=cache.position)
            cache.reserve(T, ahead)
            (logits,) = self._pass([SequenceInput(cache, tokens, T if all_logits else 1, guesses)])
        return logits if all_logits else logits[0]

    def run_together(self, inputs: Sequence[SequenceInput]) -> list[np.ndarray]:
        """Run one pass of several sequences, and return the logits [logits, V] of each sequence.

        If the pass fails, no tokens are added to any cache.
        """
        with self.shared.lock:
            for entry in inputs:
                entry.cache.reserve(len(entry.tokens))
            return self._pass(inputs)

    def accept(self, cache: Cache, tokens: Sequence[int]) -> None:
        """Call `Cache.accept` while no pass is running."""
        with self.shared.lock:
            cache.accept(tokens)

    def _pass(self, inputs: Sequence[SequenceInput]) -> list[np.ndarray]:
        """Run one pass. The caller has reserved room in the caches."""
        positions, T, keys, wanted = [], 0, 0, 0
        for cache, tokens, rows, guesses in inputs:
            if not 0 <= guesses < len(tokens):
                raise InputError("each sequence of a pass needs a token that is not a guess")
            if self.config.embedding and (cache.position or rows != 1):
                raise InputError(
                    "an embedding model needs every text whole, in one pass, and returns one row for each text"
                )
            positions.append(cache.position)
            # `keys` is needed even for a chunk of many tokens: if the chunk has only one wanted row, several workers can share
            # the attention of this row, and then the scratch memory must hold the scores of all keys.
            T, keys, wanted = T + len(tokens), max(keys, cache.position + len(tokens)), wanted + rows
        for entry in inputs:
            entry.cache.reject_guesses()
            if self.instruments.poison:
                entry.cache.poison_uncommitted()
        scratch, program = self._scratch_for(T, keys), self.program
        logits = np.empty((wanted, program.outputs), np.float32)
        batch = _batch(inputs, logits.reshape(-1))
        if not program.stores:
            # The program stores no KV row at the query's own position, so attention must not read that row. Therefore,
            # attention treats the query as standing one position earlier.
            batch.segments[:, :, ORIGIN] -= 1
        for table, offset, width in program.gathers:
            table.gather(batch.tokens, scratch.floats[offset * T : (offset + width) * T].reshape(T, width))
        trace = NO_TRACE
        if self.instruments.traces is not None:
            trace = new_trace(program.layers * len(program.labels), T)
        if self.instruments.poison:  # the machine code does not check the types of its arguments
            assert self._forward is self.team.compile(forward, program.model, scratch, batch, trace)
        try:
            self.team.run(
                self._forward, program.model, scratch, batch, trace,
                watermarks=positions * len(self.config.kv_layers), counters=program.phases,
                keep_alive=[entry.cache.layers for entry in inputs], instruments=self.instruments,
                phases=program.labels,
            )  # fmt: skip
        except BaseException:
            if not self.team.settled:
                self._scratch = None  # a stalled worker may still write to the scratch memory
                for entry in inputs if program.stores else ():
                    entry.cache.abandon()
            raise
        if self.instruments.traces is not None:
            self.instruments.traces.append(trace)
        if self.kept:
            offset, width = program.buffers[self.kept]
            self.kept_rows = scratch.floats[offset * T : offset * T + wanted * width].reshape(wanted, width).copy()
        parts, first = [], 0
        for cache, tokens, rows, guesses in inputs:
            known, end = len(tokens) - guesses, cache.position + len(tokens)
            if program.stores:
                cache.commit(tokens[:known], tokens[known:])
            if program.stores and self.kept:
                cache.hidden = HiddenStates(end - rows, self.kept_rows[first : first + rows])
            parts.append(logits[first : first + rows])
            first += rows
        return parts

    def set_workers(self, workers: int) -> None:
        """Replace the team by a team of this size, after a running pass has finished."""
        with self.shared.lock:
            former, self.shared.team = self.team, Team(workers, self.team.deadline)
        former.close()

    def _compile(self) -> None:
        """Load the forward pass from the kernel cache on disk, or compile the forward pass."""
        scratch, logits = self._scratch_for(1, 1), np.empty(0, np.float32)
        batch = _batch([SequenceInput(self.cache(), [], 0)], logits)
        self._forward = self.team.compile(forward, self.program.model, scratch, batch, NO_TRACE)
        mark_compiled(self.kv)

    def digest(self, cache: Cache) -> list[str]:
        """Call `Cache.digest` while no pass is running."""
        with self.shared.lock:
            return cache.digest()

    def rewind(self, cache: Cache, position: int) -> None:
        """Call `Cache.rewind` while no pass is running."""
        with self.shared.lock:
            cache.rewind(position)

    def reserve(self, cache: Cache, tokens: int) -> None:
        """Call `Cache.reserve` while no pass is running."""
        with self.shared.lock:
            cache.reserve(tokens)

    def cache(self, keep: int = 0) -> Cache:
        """Return an empty KV cache for a new session."""
        return Cache(self.config, self.instruments.poison, self.kv, keep)

    def prefix_cache(self, budget: int) -> "PrefixCache":
        """Return an empty prefix cache of at most `budget` bytes."""
        from gemma_py.runtime.prefix_cache import PrefixCache  # imported here, because only schedulers need it

        return PrefixCache(self.config, self.kv, budget)

    def _scratch_for(self, T: int, keys: int) -> Scratch:
        """Return scratch memory for T rows and for attention scores of `keys` keys. The memory is kept for later passes."""
        workers = self.team.workers
        if self._scratch is None or self._rows < T or self._workers != workers:
            # The attributes are assigned together, after the allocation. If the allocation fails, `_rows` still matches
            # `_scratch`.
            self._scratch, self._rows, self._workers = new_scratch(self.program.sizes, T, workers), T, workers
        # Workers share positions only if there are more workers than pairs of a sequence and a key/value head. Each pair
        # needs scores for every key.
        shared = workers - 1
        if len(self._scratch.scores) < shared * keys * LANES:
            self._scratch = self._scratch._replace(scores=aligned(shared * keys * 3 // 2 * LANES))
        if self.instruments.poison:
            for array in _floats_of(self._scratch):
                array.fill(np.nan)
        return self._scratch

    def close(self) -> None:
        self.team.close()


def _batch(inputs: Sequence[SequenceInput], logits: np.ndarray) -> Batch:
    """Return the arguments of the kernel. Rows are in the order of the inputs."""
    tokens: list[int] = []
    rows: tuple[list[int], list[int]] = ([], [])
    positions: tuple[list[int], list[int]] = ([], [])
    segments: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
    longest = [0, 0]
    for entry in inputs:
        before, count, position = len(tokens), len(entry.tokens), entry.cache.position
        tokens += entry.tokens
        for kind, computed in ((ALL, count), (WANTED, entry.logits)):
            first, skipped = len(rows[kind]), count - computed
            rows[kind].extend(range(before + skipped, before + count))
            positions[kind].extend(range(position + skipped, position + count))
            segments[kind].append((first, first + computed, position + skipped - first))
            longest[kind] = max(longest[kind], computed)
    counts = [(len(rows[kind]), longest[kind]) for kind in (ALL, WANTED)]
    unused = [0] * (len(tokens) - len(rows[WANTED]))
    rows[WANTED].extend(unused)
    positions[WANTED].extend(unused)
    return Batch(
        np.array(tokens, np.int64), np.array(rows, np.int64), np.array(positions, np.int64), np.array(segments, np.int64),
        np.array(counts, np.int64), np.array([entry.cache.addresses() for entry in inputs]),
        np.empty(0, inputs[0].cache.dtype), logits,
    )  # fmt: skip


_runners: "weakref.WeakSet[Runner]" = weakref.WeakSet()


def _after_fork() -> None:
    """Reset the runners in a forked child. The threads that held locks or ran passes do not exist there."""
    for runner in list(_runners):
        runner.shared.lock = threading.Lock()
        runner._scratch = None


os.register_at_fork(after_in_child=_after_fork)


def _floats_of(part: object) -> Iterator[np.ndarray]:
    """Yield the float32 arrays of a nested tuple of arrays."""
    if isinstance(part, tuple):
        for inner in part:
            yield from _floats_of(inner)
    elif isinstance(part, np.ndarray) and part.dtype == np.float32:
        yield part
