"""The scheduler: a thread that batches requests, computes their passes and reports events to listeners.

A request waits in a bounded queue until fewer than `parallel` requests run and the request's whole KV cache fits into
the memory. Every pass then computes one token of each answer and a part of each prompt. The other requests of a pass do
not change a request's logits. Between passes, the scheduler removes cancelled requests and admits waiting ones.
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
from gemma_py.generate.embedding import check_generates
from gemma_py.generate.engine import Engine
from gemma_py.generate.events import Event, Failed, Finished, Generated, Listener, PrefillProgress, Scored, Usage
from gemma_py.generate.sampling import ROWS_AT_ONCE
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS, PrefixCache
from gemma_py.runtime.runner import CHUNK, SequenceInput

# Durations of a pass to aim at: of a pass that computes only prompts, and of a pass that also decodes. The second one
# is shorter, because the next token of every answer waits for the end of the pass.
_PASS_SECONDS, _PASS_SECONDS_BESIDE = 0.5, 0.15
_FEWEST_ROWS = 8  # a pass has at least so many prompt tokens, because a smaller pass would hardly be faster
_UNKNOWN_MEMORY, _MOST_PREFIX_BYTES = 4 << 30, 1 << 30
SLOWEST_STEP = 60.0  # seconds after which a step counts as hanging


@dataclass(frozen=True)
class Health:
    """The health of the scheduler.

    why: what is wrong, or an empty string.
    permanent: whether every later pass will fail too.
    waiting: seconds since the end of the last step; 0 if there are no requests.
    """

    ok: bool
    why: str
    permanent: bool
    waiting: float


@dataclass(frozen=True)
class SchedulerStats:
    """Counters of the scheduler.

    running, waiting: the number of requests that run now, and that wait now.
    kv_bytes: the memory reserved for the KV caches of running requests.
    prefix_bytes: the size of the prefix cache.
    prefix_hits: requests since the start for which the prefix cache had a prefix. prefix_misses: the other requests.
    cached_tokens: prompt tokens since the start that were found in the prefix cache.
    passes: passes since the start that succeeded. failed_passes: passes that failed and were repeated.
    computed_tokens: tokens computed since the start.
    """

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
    """A handle to cancel an accepted request."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.cancelled = False

    def cancel(self) -> None:
        """End the request before the next pass. The last event is then Finished with the reason "cancelled"."""
        self.cancelled = True
        self._scheduler._notify()


