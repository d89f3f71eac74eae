"""Many requests, one engine: a thread of its own admits requests, computes passes and tells each listener the events.

A request waits in a bounded queue until fewer than `parallel` are running and the memory for all the keys and values that it
may need is free. Once admitted, it has a part in every pass: a token of its answer, or as much of its prompt as the pass has
rows for. Its results do not depend on the other requests, not by a bit. Before every pass, cancelled requests leave and
waiting ones are admitted.
"""

import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemma_py import machine
from gemma_py.errors import ComputationError, ContextError, GemmaError, InputError, Overloaded, WorkerError
from gemma_py.generate.core import Generation, Request
from gemma_py.generate.engine import Engine
from gemma_py.generate.events import Event, Failed, Finished, Generated, Listener, PrefillProgress, Scored, Usage
from gemma_py.generate.sampling import ROWS_AT_ONCE
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS, PrefixCache
from gemma_py.runtime.runner import CHUNK, SequenceInput

# How long a pass should take: with prompts alone, as a request can be cancelled between passes; with answers, which pause so long.
_PASS_SECONDS, _PASS_SECONDS_BESIDE = 0.5, 0.15
_FEWEST_ROWS = 8  # of prompts in a pass; with fewer, a pass takes as long
_UNKNOWN_MEMORY, _MOST_PREFIX_BYTES = 4 << 30, 1 << 30
_SLOWEST_STEP = (
    60.0  # seconds without the end of a step, though there is work, after which the scheduler counts as hanging
)


@dataclass(frozen=True)
class Health:
    """why: what is wrong, if anything is. permanent: whether a later pass cannot succeed either. waiting: seconds since the last
    step ended, while there is work; else 0."""

    ok: bool
    why: str
    permanent: bool
    waiting: float


@dataclass(frozen=True)
class SchedulerStats:
    """running, waiting: requests. kv_bytes: reserved by running ones; prefix_bytes: in the prefix cache. The others count
    since the start: requests that hit or missed the prefix cache, and the tokens of the hits; passes, those that failed and
    were tried again, and the tokens computed in them."""

    running: int
    waiting: int
    kv_bytes: int
    prefix_bytes: int
    prefix_hits: int
    prefix_misses: int
    cached_tokens: int
    passes: int
    failed_passes: int
    computed_tokens: int


