"""Fault injection for tests: random delays, injected faults, and omitted synchronisation.

Every function of sync.py checks the cell FAULT_PLAN at run time, so that tests run the machine code that users run. A check
takes 3 ns, which is about 3 microseconds for the thousand calls of a forward pass. A check takes so little because the
cache line of FAULT_PLAN is rarely written and stays in the L1 cache of every core.
"""

from dataclasses import dataclass

import numpy as np

from gemma_py.errors import InputError
from gemma_py.kernels.atomics import load_acquire, sleep_microseconds, spin_hint, yield_cpu
from gemma_py.kernels.decorator import inlined
from gemma_py.runtime import cells as c

ENTER, CLAIM, PUBLISH, AWAIT, BARRIER, ANYWHERE = 1, 2, 3, 4, 5, -1
ANY = -1
_STALL, _RAISE = 1, 2
_NOTHING, OMIT_BARRIER, OMIT_ORDER, OMIT_AWAIT, OMIT_AHEAD = 0, 1, 2, 3, 4
_PLACES = {"anywhere": ANYWHERE, "enter": ENTER, "claim": CLAIM, "publish": PUBLISH, "await": AWAIT, "barrier": BARRIER}
_FAULTS = {"": 0, "stall": _STALL, "raise": _RAISE}
_OMISSIONS = {"": _NOTHING, "barrier": OMIT_BARRIER, "order": OMIT_ORDER, "await": OMIT_AWAIT,
              "ahead": OMIT_AHEAD}  # fmt: skip


@dataclass(frozen=True)
class FaultPlan:
    """The faults to inject into a run.

    seed: if not 0, every call of sync.py begins with a random delay, and `claim_any` returns the tiles in a random order. The
        seed determines the random numbers, but the operating system still schedules the threads.
    fault: "stall", "raise", or "" for no fault.
    worker, layer, phase: the worker that has the fault, and the layer and phase in which it occurs. ANY matches every
        layer or phase.
    place: the function of sync.py in which the fault occurs: "enter", "claim" (after a tile is claimed), "publish", "await",
        "barrier" (before the worker arrives), or "anywhere" for whichever is called first.
    omit: the synchronisation to leave out, so that a test can show that it is needed. "barrier": workers do not wait at
        barriers. "order": rows are published without waiting for earlier rows. "await": attention waits for no KV rows.
        "ahead": attention waits for KV rows up to the query's own position, but not for the later KV rows that it needs where
        it is bidirectional. "": nothing is left out.
    omit_layer, omit_phase: the layer and phase in which synchronisation is left out. ANY matches every layer or phase.
    """

    seed: int = 0
    fault: str = ""
    worker: int = 0
    layer: int = ANY
    phase: int = ANY
    place: str = "anywhere"
    omit: str = ""
    omit_layer: int = ANY
    omit_phase: int = ANY

    def __post_init__(self) -> None:
        if self.fault not in _FAULTS or self.place not in _PLACES or self.omit not in _OMISSIONS:
            known = f"faults {list(_FAULTS)}, places {list(_PLACES)}, omissions {list(_OMISSIONS)}"
            raise InputError(f"invalid fault plan {self}: expected {known}")

    def apply(self, cells: c.Cells) -> None:
        values = {c.FAULT_PLAN: 1, c.SEED: self.seed, c.FAULT: _FAULTS[self.fault], c.FAULT_WORKER: self.worker}
        values |= {c.FAULT_LAYER: self.layer, c.FAULT_PHASE: self.phase, c.FAULT_PLACE: _PLACES[self.place]}
        values |= {
            c.OMISSION: _OMISSIONS[self.omit],
            c.OMISSION_LAYER: self.omit_layer,
            c.OMISSION_PHASE: self.omit_phase,
        }
        for cell, value in values.items():
            cells.shared[cell] = value
        for worker in range(len(cells.own) // c.LINE):
            seed = np.random.SeedSequence([abs(self.seed), worker]).generate_state(1, np.uint64)[0]
            cells.own[worker * c.LINE + c.RANDOM] = int(seed >> np.uint64(1))


@inlined
def _draw(cells, worker):
    """Return 31 random bits: high bits of a linear congruential generator, because the low bits are less random."""
    at = worker * c.LINE + c.RANDOM
    cells.own[at] = cells.own[at] * 6364136223846793005 + 1442695040888963407
    return (cells.own[at] >> 32) & 0x7FFFFFFF


@inlined
def _delay(cells, worker):
    """Delay this worker by a random time.

    Half of the calls return at once. The others yield the core, spin or sleep. One call in 1024 sleeps for 2 ms, so
    that the other workers get far ahead.
    """
    kind, length = _draw(cells, worker) & 1023, _draw(cells, worker)
    if kind == 0:
        sleep_microseconds(np.uint32(2000))
    elif kind < 32:
        sleep_microseconds(np.uint32(length & 127))
    elif kind < 256:
        for _ in range(length & 4095):
            spin_hint()
    elif kind < 512:
        for _ in range(length & 15):
            yield_cpu()


@inlined
def _is_at(cells, worker, layer, phase):
    at = worker * c.LINE
    return (layer == ANY or layer == cells.own[at + c.LAYER]) and (phase == ANY or phase == cells.own[at + c.PHASE])


@inlined
def inject(cells, worker, place):
    """Delay this worker if the plan has a seed, and inject the plan's fault if this is the fault's place.

    The caller has checked FAULT_PLAN.
    """
    shared = cells.shared
    if shared[c.SEED] != 0:
        _delay(cells, worker)
    fault = shared[c.FAULT]
    if fault == 0 or worker != shared[c.FAULT_WORKER]:
        return
    if not _is_at(cells, worker, shared[c.FAULT_LAYER], shared[c.FAULT_PHASE]):
        return
    if shared[c.FAULT_PLACE] != ANYWHERE and shared[c.FAULT_PLACE] != place:
        return
    if fault == _RAISE:
        raise RuntimeError("an injected fault")
    # This loop imitates a stalled worker, so it does not end when the run is broken, but only when the team is closed.
    while load_acquire(shared, c.END_STALLS) == 0:
        sleep_microseconds(np.uint32(1000))


@inlined
def omits(cells, worker, what):
    """Return whether the plan leaves out this synchronisation in the worker's current layer and phase."""
    shared = cells.shared
    return shared[c.OMISSION] == what and _is_at(cells, worker, shared[c.OMISSION_LAYER], shared[c.OMISSION_PHASE])


@inlined
def shuffle(cells, index, tile, tiles):
    """Return the tile to compute in place of `tile`. The seed and the counter determine a permutation of the tiles.

    The permutation is (tile * factor + shift) % tiles, where factor has no common divisor with `tiles`.
    """
    seed = cells.shared[c.SEED]
    if seed == 0 or tiles < 3:
        return tile
    mixed = ((seed * 2654435761 + index * 40503) >> 3) & 0x3FFFFFFF
    factor = 1 + mixed % tiles
    while _greatest_common_divisor(factor, tiles) != 1:
        factor += 1
    return (tile * factor + (mixed >> 7)) % tiles


@inlined
def _greatest_common_divisor(a, b):
    while b != 0:
        a, b = b, a % b
    return a
