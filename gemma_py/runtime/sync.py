"""Synchronisation of the workers of one run. Kernels call these functions.

A kernel has the signature `kernel(worker, workers, cells, ...)`. Every worker calls the kernel once, and the kernel returns
True when done. If a function here returns False, the run is broken and the kernel must return False at once. In a broken
run, `claim` returns -1, and the next wait returns False.

A tile is a part of the outputs of a phase. Workers claim the tiles of a phase from a counter. Some tiles are rows of
positions that other workers wait for: publishing rows raises a watermark, and all rows of positions below the watermark can
be read.

A wait never hangs. It ends when the awaited condition holds or when the run is broken, and the team breaks the run if a
worker fails or stalls (see team.py).

Kernels must follow two rules:
- Between two calls of this module, a kernel works for at most some milliseconds. To the team, a worker that makes no calls
  for long looks stalled.
- A kernel that publishes tiles claims them with `claim`, in ascending order. The worker with the lowest unpublished tile
  then waits for no other worker, so there is no deadlock.

The usual loop, without `:=`, which numba does not support in a while statement:
    tile = claim(cells, worker, index, tiles)
    while tile >= 0:
        ...
        tile = claim(cells, worker, index, tiles)
    if not barrier(cells, worker, workers):
        return False
"""

from gemma_py.kernels.atomics import compare_exchange, fetch_add, load_acquire, spin_hint, store_release, yield_cpu
from gemma_py.kernels.decorator import inlined
from gemma_py.runtime import fault_injection, profile
from gemma_py.runtime.cells import (
    ARRIVED,
    AT_BARRIER,
    AWAITED,
    BOUND,
    BROKEN,
    COMPUTES,
    FAULT_PLAN,
    FOR_ROWS,
    GENERATION,
    LAYER,
    LINE,
    PHASE,
    PROGRESS,
    SPINS,
    TO_PUBLISH,
    WAITING,
)

_NO_TILE = -1


@inlined
def _advance(cells, worker):
    at = worker * LINE + PROGRESS
    store_release(cells.own, at, cells.own[at] + 1)


@inlined
def is_intact(cells):
    """Return True unless the run is broken."""
    return load_acquire(cells.shared, BROKEN) == 0


@inlined
def progress(cells, worker):
    """Count a step of this worker. A kernel calls this in long work without claims and waits, because it would look stalled."""
    _advance(cells, worker)
    return is_intact(cells)


@inlined
def fail(cells, worker):
    """Break the run and record this worker as the cause. Return False, for kernels to `return fail(cells, worker)`."""
    compare_exchange(cells.shared, BROKEN, 0, worker + 1)
    return False


@inlined
def enter(cells, worker, layer, phase):
    """Record that this worker begins the phase, for error messages and fault injection."""
    if cells.times.shape[0] > 0:
        profile.account(cells, worker, profile.WORK)
    at = worker * LINE
    store_release(cells.own, at + LAYER, layer)
    store_release(cells.own, at + PHASE, phase)
    _advance(cells, worker)
    if load_acquire(cells.shared, FAULT_PLAN):
        fault_injection.inject(cells, worker, fault_injection.ENTER)
    return is_intact(cells)


@inlined
def claim(cells, worker, index, tiles):
    """Claim the next tile of counter `index`, and return the tile's number.

    Returns -1 if none of the `tiles` tiles is left or if the run is broken.
    """
    if not is_intact(cells):
        return _NO_TILE
    tile = fetch_add(cells.counters, index * LINE, 1)
    if tile >= tiles:
        return _NO_TILE
    _advance(cells, worker)
    if load_acquire(cells.shared, FAULT_PLAN):
        fault_injection.inject(cells, worker, fault_injection.CLAIM)
    return tile


@inlined
def claim_any(cells, worker, index, tiles):
    """Claim a tile of a phase in which tiles may be computed in any order. In tests, fault injection shuffles the tiles."""
    tile = claim(cells, worker, index, tiles)
    if tile >= 0 and load_acquire(cells.shared, FAULT_PLAN):
        return fault_injection.shuffle(cells, index, tile, tiles)
    return tile


