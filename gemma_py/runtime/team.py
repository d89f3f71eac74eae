"""The worker team, which starts and watches the threads that run kernels.

`Team.run` calls a kernel on every worker, without the GIL, and returns when every worker is done. Such a call is a run. The
calling thread does not compute. It watches the workers, so that Ctrl-C works during a long prefill and stalls are detected.

A team has a deadline, the maximum time in seconds until `Team.run` reports a stall. The fraction _PATIENCE of the deadline is
the patience, the time for which a worker may make no step. A step is a claimed tile, a finished wait, an entered phase or a
call of `progress`. The team fails a run in two cases:
- Stall: one worker could continue but makes no step for longer than the patience, while another worker waits or has
  finished. If a team has only one worker, the second condition does not apply.
- Deadlock: every worker waits or has finished, and no awaited cell has a value that would let a worker continue. No worker
  can change that, so the team waits only for the ticks that prove the deadlock (see `_Watch.tick`).
Steps are watched, not the duration of a phase, because a phase may take minutes on a slow machine. Time is counted in ticks
of the watching thread. While the process is suspended, the watching thread is suspended too, so no ticks are counted.
Compilation does not count as a stall.

On a busy machine, a worker may wait for a core for many seconds. That time does not count as a stall: while the system says
that the thread is ready to run, only its CPU time counts. Systems without /proc do not say so, and there all time counts.

A thread cannot be killed, so the team replaces a stalled thread by a new one. If the stalled thread continues, its next
call of sync.py reports the broken run, and the thread ends. Until then the thread may write to the arrays of the failed run
(see `WorkerError.settled`), but not to the cells of another run, which are the variables that the workers of a run share
(cells.py). A thread that never continues stays as a daemon thread.
"""

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numba
from numba.core.compiler_lock import global_compiler_lock

from gemma_py import machine
from gemma_py.errors import ComputationError, InputError, WorkerError
from gemma_py.kernels.atomics import is_ieee
from gemma_py.runtime.cells import (
    AT_BARRIER,
    AWAITED,
    BOUND,
    BROKEN,
    COMPUTES,
    END_STALLS,
    LAYER,
    LINE,
    NOWHERE,
    PHASE,
    PROGRESS,
    SPINS,
    WAITING,
    WAITS,
    Array,
    Cells,
    make_cells,
)
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.profile import lines_needed

# The number of successive ticks without a step that prove a deadlock.
_SURE = 2
# Fractions of the deadline. _PATIENCE: the time without a step after which a worker counts as stalled. _GRACE: the time that
# the other workers then have to leave the run. _TICK: the interval at which the calling thread looks at the workers.
_PATIENCE, _GRACE, _TICK = 0.7, 0.2, 0.02
# A worker that yields may lose its core for some milliseconds, even to a process of low priority. So a worker spins for about
# 1 ms, which is longer than almost every wait. A team with more workers than logical CPUs yields sooner, because a spinning worker
# keeps another worker from its core.
_MANY_SPINS, _FEW_SPINS = 16_384, 256
_NO_INSTRUMENTS = Instruments()
_NOT_IEEE = "the thread inherited a floating-point mode that flushes subnormals to zero or does not round to nearest"


class _Outcome(NamedTuple):
    worker: int
    error: BaseException | None = None
    at_fault: bool = False


class _Reports:
    """What the workers of a run report to the calling thread when they finish.

    finished: the numbers of the workers that have finished.
    outcomes: the outcome of the last worker, and the outcome of every worker that finishes after the run is broken. If every
    outcome woke the calling thread, the other workers would wait while that thread holds the GIL, about 40 us for each outcome.
    """

    def __init__(self, workers: int, cells: Cells) -> None:
        self._workers, self._cells = workers, cells
        self.finished: set[int] = set()
        self.outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()

    def add(self, outcome: _Outcome) -> None:
        """Report that a worker has finished.

        The outcome of a broken run comes before and after the change of `finished`: before, so that it is in the queue when the
        calling thread sees that all workers have finished, and after, so that it wakes the calling thread then.
        """
        is_broken = bool(self._cells.shared[BROKEN])
        if is_broken:
            self.outcomes.put(outcome)
        self.finished.add(outcome.worker)
        if is_broken or len(self.finished) == self._workers:
            self.outcomes.put(outcome)


