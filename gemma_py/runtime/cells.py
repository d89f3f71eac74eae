"""The shared cells of one run of the team: who waits, how far each worker is, and whether the run is broken.

Every run has cells of its own. A worker that was given up and wakes late finds its own run broken and leaves; it
cannot reach the cells of a later one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]

LINE = 16  # cells; 128 bytes: Apple's line, and the pair of lines that x86 fetches together

# `shared`, first line: written at most once in a run, so every core keeps it and a read hits the first cache.
BROKEN = 0  # 0, or 1 + the worker at fault
TRIAL = 1  # 1 in a test mode (see trial.py), whose settings follow
SEED, FAULT, FAULT_WORKER, FAULT_LAYER, FAULT_PHASE, FAULT_PLACE, RELEASE, DROP, DROP_LAYER, DROP_PHASE = range(2, 12)
# The barrier's cells, a line each, since all workers write one and all watch the other.
ARRIVED, GENERATION = LINE, 2 * LINE
_SHARED_LINES = 3

# `own`, one line a worker, written by it alone.
PROGRESS, WAITING, LAYER, PHASE, RANDOM = range(5)

# Why a worker waits: values of WAITING.
COMPUTES, AT_BARRIER, TO_PUBLISH, FOR_ROWS = range(4)
WAITS = ("computes", "waits at a barrier", "waits to publish rows", "waits for rows")

NOWHERE = -1  # layer and phase before a worker has entered any


class Cells(NamedTuple):
    """What a kernel gets as `cells`; marks and claims are numbered from 0 and each has a line to itself."""

    shared: Array
    own: Array
    marks: Array
    claims: Array
    times: Array  # see profile.py; empty: off


def make_cells(workers: int, marks: Sequence[int] = (), claims: int = 0, times: int = 0) -> Cells:
    """Cells of a new run; `marks` are the watermarks' first values, usually the positions where sessions stand.

    One block for all, since this is done for every token; its lines begin where the machine's lines do. There is always
    one mark and one claim, used or not. times: lines of it a worker.
    """
    sizes = (_SHARED_LINES, workers, max(len(marks), 1), max(claims, 1), workers * times)
    memory = np.zeros((sum(sizes) + 1) * LINE, np.int64)
    at = -(memory.ctypes.data // memory.itemsize) % LINE
    parts = []
    for size in sizes:
        parts.append(memory[at : at + size * LINE])
        at += size * LINE
    cells = Cells(*parts)
    cells.own[LAYER::LINE] = NOWHERE
    cells.own[PHASE::LINE] = NOWHERE
    cells.marks[: len(marks) * LINE : LINE] = marks
    return cells
