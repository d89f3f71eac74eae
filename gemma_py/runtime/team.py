"""The worker team: the one place that starts threads for arithmetic.

`run` calls one kernel once on every worker, without the GIL, and returns when all are done. The calling thread does not
compute; it watches the workers, so Ctrl-C works in the middle of a long prefill and every stall is noticed.

How a stall is recognised: elapsed time alone does not show one, because a phase may take minutes on a slow machine. Each
worker counts its steps (a tile claimed, a wait that ended, a phase entered), and the team fails the run in two cases:
- A worker neither steps nor waits for longer than the patience, while another worker waits or has finished (or, with one
  worker, at any time). A long computation steps at every tile; one that no other worker waits for may take any time.
- No worker steps, and all of them wait or have finished: a deadlock.
The patience is counted in the watcher's own ticks and not read off a clock, so stopping, swapping out or suspending the
whole process is not taken for a stall. Compiling is not a stall either.

A thread cannot be killed, so a stalled worker is replaced by a new thread. The stalled thread continues until its next
wait, claim or phase, finds its run broken, and ends. Until then it may write to the arrays of the failed run (see
`WorkerError.settled`); it cannot reach the cells of another run. If it never wakes, it stays as a daemon thread, and its
memory with it.
"""

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

from gemma_py.errors import ComputationError, InputError, WorkerError
from gemma_py.kernels.atomics import is_ieee
from gemma_py.runtime.cells import (
    BROKEN,
    COMPUTES,
    END_STALLS,
    LAYER,
    LINE,
    NOWHERE,
    PHASE,
    PROGRESS,
    WAITING,
    WAITS,
    Array,
    Cells,
    make_cells,
)
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.profile import lines_needed

# Shares of the deadline: how long a stall is watched before it counts, then how long the other workers have to leave the run.
# The rest allows for a watcher that is scheduled late.
_PATIENCE, _GRACE, _TICK = 0.7, 0.2, 0.02
_NO_INSTRUMENTS = Instruments()
_NOT_IEEE = "its thread, like the thread that started it, flushes subnormals to zero or does not round to nearest"


@dataclass(frozen=True)
class _Outcome:
    worker: int
    error: BaseException | None = None
    at_fault: bool = False


