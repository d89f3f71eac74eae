import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from crowd import WAIT, Client
from repository import TINY

import gemma_py
from gemma_py.errors import ComputationError
from gemma_py.generate import base_scheduler
from gemma_py.generate.core import Request
from gemma_py.generate.events import Event, Failed, Finished, Generated, PrefillProgress
from gemma_py.generate.scheduler import Scheduler
from gemma_py.runtime.runner import SequenceInput
from gemma_py.server.events import EventQueue
from gemma_py.server.openai.service import Job

EVENTS = [PrefillProgress(done, 9, 0) for done in range(5)]


class Accepts:
    """A scheduler that accepts every request. listeners: of the requests"""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Event], None]] = []

    def submit(self, request: Any, listener: Callable[[Event], None]) -> Any:
        self.listeners.append(listener)
        return SimpleNamespace(cancel=lambda: None)


def queue_of(loop: Any) -> tuple[EventQueue, Callable[[Event], None]]:
    scheduler: Any = Accepts()
    metrics: Any = SimpleNamespace()
    queue = EventQueue(scheduler, Job([None], []), metrics, loop)
    return queue, scheduler.listeners[0]


async def in_turns(queue: EventQueue, send: Callable[[Event], None]) -> list[list[Any]]:
    """Send events before and while `get` waits, in another thread. Return what each `get` returned."""
    got = []
    for _ in range(20):
        await asyncio.to_thread(send, EVENTS[0])
        got.append(await queue.get(30))
        waiting = asyncio.ensure_future(queue.get(0.5))
        await asyncio.sleep(0)  # now `get` waits
        await asyncio.to_thread(send, EVENTS[1])
        got.append(await waiting)
    return got


@pytest.mark.parametrize("mutant", [False, True])
def test_an_event_wakes_the_event_loop_whenever_it_comes(monkeypatch: pytest.MonkeyPatch, mutant: bool) -> None:
    """mutant: after the first event, no event wakes the loop."""

    async def run() -> bool:
        got = await in_turns(*queue_of(asyncio.get_running_loop()))
        return got == [[(0, EVENTS[0])], [(0, EVENTS[1])]] * 20

    if mutant:
        monkeypatch.setattr(EventQueue, "_wake", lambda self: self._arrived.set())
    assert asyncio.run(run()) != mutant


def test_events_that_come_together_wake_the_event_loop_once() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        wakes: list[Callable[[], None]] = []
        counting: Any = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=wakes.append)
        queue, send = queue_of(counting)
        for number in (1, 2):
            for event in EVENTS:
                send(event)
            assert len(wakes) == number
            loop.call_soon(wakes[-1])
            assert await queue.get(30) == [(0, event) for event in EVENTS]
            await asyncio.sleep(0)

    asyncio.run(run())


def test_no_event_and_an_error() -> None:
    async def run() -> None:
        queue, _ = queue_of(asyncio.get_running_loop())
        assert await queue.get(0.01) == []
        queue.fail(ComputationError("the engine has failed"))
        ((index, event),) = await queue.get()
        assert index == 0 and isinstance(event, Failed)

    asyncio.run(run())


# --- the scheduler ----------------------------------------------------------------------------------------------------


def test_events_are_sent_while_the_next_pass_runs(
    tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, threads, honest = threading.Semaphore(0), set(), tiny_engine.run_together

    def run(parts: Sequence[SequenceInput]) -> list[np.ndarray]:
        if parts[0].cache.position:
            assert heard.acquire(timeout=WAIT), "the token of the last pass was not sent"
        return honest(parts)

    def listener(event: Event) -> None:
        threads.add(threading.current_thread().name)
        if isinstance(event, Generated):
            heard.release()
        if isinstance(event, Finished | Failed):
            last.put(event)

    last: SimpleQueue[Event] = SimpleQueue()
    scheduler = Scheduler(tiny_engine)
    monkeypatch.setattr(tiny_engine, "run_together", run)
    scheduler.submit(Request([2, 5], 20, speculate="off"), listener)
    assert isinstance(last.get(timeout=3 * WAIT), Finished)
    scheduler.close()
    assert len(threads) == 1


@pytest.fixture(params=[BrokenPipeError, ValueError])
def no_stderr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks cannot be printed, because stderr is a closed pipe or a closed file."""

    def closed() -> None:
        raise request.param

    monkeypatch.setattr("traceback.print_exc", closed)


@pytest.mark.usefixtures("no_stderr")
def test_a_listener_that_exits_leaves_other_requests_their_events(tiny_engine: gemma_py.Engine) -> None:
    """The listener raises SystemExit."""

    def listener(event: Event) -> None:
        raise SystemExit

    scheduler = Scheduler(tiny_engine)
    scheduler.submit(Request([2, 5], 4000), listener)
    client = Client(scheduler, Request([2], 20))
    assert isinstance(client.end(), Finished) and len(client.made) == 20
    scheduler.close()


@pytest.mark.usefixtures("no_stderr")
def test_requests_end_with_an_error_if_the_scheduler_fails(
    tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(parts: Sequence[SequenceInput]) -> list[np.ndarray]:
        raise MemoryError

    monkeypatch.setattr(tiny_engine, "run_together", run)
    scheduler = Scheduler(tiny_engine)
    last = Client(scheduler, Request([2, 5], 20)).end()
    assert isinstance(last, Failed) and "MemoryError" in str(last.error)
    scheduler.close()


def test_health_reports_a_listener_that_blocks(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_scheduler, "SLOWEST_STEP", 1.0)
    free, last = threading.Event(), SimpleQueue[Event]()

    def listener(event: Event) -> None:
        free.wait(WAIT)
        if isinstance(event, Finished | Failed):
            last.put(event)

    scheduler = Scheduler(tiny_engine)
    scheduler.submit(Request([2, 5], 500, speculate="off"), listener)
    while not (why := scheduler.health().why):
        assert last.empty() and scheduler.stats().passes < 100
    assert "no step has ended for" in why
    free.set()
    assert isinstance(last.get(timeout=WAIT), Finished)
    scheduler.close()


def test_events_are_sent_before_the_draft_model_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, honest = threading.Semaphore(0), Scheduler._plan

    def plan(scheduler: Scheduler) -> Any:
        if any(sequence.answering for sequence in scheduler._running):
            assert heard.acquire(timeout=WAIT), "the token of the last pass was not sent"
        return honest(scheduler)

    monkeypatch.setattr(Scheduler, "_plan", plan)
    with gemma_py.load(TINY, draft=TINY) as engine:
        scheduler = Scheduler(engine)
        last: SimpleQueue[Event] = SimpleQueue()

        def listener(event: Event) -> None:
            if isinstance(event, Generated):
                heard.release()
            if isinstance(event, Finished | Failed):
                last.put(event)

        scheduler.submit(Request([2, 5], 20), listener)
        assert isinstance(last.get(timeout=3 * WAIT), Finished)
        scheduler.close()


def test_closing_a_scheduler_sends_the_last_events(tiny_engine: gemma_py.Engine) -> None:
    """The listener is slow, so events are still waiting when the scheduler has ended all requests."""
    heard: list[Event] = []

    def listener(event: Event) -> None:
        time.sleep(0.2)
        heard.append(event)

    scheduler = Scheduler(tiny_engine)
    for _ in range(3):
        scheduler.submit(Request([2, 5], 1), listener)
    scheduler.drain(WAIT)
    scheduler.close()
    assert sum(isinstance(event, Finished) for event in heard) == 3
