import contextlib
import ctypes
import gc
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from repository import child_environment
from small_pass import (
    ATTEND,
    DEADLINE,
    GENEROUS,
    LAYERS,
    MIX,
    NAMES,
    PRODUCE,
    STORE,
    WORKERS,
    count_up,
    forward,
    hold,
    leave_early,
    make_arrays,
    passed,
    publish_twice,
    refuse,
    work_slowly,
)

from gemma_py.errors import InputError, WorkerError
from gemma_py.kernels.atomics import (
    compare_exchange,
    fetch_add,
    is_ieee,
    load_acquire,
    store_release,
)
from gemma_py.kernels.decorator import kernel
from gemma_py.reference.arithmetic import is_ieee as specification_is_ieee
from gemma_py.runtime.cells import LINE, make_cells
from gemma_py.runtime.fault_injection import FaultPlan, shuffle
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.team import Team


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    with Team(1) as alone:
        return passed(alone)


@pytest.fixture
def team() -> Iterator[Team]:
    with Team(WORKERS) as team:
        yield team


def raised(team: Team, *args: Any, **options: Any) -> WorkerError:
    before = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        team.run(*args, phases=NAMES, **options)
    assert time.monotonic() - before < GENEROUS
    return caught.value


def run_faulty(team: Team, plan: FaultPlan) -> WorkerError:
    return raised(
        team,
        forward,
        *make_arrays(),
        0,
        watermarks=[0] * LAYERS,
        counters=3 * LAYERS,
        instruments=Instruments(fault_plan=plan),
    )


_others: set[threading.Thread] = set()  # threads of engines that other tests keep open


@pytest.fixture(autouse=True)
def others() -> None:
    _others.clear()
    _others.update(threading.enumerate())


def team_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("gemma_py-") and t not in _others]


# --- cells ------------------------------------------------------------------------------------------------------------


def test_atomics_do_what_their_names_say() -> None:
    @kernel
    def use(cells):
        before = fetch_add(cells, 1, 5)
        failed, swapped = compare_exchange(cells, 1, 0, 9), compare_exchange(cells, 1, 7, 9)
        store_release(cells, 0, load_acquire(cells, 1))
        return before, failed, swapped

    cells = np.array([0, 2], np.int64)
    assert use(cells) == (2, 7, 7)
    assert cells.tolist() == [9, 9]


def test_atomic_counts_lose_nothing(team: Team) -> None:
    counter = np.zeros(2, np.int64)
    team.run(count_up, counter, 50_000)
    assert counter.tolist() == [WORKERS * 50_000] * 2


def test_cells_have_lines_of_their_own() -> None:
    cells = make_cells(3, watermarks=[4, 5], counters=0)
    assert all(array.ctypes.data % (8 * LINE) == 0 for array in cells if array.size)
    assert cells.watermarks[::LINE].tolist() == [4, 5] and cells.own[2::LINE].tolist() == [-1] * 3


@kernel
def _shuffled(cells, index, tile, tiles):
    return shuffle(cells, index, tile, tiles)


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 7, 12, 97])
def test_shuffled_claims_are_a_permutation(tiles: int) -> None:
    for seed in range(1, 20):
        cells = make_cells(1)
        FaultPlan(seed=seed).apply(cells)
        assert sorted(_shuffled(cells, 2, tile, tiles) for tile in range(tiles)) == list(range(tiles))


# --- waits that hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_any_team_matches_one_worker(workers: int, expected: np.ndarray) -> None:
    with Team(workers) as team:
        for seed in range(100):
            assert np.array_equal(passed(team, FaultPlan(seed=seed)), expected), f"seed {seed}"
        for _ in range(100):
            assert np.array_equal(passed(team), expected)


def test_rows_are_published_from_where_the_watermark_stands(team: Team) -> None:
    for start in (1, 1000):
        passed(team, FaultPlan(seed=start), start)


