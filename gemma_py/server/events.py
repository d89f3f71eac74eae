"""A queue that carries the events of one HTTP request from the scheduler into asyncio's event loop."""

import asyncio
import time
from collections import deque
from functools import partial
from typing import Any

from gemma_py.errors import GemmaError
from gemma_py.generate.base_scheduler import BaseScheduler, Ticket
from gemma_py.generate.events import Event, Failed, Finished, Generated
from gemma_py.server.metrics import Metrics
from gemma_py.server.openai.service import Job

ChoiceEvent = tuple[int, Event]  # (index of the choice, event)


class EventQueue:
    """Submits the choices of an HTTP request to the scheduler, and queues their events. `close` cancels unfinished choices.

    The event loop is woken once for all events of a request that arrive before it runs, because each wake-up takes time from the
    workers.
    """

    def __init__(
        self, scheduler: BaseScheduler[Any, Any], job: Job, metrics: Metrics, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._metrics, self._loop = metrics, loop
        self._events: deque[ChoiceEvent] = deque()
        self._arrived = asyncio.Event()
        self._waking = False  # whether the event loop is about to call `_wake`
        self._last_token: dict[int, float] = {}  # index of a choice -> time of the choice's last token
        self._tickets: list[Ticket] = []
        try:
            for index, request in enumerate(job.requests):
                self._tickets.append(scheduler.submit(request, partial(self._put, index)))
        except GemmaError:
            self.close()
            raise

    def _put(self, index: int, event: Event) -> None:
        """Queue an event. The scheduler calls this in one of its threads."""
        if isinstance(event, Generated):
            now = time.monotonic()
            if index in self._last_token:
                self._metrics.between.observe(now - self._last_token[index])
            self._last_token[index] = now
        elif isinstance(event, Finished):
            self._metrics.ended(event.usage)
        self._events.append((index, event))
        if not self._waking and not self._loop.is_closed():
            self._waking = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._waking = False  # before `get` looks for events, so that an event that comes later wakes the loop again
        self._arrived.set()

    def fail(self, error: GemmaError) -> None:
        """Queue an error. Called in the event loop if the scheduler has failed or hangs."""
        self._events.append((0, Failed(error)))
        self._arrived.set()

    async def get(self, seconds: float | None = None) -> list[ChoiceEvent]:
        """Wait for an event, and return all queued events. Return an empty list if no event arrives within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not self._events:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()