class Ticket:
    """A request that the scheduler has accepted."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.cancelled = False

    def cancel(self) -> None:
        """End the request within one step, with a Finished event whose reason is "cancelled", unless it has ended already."""
        self.cancelled = True
        self._scheduler._notify()


class _Sequence:
    """A request, waiting or running."""

    def __init__(self, generation: Generation, listener: Listener, ticket: Ticket, kv_bytes: int) -> None:
        self.generation, self.ticket, self.kv_bytes = generation, ticket, kv_bytes
        self._listener = listener
        self.ids = list(generation.prompt)  # followed by the tokens of the answer
        self.prompt = np.array(generation.prompt)
        self.cache: Cache | None = None  # while it runs
        self.cached = 0
        self.scores = 0  # how many of the prompt's tokens have been reported as Scored events
        self.arrived = time.monotonic()
        self.admitted = self.first_token = 0.0

    @property
    def position(self) -> int:
        return 0 if self.cache is None else self.cache.position

    @property
    def pending(self) -> int:
        """Tokens of the prompt and the answer that are not computed yet."""
        return len(self.ids) - self.position

    @property
    def answering(self) -> bool:
        return bool(self.generation.generated)

    @property
    def scoring(self) -> bool:
        """Whether the next tokens are of a prompt whose log probabilities are reported; then each row needs logits."""
        return self.generation.request.scored and not self.answering

    @property
    def prefilling(self) -> bool:
        """Whether it still has tokens to prefill: its prompt, or prompt and answer again after a failed pass. A sequence that
        decodes has one token pending."""
        return not self.answering or self.pending > 1

    def tell(self, event: Event) -> None:
        """Pass an event to the listener. An exception of the listener ends its own request and no other."""
        try:
            self._listener(event)
        except Exception:
            traceback.print_exc()
            self.ticket.cancelled = True

    def usage(self) -> Usage:
        now = time.monotonic()
        return Usage(
            len(self.prompt), self.cached, len(self.generation.generated), (self.admitted or now) - self.arrived,
            (self.first_token or now) - self.arrived, now - self.arrived,
        )  # fmt: skip


def shares(needs: Sequence[int], room: int) -> list[int]:
    """The rows of a pass that each prompt gets. needs: their pending tokens, in the order of arrival.

    Half of the room is for the one that arrived first, so that none waits for ever; the rest is for the shortest.
    """
    given = [0] * len(needs)
    order = sorted(range(len(needs)), key=lambda number: needs[number])
    for number, part in ((0, (room + 1) // 2), *((number, room) for number in order)):
        more = min(part, needs[number] - given[number], room - sum(given))
        given[number] += more
    return given


class Scheduler:
    """Runs all passes of an engine from a thread of its own. Close it before the engine."""

    def __init__(
        self,
        engine: Engine,
        parallel: int = 8,
        queue: int = 64,
        kv_bytes: int | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        """parallel: requests that run at once and share passes. queue: requests that may wait. kv_bytes: for keys and
        values of running requests; a third of the free memory if left out. prefix_bytes: of the prefix cache, 0 for none; a
        sixth of the free memory, and a gigabyte at most, if left out."""
        free = machine.memory() or _UNKNOWN_MEMORY
        self.kv_bytes = free // 3 if kv_bytes is None else kv_bytes
        prefix_bytes = min(free // 6, _MOST_PREFIX_BYTES) if prefix_bytes is None else prefix_bytes
        if parallel < 1 or queue < 0 or self.kv_bytes < 1 or prefix_bytes < 0:
            raise InputError(
                f"a scheduler needs parallel and kv_bytes from 1, queue and prefix_bytes from 0, found {parallel}, "
                f"{self.kv_bytes}, {queue} and {prefix_bytes}"
            )
        self.engine, self.parallel, self.queue = engine, parallel, queue
        self._changed = threading.Condition()  # guards what follows
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._open, self._closed = True, False
        self._error: GemmaError | None = None
        self._trouble: WorkerError | None = None  # why the last pass failed, until one succeeds
        self._stepped = time.monotonic()  # when the last step ended, or the first request arrived after none
        self._request_seconds = 1.0  # running average
        # Used by the scheduler's thread only:
        self._prefixes = PrefixCache(engine.config, engine.kv_type, prefix_bytes)
        self._passes = self._failed = self._computed = 0
        self._row_seconds = 1 / 64  # running average over passes with prompts; a guess at first
        self._thread = threading.Thread(target=self._work, name="gemma_py-scheduler", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Accept a request. An invalid one raises at once, and Overloaded is raised if the queue is full.

        The listener is called from the scheduler's thread and must not block. Its last event is Finished or Failed.
        """
        generation = self.engine.generation(request, least_tokens=0)
        sequence = _Sequence(generation, listener, Ticket(self), self._kv_bytes(generation))
        with self._changed:
            if self._error is not None:
                raise ComputationError(f"the engine has failed: {self._error}")
            if not self._open:
                raise Overloaded("no more requests are accepted: the server is ending", 10.0)
            if len(self._waiting) >= self.queue + max(0, self.parallel - len(self._running)):
                raise Overloaded(f"{len(self._waiting)} requests are waiting already", self._retry_after())
            if self._idle():
                self._stepped = time.monotonic()
            self._waiting.append(sequence)
            self._changed.notify_all()
        return sequence.ticket

    def _kv_bytes(self, generation: Generation) -> int:
        """The most bytes that the request's keys and values may need."""
        prompt, new = len(generation.prompt), generation.max_tokens
        size = self.engine.cache_bytes(prompt + new, BLOCK_TOKENS)
        if size > self.kv_bytes:
            raise ContextError(
                f"{prompt} prompt tokens and {new} new ones need {size / 2**20:.1f} MiB for keys and values; the scheduler has "
                f"{self.kv_bytes / 2**20:.1f}"
            )
        return size

    def _retry_after(self) -> float:
        """Seconds until a place in the queue is likely to be free."""
        return min(60.0, max(1.0, self._request_seconds / self.parallel))

    def health(self) -> Health:
        with self._changed:
            waiting = 0.0 if self._idle() else time.monotonic() - self._stepped
            if self._error is not None:
                return Health(False, str(self._error), True, waiting)
            if not self._thread.is_alive() and not self._closed:
                return Health(False, "the scheduler's thread has ended", True, waiting)
            if self._trouble is not None and not self._idle():
                return Health(False, str(self._trouble), False, waiting)
            if waiting > _SLOWEST_STEP:
                return Health(False, f"no step for {waiting:.0f} s", True, waiting)
            return Health(True, "", False, waiting)

    def stats(self) -> SchedulerStats:
        with self._changed:
            prefixes, used = self._prefixes, sum(sequence.kv_bytes for sequence in self._running)
            return SchedulerStats(
                len(self._running), len(self._waiting), used, prefixes.nbytes, prefixes.hits, prefixes.misses,
                prefixes.hit_tokens, self._passes, self._failed, self._computed,
            )  # fmt: skip

    def drain(self, deadline: float) -> int:
        """Accept no more requests and wait until all have ended. Returns how many were cancelled after `deadline` seconds."""
        with self._changed:
            self._open = False
            self._changed.wait_for(self._idle, max(0.0, deadline))
            left = (*self._waiting, *self._running)
            for sequence in left:
                sequence.ticket.cancelled = True
            self._changed.notify_all()
            # The end takes one more step, or the engine's deadline if the pass hangs.
            self._changed.wait_for(self._idle, _SLOWEST_STEP)
            return len(left)

    def close(self) -> None:
        """Cancel all requests and end the thread. A second call does nothing."""
        self.drain(0.0)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_SLOWEST_STEP)

    def _idle(self) -> bool:
        return not self._waiting and not self._running

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or not self._idle())
                    if self._closed:
                        return
                self._step()
                with self._changed:
                    self._stepped = time.monotonic()
                    self._changed.notify_all()
        except WorkerError as error:
            self._fail(error)
        except Exception as error:
            traceback.print_exc()
            self._fail(ComputationError(f"the scheduler failed: {type(error).__name__}: {error}"))

    def _step(self) -> None:
        """Remove cancelled requests, admit waiting ones, compute one pass, choose tokens."""
        self._remove_cancelled()
        self._admit()
        sequences, inputs = self._plan()
        if not inputs:
            return
        try:
            results = self._pass(inputs)
        except WorkerError as error:
            again, self._trouble = self._trouble is not None, error
            if again:
                raise
            self._failed += 1
            if not error.settled:  # the stalled worker may still write to these caches, so new ones are allocated
                for sequence in sequences:
                    self._allocate(sequence)  # the request is computed again, with the same bits
            return  # the next step tries again
        self._trouble = None
        for sequence, part, logits in zip(sequences, inputs, results, strict=True):
            self._prefixes.insert(part.cache, part.cache.position - len(part.tokens))
            if not sequence.answering:
                sequence.tell(PrefillProgress(sequence.position, len(sequence.prompt), sequence.cached))
            try:
                if sequence.scoring:
                    self._score(sequence, logits)
                if sequence.pending == 0:
                    self._choose(sequence, logits[-1])
            except GemmaError as error:
                self._finish(sequence, Failed(error))

    def _remove_cancelled(self) -> None:
        with self._changed:
            cancelled = [s for s in (*self._waiting, *self._running) if s.ticket.cancelled]
        for sequence in cancelled:
            self._finish(sequence, Finished("cancelled", sequence.usage()))

    def _finish(self, sequence: _Sequence, last: Finished | Failed) -> None:
        """Remove the request and tell its listener. Its place is free before the listener is called."""
        sequence.cache = None
        with self._changed:
            if sequence in self._running:
                self._running.remove(sequence)
                self._request_seconds += 0.2 * (time.monotonic() - sequence.arrived - self._request_seconds)
            else:
                self._waiting.remove(sequence)
        sequence.tell(last)

    def _admit(self) -> None:
        """Start waiting requests, in the order of their arrival, while there are places and memory."""
        for sequence in list(self._waiting):
            used = sum(running.kv_bytes for running in self._running)
            if len(self._running) == self.parallel or used + sequence.kv_bytes > self.kv_bytes:
                return
            if self._being_computed(sequence):
                continue
            sequence.cached, sequence.admitted = self._allocate(sequence), time.monotonic()
            with self._changed:
                self._waiting.remove(sequence)
                self._running.append(sequence)

    def _allocate(self, sequence: _Sequence) -> int:
        """Allocate the request's KV cache and copy its longest cached prefix into it. Returns the number of tokens copied."""
        cache = self.engine.new_cache(BLOCK_TOKENS)
        cache.prepare(len(sequence.prompt) + sequence.generation.max_tokens, CHUNK)
        hit = 0 if sequence.scoring else self._prefixes.restore(cache, sequence.ids)
        sequence.cache = cache
        return hit

    def _being_computed(self, sequence: _Sequence) -> bool:
        """Whether a running request is computing a prefix that this one shares; waiting for it then takes less time."""
        if self._prefixes.capacity == 0:
            return False
        for other in self._running:
            size = min(len(sequence.prompt) - 1, len(other.prompt))
            differ = np.flatnonzero(sequence.prompt[:size] != other.prompt[:size])
            common = (int(differ[0]) if len(differ) else size) // BLOCK_TOKENS * BLOCK_TOKENS
            if not other.answering and max(other.position, BLOCK_TOKENS) < common:
                return True
        return False

    def _plan(self) -> tuple[list[_Sequence], list[SequenceInput]]:
        """The next pass: one token of every answer, and as many tokens of prompts as there is time for."""
        answers = [s for s in self._running if not s.prefilling]
        prompts = [s for s in self._running if s.prefilling]
        seconds = _PASS_SECONDS_BESIDE if answers else _PASS_SECONDS
        room = max(_FEWEST_ROWS, min(CHUNK, int(seconds / self._row_seconds)) - len(answers))
        counts = [1] * len(answers) + (shares([s.pending for s in prompts], room) if prompts else [])
        sequences, inputs, scored = [], [], 0
        for sequence, count in zip((*answers, *prompts), counts, strict=True):
            if sequence.scoring:
                count = min(count, ROWS_AT_ONCE - scored)
                scored += count
            if count and sequence.cache is not None:
                tokens = sequence.ids[sequence.position : sequence.position + count]
                logits = count if sequence.scoring else 1 if count == sequence.pending else 0
                sequences.append(sequence)
                inputs.append(SequenceInput(sequence.cache, tokens, logits))
        return sequences, inputs

    def _pass(self, inputs: list[SequenceInput]) -> list[np.ndarray]:
        """Run one pass. Returns the logits of each input."""
        start = time.monotonic()
        results = self.engine.run_together(inputs)
        rows = sum(len(part.tokens) for part in inputs)
        if rows > len(
            inputs
        ):  # a pass without prompts does not show the time of a row: most of its time is reading the weights
            self._row_seconds += 0.8 * ((time.monotonic() - start) / rows - self._row_seconds)
        self._passes += 1
        self._computed += rows
        return results

    def _score(self, sequence: _Sequence, logits: np.ndarray) -> None:
        """Report the scores of the prompt's tokens that follow those of the pass.    logits: [tokens, V]"""
        if sequence.scores == 0:
            sequence.tell(Scored(sequence.ids[0], None, ()))
            sequence.scores = 1
        # Scores that were reported before the request had to be computed again are not repeated.
        for at in range(sequence.scores, min(sequence.position + 1, len(sequence.ids))):
            row, token = logits[at - 1 - sequence.position], sequence.ids[at]
            sequence.tell(Scored(token, *sequence.generation.score(row, token)))
            sequence.scores += 1

    def _choose(self, sequence: _Sequence, logits: np.ndarray) -> None:
        """Choose the next token of an answer and report it."""
        if sequence.generation.max_tokens == 0:
            self._finish(sequence, Finished("length", sequence.usage()))
            return
        token = sequence.generation.next(logits)
        sequence.ids.append(token.id)
        sequence.first_token = sequence.first_token or time.monotonic()
        sequence.tell(Generated(token, sequence.generation.top))
        if token.finish_reason is not None:
            self._finish(sequence, Finished(token.finish_reason, sequence.usage()))

    def _fail(self, error: GemmaError) -> None:
        """No more passes can be computed: every request fails, and so do those that arrive later."""
        with self._changed:
            self._error = error
            left = [*self._running, *self._waiting]
        for sequence in left:
            self._finish(sequence, Failed(error))
