"""Fault injection for tests: random delays, faults, and synchronisation that is left out. Switched off, it costs a branch.

It is switched by a cell and not at compile time, so that the machine code under test is the machine code that ships. The
cell is on the cache line of BROKEN, which every worker reads anyway and none writes: the read hits the L1 cache and the
branch is always predicted. Measured: a call of sync.py takes 6 ns with it and 3 ns without. A forward pass makes a thousand
calls, so it costs three microseconds a pass.
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
_NOTHING, OMIT_BARRIER, OMIT_ORDER, OMIT_AWAIT = 0, 1, 2, 3
_PLACES = {"anywhere": ANYWHERE, "enter": ENTER, "claim": CLAIM, "publish": PUBLISH, "await": AWAIT, "barrier": BARRIER}
_FAULTS = {"": 0, "stall": _STALL, "raise": _RAISE}
_OMISSIONS = {"": _NOTHING, "barrier": OMIT_BARRIER, "order": OMIT_ORDER, "await": OMIT_AWAIT}


@dataclass(frozen=True)
class FaultPlan:
    """What to inject into a run. The seed fixes each worker's random numbers, but not the schedule that results from them.

    seed: unless it is 0, there are random delays and yields at each enter, claim, publish, await and barrier, and the tiles of
        `claim_any` are shuffled.
    fault: "stall" or "raise", by `worker` (one number), in `layer` and `phase` (ANY matches all), at `place`: "enter",
        "claim" (holding a tile), "publish", "await" or "barrier" (before it), or "anywhere" (whichever comes first).
    omit: a synchronisation that is left out, as a negative control. "barrier": barriers of that layer and phase let every
        worker pass. "order": rows are published at once, whatever the watermark. "await": no worker waits for rows.
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
        """Write the settings into the cells of a run that has not begun."""
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
    """31 random bits. A linear congruence is enough: only its high bits are used, and only to vary schedules."""
    at = worker * c.LINE + c.RANDOM
    cells.own[at] = cells.own[at] * 6364136223846793005 + 1442695040888963407
    return (cells.own[at] >> 32) & 0x7FFFFFFF


@inlined
def _delay(cells, worker):
    """Half of the time no delay; else some yields, a spin, or (rarely) a sleep in which the other workers get far ahead."""
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
    """Delay this worker or inject a fault, as the plan says for this place. Call it only where FAULT_PLAN is set."""
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
    # A real stall reacts to nothing, so this one does not look at BROKEN. It ends when the team is closed.
    while load_acquire(shared, c.END_STALLS) == 0:
        sleep_microseconds(np.uint32(1000))


@inlined
def omits(cells, worker, what):
    """Whether the plan leaves this synchronisation out."""
    shared = cells.shared
    return shared[c.OMISSION] == what and _is_at(cells, worker, shared[c.OMISSION_LAYER], shared[c.OMISSION_PHASE])


@inlined
def shuffle(cells, index, tile, tiles):
    """A permutation of the tiles, drawn from the seed and the counter: times a unit modulo `tiles`, plus a shift."""
    seed = cells.shared[c.SEED]
    if seed == 0 or tiles < 3:
        return tile
    mixed = ((seed * 2654435761 + index * 40503) >> 3) & 0x3FFFFFFF
    factor = 1 + mixed % tiles
    while _divisor(factor, tiles) != 1:
        factor += 1
    return (tile * factor + (mixed >> 7)) % tiles


@inlined
def _divisor(a, b):
    while b != 0:
        a, b = b, a % b
    return a
