"""The scheduler of an embedding model: a thread that computes the texts of all requests in shared passes.

At most `parallel` requests run, and each pass takes texts of the running requests in turn, so that a request with many texts
does not delay the others. The company of a text does not change the bits of the text's embedding.
"""

import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain, zip_longest

import numpy as np

from gemma_py.errors import ComputationError, GemmaError, InputError, Overloaded, WorkerError
from gemma_py.generate.embedding import check_embeds, embed_pass, how_many
from gemma_py.generate.engine import Engine
from gemma_py.generate.scheduler import SLOWEST_STEP, Health, SchedulerStats
from gemma_py.runtime.cache import Cache


class _Texts:
    """A request: texts as token ids, longest first, and the rows computed so far."""

    def __init__(self, texts: Sequence[list[int]], width: int) -> None:
        self.texts, self.rows = texts, np.empty((len(texts), width), np.float32)
        self.order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
        self.done = 0  # the first `done` texts of `order` are computed
        self.result: Future[np.ndarray] = Future()


class EmbeddingScheduler:
    """Runs all passes of an embedding model's engine in one thread. Close the scheduler before the engine."""

    def __init__(self, engine: Engine, parallel: int = 8, queue: int = 64) -> None:
        """Start the scheduler's thread. parallel: the most requests that run at once. queue: the most requests that wait."""
        check_embeds(engine)
        if parallel < 1 or queue < 0:
            raise InputError(f"parallel should be at least 1 and queue at least 0, found {parallel} and {queue}")
        self.engine, self.parallel, self.queue = engine, parallel, queue
        self._changed = threading.Condition()  # the lock of the fields from here to _stepped
        self._waiting: list[_Texts] = []
        self._running: list[_Texts] = []
        self._open, self._closed = True, False
        self._error: GemmaError | None = None
        self._trouble: WorkerError | None = None  # the error of the last pass; None if the pass succeeded
        self._stepped = time.monotonic()  # the end of the last step, or a request's arrival while idle
        # Only the scheduler's thread writes the fields below.
        self._caches: list[Cache] = []
        self._passes = self._failed = self._computed = 0
        self._thread = threading.Thread(target=self._work, name="gemma_py-embedding", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, texts: Sequence[list[int]]) -> "Future[np.ndarray]":
        """Accept texts, as `texts_to_ids` returns them. Raise Overloaded if the queue is full.

        The result is what `embed_all` returns. Cancelling the future ends the request before the next pass.
        """
        request = _Texts(texts, self.engine.program.outputs)
        with self._changed:
            if self._error is not None:
                raise ComputationError(f"the engine has failed: {self._error}")
            if not self._open:
                raise Overloaded("the server is shutting down and accepts no more requests", 10.0)
            if len(self._waiting) + len(self._running) >= self.queue + self.parallel:
                raise Overloaded(f"the queue is full: {len(self._waiting)} requests are waiting", 1.0)
            if self._idle():
                self._stepped = time.monotonic()
            self._waiting.append(request)
            self._changed.notify_all()
        return request.result

    def health(self) -> Health:
        with self._changed:
            waiting = 0.0 if self._idle() else time.monotonic() - self._stepped
            if self._error is not None:
                return Health(False, str(self._error), True, waiting)
            if self._trouble is not None and not self._idle():
                return Health(False, str(self._trouble), False, waiting)
            if waiting > SLOWEST_STEP:
                return Health(False, f"no step has ended for {waiting:.0f} s", True, waiting)
            return Health(True, "", False, waiting)

    def stats(self) -> SchedulerStats:
        with self._changed:
            kv_bytes = sum(cache.nbytes for cache in self._caches)
            return SchedulerStats(
                len(self._running), len(self._waiting), kv_bytes, 0, 0, 0, 0, self._passes, self._failed, self._computed
            )

    def drain(self, deadline: float) -> int:
        """Accept no more requests, wait `deadline` seconds, then cancel the rest. Return the number of cancelled requests."""
        with self._changed:
            self._open = False
            self._changed.wait_for(self._idle, max(0.0, deadline))
            left = [*self._waiting, *self._running]
            self._end(left, ComputationError("the server ended before the request was complete"))
            self._changed.notify_all()
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

    def _end(self, requests: Sequence[_Texts], error: GemmaError | None = None) -> None:
        """Remove requests, and give each its rows or the error. A request that was cancelled is only removed."""
        with self._changed:
            self._waiting = [request for request in self._waiting if request not in requests]
            self._running = [request for request in self._running if request not in requests]
        for request in requests:
            if request.result.set_running_or_notify_cancel():
                if error is None:
                    request.result.set_result(request.rows)
                else:
                    request.result.set_exception(error)

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
        except Exception as error:
            traceback.print_exc()
            failure = error if isinstance(error, WorkerError) else ComputationError(f"the scheduler failed: {error}")
            with self._changed:
                self._error = failure
                left = [*self._waiting, *self._running]
            self._end(left, failure)

    def _step(self) -> None:
        """Remove cancelled requests, admit waiting ones, and compute one pass."""
        with self._changed:
            cancelled = [request for request in (*self._waiting, *self._running) if request.result.cancelled()]
        self._end(cancelled)
        with self._changed:
            room = self.parallel - len(self._running)
            self._running += self._waiting[:room]
            del self._waiting[:room]
            running = list(self._running)
        chosen = self._choose(running)
        try:
            if chosen:
                rows = embed_pass(self.engine, [request.texts[number] for request, number in chosen], self._caches)
                self._passes += 1
                self._computed += sum(len(request.texts[number]) for request, number in chosen)
        except WorkerError as error:
            if self._trouble is not None:
                raise
            self._trouble, self._caches = error, []  # a stalled worker may still write to the caches
            self._failed += 1
            return  # the next step repeats the pass
        self._trouble = None
        for at, (request, number) in enumerate(chosen):
            request.rows[number] = rows[at]
            request.done += 1
        self._end([request for request in running if request.done == len(request.texts)])

    def _choose(self, running: Sequence[_Texts]) -> list[tuple[_Texts, int]]:
        """Return the texts of the next pass: of each running request the longest text that is left, then the next one."""
        queues = [[(request, number) for number in request.order[request.done :]] for request in running]
        turns = [entry for entry in chain.from_iterable(zip_longest(*queues)) if entry is not None]
        count = how_many([len(request.texts[number]) for request, number in turns]) if turns else 0
        return turns[:count]
