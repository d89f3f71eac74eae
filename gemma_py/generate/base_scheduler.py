"""The base class of the schedulers of text generation and of embeddings: the queue, the thread, health and shutdown."""

import contextlib
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gemma_py.errors import ComputationError, GemmaError, InputError, Overloaded, WorkerError
from gemma_py.generate.engine import Engine
from gemma_py.generate.events import Event, Failed, Finished, Listener, Usage

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
    """Counters of the scheduler. An embedding model has no prefix cache, so its prefix counters are 0.

    running, waiting: the numbers of running and of waiting requests.
    kv_bytes: the memory reserved for the KV caches of running requests.
    prefix_bytes: the size of the prefix cache.

    Counted since the start of the scheduler:
    prefix_hits, prefix_misses: requests for which the prefix cache had a prefix, and had none.
    cached_tokens: prompt tokens that were found in the prefix cache.
    passes: passes that succeeded.
    failed_passes: passes that failed and were repeated.
    computed_tokens: computed tokens, without wrong guesses.
    guessed_tokens: guessed tokens that were computed.
    accepted_tokens: guessed tokens that were equal to the chosen tokens.
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
    guessed_tokens: int = 0
    accepted_tokens: int = 0


class Ticket:
    """A handle to cancel an accepted request."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self.cancelled = False

    def cancel(self) -> None:
        """End the request before the next pass. The last event is then Finished with the reason "cancelled"."""
        self.cancelled = True
        self._notify()


class ScheduledRequest(ABC):
    def __init__(self, listener: Listener, ticket: Ticket) -> None:
        self._listener, self.ticket = listener, ticket
        self.arrived = time.monotonic()
        self.admitted = 0.0

    @abstractmethod
    def usage(self) -> Usage: ...

    def tell(self, event: Event) -> None:
        """Send an event to the listener. If the listener raises an exception, cancel this request."""
        try:
            self._listener(event)
        except BaseException:  # even SystemExit, because the other requests need this thread
            self.ticket.cancelled = True
            _print_traceback()


def _print_traceback() -> None:
    with contextlib.suppress(Exception):  # stderr may be a closed file or a closed pipe
        traceback.print_exc()


Q = TypeVar("Q")  # the type of the requests that clients submit
R = TypeVar("R", bound=ScheduledRequest)  # the type in which the scheduler keeps requests


class BaseScheduler(ABC, Generic[Q, R]):
    """Runs all passes of an engine in one thread. Close the scheduler before the engine."""

    def __init__(self, engine: Engine, parallel: int, queue: int) -> None:
        """parallel: the most requests that run at once. queue: the most requests that wait."""
        if parallel < 1 or queue < 0:
            raise InputError(f"parallel should be at least 1 and queue at least 0, found {parallel} and {queue}")
        self.engine, self.parallel, self.queue = engine, parallel, queue
        self._changed = threading.Condition()  # guards the fields from _waiting to _request_seconds
        self._waiting: list[R] = []
        self._running: list[R] = []
        self._open, self._closed = True, False
        self._error: GemmaError | None = None
        self._trouble: WorkerError | None = None  # the error of the last pass; None if the pass succeeded
        # When the last step ended, or when a request arrived while there was nothing to do.
        self._stepped = time.monotonic()
        self._request_seconds = 1.0  # running average of the duration of a request
        self._passes = self._failed = self._computed = 0  # only the scheduler's thread writes these counters
        # The subclass starts the thread after setting its own fields.
        self._thread = threading.Thread(target=self._work, name="gemma_py-scheduler", daemon=True)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: Q, listener: Listener) -> Ticket:
        """Accept a request. An invalid request raises InputError or ContextError, a full queue Overloaded.

        The listener is called in a thread of the scheduler, always the same, and must not block. The last event is Finished or Failed.
        """
        ticket = Ticket(self._notify)
        scheduled = self._scheduled(request, listener, ticket)
        with self._changed:
            if self._error is not None:
                raise ComputationError(f"the engine has failed: {self._error}")
            if not self._open:
                raise Overloaded("the server is shutting down and accepts no more requests", 10.0)
            if len(self._waiting) + len(self._running) >= self.queue + self.parallel:
                raise Overloaded(f"the queue is full: {self.stats().waiting} requests are waiting", self._retry_after())
            if self._idle():
                self._stepped = time.monotonic()
            self._waiting.append(scheduled)
            self._changed.notify_all()
        return ticket

    def prepare_constraint(self, description: dict[str, Any]) -> None:
        """Prepare for requests whose constraints have descriptions like this one.

        Requests bring their constraints with them, so only a scheduler that rebuilds them in other processes has to prepare.
        """

    @abstractmethod
    def _scheduled(self, request: Q, listener: Listener, ticket: Ticket) -> R:
        """Check a request, and return it with the data that the scheduler needs."""

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
            for why in self.engine.lost_shards:
                return Health(False, why, False, waiting)
            if waiting > SLOWEST_STEP:
                return Health(False, f"no step has ended for {waiting:.0f} s", True, waiting)
            return Health(True, "", False, waiting)

    @abstractmethod
    def stats(self) -> SchedulerStats: ...

    def drain(self, deadline: float) -> int:
        """Accept no more requests, wait up to `deadline` seconds, then cancel the rest. Return how many were cancelled."""
        with self._changed:
            self._open = False
            self._changed.wait_for(self._idle, max(0.0, deadline))
            left = (*self._waiting, *self._running)
            for request in left:
                request.ticket.cancel()
            # A cancelled request ends with the current pass. The engine stops a hanging pass at the engine's deadline.
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
                    self._changed.wait_for(lambda: self._closed or self._has_work())
                    if self._closed:
                        return
                self._step()
                with self._changed:
                    self._stepped = time.monotonic()
                    self._changed.notify_all()
        except WorkerError as error:
            self._fail(error)
        except Exception as error:
            _print_traceback()
            self._fail(ComputationError(f"the scheduler failed: {type(error).__name__}: {error}"))

    def _has_work(self) -> bool:
        return not self._idle()

    @abstractmethod
    def _step(self) -> None:
        """Remove cancelled requests, admit waiting ones, and compute one pass."""

    def _remove_cancelled(self) -> None:
        with self._changed:
            cancelled = [request for request in (*self._waiting, *self._running) if request.ticket.cancelled]
        for request in cancelled:
            self._finish(request, Finished("cancelled", request.usage()))

    def _finish(self, request: R, last: Finished | Failed) -> None:
        """Remove the request before sending its last event, because the client may then send a new request at once."""
        with self._changed:
            if request in self._running:
                self._running.remove(request)
                self._request_seconds += 0.2 * (time.monotonic() - request.arrived - self._request_seconds)
            else:
                self._waiting.remove(request)
        request.tell(last)

    def _note_failed_pass(self, error: WorkerError) -> None:
        """Count a failed pass, which the next step repeats. If the pass before failed too, raise the error instead."""
        again, self._trouble = self._trouble is not None, error
        if again:
            raise error
        self._failed += 1

    def _fail(self, error: GemmaError) -> None:
        """End every request with this error, and accept no more requests."""
        with self._changed:
            self._error = error
            left = [*self._running, *self._waiting]
        for request in left:
            self._finish(request, Failed(error))
        self._notify()
