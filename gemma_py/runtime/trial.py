"""Test modes: schedules shaken on purpose, faults put in, synchronisation left out. Off, they cost a branch.

They are switched by a cell, not at compile time, so that the machine code under test is the machine code that ships.
The cell lies in the line that holds BROKEN, which every worker reads anyway and nobody writes: a hit in the first cache
and a branch that is always predicted. Measured: 6 ns a call of sync.py with it, 3 without; a thousand calls make a
forward pass, so it is three microseconds of one.
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
NOTHING, DROP_BARRIER, DROP_ORDER, DROP_AWAIT = 0, 1, 2, 3
_PLACES = {"anywhere": ANYWHERE, "enter": ENTER, "claim": CLAIM, "publish": PUBLISH, "await": AWAIT, "barrier": BARRIER}
_FAULTS = {"": 0, "stall": _STALL, "raise": _RAISE}
_DROPS = {"": NOTHING, "barrier": DROP_BARRIER, "order": DROP_ORDER, "await": DROP_AWAIT}


@dataclass(frozen=True)
class Trial:
    """What to do to a run. The seed fixes what each worker draws, not the schedule that the machine makes of it.

    seed: not 0: random delays and yields at each enter, claim, publish, await and barrier, and shuffled `claim_any`.
    fault: "stall" or "raise", by `worker` (one number), in `layer` and `phase` (ANY matches all), at `place`: "enter",
        "claim" (holding a tile), "publish", "await" or "barrier" (before it), or "anywhere" (whichever comes first).
    drop: a negative control. "barrier": barriers of that layer and phase let everybody through. "order": rows are
        published at once, whatever the watermark. "await": nobody waits for rows.
    """

    seed: int = 0
    fault: str = ""
    worker: int = 0
    layer: int = ANY
    phase: int = ANY
    place: str = "anywhere"
    drop: str = ""
    drop_layer: int = ANY
    drop_phase: int = ANY

    def __post_init__(self) -> None:
        if self.fault not in _FAULTS or self.place not in _PLACES or self.drop not in _DROPS:
            known = f"faults {list(_FAULTS)}, places {list(_PLACES)}, drops {list(_DROPS)}"
            raise InputError(f"no such trial: {self}; there are {known}")

    def apply(self, cells: c.Cells) -> None:
        """Write the settings into the cells of a run that has not begun."""
        values = {c.TRIAL: 1, c.SEED: self.seed, c.FAULT: _FAULTS[self.fault], c.FAULT_WORKER: self.worker}
        values |= {c.FAULT_LAYER: self.layer, c.FAULT_PHASE: self.phase, c.FAULT_PLACE: _PLACES[self.place]}
        values |= {c.DROP: _DROPS[self.drop], c.DROP_LAYER: self.drop_layer, c.DROP_PHASE: self.drop_phase}
        for cell, value in values.items():
            cells.shared[cell] = value
        for worker in range(len(cells.own) // c.LINE):
            seed = np.random.SeedSequence([abs(self.seed), worker]).generate_state(1, np.uint64)[0]
            cells.own[worker * c.LINE + c.RANDOM] = int(seed >> np.uint64(1))


@inlined
def _draw(cells, worker):
    """31 random bits. A linear congruence is enough: only its high bits are used, and only to shake schedules."""
    at = worker * c.LINE + c.RANDOM
    cells.own[at] = cells.own[at] * 6364136223846793005 + 1442695040888963407
    return (cells.own[at] >> 32) & 0x7FFFFFFF


@inlined
def _dawdle(cells, worker):
    """Half the time nothing; else some yields, a spin, or (rarely) a sleep in which the others run far ahead."""
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
def attend(cells, worker, place):
    """What a trial wants of this worker here. Call it only where TRIAL is set."""
    shared = cells.shared
    if shared[c.SEED] != 0:
        _dawdle(cells, worker)
    fault = shared[c.FAULT]
    if fault == 0 or worker != shared[c.FAULT_WORKER]:
        return
    if not _is_at(cells, worker, shared[c.FAULT_LAYER], shared[c.FAULT_PHASE]):
        return
    if shared[c.FAULT_PLACE] != ANYWHERE and shared[c.FAULT_PLACE] != place:
        return
    if fault == _RAISE:
        raise RuntimeError("a fault that a trial put in")
    # A real stall heeds nothing, so this one does not look at BROKEN; the team lets go of it when it is closed.
    while load_acquire(shared, c.RELEASE) == 0:
        sleep_microseconds(np.uint32(1000))


@inlined
def drops(cells, worker, what):
    """Whether a negative control leaves this synchronisation out."""
    shared = cells.shared
    return shared[c.DROP] == what and _is_at(cells, worker, shared[c.DROP_LAYER], shared[c.DROP_PHASE])


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
