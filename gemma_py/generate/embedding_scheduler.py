"""The scheduler of an embedding model: a thread that computes the texts of all requests in shared passes.

At most `parallel` requests run, and each pass takes texts of the running requests in turn, so that a request with many texts
does not delay the others. The company of a text does not change the bits of the text's embedding.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain, zip_longest

import numpy as np

from gemma_py.errors import ComputationError, GemmaError, WorkerError
from gemma_py.generate.base_scheduler import BaseScheduler, ScheduledRequest, SchedulerStats
from gemma_py.generate.embedding import check_embeds, embed_pass, how_many
from gemma_py.generate.engine import Engine
from gemma_py.runtime.cache import Cache


class _Texts(ScheduledRequest):
    """A request: texts as token ids, and the rows computed so far."""

    def __init__(self, texts: Sequence[list[int]], width: int) -> None:
        super().__init__()
        self.texts, self.rows = texts, np.empty((len(texts), width), np.float32)
        self.order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
        self.done = 0  # the first `done` texts of `order` are computed
        self.result: Future[np.ndarray] = Future()
        self._cut_off = False

    @property
    def cancelled(self) -> bool:
        return self._cut_off or self.result.cancelled()

    def cancel(self) -> None:
        self._cut_off = True

    def report_cancelled(self) -> None:
        self.report_error(ComputationError("the server ended before the request was complete"))

    def report_error(self, error: GemmaError) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)

    def report_rows(self) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_result(self.rows)


class EmbeddingScheduler(BaseScheduler[_Texts]):
    """The scheduler of an embedding model."""

    def __init__(self, engine: Engine, parallel: int = 8, queue: int = 64) -> None:
        """Start the scheduler's thread. parallel: the most requests that run at once. queue: the most requests that wait."""
        check_embeds(engine)
        super().__init__(engine, parallel, queue)
        self._caches: list[Cache] = []  # only the scheduler's thread writes this field
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, texts: Sequence[list[int]]) -> "Future[np.ndarray]":
        """Accept texts, as `texts_to_ids` returns them. Raise Overloaded if the queue is full.

        The result is what `embed_all` returns. Cancelling the future ends the request before the next pass.
        """
        request = _Texts(texts, self.engine.program.outputs)
        self._enqueue(request)
        return request.result

    def stats(self) -> SchedulerStats:
        with self._changed:
            kv_bytes = sum(cache.nbytes for cache in self._caches)
            return SchedulerStats(
                len(self._running), len(self._waiting), kv_bytes, 0, 0, 0, 0, self._passes, self._failed, self._computed
            )

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._remove_cancelled()
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
            self._note_failed_pass(error)
            self._caches = []  # a stalled worker may still write to the caches
            return  # the next step repeats the pass
        self._trouble = None
        for at, (request, number) in enumerate(chosen):
            request.rows[number] = rows[at]
            request.done += 1
        for request in running:
            if request.done == len(request.texts):
                self._remove(request)
                request.report_rows()

    def _choose(self, running: Sequence[_Texts]) -> list[tuple[_Texts, int]]:
        """Return the texts of the next pass: of each running request the longest text that is left, then the next one."""
        queues = [[(request, number) for number in request.order[request.done :]] for request in running]
        turns = [entry for entry in chain.from_iterable(zip_longest(*queues)) if entry is not None]
        count = how_many([len(request.texts[number]) for request, number in turns]) if turns else 0
        return turns[:count]
