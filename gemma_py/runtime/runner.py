"""Runs tokens through a model on a team: owns scratch, compiles once, keeps sequences apart."""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gemma_py.errors import UnsupportedError, check_context
from gemma_py.kernels.attention import LANES, scratch_size
from gemma_py.kernels.matmul import CodedRows, unpack_buffer_sizes
from gemma_py.kernels.memory import aligned
from gemma_py.kernels.panels import INPUT_BLOCK, UnpackBuffer
from gemma_py.models.config import Config
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.compiling import mark_compiled
from gemma_py.runtime.forward import COUNTERS, PHASES, UNTRACED, Batch, Scratch, Trace, forward
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.team import Team
from gemma_py.weights.pack import Packed

CHUNK = 512  # tokens of a pass unless told otherwise
NO_TRACE = Trace(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))


def new_trace(config: Config, T: int) -> Trace:
    """For one pass of T tokens; [(L + 1) * COUNTERS, T] each."""
    shape = ((len(config.layers) + 1) * COUNTERS, T)
    return Trace(np.full(shape, UNTRACED, np.int64), np.full(shape, -1, np.int64))


@dataclass(frozen=True)
class Part:
    """What a pass does for one sequence: some tokens more, and logits of so many of the last of them."""

    cache: Cache
    tokens: list[int]
    logits: int = 1