@pytest.mark.parametrize(
    "mutation",
    [
        FaultPlan(seed=1, omit="barrier", omit_phase=MIX),
        FaultPlan(seed=1, omit="barrier", omit_phase=ATTEND),
        FaultPlan(seed=1, omit="barrier", omit_layer=1, omit_phase=MIX),
        FaultPlan(seed=1, omit="barrier", omit_layer=1, omit_phase=ATTEND),
        FaultPlan(seed=1, omit="order"),
        FaultPlan(seed=1, omit="await"),
        FaultPlan(seed=1, omit="await", omit_layer=LAYERS - 1),
    ],
    ids=lambda plan: f"{plan.omit}-{plan.omit_layer}-{plan.omit_phase}",
)
def test_negative_control_is_caught(team: Team, mutation: FaultPlan, expected: np.ndarray) -> None:
    """Without the wait or the order, the check of test_any_team_matches_one_worker must fail."""
    for seed in range(1, 300):
        plan = FaultPlan(**{**vars(mutation), "seed": seed})
        if not np.array_equal(passed(team, plan), expected):
            return
    pytest.fail(f"no seed shows a wrong result under {mutation}")


# --- waits that end ---------------------------------------------------------------------------------------------------


def check_fault(team: Team, plan: FaultPlan, expected: np.ndarray) -> None:
    error = run_faulty(team, plan)
    assert (error.worker, error.layer, error.phase) == (plan.worker, plan.layer, plan.phase)
    assert f"worker {plan.worker} of {WORKERS}" in str(error) and f"phase {NAMES[plan.phase]}" in str(error)
    assert error.settled == (plan.fault == "raise")
    assert ("an injected fault" if plan.fault == "raise" else "stalled") in str(error)
    assert np.array_equal(passed(team), expected)


FAULT_PLACES = [(MIX, "enter"), (MIX, "barrier"), (PRODUCE, "enter"), (ATTEND, "enter"), (ATTEND, "barrier")]


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize(("phase", "place"), FAULT_PLACES)
def test_exception_is_reported_and_the_team_stays_usable(
    team: Team, layer: int, phase: int, place: str, expected: np.ndarray
) -> None:
    for worker in range(WORKERS):
        check_fault(team, FaultPlan(worker, "raise", worker, layer, phase, place), expected)


@pytest.mark.parametrize(("phase", "place"), FAULT_PLACES)
def test_stall_is_reported_and_the_team_stays_usable(phase: int, place: str, expected: np.ndarray) -> None:
    with Team(WORKERS, deadline=DEADLINE) as team:
        check_fault(team, FaultPlan(5, "stall", phase % WORKERS, 1, phase, place), expected)
    assert not team_threads()


@pytest.mark.parametrize(
    ("phase", "place"), [(MIX, "claim"), (PRODUCE, "claim"), (STORE, "publish"), (ATTEND, "claim"), (ATTEND, "await")]
)
@pytest.mark.parametrize("fault", ["raise", "stall"])
def test_fault_with_a_tile_in_hand_is_reported(phase: int, place: str, fault: str, expected: np.ndarray) -> None:
    """A single worker claims every tile. One of several workers may claim none, so the run is repeated with more seeds."""
    with Team(1, deadline=DEADLINE) as alone:
        error = run_faulty(alone, FaultPlan(0, fault, 0, 1, phase, place))
        assert (error.worker, error.layer, error.phase) == (0, 1, phase)
    with Team(WORKERS, deadline=DEADLINE) as team:
        for seed in range(1, 100):
            try:
                passed(team, FaultPlan(seed, fault, 2, 1, phase, place))
            except WorkerError as error:
                assert (error.worker, error.layer, error.phase) == (2, 1, phase)
                break
        else:
            pytest.fail("worker 2 never got a tile")
        assert np.array_equal(passed(team), expected)


def test_hundred_exceptions_are_reported(team: Team, expected: np.ndarray) -> None:
    for seed in range(1, 101):
        error = run_faulty(team, FaultPlan(seed, "raise", seed % WORKERS, seed % LAYERS, ATTEND, "enter"))
        assert (error.worker, error.layer, error.settled) == (seed % WORKERS, seed % LAYERS, True)
        assert isinstance(error.__cause__, RuntimeError)
    assert np.array_equal(passed(team), expected)
    assert len(team_threads()) == WORKERS


