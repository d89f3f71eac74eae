"""Cells, the int64 variables that the workers of one run share, such as tile counters, watermarks and progress.

Every run has new cells. A stalled worker that continues after its run has failed still uses the old cells, so that it
cannot disturb a later run.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]

# 16 cells are 128 bytes. This is a cache line of Apple's processors, and the two lines that x86 processors prefetch
# together.
LINE = 16

# Cells in the first line of `shared`. They change at most once in a run, so every core keeps this line in its L1 cache.
BROKEN = 0  # 0, or 1 + the number of the worker that broke the run
FAULT_PLAN = 1  # 1 if a test injects faults; the next cells hold the FaultPlan of fault_injection.py
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
SPINS = 12  # the number of spins after which a waiting worker yields its core to other threads
# Cells of the barrier. ARRIVED and GENERATION are on two cache lines, because workers poll GENERATION while others write
# ARRIVED.
ARRIVED, GENERATION = LINE, 2 * LINE
_SHARED_LINES = 3

# Cells in `own`. Each worker has a line there, which only this worker writes.
PROGRESS, WAITING, LAYER, PHASE, RANDOM, AWAITED, BOUND = range(7)

# The values of the cell WAITING: what a worker waits for. A waiting worker continues when the awaited cell exceeds the value of
# the worker's cell BOUND. The awaited cell has the index AWAITED, in `shared` for AT_BARRIER and in `watermarks` otherwise.
COMPUTES, AT_BARRIER, TO_PUBLISH, FOR_ROWS = range(4)
WAITS = ("computes", "waits at a barrier", "waits to publish rows", "waits for rows")

NOWHERE = -1  # the value of LAYER and PHASE before a worker begins its first phase


class Cells(NamedTuple):
    """The cells of one run. Each watermark and each counter is on a cache line of its own."""

    shared: Array
    own: Array
    watermarks: Array
    counters: Array  # for each phase, the next tile that a worker can claim
    times: Array  # nanoseconds by worker and phase, see profile.py; empty if profiling is off


def make_cells(workers: int, watermarks: Sequence[int] = (), counters: int = 0, times: int = 0) -> Cells:
    """Allocate the cells of a new run, with at least one watermark and one counter.

    watermarks: the initial values of the watermarks
    counters: the number of tile counters
    times: the number of lines of `times` per worker

    All cells are in one allocation, because a run begins for every generated token, and several allocations would take
    longer.
    """
    sizes = (_SHARED_LINES, workers, max(len(watermarks), 1), max(counters, 1), workers * times)
    memory = np.zeros((sum(sizes) + 1) * LINE, np.int64)
    address = memory.__array_interface__["data"][0]  # takes half as long as memory.ctypes.data
    at = -(address // memory.itemsize) % LINE
    parts = []
    for size in sizes:
        parts.append(memory[at : at + size * LINE])
        at += size * LINE
    cells = Cells(*parts)
    cells.own.reshape(workers, LINE)[:, LAYER : PHASE + 1] = NOWHERE
    cells.watermarks[: len(watermarks) * LINE : LINE] = watermarks
    return cells