class _Run(NamedTuple):
    """One call of a kernel on every worker.

    Each run has its own cells and queue, so that a late worker cannot disturb a later run.
    """

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    workers: int
    cells: Cells
    reports: _Reports
    keep_alive: object  # owns memory to which `args` has only addresses
    phases: Sequence[str]

    def perform(self, worker: int) -> _Outcome:
        try:
            done = self.kernel(worker, self.workers, self.cells, *self.args)
        # Any exception, even KeyboardInterrupt, must break the run, because the other workers wait for this one.
        except BaseException as error:
            self.break_run(worker)
            return _Outcome(worker, error)
        if done is not None and not done:
            self.break_run(worker)
        return _Outcome(worker, at_fault=self.culprit() == worker)

    def culprit(self) -> int | None:
        return int(self.cells.shared[BROKEN]) - 1 if self.cells.shared[BROKEN] else None

    def break_run(self, worker: int) -> None:
        """Break the run and record this worker as the cause, unless the run is already broken."""
        if not self.cells.shared[BROKEN]:
            self.cells.shared[BROKEN] = worker + 1

    def error(self, worker: int, what: str) -> WorkerError:
        at = worker * LINE
        layer, phase = int(self.cells.own[at + LAYER]), int(self.cells.own[at + PHASE])
        if layer == NOWHERE and phase == NOWHERE:
            return WorkerError(worker, self.workers, None, None, what)
        name = self.phases[phase] if 0 <= phase < len(self.phases) else None
        return WorkerError(worker, self.workers, layer, phase, what, name)


class _WorkerThread(threading.Thread):
    """A worker thread with an inbox of runs. The thread refers to no team, so that its team can be garbage-collected."""

    def __init__(self, number: int, home: set[int] | None) -> None:
        self.inbox: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        super().__init__(target=_work, args=(number, home, self.inbox), name=f"gemma_py-{number}", daemon=True)
        self.start()

    def stop(self) -> None:
        """Make the thread end after the runs in its inbox."""
        self.inbox.put(None)


def _work(number: int, home: set[int] | None, inbox: "queue.SimpleQueue[_Run | None]") -> None:
    """Perform runs. home: the logical CPUs on which this thread stays, or None for all CPUs"""
    if home is not None:
        machine.stay_on(home)
    ieee = is_ieee()
    while (run := inbox.get()) is not None:
        if ieee:
            outcome = run.perform(number)
        else:
            run.break_run(number)
            outcome = _Outcome(number, ComputationError(_NOT_IEEE))
        reports = run.reports
        del run  # a reference would keep the arrays of the run alive while the worker is idle
        reports.add(outcome)
        del outcome, reports
        if not ieee:  # end this thread; the next run starts a new one, which may inherit IEEE mode
            return


class _Watch:
    """Detects stalls and deadlocks of a run from the workers' cells (see the docstring of this module)."""

    def __init__(self, cells: Cells, finished: set[int], threads: "Sequence[_WorkerThread]", patience: float) -> None:
        """finished: the numbers of the workers that have finished, to which numbers are added during the run"""
        self._cells, self._finished, self._threads, self._patience = cells, finished, threads, patience
        self._steps = [-1] * len(threads)
        self._ages = [0.0] * len(threads)  # for how many seconds each worker could run but made no step
        self._cpu_times = [0.0] * len(threads)
        self._quiet_ticks = 0

    def tick(self, elapsed: float) -> tuple[int, str] | None:
        """Look at the workers after `elapsed` seconds. Return a stalled worker and a description, or None.

        A tick first reads which workers rest, and then reads the workers' steps. Suppose that every worker rests in two
        successive ticks, and that no worker has made a step since the tick before. Then every worker stayed in one wait
        between the two ticks, so no cell changed. The second tick saw that no cell lets a worker continue: a deadlock.
        """
        if global_compiler_lock.is_locked():  # workers make no steps while a kernel is compiled or loaded
            return None
        workers = range(len(self._threads))
        resting = [self._rests(worker) for worker in workers]
        steps = [int(self._cells.own[worker * LINE + PROGRESS]) for worker in workers]
        moved = [new != old for new, old in zip(steps, self._steps, strict=True)]
        self._steps = steps
        is_awaited = any(resting) or len(workers) == 1
        for worker in workers:
            if moved[worker] or resting[worker] or not is_awaited:
                self._ages[worker] = 0.0
                continue
            self._ages[worker] += self._time_on_core(worker, elapsed)
            if self._ages[worker] > self._patience:
                return worker, f"stalled: no step for {self._ages[worker]:.1f} s"
        present = [worker for worker in workers if worker not in self._finished]
        is_quiet = bool(present) and all(resting) and not any(moved)
        self._quiet_ticks = self._quiet_ticks + 1 if is_quiet else 0
        if self._quiet_ticks >= _SURE:
            culprit = self._rearmost(present)
            return culprit, f"is in a deadlock ({WAITS[self._cells.own[culprit * LINE + WAITING]]})"
        return None

    def _rests(self, worker: int) -> bool:
        """Return whether a worker has finished, or waits for a cell that does not let the worker continue yet."""
        at, own = worker * LINE, self._cells.own
        why, index, bound = int(own[at + WAITING]), int(own[at + AWAITED]), int(own[at + BOUND])
        if worker in self._finished or why == COMPUTES:
            return worker in self._finished
        awaited = self._cells.shared if why == AT_BARRIER else self._cells.watermarks
        # If the worker has begun another wait between the reads of its cells, `index` may belong to the other array.
        return index < len(awaited) and int(awaited[index]) <= bound

    def _time_on_core(self, worker: int, elapsed: float) -> float:
        """Return `elapsed` without the time in which the worker's thread waited for a core."""
        number = self._threads[worker].native_id
        state = None if number is None else machine.thread_state(number)
        if state is None:
            return elapsed
        is_ready, cpu_time = state
        used, self._cpu_times[worker] = cpu_time - self._cpu_times[worker], cpu_time
        return min(elapsed, used) if is_ready else elapsed

    def _rearmost(self, present: list[int]) -> int:
        """Return the worker that causes a deadlock: of the workers that had not finished, the one in the earliest phase."""
        own = self._cells.own
        return min(present, key=lambda w: (own[w * LINE + LAYER], own[w * LINE + PHASE], w))


