"""A queue that carries the events of one HTTP request from the scheduler's thread into asyncio's event loop."""

import asyncio
import time
from functools import partial
from typing import Any

from gemma_py.errors import GemmaError
from gemma_py.generate.base_scheduler import BaseScheduler, Ticket
from gemma_py.generate.events import Event, Failed, Finished, Generated
from gemma_py.server.metrics import Metrics
from gemma_py.server.openai.service import Job

ChoiceEvent = tuple[int, Event]  # (index of the choice, event)


class EventQueue:
    """Submits the choices of an HTTP request to the scheduler, and queues their events. `close` cancels unfinished choices."""

    def __init__(
        self, scheduler: BaseScheduler[Any, Any], job: Job, metrics: Metrics, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._metrics, self._loop = metrics, loop
        self._queue: asyncio.Queue[ChoiceEvent] = asyncio.Queue()
        self._last_token: dict[int, float] = {}  # index of a choice -> time of the choice's last token
        self._tickets: list[Ticket] = []
        try:
            for index, request in enumerate(job.requests):
                self._tickets.append(scheduler.submit(request, partial(self._put, index)))
        except GemmaError:
            self.close()
            raise

    def _put(self, index: int, event: Event) -> None:
        """Queue an event. The scheduler calls this in its own thread."""
        if isinstance(event, Generated):
            now = time.monotonic()
            if index in self._last_token:
                self._metrics.between.observe(now - self._last_token[index])
            self._last_token[index] = now
        elif isinstance(event, Finished):
            self._metrics.ended(event.usage)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

    def fail(self, error: GemmaError) -> None:
        """Queue an error. Called in the event loop if the scheduler has failed or hangs."""
        self._queue.put_nowait((0, Failed(error)))

    async def get(self, seconds: float | None = None) -> list[ChoiceEvent]:
        """Wait for an event, and return all queued events. Return an empty list if no event arrives within `seconds`."""
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
