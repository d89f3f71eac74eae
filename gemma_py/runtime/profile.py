"""Where a pass spends its time: each worker's nanoseconds by phase, at work and waiting. Off, it costs a branch.

A worker looks at the clock where it enters a phase and where a wait begins and ends; the time since it last looked
belongs to what it was doing till then. On means that `times` has room: like tests' modes it is not a matter of
compiling, so what is measured is the machine code that ships.
"""

import numpy as np

from gemma_py.kernels.atomics import nanoseconds
from gemma_py.kernels.decorator import inlined
from gemma_py.runtime import cells as c

_SINCE = 0  # when this worker last looked at the clock
_FIRST = 1  # the first phase's two numbers; the others follow
WORK, WAIT = 0, 1


@inlined
def account(cells, worker, what):
    """The time since the last look is `what` of the phase that this worker is in. Call it only where times has room."""
    size = cells.times.shape[0] // (cells.own.shape[0] // c.LINE)
    at, phase, now = worker * size, cells.own[worker * c.LINE + c.PHASE], nanoseconds()
    if phase != c.NOWHERE:
        cells.times[at + _FIRST + 2 * phase + what] += now - cells.times[at + _SINCE]
    cells.times[at + _SINCE] = now


def room(phases: int) -> int:
    """Lines of `times` a worker."""
    return -(-(_FIRST + 2 * phases) // c.LINE)


class Profile:
    """Sums over passes.

    nanoseconds: int64 [workers, phases, 2], WORK and WAIT. barriers, passes: how many.
    """

    def __init__(self, workers: int, phases: int) -> None:
        self.nanoseconds = np.zeros((workers, phases, 2), np.int64)
        self.barriers = self.passes = 0

    def add(self, cells: c.Cells) -> None:
        """A run that ended well."""
        workers, phases, _ = self.nanoseconds.shape
        self.nanoseconds += cells.times.reshape(workers, -1)[:, _FIRST : _FIRST + 2 * phases].reshape(
            workers, phases, 2
        )
        self.barriers += int(cells.shared[c.GENERATION])
        self.passes += 1
