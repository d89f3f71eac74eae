"""The scheduler of an embedding model: a thread that computes the texts of all requests in shared passes.

At most `parallel` requests run. Each pass takes texts of the running requests in turn, so that a request with many texts
does not delay the others. The other texts of a pass do not change the bits of a text's embedding.
"""

import time
from collections.abc import Sequence
from itertools import chain, zip_longest

import numpy as np

from gemma_py.errors import WorkerError
from gemma_py.generate.base_scheduler import BaseScheduler, ScheduledRequest, SchedulerStats, Ticket
from gemma_py.generate.embedding import check_embeds, embed_pass, how_many
from gemma_py.generate.engine import Engine
from gemma_py.generate.events import Embedded, Finished, Listener, Usage
from gemma_py.runtime.cache import Cache


class _Texts(ScheduledRequest):
    """A request: texts as token ids, and the rows computed so far."""

    def __init__(self, texts: Sequence[list[int]], width: int, listener: Listener, ticket: Ticket) -> None:
        super().__init__(listener, ticket)
        self.texts, self.rows = texts, np.empty((len(texts), width), np.float32)
        self.order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
        self.done = 0  # the texts order[:done] are computed

    def usage(self) -> Usage:
        now = time.monotonic()
        queued = (self.admitted or now) - self.arrived
        return Usage(sum(map(len, self.texts)), 0, 0, queued, now - self.arrived, now - self.arrived)


class EmbeddingScheduler(BaseScheduler[Sequence[list[int]], _Texts]):
    """The scheduler of an embedding model. A request is a list of texts, as `texts_to_ids` returns them."""

    def __init__(self, engine: Engine, parallel: int = 8, queue: int = 64) -> None:
        check_embeds(engine)
        super().__init__(engine, parallel, queue)
        self._caches: list[Cache] = []  # only the scheduler's thread writes this field
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def _scheduled(self, request: Sequence[list[int]], listener: Listener, ticket: Ticket) -> _Texts:
        return _Texts(request, self.engine.program.outputs, listener, ticket)

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
            admitted = self._waiting[: self.parallel - len(self._running)]
            del self._waiting[: len(admitted)]
            self._running += admitted
            for request in admitted:
                request.admitted = time.monotonic()
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
            return  # the failed pass is repeated by the next step
        self._trouble = None
        for at, (request, number) in enumerate(chosen):
            request.rows[number] = rows[at]
            request.done += 1
        for request in running:
            if request.done == len(request.texts):
                request.tell(Embedded(request.rows))
                self._finish(request, Finished("stop", request.usage()))

    def _choose(self, running: Sequence[_Texts]) -> list[tuple[_Texts, int]]:
        """Return the texts of the next pass: the longest remaining text of each running request, then the second longest,
        and so on.
        """
        queues = [[(request, number) for number in request.order[request.done :]] for request in running]
        turns = [entry for entry in chain.from_iterable(zip_longest(*queues)) if entry is not None]
        count = how_many([len(request.texts[number]) for request, number in turns]) if turns else 0
        return turns[:count]