@dataclass(frozen=True)
class _Run:
    """One kernel call on every worker. Each run has its own cells and queue, so a late worker cannot disturb another run."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    workers: int
    cells: Cells
    outcomes: "queue.SimpleQueue[_Outcome]"
    keep_alive: object  # the memory that addresses among the arguments point to; referenced while any worker may use it

    def perform(self, worker: int) -> _Outcome:
        try:
            done = self.kernel(worker, self.workers, self.cells, *self.args)
        except BaseException as error:  # of any kind: the other workers must stop waiting for this one
            self.break_run(worker)
            return _Outcome(worker, error)
        if done is not None and not done:
            self.break_run(worker)
        return _Outcome(worker, at_fault=self.culprit() == worker)

    def culprit(self) -> int | None:
        return int(self.cells.shared[BROKEN]) - 1 if self.cells.shared[BROKEN] else None

    def break_run(self, worker: int) -> None:
        """Break the run. The first worker that does so is reported as the one at fault; of two at the same time, either is."""
        if not self.cells.shared[BROKEN]:
            self.cells.shared[BROKEN] = worker + 1

    def error(self, worker: int, what: str, phases: Sequence[str]) -> WorkerError:
        at = worker * LINE
        layer, phase = int(self.cells.own[at + LAYER]), int(self.cells.own[at + PHASE])
        if layer == NOWHERE and phase == NOWHERE:
            return WorkerError(worker, self.workers, None, None, what)
        name = phases[phase] if 0 <= phase < len(phases) else None
        return WorkerError(worker, self.workers, layer, phase, what, name)


class _WorkerThread(threading.Thread):
    """A thread and its inbox. It holds no reference to its team, so that an unused team can be garbage-collected."""

    def __init__(self, number: int) -> None:
        self.inbox: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        super().__init__(target=_work, args=(number, self.inbox), name=f"gemma_py-{number}", daemon=True)
        self.start()

    def stop(self) -> None:
        """Let the thread end after its current run, if it is in one."""
        self.inbox.put(None)


def _work(number: int, inbox: "queue.SimpleQueue[_Run | None]") -> None:
    ieee = is_ieee()
    while (run := inbox.get()) is not None:
        if ieee:
            outcome = run.perform(number)
        else:
            run.break_run(number)
            outcome = _Outcome(number, ComputationError(_NOT_IEEE))
        outcomes = run.outcomes
        del run  # an idle worker must not keep a session's arrays alive
        outcomes.put(outcome)
        del outcome, outcomes
        if not ieee:  # inherited from the thread that started this one; the next run gets a new thread
            return


class _Watch:
    """Tells slow workers from stalled ones; the rules are at the top of this file."""

    def __init__(self, own: Array, workers: int, patience: float) -> None:
        self._own, self._workers, self._patience = own, workers, patience
        self._steps = [-1] * workers
        self._ages = [0.0] * workers
        self._idle = 0.0
        self.left: set[int] = set()

    def tick(self, elapsed: float) -> tuple[int, str] | None:
        """Account for one more tick: the stalled worker and a description of the stall, or None while there is no stall."""
        if (
            global_compiler_lock.is_locked()
        ):  # a kernel is being compiled or loaded from the cache, which takes no steps
            return None
        steps = [int(self._own[worker * LINE + PROGRESS]) for worker in range(self._workers)]
        waits = [int(self._own[worker * LINE + WAITING]) for worker in range(self._workers)]
        moved = [new != old for new, old in zip(steps, self._steps, strict=True)]
        self._steps = steps
        resting = [worker in self.left or waits[worker] != COMPUTES for worker in range(self._workers)]
        is_awaited = any(resting) or self._workers == 1
        for worker in range(self._workers):
            if moved[worker] or resting[worker] or not is_awaited:
                self._ages[worker] = 0.0
                continue
            self._ages[worker] += elapsed
            if self._ages[worker] > self._patience:
                return worker, f"stalled: no step for {self._ages[worker]:.1f} s"
        self._idle = self._idle + elapsed if all(resting) and not any(moved) else 0.0
        if self._idle > self._patience:
            return self._rearmost(), f"is in a deadlock ({WAITS[waits[self._rearmost()]]}) for {self._idle:.1f} s"
        return None

    def _rearmost(self) -> int:
        """The waiting worker that is furthest behind: the cause of the deadlock is what this one waits for."""
        present = [worker for worker in range(self._workers) if worker not in self.left]
        return min(present, key=lambda w: (self._own[w * LINE + LAYER], self._own[w * LINE + PHASE], w))


def _stop_all(threads: "list[_WorkerThread | None]") -> None:
    for thread in threads:
        if thread is not None:
            thread.stop()


class Team:
    """Worker threads for kernels `kernel(worker, workers, cells, *args) -> bool`, see sync.py. Use as a context manager, or `close`.

    Several Python threads may call `run`; the runs are executed one after the other. deadline: the longest time, in seconds,
    in which a failure or a stall is reported to the caller. phases: the names of phase numbers, for error messages. A forked
    child process starts threads of its own at its first run.
    """

    def __init__(self, workers: int, deadline: float = 5.0, phases: Sequence[str] = ()) -> None:
        if workers < 1 or not deadline > 0:
            raise InputError(f"a team needs at least 1 worker and a deadline above 0, found {workers} and {deadline}")
        self.workers, self.deadline, self.phases = workers, deadline, tuple(phases)
        self._tick = min(0.1, deadline * _TICK)
        self._closed = False
        self.settled = True  # as WorkerError.settled, of the latest failed run, whatever its error
        self._lock = threading.Lock()
        self._threads: list[_WorkerThread | None] = [None] * workers
        self._stalled: list[tuple[_WorkerThread, Cells]] = []
        self._finalizer = weakref.finalize(self, _stop_all, self._threads)
        is_ieee()  # compiled here once, so that not all workers compile it at the same time
        _teams.add(self)

    def run(
        self,
        kernel: Callable[..., Any],
        *args: Any,
        watermarks: Sequence[int] = (),
        counters: int = 0,
        keep_alive: object = None,
        instruments: Instruments = _NO_INSTRUMENTS,
    ) -> list[int]:
        """Call the kernel on every worker and return the final watermarks.

        watermarks: their first values. counters: how many tile counters the kernel claims from.

        keep_alive: an object that is referenced as long as any worker, even a stalled one, may use its memory.

        Raises WorkerError, chained to the exception that a worker raised, if any; the team can be used again afterwards.
        The results of a failed run are invalid, and its arrays may be reused only if the error says `settled`. An exception
        in the calling thread (Ctrl-C) breaks the run too, and propagates.
        """
        with self._lock:
            if self._closed:
                raise InputError("the worker team is closed")
            plan, profile = instruments.fault_plan, instruments.profile
            cells = make_cells(
                self.workers, watermarks, counters, 0 if profile is None else lines_needed(len(self.phases))
            )
            run = _Run(kernel, args, self.workers, cells, queue.SimpleQueue(), keep_alive)
            if plan is not None:
                plan.apply(run.cells)
            if getattr(kernel, "overloads", None) == {}:
                self.compile(kernel, *args)
            threads = self._start_threads()
            watch = _Watch(run.cells.own, self.workers, _PATIENCE * self.deadline)
            try:
                for thread in threads:
                    thread.inbox.put(run)
                self._watch(run, threads, watch)
            except BaseException as error:
                run.break_run(0)
                self.settled = False  # stays so if the wait below is interrupted
                self.settled = self._wait_for_workers(run, watch.left, error)
                raise
            if profile is not None:
                profile.add(run.cells)
            return [int(mark) for mark in run.cells.watermarks[: len(watermarks) * LINE : LINE]]

    def compile(self, kernel: Any, *args: Any) -> None:
        """Compile the kernel for arguments of these types, in the calling thread, unless it is compiled already."""
        types = tuple(numba.typeof(value) for value in (0, self.workers, make_cells(1), *args))
        if types not in kernel.overloads:
            kernel.compile(types)

    def _start_threads(self) -> list[_WorkerThread]:
        """All worker threads. They are started at the first run, and replaced here after a fork, a death or a stall."""
        for number, thread in enumerate(self._threads):
            if thread is None or not thread.is_alive():
                self._threads[number] = _WorkerThread(number)
        self._stalled = [(thread, cells) for thread, cells in self._stalled if thread.is_alive()]
        return [thread for thread in self._threads if thread is not None]

    def _watch(self, run: _Run, threads: list[_WorkerThread], watch: _Watch) -> None:
        """Return when all workers have finished the run; raise for the first one that failed."""
        before = time.monotonic()
        while len(watch.left) < self.workers:
            try:
                outcome = run.outcomes.get(timeout=self._tick)
            except queue.Empty:
                # At most two ticks count at a time: when the watcher was suspended, the workers may have been, too.
                now = time.monotonic()
                self._look(run, threads, watch, min(now - before, 2 * self._tick))
                before = now
                continue
            watch.left.add(outcome.worker)
            if outcome.error is not None:
                what = f"failed with {type(outcome.error).__name__}: {outcome.error},"
                raise run.error(outcome.worker, what, self.phases) from outcome.error
            if outcome.at_fault:
                raise run.error(outcome.worker, "reported a failure", self.phases)
        culprit = run.culprit()
        if culprit is not None:  # it broke the run and then returned True
            raise run.error(culprit, "reported a failure", self.phases)

    def _look(self, run: _Run, threads: list[_WorkerThread], watch: _Watch, elapsed: float) -> None:
        for number, thread in enumerate(threads):
            # The queue is checked again, because a thread may put its outcome there and only then end.
            if number not in watch.left and not thread.is_alive() and run.outcomes.empty():
                run.break_run(number)
                watch.left.add(number)
                raise run.error(number, "died", self.phases)
        fault = watch.tick(elapsed)
        if fault is not None:
            run.break_run(fault[0])
            raise run.error(*fault, self.phases)

    def _wait_for_workers(self, run: _Run, left: set[int], error: BaseException) -> bool:
        """Wait for the other workers to leave a broken run, and replace those that do not in time. Whether all have left."""
        settled = True
        until = time.monotonic() + _GRACE * self.deadline
        with contextlib.suppress(queue.Empty):
            while len(left) < self.workers:
                left.add(run.outcomes.get(timeout=max(0.0, until - time.monotonic())).worker)
        for number, thread in enumerate(self._threads):
            if number not in left and thread is not None:
                thread.stop()
                self._threads[number] = None
                if thread.is_alive():
                    self._stalled.append((thread, run.cells))
                    settled = False
                    if isinstance(error, WorkerError):
                        error.settled = False
        return settled

    def close(self) -> None:
        """End the threads, after the run that another Python thread may have started. Closing twice does nothing more."""
        with self._lock:
            self._closed = True
            leaving = [thread for thread in self._threads if thread is not None]
            for thread, cells in self._stalled:
                cells.shared[END_STALLS] = 1  # ends the stalls that fault injection caused, and no others
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
        """Run in the child after a fork: the worker threads exist only in the parent, and so may the thread that holds the
        lock, which is therefore made anew."""
        self._lock = threading.Lock()
        self._threads[:] = [None] * self.workers
        self._stalled = []


_teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


def _after_fork() -> None:
    for team in list(_teams):
        team._forget_threads()


os.register_at_fork(after_in_child=_after_fork)
