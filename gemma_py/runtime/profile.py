"""The profile of passes: how long each worker works and waits in each phase.

A worker reads the clock when it enters a phase, and when a wait begins or ends. The time since the previous reading is
then counted as work or as waiting. Profiling is on if `cells.times` is not empty. Kernels check this at run time, so
the profiled machine code is the machine code that users run.
"""

import numpy as np

from gemma_py.kernels.atomics import nanoseconds
from gemma_py.kernels.decorator import inlined
from gemma_py.runtime import cells as c

# Layout of a worker's part of `times`: the time of the last clock reading, then WORK and WAIT of each phase.
_SINCE = 0
_FIRST = 1
WORK, WAIT = 0, 1


@inlined
def account(cells, worker, what):
    """Add the time since the worker's last clock reading to the current phase, as WORK or WAIT.

    The caller has checked that profiling is on.
    """
    size = cells.times.shape[0] // (cells.own.shape[0] // c.LINE)
    at, phase, now = worker * size, cells.own[worker * c.LINE + c.PHASE], nanoseconds()
    if phase != c.NOWHERE:
        cells.times[at + _FIRST + 2 * phase + what] += now - cells.times[at + _SINCE]
    cells.times[at + _SINCE] = now


def lines_needed(phases: int) -> int:
    """Return the number of cache lines of `times` that a worker needs."""
    return -(-(_FIRST + 2 * phases) // c.LINE)


class Profile:
    """Times and counts, summed over passes.

    nanoseconds: int64 [workers, phases, 2]; index WORK or WAIT of the last axis
    barriers, passes: the number of barriers and the number of passes
    """

    def __init__(self, workers: int, phases: int) -> None:
        self.nanoseconds = np.zeros((workers, phases, 2), np.int64)
        self.barriers = self.passes = 0

    def add(self, cells: c.Cells) -> None:
        """Add the times of a run. Failed runs are not added."""
        workers, phases, _ = self.nanoseconds.shape
        self.nanoseconds += cells.times.reshape(workers, -1)[:, _FIRST : _FIRST + 2 * phases].reshape(
            workers, phases, 2
        )
        self.barriers += int(cells.shared[c.GENERATION])
        self.passes += 1
