"""The runner of a model whose layers are divided among shards.

    first shard  --rows-->  second shard  --rows-->  ...  --rows-->  last shard, in this process  -->  logits

The engine uses `Shards` like a `Runner`. The KV rows are in the shards. A `ShardedCache` has only the tokens, and the number by
which the shards find their caches of the sequence. Orders that need no result are collected, and go to the shards together with
the next pass.

If an order is interrupted, perhaps only some shards have carried out the order. Then all shards drop all caches, and a
sequence's tokens are computed again before the sequence's next pass. The new KV rows have the bits of the old ones, so no answer
changes.
"""

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np

from gemma_py.cluster.caches import ShardedCache, ShardedPrefixCache
from gemma_py.cluster.shard import (
    Begin,
    Drop,
    FindPrefix,
    Order,
    PassResult,
    Prepare,
    Read,
    Reset,
    Restore,
    Rows,
    Run,
    SequencePart,
    Shard,
    SpanRunner,
)
from gemma_py.cluster.spans import Span
from gemma_py.errors import ComputationError, InputError, ShardError
from gemma_py.models.config import Config
from gemma_py.runtime.cache import Cache, check_context
from gemma_py.runtime.prefix_cache import PrefixCache
from gemma_py.runtime.program import LinkedProgram
from gemma_py.runtime.runner import CHUNK, Runner, SequenceInput, SharedTeam
from gemma_py.runtime.trace import UNTRACED, Trace

# A shard's error is raised only after at least this many attempts, and after the patience of the hosts.
_LEAST_ATTEMPTS = 3
_PAUSE = 0.5  # seconds before the second attempt and each later one
_PIECE = 64  # tokens of a piece of a pass
T = TypeVar("T")


class Link(Protocol):
    """Carries orders to a shard, and results back."""

    @property
    def usable(self) -> bool: ...

    def call(self, orders: Sequence[Order], rows: Rows) -> list[Any]:
        """Let the shard carry out orders. If the shard fails, raise ShardError."""

    def set_threads(self, threads: int) -> None: ...

    def close(self) -> None: ...


class LocalLink:
    """The link to the last shard, which is in this process."""

    usable = True

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def call(self, orders: Sequence[Order], rows: Rows) -> list[Any]:
        return self.shard.apply(orders, rows)

    def set_threads(self, threads: int) -> None:
        """Do nothing, because the shard uses the worker team of `Shards`."""

    def close(self) -> None:
        """Do nothing, because `Shards` closes the worker team."""


class Starter(Protocol):
    """patience: how many seconds to try again, if a shard ends or cannot be started.
    overlap: whether a long pass is divided, so that shards compute at the same time; False if all shards are on one machine,
        and the threads of one shard use all its cores
    """

    @property
    def patience(self) -> float: ...

    @property
    def overlap(self) -> bool: ...

    def start(self, number: int) -> Link:
        """Start the shard with this number, or another one in its place."""