@inlined
def _wait_above(cells, worker, why, line, index, bound):
    """Wait until the cell line[index] exceeds `bound`. The value of this cell never decreases.

    why: the reason for the wait, which is stored in the cell WAITING. The team also reads `index` and `bound` from the cells
        AWAITED and BOUND, to tell a deadlock from a worker whose wait is over but which has not got a core yet.

    After cells.shared[SPINS] spins, the worker yields its core to other threads after every spin. These cells are stored only
    then. Most waits end earlier and so need no store to a cell that the team reads.
    """
    if cells.times.shape[0] > 0:
        profile.account(cells, worker, profile.WORK)
    spins, limit = 0, cells.shared[SPINS]
    while load_acquire(line, index) <= bound:
        if not is_intact(cells):
            return False
        if spins < limit:
            spin_hint()
        else:
            if spins == limit:
                at = worker * LINE
                store_release(cells.own, at + AWAITED, index)
                store_release(cells.own, at + BOUND, bound)
                store_release(cells.own, at + WAITING, why)
            yield_cpu()
        spins += 1
    if spins > limit:
        store_release(cells.own, worker * LINE + WAITING, COMPUTES)
    if cells.times.shape[0] > 0:
        profile.account(cells, worker, profile.WAIT)
    _advance(cells, worker)
    return is_intact(cells)


@inlined
def barrier(cells, worker, workers):
    """Wait until every worker has arrived. After the barrier, every worker sees all writes from before the barrier."""
    if load_acquire(cells.shared, FAULT_PLAN):
        fault_injection.inject(cells, worker, fault_injection.BARRIER)
        if fault_injection.omits(cells, worker, fault_injection.OMIT_BARRIER):
            return is_intact(cells)
    # GENERATION must be read before this worker arrives, because the last worker to arrive increments it.
    generation = load_acquire(cells.shared, GENERATION)
    if fetch_add(cells.shared, ARRIVED, 1) == workers - 1:
        store_release(cells.shared, ARRIVED, 0)
        store_release(cells.shared, GENERATION, generation + 1)
        if cells.times.shape[0] > 0:
            profile.account(cells, worker, profile.WORK)
        _advance(cells, worker)
        return is_intact(cells)
    return _wait_above(cells, worker, AT_BARRIER, cells.shared, GENERATION, generation)


@inlined
def publish(cells, worker, mark, first, last):
    """Publish rows first .. last - 1: wait until the watermark is `first`, then set the watermark to `last`.

    The wait has acquire semantics and the store has release semantics. A worker that reads `last` from the watermark
    therefore sees all earlier rows, including the rows of other workers. If the watermark is above `first`, two workers
    have published one row, and the run is broken.
    """
    at = mark * LINE
    if load_acquire(cells.shared, FAULT_PLAN):
        fault_injection.inject(cells, worker, fault_injection.PUBLISH)
        if fault_injection.omits(cells, worker, fault_injection.OMIT_ORDER):
            if load_acquire(cells.watermarks, at) < last:
                store_release(cells.watermarks, at, last)
            return is_intact(cells)
    if not _wait_above(cells, worker, TO_PUBLISH, cells.watermarks, at, first - 1):
        return False
    if load_acquire(cells.watermarks, at) != first:
        return fail(cells, worker)
    store_release(cells.watermarks, at, last)
    return True


@inlined
def last_awaited(cells, worker, position, last):
    """Return the position up to which rows must be published before the query at `position` is computed.

    This is `last`, the last position that the query sees. If fault injection leaves out the wait for rows after the query,
    it is `position`.
    """
    if load_acquire(cells.shared, FAULT_PLAN) and fault_injection.omits(cells, worker, fault_injection.OMIT_AHEAD):
        return position
    return last


@inlined
def await_rows(cells, worker, mark, position):
    """Wait until all rows up to the one at `position` are published."""
    if load_acquire(cells.shared, FAULT_PLAN):
        fault_injection.inject(cells, worker, fault_injection.AWAIT)
        if fault_injection.omits(cells, worker, fault_injection.OMIT_AWAIT):
            return is_intact(cells)
    return _wait_above(cells, worker, FOR_ROWS, cells.watermarks, mark * LINE, position)