def _stop_all(threads: "list[_WorkerThread | None]") -> None:
    for thread in threads:
        if thread is not None:
            thread.stop()


class Team:
    """A team of worker threads, which run kernels `kernel(worker, workers, cells, *args) -> bool` (see sync.py).

    Use the team as a context manager, or call `close`. Several Python threads may call `run`; the runs are executed one after
    another. After a fork, the team in the child process starts new threads at the first run.

    deadline: the maximum time in seconds until `run` reports a failure or a stall. Time in which a worker waits for a core
        does not count.
    """

    def __init__(self, workers: int, deadline: float = 5.0) -> None:
        if workers < 1 or not deadline > 0:
            raise InputError(f"a team needs at least 1 worker and a deadline above 0, found {workers} and {deadline}")
        self.workers, self.deadline = workers, deadline
        self._spins = _MANY_SPINS if workers <= len(machine.affinity()) else _FEW_SPINS
        # If every core has a worker, each worker stays on its core. Otherwise the system sometimes wakes two workers on one core,
        # if another process runs on a core, and leaves them there for tens of milliseconds.
        cores = machine.physical_cores(machine.affinity())
        self._homes: list[set[int] | None] = [*cores] if len(cores) == workers else [None] * workers
        self._tick = min(0.1, deadline * _TICK)
        self._closed = False
        self.settled = True  # whether every worker has left the latest failed run
        self._lock = threading.Lock()
        self._threads: list[_WorkerThread | None] = [None] * workers
        self._stalled: list[tuple[_WorkerThread, Cells]] = []
        self._finalizer = weakref.finalize(self, _stop_all, self._threads)
        is_ieee()
        _teams.add(self)

    def run(
        self,
        kernel: Callable[..., Any],
        *args: Any,
        watermarks: Sequence[int] = (),
        counters: int = 0,
        keep_alive: object = None,
        instruments: Instruments = _NO_INSTRUMENTS,
        phases: Sequence[str] = (),
    ) -> Array:
        """Call the kernel on every worker and return the final watermarks.

        watermarks: the initial values of the watermarks (see sync.py).
        counters: the number of tile counters that the kernel claims from.
        keep_alive: an object whose memory the kernel uses. The run refers to the object until the last worker, even a
        stalled one, has left the run.
        phases: the names of the phases by number, for error messages.

        Raises WorkerError if a worker fails or stalls. The error is chained to the worker's exception, if there is one. The
        team can be used again afterwards. The results of a failed run are invalid, and the arrays of the run may be used
        again only if `WorkerError.settled` is True. An exception in the calling thread, such as KeyboardInterrupt, also
        breaks the run.
        """
        with self._lock:
            if self._closed:
                raise InputError("the worker team is closed")
            plan, profile = instruments.fault_plan, instruments.profile
            cells = make_cells(self.workers, watermarks, counters, 0 if profile is None else lines_needed(len(phases)))
            cells.shared[SPINS] = self._spins
            run = _Run(kernel, args, self.workers, cells, _Reports(self.workers, cells), keep_alive, phases)
            if plan is not None:
                plan.apply(run.cells)
            if getattr(kernel, "overloads", None) == {}:
                self.compile(kernel, *args)
            threads = self._start_threads()
            watch = _Watch(run.cells, run.reports.finished, threads, _PATIENCE * self.deadline)
            try:
                for thread in threads:
                    thread.inbox.put(run)
                self._watch(run, threads, watch)
            except BaseException as error:
                run.break_run(0)
                self.settled = False  # must be False if an exception interrupts the next line
                self.settled = self._wait_for_workers(run, error)
                raise
            if profile is not None:
                profile.add(run.cells)
            return run.cells.watermarks[: len(watermarks) * LINE : LINE]

    def compile(self, kernel: Any, *args: Any) -> Callable[..., Any]:
        """Compile the kernel for arguments of these types, unless that is already done, and return its machine code, which
        `run` also accepts as a kernel. The calling thread compiles.

        Calling the machine code takes 0.5 us instead of 8 us, because numba's dispatcher, which looks at the types of the
        arguments, is not called. Hazard: arguments of other types are not refused, but misread.
        """
        types = tuple(numba.typeof(value) for value in (0, self.workers, make_cells(1), *args))
        if types not in kernel.overloads:
            kernel.compile(types)
        code: Callable[..., Any] = kernel.overloads[types].entry_point
        return code

    def _start_threads(self) -> list[_WorkerThread]:
        """Return the worker threads, after starting those that are missing: not started yet, ended, or given up after a
        stall.
        """
        for number, thread in enumerate(self._threads):
            if thread is None or not thread.is_alive():
                self._threads[number] = _WorkerThread(number, self._homes[number])
        self._stalled = [(thread, cells) for thread, cells in self._stalled if thread.is_alive()]
        return [thread for thread in self._threads if thread is not None]

    def _watch(self, run: _Run, threads: list[_WorkerThread], watch: _Watch) -> None:
        """Wait until every worker has finished the run. The first worker that fails or stalls raises WorkerError."""
        before = time.monotonic()
        while len(run.reports.finished) < self.workers or not run.reports.outcomes.empty():
            try:
                outcome = run.reports.outcomes.get(timeout=self._tick)
            except queue.Empty:
                # If more than two ticks have passed, this thread was suspended, and perhaps every worker too. Counting
                # only two ticks keeps the workers from looking stalled.
                now = time.monotonic()
                self._look(run, threads, watch, min(now - before, 2 * self._tick))
                before = now
                continue
            if outcome.error is not None:
                what = f"failed with {type(outcome.error).__name__}: {outcome.error},"
                raise run.error(outcome.worker, what) from outcome.error
            if outcome.at_fault:
                raise run.error(outcome.worker, "reported a failure")

    def _look(self, run: _Run, threads: list[_WorkerThread], watch: _Watch, elapsed: float) -> None:
        for number, thread in enumerate(threads):
            # A worker is added to `finished` before its thread ends, so is_alive() must be called first.
            if not thread.is_alive() and number not in run.reports.finished:
                run.break_run(number)
                run.reports.finished.add(number)
                raise run.error(number, "died")
        fault = watch.tick(elapsed)
        if fault is not None:
            run.break_run(fault[0])
            raise run.error(*fault)

    def _wait_for_workers(self, run: _Run, error: BaseException) -> bool:
        """Wait until the other workers leave a broken run, and replace late ones. Return whether all have left."""
        settled = True
        until = time.monotonic() + _GRACE * self.deadline
        with contextlib.suppress(queue.Empty):
            while len(run.reports.finished) < self.workers:
                run.reports.outcomes.get(timeout=max(0.0, until - time.monotonic()))
        for number, thread in enumerate(self._threads):
            if number not in run.reports.finished and thread is not None:
                thread.stop()
                self._threads[number] = None
                if thread.is_alive():
                    self._stalled.append((thread, run.cells))
                    settled = False
                    if isinstance(error, WorkerError):
                        error.settled = False
        return settled

    def close(self) -> None:
        """End the worker threads. If another Python thread is in `run`, that run finishes first. A team may be closed
        twice.
        """
        with self._lock:
            self._closed = True
            leaving = [thread for thread in self._threads if thread is not None]
            for thread, cells in self._stalled:
                cells.shared[END_STALLS] = 1  # ends stalls that were injected by a test
                leaving.append(thread)
            self._finalizer()
            self._threads[:] = [None] * self.workers
            self._stalled = []
        until = time.monotonic() + _GRACE * self.deadline
        for thread in leaving:
            thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> "Team":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget_threads(self) -> None:
        """Reset the team in a forked child. Neither the worker threads nor the thread that held the lock exist there."""
        self._lock = threading.Lock()
        self._threads[:] = [None] * self.workers
        self._stalled = []


_teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


def _after_fork() -> None:
    for team in list(_teams):
        team._forget_threads()


os.register_at_fork(after_in_child=_after_fork)
