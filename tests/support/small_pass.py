"""A small pass with every kind of synchronisation, for tests of the worker team."""

from typing import Any

import numpy as np

from gemma_py.kernels.atomics import compare_exchange, fetch_add, load_acquire, sleep_microseconds
from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.runtime import sync
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.team import Team

WORKERS = 4  # usually more workers than cores, so that workers are preempted
LAYERS, ROWS, TILE = 3, 32, 3
TILES = -(-ROWS // TILE)
MIX, PRODUCE, STORE, ATTEND = 0, 1, 2, 3
NAMES = ("mix", "produce", "store", "attend")
DEADLINE = 1.5  # seconds without progress after which a test expects an error
GENEROUS = 60.0  # seconds after which a run counts as hanging


@inlined
def _scramble(a, b):
    return ((a * 6364136223846793005) ^ (b + 1442695040888963407)) >> 3


@inlined
def _mix(cells, worker, workers, layer, x, y):
    """Compute y from rows of x, which other workers wrote before the previous barrier."""
    if not sync.enter(cells, worker, layer, MIX):
        return False
    tile = sync.claim_any(cells, worker, 3 * layer, TILES)
    while tile >= 0:
        for t in range(tile * TILE, min(ROWS, tile * TILE + TILE)):
            y[layer, t] = _scramble(x[layer, t], x[layer, (t * 7 + 5) % ROWS])
        tile = sync.claim_any(cells, worker, 3 * layer, TILES)
    return sync.barrier(cells, worker, workers)


@inlined
def _store(cells, worker, layer, y, kv, start):
    if not sync.enter(cells, worker, layer, PRODUCE):
        return False
    tile = sync.claim(cells, worker, 3 * layer + 1, TILES)
    while tile >= 0:
        first, last = tile * TILE, min(ROWS, tile * TILE + TILE)
        for t in range(first, last):
            kv[layer, t] = _scramble(y[layer, (t * 11 + 3) % ROWS], t)
        sync.enter(cells, worker, layer, STORE)
        if not sync.publish(cells, worker, layer, start + first, start + last):
            return False
        sync.enter(cells, worker, layer, PRODUCE)
        tile = sync.claim(cells, worker, 3 * layer + 1, TILES)
    return True


@inlined
def _attend(cells, worker, workers, layer, x, kv, start):
    """Compute the next x[t] from the rows of kv up to t. A tile waits for these rows, so no barrier is needed before."""
    if not sync.enter(cells, worker, layer, ATTEND):
        return False
    tile = sync.claim_any(cells, worker, 3 * layer + 2, TILES)
    while tile >= 0:
        last = min(ROWS, tile * TILE + TILE)
        if not sync.await_rows(cells, worker, layer, start + last - 1):
            return False
        for t in range(tile * TILE, last):
            total = x[layer, t]
            for row in range(t + 1):
                total = _scramble(total, kv[layer, row])
            x[layer + 1, t] = total
        tile = sync.claim_any(cells, worker, 3 * layer + 2, TILES)
    return sync.barrier(cells, worker, workers)


@kernel
def forward(worker, workers, cells, x, y, kv, start):
    """x: [LAYERS + 1, ROWS]; y, kv: [LAYERS, ROWS]."""
    for layer in range(LAYERS):
        if not _mix(cells, worker, workers, layer, x, y):
            return False
        if not _store(cells, worker, layer, y, kv, start):
            return False
        if not _attend(cells, worker, workers, layer, x, kv, start):
            return False
    return True


@kernel
def hold(worker, workers, cells, gate, who, written):
    sync.enter(cells, worker, 1, 2)
    if worker == who:
        while load_acquire(gate, 0) == 0:
            sleep_microseconds(np.uint32(1000))
        fetch_add(written, 0, 1)
    return sync.barrier(cells, worker, workers)


@kernel
def work_slowly(worker, workers, cells, steps):
    sync.enter(cells, worker, 0, 0)
    for _ in range(steps if worker == 0 else 0):
        sleep_microseconds(np.uint32(50_000))
        if not sync.progress(cells, worker):
            return False
    return sync.barrier(cells, worker, workers)


@kernel
def refuse(worker, workers, cells, who):
    sync.enter(cells, worker, 4, 1)
    if worker == who:
        return sync.fail(cells, worker)
    return sync.barrier(cells, worker, workers)


@kernel
def leave_early(worker, workers, cells):
    """Worker 1 skips the barrier, so no worker can pass it."""
    sync.enter(cells, worker, 6, 0)
    return worker == 1 or sync.barrier(cells, worker, workers)


@kernel
def publish_twice(worker, workers, cells):
    return sync.publish(cells, worker, 0, 0, 1)


@kernel
def count_up(worker, workers, cells, counter, n):
    for _ in range(n):
        fetch_add(counter, 0, 1)
        while True:
            seen = load_acquire(counter, 1)
            if compare_exchange(counter, 1, seen, seen + 1) == seen:
                break
    return True


def make_arrays() -> tuple[Any, ...]:
    x = np.full((LAYERS + 1, ROWS), -1, np.int64)
    x[0] = np.arange(ROWS) * 1000 + 7
    return x, np.full((LAYERS, ROWS), -1, np.int64), np.full((LAYERS, ROWS), -1, np.int64)


def passed(team: Team, plan: FaultPlan | None = None, start: int = 0) -> np.ndarray:
    x, y, kv = make_arrays()
    instruments = Instruments(fault_plan=plan)
    marks = team.run(
        forward, x, y, kv, start, watermarks=[start] * LAYERS, counters=3 * LAYERS, instruments=instruments
    )
    assert (plan is not None and plan.omit) or marks.tolist() == [start + ROWS] * LAYERS
    return np.concatenate([x, y, kv])