@pytest.mark.parametrize("who", range(WORKERS))
def test_worker_that_gives_up_is_named(team: Team, who: int) -> None:
    error = raised(team, refuse, who)
    assert (error.worker, error.layer, error.phase, error.settled) == (who, 4, 1, True)
    assert "reported a failure" in str(error)


def test_waiting_for_nobody_is_reported() -> None:
    with Team(WORKERS, DEADLINE) as team:
        error = raised(team, leave_early)
    assert error.worker != 1 and error.layer == 6 and "is in a deadlock (waits at a barrier)" in str(error)
    assert error.settled


def test_rows_with_two_owners_are_reported(team: Team) -> None:
    assert "reported a failure before its first phase" in str(raised(team, publish_twice, watermarks=[0]))


def test_long_work_is_no_stall() -> None:
    with Team(2, deadline=1.0) as team:
        team.run(work_slowly, 60)


def test_late_worker_cannot_disturb_later_runs(expected: np.ndarray) -> None:
    with Team(WORKERS, deadline=1.0) as team:
        gate, written = np.zeros(1, np.int64), np.zeros(1, np.int64)
        error = raised(team, hold, gate, 2, written)
        assert (error.worker, error.layer, error.phase, error.settled) == (2, 1, 2, False)
        assert len(team_threads()) == WORKERS  # the stalled worker still runs, and no thread was added
        assert np.array_equal(passed(team, FaultPlan(seed=3)), expected)
        assert len(team_threads()) == WORKERS + 1
        gate[0] = 1
        for seed in range(1, 50):
            assert np.array_equal(passed(team, FaultPlan(seed=seed)), expected)
        until = time.monotonic() + GENEROUS
        while len(team_threads()) > WORKERS and time.monotonic() < until:
            time.sleep(0.01)
        # The stalled worker continued, wrote to the array of its run, and ended.
        assert written[0] == 1 and len(team_threads()) == WORKERS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_thread_is_reported_and_replaced(team: Team, expected: np.ndarray) -> None:
    passed(team)
    victim = next(thread for thread in team_threads() if thread.name.endswith("-3"))
    kill = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert victim.ident is not None
    assert kill(ctypes.c_ulong(victim.ident), ctypes.py_object(SystemExit)) == 1
    # The worker may die before, in or after the kernel.
    error = None
    try:
        passed(team)
    except WorkerError as caught:
        error = caught
    assert error is not None and error.worker == 3 and ("died" in str(error) or "SystemExit" in str(error))
    assert np.array_equal(passed(team), expected)


def test_interrupt_in_the_caller_passes_on(expected: np.ndarray) -> None:
    script = """
import os, signal, sys, threading
from small_pass import Team, work_slowly, passed
team = Team(2)
team.run(work_slowly, 0)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    team.run(work_slowly, 10_000)
except KeyboardInterrupt:
    passed(team)
    print("interrupted, and well")
"""
    assert "interrupted, and well" in run_python(script)


# --- life of a team ---------------------------------------------------------------------------------------------------


