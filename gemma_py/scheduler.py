"""Many requests, one engine: a thread of its own takes them in, computes, and tells each listener what came of it.

A request waits in a bounded queue until one of the `parallel` places is free; then its prompt is computed in chunks and
its answer token by token, in turns with the others. What a request gets does not depend on its company, by a bit.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gemma_py.engine import Engine
from gemma_py.errors import ComputationError, ContextError, GemmaError, InputError, Overloaded
from gemma_py.generation import Constraint, Continuation, Token
from gemma_py.runtime.runner import CHUNK
from gemma_py.sampling import Sampler, Sampling, likeliest
from gemma_py.score import log_probabilities
from gemma_py.stream import TextStream, stop_strings

_MOST_TOP = 100  # alternatives of a token
_SLOWEST_STEP = 60.0  # seconds; if no step ends for so long though there is work, something is wrong


@dataclass(frozen=True)
class Request:
    """ids: the prompt. stop: strings that end the answer; ends: tokens that do. trim: no white space in front of it.
    top_logprobs: how many of the likeliest tokens to tell at each place."""

    ids: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    trim: bool = False
    top_logprobs: int = 0
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Usage:
    """prompt, cached, generated: tokens; cached are those of the prompt that were not computed again. Seconds from when
    the request came: until it was taken up, until its first token, until now."""

    prompt: int
    cached: int
    generated: int
    queued_seconds: float
    first_token_seconds: float
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Prompt tokens that are done, of how many, and how many of them were cached."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True)
class Made:
    """A token, and the likeliest at its place with their log probabilities, in order."""

    token: Token
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Finished:
    """The last event. reason: "stop", "length" or "cancelled"."""

    reason: str
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """The last event of a request that got no further."""

    error: GemmaError


Event = Progress | Made | Finished | Failed
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Health:
    """waiting: seconds since the last step ended while there is work, else 0."""

    ok: bool
    why: str
    waiting: float


@dataclass(frozen=True)
class Stats:
    """running, waiting: requests. kv_bytes: what running ones have reserved. The others count since the start."""

    running: int
    waiting: int
    kv_bytes: int
    prefix_bytes: int
    prefix_hits: int
    prefix_misses: int
    cached_tokens: int
    passes: int
    computed_tokens: int


class Ticket:
    """A request that was taken in."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.cancelled = False

    def cancel(self) -> None:
        """It ends within one step, with a Finished event whose reason is "cancelled", unless it has ended before."""
        self.cancelled = True
        self._scheduler._notify()


class _Sequence:
    """A request on its way."""

    def __init__(self, request: Request, listener: Listener, ticket: Ticket, continuation: Continuation) -> None:
        self.request, self.ticket, self.continuation = request, ticket, continuation
        self._listener = listener
        self.todo = list(request.ids)  # tokens that are known and not computed
        self.cached = 0
        self.came = time.monotonic()
        self.taken_up = self.first_token = 0.0

    def tell(self, event: Event) -> None:
        """What a listener does wrong ends its own request and no other."""
        try:
            self._listener(event)
        except Exception:
            traceback.print_exc()
            self.ticket.cancelled = True

    def usage(self) -> Usage:
        now = time.monotonic()
        return Usage(
            len(self.request.ids), self.cached, len(self.continuation.made), (self.taken_up or now) - self.came,
            (self.first_token or now) - self.came, now - self.came,
        )  # fmt: skip


