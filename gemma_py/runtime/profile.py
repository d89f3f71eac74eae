"""Where a pass spends its time: each worker's nanoseconds by phase, working and waiting. Switched off, it costs a branch.

A worker reads the clock where it enters a phase and where a wait begins and ends; the time since it last read it is counted
as work or as waiting. Profiling is switched on by giving `times` a size, not at compile time, so the machine code that is
measured is the machine code that ships.
"""

import numpy as np

from gemma_py.kernels.atomics import nanoseconds
from gemma_py.kernels.decorator import inlined
from gemma_py.runtime import cells as c

_SINCE = 0  # when this worker last read the clock
_FIRST = 1  # the first phase's two numbers; the others follow
WORK, WAIT = 0, 1


@inlined
def account(cells, worker, what):
    """Count the time since the last reading as `what`, WORK or WAIT, of this worker's phase. Call it only where profiling is on."""
    size = cells.times.shape[0] // (cells.own.shape[0] // c.LINE)
    at, phase, now = worker * size, cells.own[worker * c.LINE + c.PHASE], nanoseconds()
    if phase != c.NOWHERE:
        cells.times[at + _FIRST + 2 * phase + what] += now - cells.times[at + _SINCE]
    cells.times[at + _SINCE] = now


def lines_needed(phases: int) -> int:
    """How many lines of `times` a worker needs."""
    return -(-(_FIRST + 2 * phases) // c.LINE)


class Profile:
    """Sums over passes.

    nanoseconds: int64 [workers, phases, 2], the last axis being WORK and WAIT. barriers, passes: their numbers.
    """

    def __init__(self, workers: int, phases: int) -> None:
        self.nanoseconds = np.zeros((workers, phases, 2), np.int64)
        self.barriers = self.passes = 0

    def add(self, cells: c.Cells) -> None:
        """Add the times of a run that succeeded."""
        workers, phases, _ = self.nanoseconds.shape
        self.nanoseconds += cells.times.reshape(workers, -1)[:, _FIRST : _FIRST + 2 * phases].reshape(
            workers, phases, 2
        )
        self.barriers += int(cells.shared[c.GENERATION])
        self.passes += 1
