"""Workers that get no core on a busy machine are not reported as stalled or deadlocked, but real stalls and deadlocks
are.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from small_pass import GENEROUS, hold, leave_early

from gemma_py import machine
from gemma_py.errors import WorkerError
from gemma_py.kernels.decorator import kernel
from gemma_py.runtime import sync
from gemma_py.runtime.cells import AT_BARRIER, AWAITED, BOUND, FOR_ROWS, GENERATION, LINE, WAITING, Cells, make_cells
from gemma_py.runtime.team import Team, _Watch

PATIENCE = 1.0  # seconds until a stall is reported
DEADLINE = 0.1  # seconds, of a team whose workers are starved
Fault = tuple[int, str] | None


@kernel
def pass_barriers(worker, workers, cells, barriers):
    done = sync.enter(cells, worker, 0, 0)
    for _ in range(barriers):
        done = done and sync.barrier(cells, worker, workers)
    return done


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(2) as team:
        team.run(pass_barriers, 1)
        yield team


def wait_for(cells: Cells, worker: int, why: int, index: int, bound: int) -> None:
    for cell, value in ((WAITING, why), (AWAITED, index), (BOUND, bound)):
        cells.own[worker * LINE + cell] = value


def watched(team: Team, cells: Cells, ticks: int = 100) -> Fault:
    """The fault that the team reports within `ticks` ticks of 0.1 s, while no worker makes a step."""
    watch = _Watch(cells, set(), team._start_threads(), PATIENCE)
    return next((fault for _ in range(ticks) if (fault := watch.tick(0.1)) is not None), None)


class Clock:
    """Acts as `machine.thread_state` for a thread that uses a fraction of a core."""

    def __init__(self, is_ready: bool, fraction: float) -> None:
        self.is_ready, self.fraction, self.calls = is_ready, fraction, 0

    def __call__(self, number: int) -> tuple[bool, float]:
        self.calls += 1
        return self.is_ready, self.calls * 0.1 * self.fraction


@pytest.fixture(params=["barrier", "rows"])
def cells(request: pytest.FixtureRequest) -> Cells:
    """The cells of a run in which worker 0 waits for a condition that is already true, and worker 1 waits for worker 0."""
    cells = make_cells(2, watermarks=[3, 8])
    cells.shared[GENERATION] = 5
    wait_for(cells, 1, AT_BARRIER, GENERATION, 5)
    wait_for(cells, 0, *((AT_BARRIER, GENERATION, 4) if request.param == "barrier" else (FOR_ROWS, LINE, 7)))
    return cells


def test_a_released_worker_without_a_core_is_no_fault(
    team: Team, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "thread_state", Clock(is_ready=True, fraction=0.05))
    assert watched(team, cells) is None


@pytest.mark.parametrize(("is_ready", "fraction"), [(False, 0.0), (True, 1.0), (True, 0.5)])
def test_a_released_worker_that_could_run_has_stalled(
    team: Team, cells: Cells, monkeypatch: pytest.MonkeyPatch, is_ready: bool, fraction: float
) -> None:
    monkeypatch.setattr(machine, "thread_state", Clock(is_ready, fraction))
    fault = watched(team, cells, ticks=30)
    assert fault is not None and fault[0] == 0 and "stalled" in fault[1]


def test_without_thread_states_all_time_counts(team: Team, cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "thread_state", lambda number: None)
    assert watched(team, cells, ticks=10) is None
    fault = watched(team, cells, ticks=12)
    assert fault is not None and fault[0] == 0 and "stalled" in fault[1]


def test_a_deadlock_is_reported_at_once(team: Team) -> None:
    cells = make_cells(2, watermarks=[3])
    wait_for(cells, 0, FOR_ROWS, 0, 3)
    wait_for(cells, 1, AT_BARRIER, GENERATION, 0)
    # The first tick has no earlier counts of steps to compare with, and a worker may still make a step before the second.
    assert watched(team, cells, ticks=2) is None
    assert watched(team, cells, ticks=3) == (0, "is in a deadlock (waits for rows)")


def test_a_step_between_two_ticks_is_no_deadlock(team: Team) -> None:
    cells = make_cells(2)
    wait_for(cells, 0, AT_BARRIER, GENERATION, 0)
    wait_for(cells, 1, AT_BARRIER, GENERATION, 0)
    watch = _Watch(cells, set(), team._start_threads(), PATIENCE)
    for _ in range(20):
        assert watch.tick(0.1) is None and watch.tick(0.1) is None
        cells.own[LINE] += 1  # worker 1 makes a step


def starve(core: int) -> subprocess.Popen[bytes]:
    """Make the team's threads share one core with a new process that always wants the core and has a higher priority."""
    for thread in threading.enumerate():
        if thread.name.startswith("gemma_py-starved-"):
            assert thread.native_id is not None
            os.sched_setaffinity(thread.native_id, {core})
            os.sched_setscheduler(thread.native_id, os.SCHED_IDLE, os.sched_param(0))
    script = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert neighbour.stdout is not None
    neighbour.stdout.readline()
    return neighbour


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux's scheduling class SCHED_IDLE")
def test_a_busy_core_breaks_no_run() -> None:
    """The workers get the core about once a second, which is many times the deadline.

    A run that ends within the deadline shows nothing: the system may leave the core to the workers for a while.
    """
    with Team(3, deadline=DEADLINE) as team:
        team.run(pass_barriers, 1)
        for thread in team._start_threads():
            thread.name = thread.name.replace("gemma_py-", "gemma_py-starved-")
        with starve(max(os.sched_getaffinity(0))) as neighbour:
            try:
                until = time.monotonic() + GENEROUS
                took = 0.0
                while took <= DEADLINE:
                    before = time.monotonic()
                    team.run(pass_barriers, 2)
                    took = time.monotonic() - before
                    if time.monotonic() > until:
                        pytest.skip(
                            f"in {GENEROUS:.0f} s, no run took longer than the deadline: this system does not rank SCHED_IDLE last"
                        )
            finally:
                neighbour.kill()


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_worker_that_holds_others_up_is_reported(sleeps: bool) -> None:
    gate, written = np.zeros(1, np.int64), np.zeros(1, np.int64)
    with Team(2, deadline=0.5) as team:
        with pytest.raises(WorkerError, match="worker 1 of 2 stalled: no step"):
            team.run(hold if sleeps else spin_at, gate, 1, written)
        with pytest.raises(WorkerError, match="is in a deadlock"):
            team.run(leave_early)
        gate[0] = 1


@kernel
def spin_at(worker, workers, cells, gate, who, written):
    sync.enter(cells, worker, 1, 2)
    while worker == who and sync.load_acquire(gate, 0) == 0:
        pass
    return sync.barrier(cells, worker, workers)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads have no CPU affinity here")
def test_each_worker_stays_on_its_core_if_every_core_has_a_worker() -> None:
    def affinities(workers: int) -> list[set[int]]:
        with Team(workers) as team:
            team.run(pass_barriers, 1)
            return [os.sched_getaffinity(thread.native_id or 0) for thread in team._start_threads()]

    cores = machine.physical_cores(machine.affinity())
    assert affinities(len(cores)) == cores
    more = len(cores) + 1
    assert affinities(more) == [machine.affinity()] * more
