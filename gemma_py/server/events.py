"""From the scheduler's thread into the event loop: the events of one request's choices, in the order they came."""

import asyncio
import time
from functools import partial

from gemma_py.errors import GemmaError
from gemma_py.generate.events import Event, Failed, Finished, Generated
from gemma_py.generate.scheduler import Scheduler, Ticket
from gemma_py.server.metrics import Metrics
from gemma_py.server.service import Job

Numbered = tuple[int, Event]


class Feed:
    """Submits at once, from any thread. `close` frees the places of what has not ended; to be called in the end."""

    def __init__(self, scheduler: Scheduler, job: Job, metrics: Metrics, loop: asyncio.AbstractEventLoop) -> None:
        self._metrics, self._loop = metrics, loop
        self._queue: asyncio.Queue[Numbered] = asyncio.Queue()
        self._last: dict[int, float] = {}  # when a choice's last token came
        self._tickets: list[Ticket] = []
        try:
            for index, request in enumerate(job.requests):
                self._tickets.append(scheduler.submit(request, partial(self._tell, index)))
        except GemmaError:
            self.close()
            raise

    def _tell(self, index: int, event: Event) -> None:
        """Called from the scheduler's thread."""
        if isinstance(event, Generated):
            now = time.monotonic()
            if index in self._last:
                self._metrics.between.observe(now - self._last[index])
            self._last[index] = now
        elif isinstance(event, Finished):
            self._metrics.ended(event.usage)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

    def fail(self, error: GemmaError) -> None:
        """Whoever waits hears of it, though the scheduler cannot say so any more."""
        self._queue.put_nowait((0, Failed(error)))

    async def next(self, seconds: float | None = None) -> list[Numbered]:
        """The events that are there, or the next one; none after so many seconds."""
        events = []
        try:
            async with asyncio.timeout(seconds):
                events.append(await self._queue.get())
        except TimeoutError:
            return []
        while not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events

    def close(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()