class _Sequence:
    """A waiting or running request."""

    def __init__(self, generation: Generation, listener: Listener, ticket: Ticket, kv_bytes: int) -> None:
        self.generation, self.ticket, self.kv_bytes = generation, ticket, kv_bytes
        self._listener = listener
        self.ids = list(generation.prompt)
        self.prompt = np.array(generation.prompt)
        self.cache: Cache | None = None  # None while waiting
        self.cached = 0
        self.scores = 0
        self.arrived = time.monotonic()
        self.admitted = self.first_token = 0.0

    @property
    def position(self) -> int:
        return 0 if self.cache is None else self.cache.position

    @property
    def pending(self) -> int:
        """The number of tokens, of prompt and answer, that are not in the KV cache yet."""
        return len(self.ids) - self.position

    @property
    def answering(self) -> bool:
        return bool(self.generation.generated)

    @property
    def scoring(self) -> bool:
        """Whether the next tokens are tokens of a prompt whose log probabilities were requested, so that all logits are
        needed.
        """
        return self.generation.request.scored and not self.answering

    @property
    def prefilling(self) -> bool:
        """Whether the next tokens have to be prefilled. If not, one token is decoded.

        These are the tokens of the prompt. After a failed pass that made the KV cache unusable, the answer is prefilled
        too.
        """
        return not self.answering or self.pending > 1

    def tell(self, event: Event) -> None:
        """Call the listener with an event. If the listener raises an exception, this request is cancelled."""
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
    """Return how many tokens of each prompt to compute in a pass that has room for `room` prompt tokens.

    needs: for each prompt, the number of tokens that are not computed yet, in order of arrival.

    The oldest prompt gets half of the room, so that it never waits for ever. The shortest prompts get the rest.
    """
    given = [0] * len(needs)
    order = sorted(range(len(needs)), key=lambda number: needs[number])
    for number, part in ((0, (room + 1) // 2), *((number, room) for number in order)):
        more = min(part, needs[number] - given[number], room - sum(given))
        given[number] += more
    return given


class Scheduler:
    """Runs all passes of an engine in one thread. Close the scheduler before the engine."""

    def __init__(
        self,
        engine: Engine,
        parallel: int = 8,
        queue: int = 64,
        kv_bytes: int | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        """Start the scheduler's thread.

        parallel: the most requests that run at once.
        queue: the most requests that wait.
        kv_bytes: the memory for the KV caches of running requests; by default, a third of the free memory.
        prefix_bytes: the memory for the prefix cache, 0 for none; by default, a sixth of the free memory and at most 1
        GiB.
        """
        check_generates(engine)
        free = machine.memory() or _UNKNOWN_MEMORY
        self.kv_bytes = free // 3 if kv_bytes is None else kv_bytes
        prefix_bytes = min(free // 6, _MOST_PREFIX_BYTES) if prefix_bytes is None else prefix_bytes
        if parallel < 1 or queue < 0 or self.kv_bytes < 1 or prefix_bytes < 0:
            raise InputError(
                f"parallel and kv_bytes should be at least 1, queue and prefix_bytes at least 0, found parallel {parallel}, "
                f"kv_bytes {self.kv_bytes}, queue {queue} and prefix_bytes {prefix_bytes}"
            )
        self.engine, self.parallel, self.queue = engine, parallel, queue
        self._changed = threading.Condition()  # also the lock of the fields from _changed to _request_seconds
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._open, self._closed = True, False
        self._error: GemmaError | None = None
        self._trouble: WorkerError | None = None  # the error of the last pass; None if the pass succeeded
        # When the last step ended, or when a request arrived while there was nothing to do.
        self._stepped = time.monotonic()
        self._request_seconds = 1.0  # running average of the duration of a request
        # Only the scheduler's thread writes the fields below.
        self._prefixes = PrefixCache(engine.config, engine.kv_type, prefix_bytes)
        self._passes = self._failed = self._computed = 0
        self._row_seconds = 1 / 64  # running average of seconds per token in passes with prompts
        self._thread = threading.Thread(target=self._work, name="gemma_py-scheduler", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Accept a request. An invalid request raises InputError or ContextError, a full queue Overloaded.

        The listener is called in the scheduler's thread and must not block. The last event is Finished or Failed.
        """
        generation = self.engine.generation(request, least_tokens=0)
        sequence = _Sequence(generation, listener, Ticket(self), self._kv_bytes(generation))
        with self._changed:
            if self._error is not None:
                raise ComputationError(f"the engine has failed: {self._error}")
            if not self._open:
                raise Overloaded("the server is shutting down and accepts no more requests", 10.0)
            if len(self._waiting) >= self.queue + max(0, self.parallel - len(self._running)):
                raise Overloaded(f"the queue is full: {len(self._waiting)} requests are waiting", self._retry_after())
            if self._idle():
                self._stepped = time.monotonic()
            self._waiting.append(sequence)
            self._changed.notify_all()
        return sequence.ticket

    def _kv_bytes(self, generation: Generation) -> int:
        """Return the size of the KV cache for the prompt and the longest possible answer."""
        prompt, new = len(generation.prompt), generation.max_tokens
        size = self.engine.cache_bytes(prompt + new, BLOCK_TOKENS)
        if size > self.kv_bytes:
            raise ContextError(
                f"{prompt} prompt tokens and {new} new tokens need {size / 2**20:.1f} MiB of KV cache, but the scheduler has "
                f"only {self.kv_bytes / 2**20:.1f} MiB"
            )
        return size

    def _retry_after(self) -> float:
        """Estimate in how many seconds the queue will have room for a request."""
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
            if waiting > SLOWEST_STEP:
                return Health(False, f"no step has ended for {waiting:.0f} s", True, waiting)
            return Health(True, "", False, waiting)

    def stats(self) -> SchedulerStats:
        with self._changed:
            prefixes, used = self._prefixes, sum(sequence.kv_bytes for sequence in self._running)
            return SchedulerStats(
                len(self._running), len(self._waiting), used, prefixes.nbytes, prefixes.hits, prefixes.misses,
                prefixes.hit_tokens, self._passes, self._failed, self._computed,
            )  # fmt: skip

    def drain(self, deadline: float) -> int:
        """Accept no more requests, wait `deadline` seconds, then cancel the requests that are left. Return their number."""
        with self._changed:
            self._open = False
            self._changed.wait_for(self._idle, max(0.0, deadline))
            left = (*self._waiting, *self._running)
            for sequence in left:
                sequence.ticket.cancelled = True
            self._changed.notify_all()
            # A cancelled request ends together with the current pass. If that pass hangs, the engine ends it at its
            # deadline.
            self._changed.wait_for(self._idle, SLOWEST_STEP)
            return len(left)

    def close(self) -> None:
        """Cancel all requests and end the thread. A scheduler may be closed twice."""
        self.drain(0.0)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(SLOWEST_STEP)

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
            if not error.settled:  # a stalled worker may still write to these caches
                for sequence in sequences:
                    self._allocate(sequence)
            return  # the failed pass is repeated by the next step
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
        """Remove the request, then send the last event. In this order, a client that sees the event finds room for a
        new request.
        """
        sequence.cache = None
        with self._changed:
            if sequence in self._running:
                self._running.remove(sequence)
                self._request_seconds += 0.2 * (time.monotonic() - sequence.arrived - self._request_seconds)
            else:
                self._waiting.remove(sequence)
        sequence.tell(last)

    def _admit(self) -> None:
        """Start waiting requests, in order of arrival, as long as fewer than `parallel` run and KV memory is free."""
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
        """Allocate a KV cache, and copy the request's longest cached prefix to it. Return the number of copied tokens."""
        cache = self.engine.new_cache(BLOCK_TOKENS)
        cache.prepare(len(sequence.prompt) + sequence.generation.max_tokens, CHUNK)
        hit = 0 if sequence.scoring else self._prefixes.restore(cache, sequence.ids)
        sequence.cache = cache
        return hit

    def _being_computed(self, sequence: _Sequence) -> bool:
        """Whether a running request is computing a prefix of this request's prompt.

        Waiting for that prefix and copying it from the prefix cache is faster than computing it a second time.
        """
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
        """Choose the tokens of the next pass: one token of every answer, and as many prompt tokens as the duration allows."""
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
        start = time.monotonic()
        results = self.engine.run_together(inputs)
        rows = sum(len(part.tokens) for part in inputs)
        # Do not count passes that only decode: they spend most of their time reading weights, whatever the number of
        # tokens.
        if rows > len(inputs):
            self._row_seconds += 0.8 * ((time.monotonic() - start) / rows - self._row_seconds)
        self._passes += 1
        self._computed += rows
        return results

    def _score(self, sequence: _Sequence, logits: np.ndarray) -> None:
        """Send a Scored event for each prompt token whose probability follows from the logits of this pass.

        logits: [tokens, V]
        """
        if sequence.scores == 0:
            sequence.tell(Scored(sequence.ids[0], None, ()))
            sequence.scores = 1
        # A pass that is repeated after a failure computes scores again that were already sent.
        for at in range(sequence.scores, min(sequence.position + 1, len(sequence.ids))):
            row, token = logits[at - 1 - sequence.position], sequence.ids[at]
            sequence.tell(Scored(token, *sequence.generation.score(row, token)))
            sequence.scores += 1

    def _choose(self, sequence: _Sequence, logits: np.ndarray) -> None:
        """Choose the next token of an answer, and send a Generated event."""
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
        """End every request with this error, and accept no more requests."""
        with self._changed:
            self._error = error
            left = [*self._running, *self._waiting]
        for sequence in left:
            self._finish(sequence, Failed(error))
