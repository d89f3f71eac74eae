"""The worker team: the one place that starts threads for arithmetic.

`run` calls one kernel once on every worker, without the GIL, and returns when all are done. The calling thread does not
compute; it watches. So Ctrl-C works in the middle of a long prefill, and somebody is always there to see a stall.

What is a stall? Time alone cannot tell: a phase may take minutes on a slow machine. Each worker counts its steps (a
tile claimed, a wait met, a phase entered), and the team gives up in two cases:
- a worker neither steps nor waits while another one waits for it, or has finished, for longer than the patience (with
  one worker: while the caller waits). A long computation steps at every tile; one that nobody waits for may take long.
- nobody steps, and all wait or have finished: they wait for something that nobody will do.
The patience is counted in the watcher's own ticks and not read off a clock, so a process that was stopped, swapped out
or asleep as a whole accuses nobody. Compiling is no stall either.

What a given-up worker can still do: a thread cannot be killed. It goes on until its next wait, claim or phase, finds
its run broken, and ends; a new thread has its place by then. Until it ends it may write to the arrays of the failed
run, whence `WorkerError.settled`; it cannot reach the cells of another run. If it never wakes it stays, a daemon, and
costs its memory.
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
    LAYER,
    LINE,
    NOWHERE,
    PHASE,
    PROGRESS,
    RELEASE,
    WAITING,
    WAITS,
    Array,
    Cells,
    make_cells,
)
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.profile import room

# Shares of the deadline: to be sure of a stall, then to let the others leave. The rest is for a late watcher.
_PATIENCE, _GRACE, _TICK = 0.7, 0.2, 0.02
_NO_INSTRUMENTS = Instruments()
_NOT_IEEE = "its thread, like the one that started it, flushes subnormals to zero or does not round to nearest"


@dataclass(frozen=True)
class _Outcome:
    worker: int
    error: BaseException | None = None
    gave_up: bool = False


@dataclass(frozen=True)
class _Run:
    """One kernel call a worker. Its cells and queue are its own, so that whoever comes late disturbs no other run."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    workers: int
    cells: Cells
    outcomes: "queue.SimpleQueue[_Outcome]"
    held: object  # what the arguments point to: it lives as long as any worker may use it

    def perform(self, worker: int) -> _Outcome:
        try:
            done = self.kernel(worker, self.workers, self.cells, *self.args)
        except BaseException as error:  # whatever it is, the others must be told
            self.give_up(worker)
            return _Outcome(worker, error)
        if done is not None and not done:
            self.give_up(worker)
        return _Outcome(worker, gave_up=self.culprit() == worker)

    def culprit(self) -> int | None:
        return int(self.cells.shared[BROKEN]) - 1 if self.cells.shared[BROKEN] else None

    def give_up(self, worker: int) -> None:
        """Break the run; the first to do so is at fault. (Two at once: both are, and either is named.)"""
        if not self.cells.shared[BROKEN]:
            self.cells.shared[BROKEN] = worker + 1

    def error(self, worker: int, what: str, phases: Sequence[str]) -> WorkerError:
        at = worker * LINE
        layer, phase = int(self.cells.own[at + LAYER]), int(self.cells.own[at + PHASE])
        if layer == NOWHERE and phase == NOWHERE:
            return WorkerError(worker, self.workers, None, None, what)
        name = phases[phase] if 0 <= phase < len(phases) else None
        return WorkerError(worker, self.workers, layer, phase, what, name)


class _Member:
    """A thread and its inbox. It holds no reference to its team, so that a forgotten team can be collected."""

    def __init__(self, number: int) -> None:
        self.inbox: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(number, self.inbox), name=f"gemma_py-{number}", daemon=True)
        self.thread.start()

    def dismiss(self) -> None:
        """End the thread after the run that it may be in."""
        self.inbox.put(None)


def _serve(number: int, inbox: "queue.SimpleQueue[_Run | None]") -> None:
    sound = is_ieee()
    while (run := inbox.get()) is not None:
        if sound:
            outcome = run.perform(number)
        else:
            run.give_up(number)
            outcome = _Outcome(number, ComputationError(_NOT_IEEE))
        outcomes = run.outcomes
        del run  # an idle worker must not keep a session's arrays alive
        outcomes.put(outcome)
        del outcome, outcomes
        if not sound:  # inherited from whoever started it; the next run gets a new thread
            return