class Shards(Runner):
    """Runs passes in several shards. The last shard is in this process, so logits are not sent.

    epoch: how often all caches were dropped.
    """

    def __init__(
        self,
        program: LinkedProgram,
        config: Config,
        shared: SharedTeam,
        kv: str,
        spans: Sequence[Span],
        starter: Starter,
        lost: list[str],
    ) -> None:
        """program: of the whole model. starter: starts all shards except the last.

        lost: holds a failed shard's error until the failed work has been repeated
        """
        # A reentrant lock, because methods that hold the lock call each other.
        shared.lock = threading.RLock()  # type: ignore[assignment]
        super().__init__(program, config, shared, kv)
        self.spans, self.epoch, self._lost = spans, 0, lost
        self._starter, self._process = starter, os.getpid()
        if starter.overlap:
            # A longer pass has more pieces, so the shards wait less while its first and its last piece are computed.
            self.chunk = CHUNK * len(spans)
        self.local = Shard(SpanRunner(spans[-1], shared, kv))
        self._orders: list[Order] = []
        self._blocks = self._last_number = 0
        # (epoch, number) of each garbage-collected cache. A deque, because garbage collection may append at any time.
        self._unused: deque[tuple[int, int]] = deque()
        self._links: list[Link] = []
        try:
            for number in range(len(spans) - 1):
                self._links.append(starter.start(number))
        except BaseException:
            self._close_links()
            raise
        self._links.append(LocalLink(self.local))

    def _compile(self) -> None:
        """Do nothing, because the runner of the last span compiles the forward pass."""

    def cache(self, keep: int = 0) -> ShardedCache:
        return ShardedCache(self, keep)

    def prefix_cache(self, budget: int) -> PrefixCache:
        return ShardedPrefixCache(self, budget)

    def run(
        self,
        cache: Cache,
        tokens: list[int],
        all_logits: bool,
        limit: int | None = None,
        ahead: int = 0,
        guesses: int = 0,
    ) -> np.ndarray:
        T = len(tokens)
        with self.locked():
            if limit is not None:
                check_context(limit, T, after=cache.position)
            (logits,) = self._pass([SequenceInput(cache, tokens, T if all_logits else 1, guesses)], ahead)
        return logits if all_logits else logits[0]

    def _pass(self, inputs: Sequence[SequenceInput], ahead: int = 0) -> list[np.ndarray]:
        for entry in inputs:
            if not 0 <= entry.guesses < len(entry.tokens):
                raise InputError("each sequence of a pass needs a token that is not a guess")
            entry.cache.reject_guesses()
        with self.locked():
            logits = self._again_after_faults(lambda: self._run(inputs, ahead))
        for cache, tokens, _, guesses in inputs:
            known = len(tokens) - guesses
            cache.commit(tokens[:known], tokens[known:])
        return logits

    def _run(self, inputs: Sequence[SequenceInput], ahead: int) -> list[np.ndarray]:
        for entry in inputs:
            self._make_current(entry.cache)
        parts = [
            SequencePart(_number(cache), tokens, rows, guesses, len(tokens)) for cache, tokens, rows, guesses in inputs
        ]
        return self._run_parts(parts, ahead, self.instruments.traces)

    def _run_parts(self, parts: Sequence[SequencePart], ahead: int, traces: list[Trace] | None) -> list[np.ndarray]:
        """Run a pass. Return the logits of each sequence."""
        mine = self.local.runner.instruments
        mine.fault_plan, mine.profile = self.instruments.fault_plan, self.instruments.profile
        whole = traces is not None or len(self._links) == 1 or not self._starter.overlap
        pieces = [parts] if whole else divided(parts, _PIECE)
        orders: list[list[Order]] = [
            [Run(piece, ahead, self.instruments.poison, traces is not None)] for piece in pieces
        ]
        orders[0][:0] = self._pending()
        made = self._pipelined(orders)
        if traces is not None:
            traces.append(_joined([result.trace for result in made[0] if result.trace is not None]))
        logits: dict[int, list[np.ndarray]] = {part.cache: [] for part in parts}
        for piece, results in zip(pieces, made, strict=True):
            for part, rows in zip(piece, results[-1].logits, strict=True):
                logits[part.cache].append(rows)
        return [rows[0] if len(rows) == 1 else np.concatenate(rows) for rows in logits.values()]

    def _pipelined(self, orders: Sequence[Sequence[Order]]) -> list[list[PassResult]]:
        """Run the pieces of a pass. Return for each piece the results of all shards.

        A shard runs a piece when the shard before has run it. Meanwhile, the shard before runs the next piece.

        orders: for each piece, whose last order is the `Run`
        """
        made: list[list[PassResult]] = [[] for _ in orders]
        if len(orders) == 1:
            rows: Rows = ()
            for link in self._links:
                made[0].append(link.call(orders[0], rows)[-1])
                rows = made[0][-1].rows
            return made
        waiting: list[queue.SimpleQueue[Rows | None]] = [queue.SimpleQueue() for _ in range(len(self._links) + 1)]
        failed = threading.Event()

        def run_pieces(number: int) -> None:
            try:
                for piece, results in zip(orders, made, strict=True):
                    rows = waiting[number].get() if number else ()
                    if rows is None or failed.is_set():
                        return
                    results.append(self._links[number].call(piece, rows)[-1])
                    waiting[number + 1].put(results[-1].rows)
            except BaseException:
                failed.set()
                raise
            finally:
                waiting[number + 1].put(None)  # after the last rows, or instead of them

        last = len(self._links) - 1
        with ThreadPoolExecutor(last, "gemma_py-shards") as pool:
            others = [pool.submit(run_pieces, number) for number in range(last)]
            run_pieces(last)
        for other in others:
            other.result()
        return made

    def set_workers(self, workers: int) -> None:
        with self.locked():
            for link in self._links:
                link.set_threads(workers)
            super().set_workers(workers)

    def close(self) -> None:
        self._close_links()
        super().close()

    def _close_links(self) -> None:
        for link in self._links:
            link.close()

    # --- for ShardedCache and ShardedPrefixCache ----------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock. Raise ComputationError in a forked process, which must not write to its parent's pipes."""
        if os.getpid() != self._process:
            raise ComputationError("an engine with shards cannot be used in a forked process")
        with self.shared.lock:
            yield

    def order(self, order: Order) -> None:
        """Collect an order, which is sent before the next request to the shards."""
        self._orders.append(order)

    def read_all(self, cache: ShardedCache, method: str, *arguments: int) -> list[Any]:
        """Call a method of each shard's cache."""

        def read() -> list[Any]:
            self._make_current(cache)
            return self._deliver(Read(cache.number, method, arguments))

        with self.locked():
            return self._again_after_faults(read)

    def read_layer(self, cache: ShardedCache, method: str, layer: int, *arguments: int) -> Any:
        """Call a method of a cache, in the shard that has a layer. layer: an index into `config.kv_layers`"""

        def read() -> Any:
            self._make_current(cache)
            self._deliver()
            number = layer
            for link, span in zip(self._links, self.spans, strict=True):
                count = len(span.config.kv_layers)
                if number < count:
                    return link.call([Read(cache.number, method, (number, *arguments))], ())[0]
                number -= count
            raise IndexError(f"there are {len(self.config.kv_layers)} layers with KV rows, found number {layer}")

        with self.locked():
            return self._again_after_faults(read)

    def restore(self, cache: ShardedCache, ids: list[int], kv_rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        layers = len(self.config.kv_layers)
        if len(kv_rows) != layers:
            found = "more" if len(kv_rows) > layers else len(kv_rows)
            raise InputError(f"the KV rows should have {layers} layers, found {found}")
        whole = Cache(self.config, kv=self.kv)
        for number, layer_rows in enumerate(kv_rows):
            whole._check_restorable(number, len(ids), layer_rows)

        def fill() -> None:
            self._make_current(cache)
            self._deliver()
            rest = list(kv_rows)
            for link, span in zip(self._links, self.spans, strict=True):
                count = len(span.config.kv_layers)
                link.call([Restore(cache.number, ids, rest[:count])], ())
                del rest[:count]

        with self.locked():
            self._again_after_faults(fill)

    def keep_prefixes(self, blocks: int) -> None:
        """Drop all caches, and create empty prefix caches of `blocks` blocks."""
        with self.locked():
            self._blocks = blocks
            self._begin_again()

    def find_prefix(self, cache: ShardedCache, ids: list[int]) -> int:
        """Copy the longest cached prefix to the empty caches of all shards. Return the number of copied tokens."""

        def find() -> int:
            self._make_current(cache)
            counts = self._deliver(FindPrefix(cache.number, ids))
            if len(set(counts)) != 1:
                raise ComputationError(f"the shards have different prefixes, of {', '.join(map(str, counts))} tokens")
            return int(counts[0])

        with self.locked():
            return self._again_after_faults(find)

    # --- orders -------------------------------------------------------------------------------------------------------

    def _make_current(self, cache: Cache) -> None:
        """Create the shards' caches of a sequence if they do not exist. After a fault, also compute the tokens again."""
        assert isinstance(cache, ShardedCache)
        if cache.current:
            return
        self._last_number += 1
        number = self._last_number
        weakref.finalize(cache, self._unused.append, (self.epoch, number)).atexit = False
        self.order(Begin(number, cache.keep, cache.poison))
        if cache.prepared is not None:
            self.order(Prepare(number, *cache.prepared))
        for first in range(0, len(cache.ids), self.chunk):
            tokens = cache.ids[first : first + self.chunk]
            left = len(cache.ids) - first - len(tokens)
            self._run_parts([SequencePart(number, tokens, 0, 0, len(tokens))], left, None)
        cache.number, cache.epoch = number, self.epoch

    def _pending(self) -> list[Order]:
        """Replace failed shards. Return the collected orders, and begin a new collection."""
        for number, link in enumerate(self._links):
            if not link.usable:
                link.close()
                self._links[number] = self._starter.start(number)
        orders, self._orders = self._orders, []
        while self._unused:
            epoch, number = self._unused.popleft()
            if epoch == self.epoch:
                orders.append(Drop(number))
        return orders

    def _deliver(self, *orders: Order) -> list[Any]:
        """Send the collected orders, then `orders`, to every shard. Return each shard's result of the last order."""
        sent = [*self._pending(), *orders]
        results = [link.call(sent, ()) for link in self._links]
        return [result[-1] for result in results] if sent else []

    def _again_after_faults(self, action: Callable[[], T]) -> T:
        """Call a function that sends orders. If a shard fails, replace the shard, and call the function again."""
        attempts, began = 0, time.monotonic()
        try:
            while True:
                attempts += 1
                try:
                    with self._drops_caches_on_errors():
                        return action()
                except ShardError as error:
                    if attempts >= _LEAST_ATTEMPTS and time.monotonic() - began > self._starter.patience:
                        raise
                    self._lost[:] = [str(error)]
                    if attempts > 1:
                        time.sleep(_PAUSE)
        finally:
            self._lost.clear()

    @contextmanager
    def _drops_caches_on_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._begin_again()
            raise

    def _begin_again(self) -> None:
        self.epoch += 1
        self._orders = [Reset(self._blocks)]


def _number(cache: Cache) -> int:
    assert isinstance(cache, ShardedCache)
    return cache.number


def divided(parts: Sequence[SequencePart], tokens: int) -> list[list[SequencePart]]:
    """Divide a pass into pieces of about `tokens` tokens. A part with guesses stays whole."""
    pieces: list[list[SequencePart]] = [[]]
    room = tokens
    for part in parts:
        first, end = 0, len(part.tokens)
        while first < end:
            if room <= 0:
                pieces.append([])
                room = tokens
            count = end - first if part.guesses else min(room, end - first)
            # The logits of the sequence are those of its last tokens.
            logits = max(0, min(count, part.logits - (end - first - count)))
            taken = part._replace(tokens=part.tokens[first : first + count], logits=logits, reserved=end - first)
            pieces[-1].append(taken)
            first, room = first + count, room - count
    return pieces


def _joined(traces: Sequence[Trace]) -> Trace:
    """Return the trace of a pass from the traces of its spans. A row is traced in one span only."""
    hashes, workers = traces[0].hashes.copy(), traces[0].workers.copy()
    for trace in traces[1:]:
        traced = trace.hashes != UNTRACED
        hashes[traced], workers[traced] = trace.hashes[traced], trace.workers[traced]
    return Trace(hashes, workers)
