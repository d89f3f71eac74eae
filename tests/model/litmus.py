"""Litmus tests for the waits in gemma_py/runtime/sync.py, and the mutations that weak_memory.py must find."""

import itertools
from collections.abc import Iterator, Sequence

from weak_memory import ACQUIRE, MODELS, RELEASE, Access, Thread, drop, explore, fetch_add, load, store, weaken

# Reasons why the order of an atomic operation cannot matter.
FLAG = "a flag that guards no data: a worker that sees the flag later only stops later"
OWN = "only the thread that watches the workers reads this cell; it does so periodically, and takes a lock each time"
TEST = "fault injection of tests, constant during a run"
COUNT = (
    "only the atomic addition matters, which protocol.pml tests: barriers and publications order the accesses to rows"
)
# The atomic operations of each function in sync.py: (operation, cell, an access in the litmus tests or a reason from above).
SOURCE: dict[str, list[tuple[str, str, str]]] = {
    "_advance": [("store_release", "at", OWN)],
    "is_intact": [("load_acquire", "BROKEN", FLAG)],
    "fail": [("compare_exchange", "BROKEN", FLAG)],
    "enter": [
        ("store_release", "at + LAYER", OWN),
        ("store_release", "at + PHASE", OWN),
        ("load_acquire", "FAULT_PLAN", TEST),
    ],
    "claim": [("fetch_add", "index * LINE", COUNT), ("load_acquire", "FAULT_PLAN", TEST)],
    "claim_any": [("load_acquire", "FAULT_PLAN", TEST)],
    "_wait_above": [
        ("load_acquire", "index", "wait"),
        ("store_release", "at + AWAITED", OWN),
        ("store_release", "at + BOUND", OWN),
        ("store_release", "at + WAITING", OWN),
        ("store_release", "worker * LINE + WAITING", OWN),
    ],
    "barrier": [
        ("load_acquire", "FAULT_PLAN", TEST),
        ("load_acquire", "GENERATION", "generation's load"),
        ("fetch_add", "ARRIVED", "arrival"),
        ("store_release", "ARRIVED", "reset"),
        ("store_release", "GENERATION", "generation's store"),
    ],
    "publish": [
        ("load_acquire", "FAULT_PLAN", TEST),
        ("load_acquire", "at", TEST),
        ("store_release", "at", TEST),
        ("load_acquire", "at", "owner's check"),
        ("store_release", "at", "publication"),
    ],
    "last_awaited": [("load_acquire", "FAULT_PLAN", TEST)],
    "await_rows": [("load_acquire", "FAULT_PLAN", TEST)],
}
# The memory orders of the operations in kernels/atomics.py.
ORDERS = {
    "load_acquire": ["acquire"],
    "store_release": ["release"],
    "fetch_add": ["acq_rel"],
    "compare_exchange": ["acq_rel", "acquire"],
}


def publishing(workers: int) -> Iterator[tuple[list[Thread], tuple[int, ...]]]:
    """Every worker but the last publishes a row, in order. The last worker waits for the published rows and reads them."""
    threads: list[Thread] = []
    for w in range(workers - 1):
        wait = [load("mark", ACQUIRE, "publish: wait", above=w - 1)] if w else []
        check = load("mark", ACQUIRE, "publish: owner's check", value=w)
        threads.append([store(f"row{w}", 1), *wait, check, store("mark", w + 1, RELEASE, "publish: publication")])
    rows = [load(f"row{w}") for w in range(workers - 1)]
    threads.append([load("mark", ACQUIRE, "await_rows: wait", above=workers - 2), *rows])
    yield threads, (1,) * (workers - 1)


def _arrive(workers: int, arrived: int, generation: int) -> list[Access]:
    begin = [load("generation", ACQUIRE, "barrier: generation's load", value=generation)]
    begin += fetch_add("arrived", arrived, "barrier: arrival")
    if arrived < workers - 1:
        return [*begin, load("generation", ACQUIRE, "barrier: wait", above=generation)]
    last = store("generation", generation + 1, RELEASE, "barrier: generation's store")
    return [*begin, store("arrived", 0, RELEASE, "barrier: reset"), last]


def meeting(workers: int) -> Iterator[tuple[list[Thread], tuple[int, ...]]]:
    """Every worker writes, passes a barrier, reads what the next worker wrote, passes a barrier and writes again.

    Yields one case for each order of arrival at the second barrier. By symmetry, workers arrive at the first barrier in
    order of their numbers.
    """
    for second in itertools.permutations(range(workers)):
        threads: list[Thread] = []
        for w in range(workers):
            threads.append(
                [
                    store(f"data{w}", 1),
                    *_arrive(workers, w, 0),
                    load(f"data{(w + 1) % workers}"),
                    *_arrive(workers, second[w], 1),
                    store(f"data{w}", 2),
                ]
            )
        yield threads, (1,) * workers


TESTS = {"publish": publishing, "barrier": meeting}
# Accesses that cause a bad outcome on ARM when their order is weakened. On x86, every load acquires and every store
# releases, so only a dropped wait causes a bad outcome.
FOUND = [
    ("publish", "await_rows: wait"),
    ("publish", "publish: publication"),
    ("barrier", "barrier: wait"),
    ("barrier", "barrier: arrival, acquire"),
    ("barrier", "barrier: arrival, release"),
    ("barrier", "barrier: generation's store"),
]
# Accesses whose order may be weakened on ARM, because a later release orders them anyway.
UNNEEDED = [
    ("publish", "publish: wait"),
    ("publish", "publish: owner's check"),
    ("barrier", "barrier: generation's load"),
    ("barrier", "barrier: reset"),
]
DROPPED = [("publish", "await_rows: wait"), ("barrier", "barrier: wait")]


def bad_outcomes(test: str, workers: int, model: str, mutation: str = "", wait: str = "") -> tuple[int, int]:
    """Return (bad outcomes, states). mutation: an access whose order is weakened to plain. wait: a wait that is
    dropped.
    """
    bad = states = 0
    for threads, good in TESTS[test](workers):
        changed: Sequence[Thread] = weaken(threads, mutation) if mutation else threads
        outcomes, count = explore(drop(changed, wait) if wait else changed, MODELS[model])
        bad += len(outcomes - {good})
        states += count
    return bad, states
