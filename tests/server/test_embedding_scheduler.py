import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from crowd import WAIT, Client

import gemma_py
from gemma_py.errors import ComputationError, InputError, Overloaded
from gemma_py.generate.embedding import embed_all
from gemma_py.generate.embedding_scheduler import EmbeddingScheduler
from gemma_py.generate.events import Embedded, Failed, Finished
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.runner import SequenceInput

TEXTS = [[2, 5, 7, 9], [2], [2, 8] * 9]


@pytest.fixture
def engine(embedding_folder: Path) -> Iterator[gemma_py.Engine]:
    with gemma_py.load(embedding_folder, threads=2, deadline=1.0) as engine:
        yield engine


class Passes:
    """Counts the passes of an engine. Passes in `failing` fail. The first pass waits for `go`."""

    def __init__(self, engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch, failing: set[int], fault: str) -> None:
        self._engine, self._run = engine, engine.run_together
        self._failing, self._fault = failing, fault
        self.count, self.entered, self.go = 0, threading.Event(), threading.Event()
        monkeypatch.setattr(engine, "run_together", self.run)

    def run(self, parts: Sequence[SequenceInput]) -> list[np.ndarray]:
        self.count += 1
        self.entered.set()
        assert self.go.wait(WAIT)
        fails = self.count in self._failing
        self._engine.instruments.fault_plan = FaultPlan(fault=self._fault, worker=1) if fails else None
        return self._run(parts)


def rows_of(client: Client) -> np.ndarray:
    end = client.end()
    assert isinstance(end, Finished) and end.reason == "stop"
    (event,) = client.heard[:-1]
    assert isinstance(event, Embedded)
    return event.rows


def test_requests_share_a_pass_and_are_counted(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    want = embed_all(engine, TEXTS)
    passes = Passes(engine, monkeypatch, set(), "")
    scheduler = EmbeddingScheduler(engine)
    first = Client(scheduler, TEXTS[:1])
    assert passes.entered.wait(WAIT)
    others = [Client(scheduler, TEXTS) for _ in range(3)]
    passes.go.set()
    assert (rows_of(first) == want[:1]).all()
    assert all((rows_of(client) == want).all() for client in others)
    stats, tokens = scheduler.stats(), sum(map(len, TEXTS))
    assert (stats.passes, passes.count, stats.computed_tokens) == (2, 2, len(TEXTS[0]) + 3 * tokens)
    end = others[0].heard[-1]
    assert isinstance(end, Finished) and (end.usage.prompt, end.usage.generated) == (tokens, 0)
    assert 0 <= end.usage.queued_seconds <= end.usage.seconds
    scheduler.close()


def test_a_shutdown_during_a_pass_ends_each_request_once(
    engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = Passes(engine, monkeypatch, set(), "")
    scheduler = EmbeddingScheduler(engine, parallel=1)
    clients = [Client(scheduler, TEXTS[:1])]
    assert passes.entered.wait(WAIT)
    clients.append(Client(scheduler, TEXTS))
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    while scheduler._open or not all(client.ticket.cancelled for client in clients):
        pass
    passes.go.set()
    closing.join(WAIT)
    ends = [client.end() for client in clients]
    assert [end.reason for end in ends if isinstance(end, Finished)] == ["stop", "cancelled"]
    assert scheduler.health().ok and not scheduler._thread.is_alive()
    assert capsys.readouterr().err == ""
    with pytest.raises(Overloaded, match="shutting down"):
        scheduler.submit(TEXTS, print)


def test_a_cancelled_request_leaves_the_passes(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(engine, monkeypatch, set(), "")
    scheduler = EmbeddingScheduler(engine, parallel=1, queue=1)
    first = Client(scheduler, TEXTS)
    assert passes.entered.wait(WAIT)
    waiting = Client(scheduler, TEXTS)
    with pytest.raises(Overloaded, match="the queue is full"):
        scheduler.submit(TEXTS, print)
    waiting.ticket.cancel()
    passes.go.set()
    end = waiting.end()
    assert isinstance(end, Finished) and end.reason == "cancelled" and len(waiting.heard) == 1
    rows_of(first)
    assert passes.count == 1
    scheduler.close()


@pytest.mark.parametrize("fault", ["raise", "stall"])
def test_a_pass_that_fails_once_is_repeated(
    engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    want = embed_all(engine, TEXTS)
    passes = Passes(engine, monkeypatch, {1}, fault)
    passes.go.set()
    scheduler = EmbeddingScheduler(engine)
    assert (rows_of(Client(scheduler, TEXTS)) == want).all()
    stats = scheduler.stats()
    assert (stats.passes, stats.failed_passes, scheduler.health().ok) == (1, 1, True)
    scheduler.close()


def test_two_failed_passes_in_a_row_end_every_request(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    Passes(engine, monkeypatch, {1, 2}, "raise").go.set()
    scheduler = EmbeddingScheduler(engine, parallel=1)
    clients = [Client(scheduler, TEXTS) for _ in range(2)]
    assert all(isinstance(client.end(), Failed) for client in clients)
    health = scheduler.health()
    assert health.permanent and not health.ok and "worker 1 of 2" in health.why
    with pytest.raises(ComputationError, match="the engine has failed"):
        scheduler.submit(TEXTS, print)
    scheduler.close()


def test_invalid_limits_and_a_model_that_generates_are_refused(
    engine: gemma_py.Engine, tiny_engine: gemma_py.Engine
) -> None:
    with pytest.raises(InputError, match="parallel should be at least 1 and queue at least 0, found 0 and 3"):
        EmbeddingScheduler(engine, parallel=0, queue=3)
    with pytest.raises(InputError, match="this model generates text"):
        EmbeddingScheduler(tiny_engine)
