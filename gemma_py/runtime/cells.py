"""The shared cells of one run of the team: which worker waits, how far each one is, and whether the run is broken.

Every run has its own cells. A stalled worker that wakes late finds its own run broken and leaves it; it cannot reach the
cells of a later run.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]

LINE = 16  # cells; 128 bytes: Apple's line, and the pair of lines that x86 fetches together

# `shared`, first line: written at most once in a run, so every core has it in its L1 cache.
BROKEN = 0  # 0, or 1 + the worker at fault
FAULT_PLAN = 1  # 1 where a test injects faults (see fault_injection.py), whose settings follow
(
    SEED,
    FAULT,
    FAULT_WORKER,
    FAULT_LAYER,
    FAULT_PHASE,
    FAULT_PLACE,
    END_STALLS,
    OMISSION,
    OMISSION_LAYER,
    OMISSION_PHASE,
) = range(2, 12)
# The barrier's cells, on a line each: all workers write the first one and poll the second one.
ARRIVED, GENERATION = LINE, 2 * LINE
_SHARED_LINES = 3

# `own`, one line a worker, written by that worker alone.
PROGRESS, WAITING, LAYER, PHASE, RANDOM = range(5)

# Why a worker waits: values of WAITING.
COMPUTES, AT_BARRIER, TO_PUBLISH, FOR_ROWS = range(4)
WAITS = ("computes", "waits at a barrier", "waits to publish rows", "waits for rows")

NOWHERE = -1  # layer and phase before a worker has entered any


class Cells(NamedTuple):
    """What a kernel gets as `cells`; watermarks and counters are numbered from 0, and each is on a cache line of its own."""

    shared: Array
    own: Array
    watermarks: Array
    counters: Array  # the next tile to claim
    times: Array  # nanoseconds by phase, see profile.py; empty: off


def make_cells(workers: int, watermarks: Sequence[int] = (), counters: int = 0, times: int = 0) -> Cells:
    """Cells of a new run. watermarks: their first values, usually the positions of the sequences. counters, times: how many tile
    counters, and how many lines of `times` a worker.

    They are one allocation, since this is done for every token, aligned to cache lines. There is always at least one
    watermark and one counter.
    """
    sizes = (_SHARED_LINES, workers, max(len(watermarks), 1), max(counters, 1), workers * times)
    memory = np.zeros((sum(sizes) + 1) * LINE, np.int64)
    at = -(memory.ctypes.data // memory.itemsize) % LINE
    parts = []
    for size in sizes:
        parts.append(memory[at : at + size * LINE])
        at += size * LINE
    cells = Cells(*parts)
    cells.own[LAYER::LINE] = NOWHERE
    cells.own[PHASE::LINE] = NOWHERE
    cells.watermarks[: len(watermarks) * LINE : LINE] = watermarks
    return cells