class Scheduler:
    """Owns the engine's time from a thread of its own. Close it before the engine.

    parallel: requests that are computed at once. queue: those that may wait beyond them.
    """

    def __init__(self, engine: Engine, parallel: int = 8, queue: int = 64) -> None:
        if parallel < 1 or queue < 0:
            raise InputError(f"parallel should be at least 1 and queue at least 0, found {parallel} and {queue}")
        self.engine, self.parallel, self.queue = engine, parallel, queue
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._open, self._closed = True, False
        self._error: GemmaError | None = None
        self._stepped = time.monotonic()  # when the last step ended, or work came after none
        self._request_seconds = 1.0  # of late
        self._passes = self._computed = 0
        self._sessions: dict[_Sequence, object] = {}
        self._thread = threading.Thread(target=self._work, name="gemma_py-scheduler", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Take a request in. What is wrong with it is raised at once; Overloaded if there is no room for it now.

        The listener is called from the scheduler's thread and must not block. Its last event is Finished or Failed.
        """
        sequence = self._checked(request, listener)
        with self._changed:
            if self._error is not None:
                raise ComputationError(f"the engine is out of order: {self._error}")
            if not self._open:
                raise Overloaded("no more requests are taken: the server is ending", 10.0)
            if len(self._waiting) >= self.queue + max(0, self.parallel - len(self._running)):
                raise Overloaded(f"{len(self._waiting)} requests wait already", self._retry_after())
            if not self._running and not self._waiting:
                self._stepped = time.monotonic()
            self._waiting.append(sequence)
            self._changed.notify_all()
        return sequence.ticket

    def _checked(self, request: Request, listener: Listener) -> _Sequence:
        engine = self.engine
        ids = engine.check_ids(request.ids)
        if not isinstance(request.max_tokens, int) or request.max_tokens < 1:
            raise InputError(f"max_tokens should be at least 1, found {request.max_tokens!r:.40}")
        if not 0 <= request.top_logprobs <= min(_MOST_TOP, engine.config.vocab_size):
            raise InputError(f"top_logprobs should be 0 to {_MOST_TOP}, found {request.top_logprobs!r:.40}")
        if len(ids) + request.max_tokens > engine.context:
            raise ContextError(
                f"{len(ids)} prompt tokens and {request.max_tokens} new ones exceed the context of {engine.context} tokens"
            )
        sampler = Sampler(request.sampling, engine.config.vocab_size, ids)
        stream = TextStream(engine.tokenizer, stop_strings(request.stop), request.trim)
        continuation = Continuation(sampler, stream, request.ends, request.max_tokens, request.constraint)
        return _Sequence(request, listener, Ticket(self), continuation)

    def _retry_after(self) -> float:
        """Until a place in the queue is likely to be free."""
        return min(60.0, max(1.0, self._request_seconds / self.parallel))

    def health(self) -> Health:
        with self._changed:
            busy = bool(self._running or self._waiting)
            waiting = time.monotonic() - self._stepped if busy else 0.0
            if self._error is not None:
                return Health(False, str(self._error), waiting)
            if not self._thread.is_alive() and not self._closed:
                return Health(False, "the scheduler's thread has ended", waiting)
            if waiting > _SLOWEST_STEP:
                return Health(False, f"no step for {waiting:.0f} s", waiting)
            return Health(True, "", waiting)

    def stats(self) -> Stats:
        with self._changed:
            return Stats(len(self._running), len(self._waiting), 0, 0, 0, 0, 0, self._passes, self._computed)

    def drain(self, deadline: float) -> None:
        """Take no more requests, and return when all have ended; what runs after so many seconds is cancelled."""
        until = time.monotonic() + deadline
        with self._changed:
            self._open = False
            self._changed.wait_for(self._idle, max(0.0, deadline))
            for sequence in (*self._waiting, *self._running):
                sequence.ticket.cancelled = True
            self._changed.notify_all()
            # A step of a pass that hangs ends with the engine's own deadline.
            self._changed.wait_for(self._idle, max(0.0, until - time.monotonic()) + 2 * _SLOWEST_STEP)

    def close(self) -> None:
        """Cancel whatever there is and end the thread. Twice is once."""
        self.drain(0.0)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _idle(self) -> bool:
        return not self._waiting and not self._running

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._idle())
                if self._closed:
                    return
            try:
                self._step()
            except Exception as error:
                traceback.print_exc()
                self._give_up(ComputationError(f"the scheduler failed: {type(error).__name__}: {error}"))
                return
            with self._changed:
                self._stepped = time.monotonic()
                self._changed.notify_all()

    def _step(self) -> None:
        """Retire, admit, compute."""
        self._retire_cancelled()
        self._admit()
        for sequence in list(self._running):
            if not sequence.ticket.cancelled:
                self._advance(sequence)

    def _retire_cancelled(self) -> None:
        with self._changed:
            cancelled = [s for s in (*self._waiting, *self._running) if s.ticket.cancelled]
            self._waiting = deque(s for s in self._waiting if not s.ticket.cancelled)
        for sequence in cancelled:
            self._retire(sequence, Finished("cancelled", sequence.usage()))

    def _retire(self, sequence: _Sequence, last: Finished | Failed) -> None:
        """Its place is free before anybody hears of its end."""
        self._sessions.pop(sequence, None)
        with self._changed:
            if sequence in self._running:
                self._running.remove(sequence)
                self._request_seconds += 0.2 * (time.monotonic() - sequence.came - self._request_seconds)
        sequence.tell(last)

    def _admit(self) -> None:
        with self._changed:
            while self._waiting and len(self._running) < self.parallel:
                sequence = self._waiting.popleft()
                sequence.taken_up = time.monotonic()
                self._running.append(sequence)
                self._sessions[sequence] = self.engine.session()

    def _advance(self, sequence: _Sequence) -> None:
        session = self._sessions[sequence]
        part = sequence.todo[:CHUNK]
        try:
            logits = session.prefill(part)  # type: ignore[attr-defined]
        except GemmaError as error:
            self._retire(sequence, Failed(error))
            return
        self._passes += 1
        self._computed += len(part)
        del sequence.todo[: len(part)]
        prompt = len(sequence.request.ids)
        if not sequence.continuation.made:
            sequence.tell(Progress(prompt - len(sequence.todo), prompt, sequence.cached))
        if not sequence.todo:
            self._choose(sequence, logits)

    def _choose(self, sequence: _Sequence, logits: np.ndarray) -> None:
        try:
            token = sequence.continuation.next(logits)
        except GemmaError as error:
            self._retire(sequence, Failed(error))
            return
        sequence.first_token = sequence.first_token or time.monotonic()
        top: tuple[tuple[int, float], ...] = ()
        if sequence.request.top_logprobs:
            ids = likeliest(logits, sequence.request.top_logprobs)[1].tolist()
            top = tuple(zip(ids, log_probabilities(logits, ids), strict=True))
        sequence.tell(Made(token, top))
        if token.finish_reason is not None:
            self._retire(sequence, Finished(token.finish_reason, sequence.usage()))
        sequence.todo.append(token.id)

    def _give_up(self, error: GemmaError) -> None:
        """Nothing can be computed any more: everybody is told, and who comes later too."""
        with self._changed:
            self._error = error
            left = [*self._running, *self._waiting]
            self._waiting.clear()
        for sequence in left:
            self._retire(sequence, Failed(error))
