"""How workers report to the calling thread, and machine code that is called without numba's dispatcher."""

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from small_pass import WORKERS, count_up, refuse

from gemma_py.errors import WorkerError
from gemma_py.runtime.cells import Cells
from gemma_py.runtime.team import Team, _Reports


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(WORKERS) as team:
        yield team


def test_machine_code_computes_what_the_kernel_computes(team: Team) -> None:
    counters = np.zeros(2, np.int64), np.zeros(2, np.int64)
    code = team.compile(count_up, counters[0], 1)
    for kernel_or_code, counter in zip((count_up, code), counters, strict=True):
        team.run(kernel_or_code, counter, 1000)
    assert counters[0].tolist() == counters[1].tolist() and counters[0].any()
    assert code is team.compile(count_up, np.ones(2, np.int64), 7)


def reported(team: Team, monkeypatch: pytest.MonkeyPatch, *run: Any) -> list[tuple[str, int]]:
    """Run a kernel, and return in which order workers are added to those that have finished, and put outcomes into the queue."""
    events: list[tuple[str, int]] = []

    class Queue(queue.SimpleQueue):
        def put(self, item: Any, *rest: Any) -> None:
            events.append(("put", item.worker))
            super().put(item, *rest)

    class Reports(_Reports):
        def __init__(self, workers: int, cells: Cells) -> None:
            super().__init__(workers, cells)
            self.outcomes, self.finished = Queue(), Finished()

    class Finished(set[int]):
        def add(self, worker: int) -> None:
            events.append(("add", worker))
            super().add(worker)

    monkeypatch.setattr("gemma_py.runtime.team._Reports", Reports)
    with contextlib.suppress(WorkerError):
        team.run(*run)
    return events


def test_only_the_last_worker_wakes_the_calling_thread(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    *added, last = reported(team, monkeypatch, count_up, np.zeros(2, np.int64), 1)
    assert sorted(added) == [("add", worker) for worker in range(WORKERS)] and last == ("put", added[-1][1])


def test_every_worker_of_a_broken_run_wakes_the_calling_thread(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome must be there when the calling thread sees that all have finished, and wake it if it already waits for this."""
    events = reported(team, monkeypatch, refuse, 1)
    assert [event for event in events if event[1] == 1] == [("put", 1), ("add", 1), ("put", 1)]
