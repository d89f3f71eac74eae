"""How the workers of one run synchronise, from inside their kernels.

A kernel is `kernel(worker, workers, cells, ...)`, is called once on every worker, and returns True when it is done.
Each function here returns a status: False means that the run is broken, and the kernel must return False at once.
(`claim` then returns no tile, and the next wait returns False.) No wait hangs: it ends when its condition holds or when the
run is broken, and the team breaks a run in which a worker has failed or stalled (see team.py).

Kernels follow two rules. Between two calls of this module (a tile, or `progress`) they do a bounded amount of work, some
milliseconds: these calls tell a slow worker from a stalled one. And they claim tiles that end in `publish` in order, by
`claim`: the worker that has the earliest tile then waits for no other, so there is no deadlock.

The usual loop (numba does not take `:=` in a while):
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
    BROKEN,
    COMPUTES,
    FAULT_PLAN,
    FOR_ROWS,
    GENERATION,
    LAYER,
    LINE,
    PHASE,
    PROGRESS,
    TO_PUBLISH,
    WAITING,
)

_SPINS = 256  # some microseconds; then yield, so that more workers than cores make progress
_NO_TILE = -1


@inlined
def _advance(cells, worker):
    at = worker * LINE + PROGRESS
    store_release(cells.own, at, cells.own[at] + 1)


@inlined
def is_intact(cells):
    """Whether the run is not broken."""
    return load_acquire(cells.shared, BROKEN) == 0


@inlined
def progress(cells, worker):
    """Count a step of this worker; for long work that neither claims nor waits."""
    _advance(cells, worker)
    return is_intact(cells)


@inlined
def fail(cells, worker):
    """Break the run for all, with this worker at fault. Always False: `return fail(cells, worker)`."""
    compare_exchange(cells.shared, BROKEN, 0, worker + 1)
    return False


@inlined
def enter(cells, worker, layer, phase):
    """Record where this worker is from now on, for error messages and fault injection."""
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
    """The next tile of counter `index`, ascending; -1 when none of the `tiles` is left or the run is broken."""
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
    """`claim` for tiles that need no order; fault plans with a seed shuffle them, to show that the order does not matter."""
    tile = claim(cells, worker, index, tiles)
    if tile >= 0 and load_acquire(cells.shared, FAULT_PLAN):
        return fault_injection.shuffle(cells, index, tile, tiles)
    return tile


@inlined
def _wait_above(cells, worker, why, line, index, bound):
    """Wait until a cell whose value only grows exceeds `bound`.

    WAITING is written only after some spinning: nearly all waits are short, and cost no stores to a shared cache line.
    """
    if cells.times.shape[0] > 0:
        profile.account(cells, worker, profile.WORK)
    spins = 0
    while load_acquire(line, index) <= bound:
        if not is_intact(cells):
            return False
        if spins < _SPINS:
            spin_hint()
        else:
            if spins == _SPINS:
                store_release(cells.own, worker * LINE + WAITING, why)
            yield_cpu()
        spins += 1
    if spins > _SPINS:
        store_release(cells.own, worker * LINE + WAITING, COMPUTES)
    if cells.times.shape[0] > 0:
        profile.account(cells, worker, profile.WAIT)
    _advance(cells, worker)
    return is_intact(cells)


@inlined
def barrier(cells, worker, workers):
    """Wait for all workers. What each of them wrote before the barrier is visible to all of them after it."""
    if load_acquire(cells.shared, FAULT_PLAN):
        fault_injection.inject(cells, worker, fault_injection.BARRIER)
        if fault_injection.omits(cells, worker, fault_injection.OMIT_BARRIER):
            return is_intact(cells)
    # Read before arriving: afterwards, the last worker to arrive may already have incremented it.
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
    """Make rows first .. last - 1 visible: wait until the watermark stands at `first`, then move it to `last`.

    The wait acquires and the store releases, so a worker that sees `last` sees all earlier rows too, whichever worker wrote them.
    A watermark that is past `first` already means that two workers own one row: the run is broken.
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
def await_rows(cells, worker, mark, position):
    """Wait until the row at `position` and all rows before it are published."""
    if load_acquire(cells.shared, FAULT_PLAN):
        fault_injection.inject(cells, worker, fault_injection.AWAIT)
        if fault_injection.omits(cells, worker, fault_injection.OMIT_AWAIT):
            return is_intact(cells)
    return _wait_above(cells, worker, FOR_ROWS, cells.watermarks, mark * LINE, position)