def run_python(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=2 * GENEROUS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_interpreter_exits_with_a_team_open_and_a_worker_stalled() -> None:
    script = """
from small_pass import MIX, Team, FaultPlan, passed

from gemma_py.errors import WorkerError

team = Team(2, deadline=1.0)
passed(team)
try:
    passed(team, FaultPlan(1, "stall", 1, 1, MIX, "enter"))
except WorkerError as error:
    print(error)
"""
    assert "worker 1 of 2 stalled" in run_python(script)


def test_several_python_threads_take_turns(team: Team, expected: np.ndarray) -> None:
    results: list[bool] = []

    def use(number: int) -> None:
        for seed in range(20):
            with contextlib.suppress(WorkerError):
                results.append(np.array_equal(passed(team, FaultPlan(seed=seed)), expected))
            if number == 0:
                run_faulty(team, FaultPlan(seed, "raise", seed % WORKERS, 0, MIX, "enter"))

    users = [threading.Thread(target=use, args=(number,)) for number in range(5)]
    for user in users:
        user.start()
    for user in users:
        user.join(GENEROUS)
    assert results == [True] * 100


def in_child(check: Any) -> None:
    with warnings.catch_warnings():
        # Newer versions of Python warn about forking a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    until = time.monotonic() + GENEROUS
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    pytest.fail("the child hangs")


def test_forked_child_gets_threads_of_its_own(team: Team, expected: np.ndarray) -> None:
    assert np.array_equal(passed(team), expected)
    in_child(lambda: np.array_equal(passed(team, FaultPlan(seed=1)), expected))

    def closes() -> bool:
        team.close()
        return not team_threads()

    in_child(closes)
    assert np.array_equal(passed(team), expected)


def test_fork_in_the_middle_of_a_run(team: Team, expected: np.ndarray) -> None:
    passed(team)
    team.run(work_slowly, 0)
    user = threading.Thread(target=team.run, args=(work_slowly, 20))
    user.start()
    time.sleep(0.2)  # the run in the parent holds the team's lock, which the child must not wait for
    in_child(lambda: np.array_equal(passed(team), expected))
    user.join(GENEROUS)
    assert not user.is_alive() and np.array_equal(passed(team), expected)


def test_closed_team_says_so_and_leaves_no_threads() -> None:
    team = Team(3)
    team.run(work_slowly, 1)
    assert len(team_threads()) == 3
    team.close()
    team.close()
    assert not team_threads()
    with pytest.raises(InputError, match="closed"):
        team.run(work_slowly, 1)


def test_forgotten_team_leaves_no_threads() -> None:
    team = Team(3)
    team.run(work_slowly, 1)
    threads = team_threads()
    del team
    gc.collect()
    for thread in threads:
        thread.join(GENEROUS)
    assert not team_threads()


def test_idle_team_keeps_no_arrays(team: Team) -> None:
    counter = np.zeros(2, np.int64)
    team.run(count_up, counter, 1)
    kept = weakref.ref(counter)
    del counter
    until = time.monotonic() + GENEROUS
    while kept() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert kept() is None


@pytest.mark.parametrize(("workers", "deadline"), [(0, 5.0), (-1, 5.0), (2, 0.0), (2, float("nan"))])
def test_impossible_teams_are_refused(workers: int, deadline: float) -> None:
    with pytest.raises(InputError):
        Team(workers, deadline)


def test_kernels_are_compiled_once(team: Team) -> None:
    passed(team)
    passed(team, FaultPlan(seed=1))
    assert len(forward.signatures) == 1


# --- arithmetic -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def flushing_to_zero() -> Iterator[None]:
    """Flush subnormals to zero in this thread.

    On x86-64, FTZ and DAZ are flags of MXCSR, the last word of glibc's saved environment. On ARM, FZ is a flag of FPCR,
    the first word.
    """
    word, flags = (7, 0x8040) if platform.machine() == "x86_64" else (0, 1 << 24)
    libm, saved, changed = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(saved)
    libm.fegetenv(changed)
    changed[word] |= flags
    libm.fesetenv(changed)
    try:
        yield
    finally:
        libm.fesetenv(saved)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64") or platform.libc_ver()[0] != "glibc",
    reason="needs glibc on Linux, and x86-64 or ARM64",
)
def test_flush_to_zero_is_noticed(expected: np.ndarray) -> None:
    with Team(2) as team:
        passed(team)
        with Team(2) as other, flushing_to_zero():
            assert not is_ieee() and not specification_is_ieee()
            # The threads of `team` started before the mode changed.
            assert np.array_equal(passed(team)[: LAYERS + 1], expected[: LAYERS + 1])
            with pytest.raises(WorkerError, match="flushes subnormals to zero"):
                passed(other)
            assert not is_ieee()
        assert is_ieee() and specification_is_ieee()
        with Team(2) as again:
            assert np.array_equal(passed(again), expected)
