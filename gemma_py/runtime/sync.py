"""How the workers of one run wait for each other, from inside their kernels.

A kernel is `kernel(worker, workers, cells, ...)`, is called once on every worker, and returns True when it is done.
Each function here returns a status: False means that the run is broken, and the kernel must return False at once.
`claim` gives no tile then, and the next wait says why. Nothing hangs: a wait ends when it is met or when the run is
broken, and the team breaks a run in which a worker has failed or stalled (see team.py).

Two rules for kernels. Do a bounded piece of work, milliseconds, between two calls of this module (a tile, or
`progress`): calls are what tells a slow worker from a stalled one. And claim tiles that end in `publish` in order, by
`claim`: whoever holds the earliest tile then never waits for another, so somebody can always go on.

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
from gemma_py.runtime import profile, trial
from gemma_py.runtime.cells import (
    ARRIVED,
    AT_BARRIER,
    BROKEN,
    COMPUTES,
    FOR_ROWS,
    GENERATION,
    LAYER,
    LINE,
    PHASE,
    PROGRESS,
    TO_PUBLISH,
    TRIAL,
    WAITING,
)

_SPINS = 256  # some microseconds; then yield, so that more workers than cores make progress
_NO_TILE = -1


@inlined
def _advance(cells, worker):
    at = worker * LINE + PROGRESS
    store_release(cells.own, at, cells.own[at] + 1)


@inlined
def whole(cells):
    """Whether nobody has broken the run."""
    return load_acquire(cells.shared, BROKEN) == 0


@inlined
def progress(cells, worker):
    """Say that this worker is alive; for long work that neither claims nor waits."""
    _advance(cells, worker)
    return whole(cells)


@inlined
def fail(cells, worker):
    """Break the run for all, with this worker at fault. Always False: `return fail(cells, worker)`."""
    compare_exchange(cells.shared, BROKEN, 0, worker + 1)
    return False


@inlined
def enter(cells, worker, layer, phase):
    """Record where this worker is from now on, for error messages and trials."""
    if cells.times.shape[0] > 0:
        profile.account(cells, worker, profile.WORK)
    at = worker * LINE
    store_release(cells.own, at + LAYER, layer)
    store_release(cells.own, at + PHASE, phase)
    _advance(cells, worker)
    if load_acquire(cells.shared, TRIAL):
        trial.attend(cells, worker, trial.ENTER)
    return whole(cells)


@inlined
def claim(cells, worker, index, tiles):
    """The next tile of counter `index`, ascending; -1 when none of the `tiles` is left or the run is broken."""
    if not whole(cells):
        return _NO_TILE
    tile = fetch_add(cells.claims, index * LINE, 1)
    if tile >= tiles:
        return _NO_TILE
    _advance(cells, worker)
    if load_acquire(cells.shared, TRIAL):
        trial.attend(cells, worker, trial.CLAIM)
    return tile


@inlined
def claim_any(cells, worker, index, tiles):
    """`claim` for tiles that need no order; trials hand them out shuffled, to show that they need none."""
    tile = claim(cells, worker, index, tiles)
    if tile >= 0 and load_acquire(cells.shared, TRIAL):
        return trial.shuffle(cells, index, tile, tiles)
    return tile


@inlined
def _wait_above(cells, worker, why, line, index, bound):
    """Wait until a cell that only grows is above `bound`.

    WAITING is written only once spinning has not helped: short waits, nearly all, cost no stores that others would see.
    """
    if cells.times.shape[0] > 0:
        profile.account(cells, worker, profile.WORK)
    spins = 0
    while load_acquire(line, index) <= bound:
        if not whole(cells):
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
    return whole(cells)


@inlined
def barrier(cells, worker, workers):
    """Wait for all workers; what each wrote before is visible to all after."""
    if load_acquire(cells.shared, TRIAL):
        trial.attend(cells, worker, trial.BARRIER)
        if trial.drops(cells, worker, trial.DROP_BARRIER):
            return whole(cells)
    # Read before arriving: afterwards the last to arrive may already have moved it on.
    generation = load_acquire(cells.shared, GENERATION)
    if fetch_add(cells.shared, ARRIVED, 1) == workers - 1:
        store_release(cells.shared, ARRIVED, 0)
        store_release(cells.shared, GENERATION, generation + 1)
        if cells.times.shape[0] > 0:
            profile.account(cells, worker, profile.WORK)
        _advance(cells, worker)
        return whole(cells)
    return _wait_above(cells, worker, AT_BARRIER, cells.shared, GENERATION, generation)


@inlined
def publish(cells, worker, mark, first, last):
    """Make rows first .. last - 1 visible: wait until the watermark stands at `first`, then move it to `last`.

    The wait acquires and the store releases, so whoever sees `last` sees all earlier rows too, whoever wrote them. A
    watermark that is past `first` already means that two workers own one row: the run is broken.
    """
    at = mark * LINE
    if load_acquire(cells.shared, TRIAL):
        trial.attend(cells, worker, trial.PUBLISH)
        if trial.drops(cells, worker, trial.DROP_ORDER):
            if load_acquire(cells.marks, at) < last:
                store_release(cells.marks, at, last)
            return whole(cells)
    if not _wait_above(cells, worker, TO_PUBLISH, cells.marks, at, first - 1):
        return False
    if load_acquire(cells.marks, at) != first:
        return fail(cells, worker)
    store_release(cells.marks, at, last)
    return True


@inlined
def await_rows(cells, worker, mark, position):
    """Wait until the row at `position`, and with it all before, is published."""
    if load_acquire(cells.shared, TRIAL):
        trial.attend(cells, worker, trial.AWAIT)
        if trial.drops(cells, worker, trial.DROP_AWAIT):
            return whole(cells)
    return _wait_above(cells, worker, FOR_ROWS, cells.marks, mark * LINE, position)