class _Watch:
    """Tells slow workers from stalled ones, tick by tick; the rules are at the top of this file."""

    def __init__(self, own: Array, workers: int, patience: float) -> None:
        self._own, self._workers, self._patience = own, workers, patience
        self._steps = [-1] * workers
        self._ages = [0.0] * workers
        self._idle = 0.0
        self.left: set[int] = set()

    def tick(self, elapsed: float) -> tuple[int, str] | None:
        """Who is at fault after one more tick, and of what; None while all is well."""
        if global_compiler_lock.is_locked():  # a kernel of new types, or a cached one being loaded: slow, and no step
            return None
        steps = [int(self._own[worker * LINE + PROGRESS]) for worker in range(self._workers)]
        waits = [int(self._own[worker * LINE + WAITING]) for worker in range(self._workers)]
        moved = [new != old for new, old in zip(steps, self._steps, strict=True)]
        self._steps = steps
        resting = [worker in self.left or waits[worker] != COMPUTES for worker in range(self._workers)]
        somebody_waits = any(resting) or self._workers == 1
        for worker in range(self._workers):
            if moved[worker] or resting[worker] or not somebody_waits:
                self._ages[worker] = 0.0
                continue
            self._ages[worker] += elapsed
            if self._ages[worker] > self._patience:
                return worker, f"stalled: no step for {self._ages[worker]:.1f} s"
        self._idle = self._idle + elapsed if all(resting) and not any(moved) else 0.0
        if self._idle > self._patience:
            return self._rearmost(), f"{WAITS[waits[self._rearmost()]]} that nobody will give, for {self._idle:.1f} s,"
        return None

    def _rearmost(self) -> int:
        """Of those who wait, the one furthest behind: what it waits for is what is missing."""
        present = [worker for worker in range(self._workers) if worker not in self.left]
        return min(present, key=lambda w: (self._own[w * LINE + LAYER], self._own[w * LINE + PHASE], w))


def _dismiss_all(crew: "list[_Member | None]") -> None:
    for member in crew:
        if member is not None:
            member.dismiss()


