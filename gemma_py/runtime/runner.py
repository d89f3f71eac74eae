"""Runs tokens through a model on a team: owns scratch, compiles once, keeps sequences apart."""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gemma_py.kernels.attention_layout import LANES
from gemma_py.kernels.memory import aligned
from gemma_py.models.config import Config
from gemma_py.models.program import ALL, WANTED
from gemma_py.runtime.batch import END_ROW, FIRST, LONGEST, ROWS, Batch, Scratch, new_scratch
from gemma_py.runtime.cache import Cache, check_context
from gemma_py.runtime.compiling import mark_compiled
from gemma_py.runtime.forward import forward
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.program import Linked
from gemma_py.runtime.team import Team
from gemma_py.runtime.trace import NO_TRACE, new_trace

CHUNK = 512  # tokens of a pass unless told otherwise


@dataclass(frozen=True)
class Part:
    """What a pass does for one sequence: some tokens more, and logits of so many of the last of them."""

    cache: Cache
    tokens: list[int]
    logits: int = 1


class Runner:
    """One pass at a time, whichever Python thread asks; sequences differ by their cache alone."""

    def __init__(
        self, program: Linked, config: Config, workers: int, deadline: float = 5.0, kv: str = "float32"
    ) -> None:
        self.program, self.config, self.kv = program, config, kv
        self.team = Team(workers, deadline, program.labels)
        self.instruments = Instruments()
        self._lock = threading.Lock()
        self._scratch: Scratch | None = None
        self._rows = 0
        self._compile()
        _runners.add(self)

    def run(
        self, cache: Cache, tokens: list[int], all_logits: bool, limit: int | None = None, ahead: int = 0
    ) -> np.ndarray:
        """Logits [V] of the last token or [T, V] of all. The cache gains the tokens only if everything went well.

        limit: positions that the cache may hold, checked while nobody else can add any.
        ahead: tokens that the caller will run next.
        """
        T = len(tokens)
        with self._lock:
            if limit is not None:
                check_context(limit, T, after=cache.position)
            cache.reserve(T, ahead)
            (logits,) = self._pass([Part(cache, tokens, T if all_logits else 1)])
        return logits if all_logits else logits[0]

    def run_together(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """One pass for several sequences: each part's logits, [logits, V]. All the caches gain their tokens, or none."""
        with self._lock:
            for part in parts:
                part.cache.reserve(len(part.tokens))
            return self._pass(parts)

    def _pass(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The caches have room for it."""
        if self.instruments.poison:
            for part in parts:
                part.cache.forget_uncommitted()
        T, longest = sum(len(part.tokens) for part in parts), max(part.cache.position for part in parts) + 1
        scratch, program = self._scratch_for(T, longest), self.program
        logits = np.empty(sum(part.logits for part in parts) * self.config.vocab_size, np.float32)
        batch = _batch(parts, self._addresses(scratch, T, logits))
        trace = NO_TRACE
        if self.instruments.traces is not None:
            trace = new_trace(program.layers * len(program.labels), T)
        try:
            self.team.run(
                forward, program.model, scratch, batch, trace,
                marks=[part.cache.position for part in parts] * len(self.config.kv_layers), claims=program.phases,
                held=(logits, [part.cache.layers for part in parts]), instruments=self.instruments,
            )  # fmt: skip
        except BaseException:
            if not self.team.settled:
                self._scratch = None  # somebody may still write there
                for part in parts:
                    part.cache.abandon()
            raise
        if self.instruments.traces is not None:
            self.instruments.traces.append(trace)
        for part in parts:
            part.cache.commit(part.tokens)
        ends = np.cumsum([part.logits for part in parts])
        return np.split(logits.reshape(-1, self.config.vocab_size), ends[:-1])

    def _addresses(self, scratch: Scratch, T: int, logits: np.ndarray) -> np.ndarray:
        """Of the program's buffers in a pass of T rows, and of the logits."""
        places, size = self.program.sizes.places, scratch.floats.itemsize
        made = np.empty(len(places) + 1, np.int64)
        made[:-1] = scratch.floats.ctypes.data + size * T * places
        made[-1] = logits.ctypes.data
        return made

    def set_workers(self, workers: int) -> None:
        """Another team, between two passes."""
        with self._lock:
            former, self.team = self.team, Team(workers, self.team.deadline, self.program.labels)
            self._scratch = None  # each worker has a part of it
        former.close()

    def _compile(self) -> None:
        """Before any worker starts, in the calling thread; from the disk where it has been done before."""
        scratch, logits = self._scratch_for(1, 1), np.empty(0, np.float32)
        batch = _batch([Part(self.cache(), [])], self._addresses(scratch, 0, logits))
        self.team.compile(forward, self.program.model, scratch, batch, NO_TRACE)
        mark_compiled(self.kv)

    def digest(self, cache: Cache) -> list[str]:
        """The cache's, while no pass is under way."""
        with self._lock:
            return cache.digest()

    def rewind(self, cache: Cache, position: int) -> None:
        """The cache's, while no pass is under way."""
        with self._lock:
            cache.rewind(position)

    def reserve(self, cache: Cache, tokens: int) -> None:
        """Room in the cache, while no pass is under way."""
        with self._lock:
            cache.reserve(tokens)

    def cache(self, keep: int = 0) -> Cache:
        """An empty one, for a new session."""
        return Cache(self.config, self.instruments.poison, self.kv, keep)

    def _scratch_for(self, T: int, keys: int) -> Scratch:
        """Room for T rows, and for the scores of single positions after so many keys; kept for later passes."""
        if self._scratch is None or self._rows < T:
            # Made before either is noted: if there is no memory for it, the old one and its size must stay together.
            self._scratch, self._rows = new_scratch(self.program.sizes, T, self.team.workers), T
        shared = self.team.workers - 1  # fewer positions than workers are shared by some of them
        if len(self._scratch.scores) < shared * keys * LANES:
            self._scratch = self._scratch._replace(scores=aligned(shared * keys * 3 // 2 * LANES))
        if self.instruments.poison:
            for array in _floats_of(self._scratch):
                array.fill(np.nan)
        return self._scratch

    def close(self) -> None:
        self.team.close()


def _batch(parts: Sequence[Part], buffers: np.ndarray) -> Batch:
    """As the kernel takes them. Rows are counted through all parts, and so are those whose logits are wanted."""
    T = sum(len(part.tokens) for part in parts)
    rows, positions = np.zeros((2, T), np.int64), np.zeros((2, T), np.int64)
    segments, counts = np.empty((2, len(parts), 3), np.int64), np.zeros((2, 2), np.int64)
    rows[ALL] = np.arange(T)
    first = wanted = 0
    for number, part in enumerate(parts):
        position, end, wanted_end = part.cache.position, first + len(part.tokens), wanted + part.logits
        positions[ALL, first:end] = np.arange(position, position + len(part.tokens))
        rows[WANTED, wanted:wanted_end] = np.arange(end - part.logits, end)
        positions[WANTED, wanted:wanted_end] = positions[ALL, end - part.logits : end]
        segments[ALL, number] = first, end, position - first
        segments[WANTED, number] = wanted, wanted_end, position + len(part.tokens) - wanted_end
        first, wanted = end, wanted_end
    counts[:, ROWS] = first, wanted
    counts[:, LONGEST] = (segments[:, :, END_ROW] - segments[:, :, FIRST]).max(axis=1)
    tokens = np.array([token for part in parts for token in part.tokens], np.int64)
    tables = np.stack([part.cache.places() for part in parts])
    return Batch(tokens, rows, positions, segments, counts, tables, np.empty(0, parts[0].cache.dtype), buffers)


_runners: "weakref.WeakSet[Runner]" = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child, whoever held a lock is gone, and a pass that was under way will never end."""
    for runner in list(_runners):
        runner._lock = threading.Lock()
        runner._scratch = None


os.register_at_fork(after_in_child=_after_fork)


def _floats_of(part: object) -> Iterator[np.ndarray]:
    """All arrays of floats of the scratch."""
    if isinstance(part, tuple):
        for inner in part:
            yield from _floats_of(inner)
    elif isinstance(part, np.ndarray) and part.dtype == np.float32:
        yield part