class Runner:
    """One pass at a time, whichever Python thread asks; sequences differ by their cache alone."""

    def __init__(
        self, packed: Packed, config: Config, workers: int, deadline: float = 5.0, kv: str = "float32"
    ) -> None:
        if any(layer.kv_source != number for number, layer in enumerate(config.layers)):
            raise UnsupportedError("layers that share another's keys and values are not supported yet")
        self.config, self.kv = config, kv
        self.team = Team(workers, deadline, PHASES)
        self.packed = packed
        self.instruments = Instruments()
        self._lock = threading.Lock()
        self._scratch: Scratch | None = None
        self._rows = 0
        self._compile()
        _runners.add(self)

    def run(
        self,
        cache: Cache,
        tokens: list[int],
        all_logits: bool,
        trace: Trace = NO_TRACE,
        limit: int | None = None,
        ahead: int = 0,
    ) -> np.ndarray:
        """Logits [V] of the last token or [T, V] of all. The cache gains the tokens only if everything went well.

        limit: positions that the cache may hold, checked while nobody else can add any.
        ahead: tokens that the caller will run next.
        trace: of `new_trace`, filled; logits are traced only where all are asked for.
        """
        T = len(tokens)
        with self._lock:
            if limit is not None:
                check_context(limit, T, after=cache.position)
            cache.reserve(T, ahead)
            (logits,) = self._pass([Part(cache, tokens, T if all_logits else 1)], trace)
        return logits if all_logits else logits[0]

    def run_together(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """One pass for several sequences: each part's logits, [logits, V]. All the caches gain their tokens, or none."""
        with self._lock:
            for part in parts:
                part.cache.reserve(len(part.tokens))
            return self._pass(parts, NO_TRACE)

    def _pass(self, parts: Sequence[Part], trace: Trace) -> list[np.ndarray]:
        """The caches have room for it."""
        if self.instruments.poison:
            for part in parts:
                part.cache.forget_uncommitted()
        batch = _batch(parts)
        longest = max(part.cache.position for part in parts) + 1
        scratch, layers = self._scratch_for(len(batch.tokens), longest), len(self.config.layers)
        logits = np.empty(sum(part.logits for part in parts) * self.config.vocab_size, np.float32)
        try:
            self.team.run(
                forward, self.packed, scratch, batch, logits, trace,
                marks=[part.cache.position for part in parts] * layers, claims=(layers + 1) * COUNTERS,
                held=[part.cache.layers for part in parts], trial=self.instruments.trial, profile=self.instruments.profile,
            )  # fmt: skip
        except BaseException:
            if not self.team.settled:
                self._scratch = None  # somebody may still write there
                for part in parts:
                    part.cache.abandon()
            raise
        for part in parts:
            part.cache.commit(part.tokens)
        ends = np.cumsum([part.logits for part in parts])
        return np.split(logits.reshape(-1, self.config.vocab_size), ends[:-1])

    def _compile(self) -> None:
        """Before any worker starts, in the calling thread; from the disk where it has been done before."""
        batch, logits = _batch([Part(self.cache(), [])]), np.empty(0, np.float32)
        self.team.compile(forward, self.packed, self._scratch_for(1, 1), batch, logits, NO_TRACE)
        mark_compiled(self.kv)

    def digest(self, cache: Cache) -> list[str]:
        """The cache's, while no pass is under way."""
        with self._lock:
            return cache.digest()

    def set_workers(self, workers: int) -> None:
        """Another number of workers from the next pass on."""
        with self._lock:
            former, self.team = self.team, Team(workers, self.team.deadline, PHASES)
            self._scratch = None  # each worker has a part of it
        former.close()

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
            self._scratch, self._rows = _make_scratch(self.config, self.packed, T, self.team.workers), T
        shared = self.team.workers - 1  # fewer positions than workers are shared by some of them
        if len(self._scratch.scores) < shared * keys * LANES:
            self._scratch = self._scratch._replace(scores=aligned(shared * keys * 3 // 2 * LANES))
        if self.instruments.poison:
            for array in _floats_of(self._scratch):
                array.fill(np.nan)
        return self._scratch

    def close(self) -> None:
        self.team.close()


def _batch(parts: Sequence[Part]) -> Batch:
    """As the kernel takes them. Rows are counted through all parts, and so are the rows of logits."""
    segments = np.empty((len(parts), 3), np.int64)
    wanted = np.full(sum(len(part.tokens) for part in parts), -1, np.int64)
    first = made = 0
    for number, part in enumerate(parts):
        end = first + len(part.tokens)
        segments[number] = first, end, part.cache.position - first
        wanted[end - part.logits : end] = np.arange(made, made + part.logits)
        first, made = end, made + part.logits
    tokens = np.array([token for part in parts for token in part.tokens], np.int64)
    tables = np.stack([part.cache.places() for part in parts])
    return Batch(tokens, segments, tables, wanted, np.empty(0, parts[0].cache.dtype))


_runners: "weakref.WeakSet[Runner]" = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child, whoever held a lock is gone, and a pass that was under way will never end."""
    for runner in list(_runners):
        runner._lock = threading.Lock()
        runner._scratch = None


os.register_at_fork(after_in_child=_after_fork)


def _make_scratch(config: Config, packed: Packed, T: int, workers: int) -> Scratch:
    D, layers = config.hidden_size, config.layers
    HE = max(y.num_attention_heads * y.head_dim for y in layers)
    GE = max(y.num_key_value_heads * y.head_dim for y in layers)
    F = max(y.intermediate_size for y in layers)
    widest = max(D, HE, F)
    ropes = T * packed.frequencies.size

    def floats(count: int) -> np.ndarray:
        return aligned(max(1, count))

    blocks = T * (widest // INPUT_BLOCK + 1)
    coded = CodedRows(
        aligned(T * widest, np.int16), aligned(2 * T * widest, np.int8),
        floats(blocks), floats(blocks), floats(blocks), floats(2 * blocks),
    )  # fmt: skip
    panel, scales = (workers * size for size in unpack_buffer_sizes(widest))
    unpacked = UnpackBuffer(aligned(panel, np.int16), floats(scales), floats(scales))
    x, n, chosen, q, k, v, a, y, gate, up = (floats(T * width) for width in (D, D, D, HE, GE, GE, HE, D, F, F))
    attention = floats(workers * scratch_size(max(y.head_dim for y in layers)))
    return Scratch(
        x, n, chosen, q, k, v, a, y, gate, up, coded, unpacked, floats(ropes), floats(ropes), attention, floats(0)
    )


def _floats_of(part: object) -> Iterator[np.ndarray]:
    """All arrays of floats of the scratch."""
    if isinstance(part, tuple):
        for inner in part:
            yield from _floats_of(inner)
    elif isinstance(part, np.ndarray) and part.dtype == np.float32:
        yield part