class Team:
    """Workers for kernels `kernel(worker, workers, cells, *args) -> bool`, see sync.py. A context manager, or close it.

    One run at a time: several Python threads may use one team and take turns. `deadline` bounds, in seconds, how long a
    failure or a stall takes to reach the caller. `phases` gives names to phase numbers in messages. A forked child gets
    threads of its own at its first run.
    """

    def __init__(self, workers: int, deadline: float = 5.0, phases: Sequence[str] = ()) -> None:
        if workers < 1 or not deadline > 0:
            raise InputError(f"a team needs at least 1 worker and a deadline above 0, found {workers} and {deadline}")
        self.workers, self.deadline, self.phases = workers, deadline, tuple(phases)
        self._tick = min(0.1, deadline * _TICK)
        self._closed = False
        self.settled = True  # of the latest run that failed, whatever it failed of: as WorkerError.settled
        self._lock = threading.Lock()
        self._crew: list[_Member | None] = [None] * workers
        self._given_up: list[tuple[_Member, Cells]] = []
        self._finalizer = weakref.finalize(self, _dismiss_all, self._crew)
        is_ieee()  # compiled here, once, and not by all workers at once
        _teams.add(self)

    def run(
        self,
        kernel: Callable[..., Any],
        *args: Any,
        marks: Sequence[int] = (),
        claims: int = 0,
        held: object = None,
        instruments: Instruments = _NO_INSTRUMENTS,
    ) -> list[int]:
        """Call the kernel on every worker; give the watermarks, which start at `marks`. There are `claims` counters.

        held: kept alive as long as a worker may be at it, even one that was given up.

        Raises WorkerError, from the exception that a worker raised if there is one; the team can be used again then.
        Results of a failed run are not to be used, and its arrays only if the error says `settled`. An exception in
        the calling thread (Ctrl-C) breaks the run too, and passes on.
        """
        with self._lock:
            if self._closed:
                raise InputError("the worker team is closed")
            trial, profile = instruments.trial, instruments.profile
            cells = make_cells(self.workers, marks, claims, 0 if profile is None else room(len(self.phases)))
            run = _Run(kernel, args, self.workers, cells, queue.SimpleQueue(), held)
            if trial is not None:
                trial.apply(run.cells)
            if getattr(kernel, "overloads", None) == {}:
                self.compile(kernel, *args)
            members = self._hire()
            watch = _Watch(run.cells.own, self.workers, _PATIENCE * self.deadline)
            try:
                for member in members:
                    member.inbox.put(run)
                self._watch(run, members, watch)
            except BaseException as error:
                run.give_up(0)
                self.settled = False  # also if the settling itself is interrupted
                self.settled = self._settle(run, watch.left, error)
                raise
            if profile is not None:
                profile.add(run.cells)
            return [int(mark) for mark in run.cells.marks[: len(marks) * LINE : LINE]]

    def compile(self, kernel: Any, *args: Any) -> None:
        """Compile the kernel for arguments of these types, in the calling thread, unless that has been done."""
        types = tuple(numba.typeof(value) for value in (0, self.workers, make_cells(1), *args))
        if types not in kernel.overloads:
            kernel.compile(types)

    def _hire(self) -> list[_Member]:
        """A full crew. Threads are started late and replaced here: after a fork, a death, or having been given up."""
        for number, member in enumerate(self._crew):
            if member is None or not member.thread.is_alive():
                self._crew[number] = _Member(number)
        self._given_up = [(member, cells) for member, cells in self._given_up if member.thread.is_alive()]
        return [member for member in self._crew if member is not None]

    def _watch(self, run: _Run, members: list[_Member], watch: _Watch) -> None:
        """Return when all workers have done their part; raise for the first who will not."""
        before = time.monotonic()
        while len(watch.left) < self.workers:
            try:
                outcome = run.outcomes.get(timeout=self._tick)
            except queue.Empty:
                # No more than two ticks at a time: what the watcher slept through, the workers may have slept through.
                now = time.monotonic()
                self._look(run, members, watch, min(now - before, 2 * self._tick))
                before = now
                continue
            watch.left.add(outcome.worker)
            if outcome.error is not None:
                what = f"failed with {type(outcome.error).__name__}: {outcome.error},"
                raise run.error(outcome.worker, what, self.phases) from outcome.error
            if outcome.gave_up:
                raise run.error(outcome.worker, "gave up", self.phases)
        culprit = run.culprit()
        if culprit is not None:  # it broke the run and then returned True
            raise run.error(culprit, "gave up", self.phases)

    def _look(self, run: _Run, members: list[_Member], watch: _Watch, elapsed: float) -> None:
        for number, member in enumerate(members):
            # The queue is read again: a thread may answer and only then end.
            if number not in watch.left and not member.thread.is_alive() and run.outcomes.empty():
                run.give_up(number)
                watch.left.add(number)
                raise run.error(number, "died", self.phases)
        fault = watch.tick(elapsed)
        if fault is not None:
            run.give_up(fault[0])
            raise run.error(*fault, self.phases)

    def _settle(self, run: _Run, left: set[int], error: BaseException) -> bool:
        """Let the others leave a broken run, and give up those who do not within the grace. Whether all have left."""
        settled = True
        until = time.monotonic() + _GRACE * self.deadline
        with contextlib.suppress(queue.Empty):
            while len(left) < self.workers:
                left.add(run.outcomes.get(timeout=max(0.0, until - time.monotonic())).worker)
        for number, member in enumerate(self._crew):
            if number not in left and member is not None:
                member.dismiss()
                self._crew[number] = None
                if member.thread.is_alive():
                    self._given_up.append((member, run.cells))
                    settled = False
                    if isinstance(error, WorkerError):
                        error.settled = False
        return settled

    def close(self) -> None:
        """End the threads, after a run that another Python thread may be in. Twice is once."""
        with self._lock:
            self._closed = True
            leaving = [member for member in self._crew if member is not None]
            for member, cells in self._given_up:
                cells.shared[RELEASE] = 1  # wakes the stalls that trials put in, and no others
                leaving.append(member)
            self._finalizer()
            self._crew[:] = [None] * self.workers
            self._given_up = []
        until = time.monotonic() + _GRACE * self.deadline
        for member in leaving:
            member.thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> "Team":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget_threads(self) -> None:
        """In a forked child: the threads are the parent's, and so may be whoever holds the lock."""
        self._lock = threading.Lock()
        self._crew[:] = [None] * self.workers
        self._given_up = []


_teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


def _after_fork() -> None:
    for team in list(_teams):
        team._forget_threads()


os.register_at_fork(after_in_child=_after_fork)
