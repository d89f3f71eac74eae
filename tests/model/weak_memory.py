"""Explores every execution of a few short threads under a memory model.

A thread is a list of loads and stores. The checker performs them one by one on a single shared memory, in every order
that the model allows. A load may take its value from an earlier store of its own thread before this store is performed.
A loop that polls a cell is modelled by its last load, so the thread lists the value that this load must find.

ARM is the multi-copy atomic model of ARMv8: the relations dob, bob and aob of aarch64.cat. There are no fences, because
the runtime uses none. Address and data dependencies are ignored, which allows more executions than ARMv8. x86 is total
store order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

PLAIN, ACQUIRE, RELEASE = "plain", "acquire", "release"
# A read-modify-write is a load and a store that no other store to the cell may separate.


@dataclass(frozen=True)
class Access:
    """A load or a store.

    name: its name in litmus.py, for mutations.
    value: what is stored, or what the load must find. A load with None accepts any value, which becomes part of the
    outcome.
    above: what the loaded value must exceed.
    pair: whether the access is part of a read-modify-write.
    """

    is_store: bool
    cell: str
    order: str = PLAIN
    value: int | None = None
    above: int | None = None
    name: str = ""
    pair: bool = False

    def accepts(self, value: Any) -> bool:
        return value == self.value if self.value is not None else self.above is None or value > self.above


Thread = Sequence[Access]
Model = Callable[[Access, Access], bool]  # whether the first access of a thread must be performed before the later one


def load(cell: str, order: str = PLAIN, name: str = "", value: int | None = None, above: int | None = None) -> Access:
    return Access(False, cell, order, value, above, name)


def store(cell: str, value: int, order: str = PLAIN, name: str = "") -> Access:
    return Access(True, cell, order, value, name=name)


def fetch_add(cell: str, found: int, name: str) -> list[Access]:
    get = Access(False, cell, ACQUIRE, found, name=f"{name}, acquire", pair=True)
    return [get, Access(True, cell, RELEASE, found + 1, name=f"{name}, release", pair=True)]


def sequential(first: Access, later: Access) -> bool:
    return True


def x86(first: Access, later: Access) -> bool:
    """A load may overtake an earlier store if neither is part of a locked instruction. Nothing else is reordered."""
    return not first.is_store or later.is_store or first.pair or later.pair


def arm(first: Access, later: Access) -> bool:
    if first.cell == later.cell and (later.is_store or (first.pair and first.is_store and later.order == ACQUIRE)):
        return True
    # An acquiring load is ldapr, which may overtake an earlier stlr to another cell.
    if (first.order == ACQUIRE and not first.is_store) or (later.order == RELEASE and later.is_store):
        return True
    # A load that must find a certain value is followed by a branch, which no later store overtakes.
    return not first.is_store and later.is_store and (first.value is not None or first.above is not None)


MODELS: dict[str, Model] = {"sequential": sequential, "x86": x86, "ARM": arm}


def explore(threads: Sequence[Thread], model: Model) -> tuple[set[tuple[int, ...]], int]:
    """Return the outcomes of all complete executions, and the number of states. Cells are 0 at first.

    An outcome: the values found by loads without a condition, thread by thread.
    """
    before = [
        [sum(1 << j for j in range(i) if model(thread[j], thread[i])) for i in range(len(thread))] for thread in threads
    ]
    start: Any
    cells = sorted({access.cell for thread in threads for access in thread})
    # State: performed accesses of each thread as bits, memory [(value, stores so far)], and results of loads [(value,
    # stores)].
    start = ((0,) * len(threads), ((0, 0),) * len(cells), ((None,) * max(map(len, threads)),) * len(threads))
    seen, stack = {start}, [start]
    outcomes: set[tuple[int, ...]] = set()
    while stack:
        done, memory, found = stack.pop()
        if all(mask == (1 << len(thread)) - 1 for mask, thread in zip(done, threads, strict=True)):
            free = (
                (access, got[0])
                for thread, gots in zip(threads, found, strict=True)
                for access, got in zip(thread, gots, strict=False)
                if got is not None
            )
            outcomes.add(tuple(value for access, value in free if access.value is None and access.above is None))
            continue
        for t, thread in enumerate(threads):
            for i, access in enumerate(thread):
                if done[t] >> i & 1 or before[t][i] & ~done[t]:
                    continue
                step = _perform(thread, i, done[t], memory[cells.index(access.cell)], found[t])
                if step is None:
                    continue
                at, (content, got) = cells.index(access.cell), step
                new = (
                    (*done[:t], done[t] | 1 << i, *done[t + 1 :]),
                    (*memory[:at], content, *memory[at + 1 :]),
                    (*found[:t], (*found[t][:i], got, *found[t][i + 1 :]), *found[t + 1 :]),
                )
                if new not in seen:
                    seen.add(new)
                    stack.append(new)
    return outcomes, len(seen)


def _perform(thread: Thread, i: int, done: int, content: Any, found: Any) -> tuple[Any, Any] | None:
    """Return (new content of the cell, result of a load), or None if the access cannot be performed now."""
    access = thread[i]
    if access.is_store:
        if access.pair and found[i - 1][1] != content[1]:
            return None  # another thread stored after this read-modify-write's load
        return (access.value, content[1] + 1), None
    own = [j for j in range(i) if thread[j].is_store and thread[j].cell == access.cell and not done >> j & 1]
    if own:
        got = (thread[own[-1]].value, -1)  # a store of this thread that is not performed yet
    else:
        got = content
        # A later load of this thread, if performed already, must not have found an older value than this load.
        later = (j for j in range(i + 1, len(thread)) if thread[j].cell == access.cell and not thread[j].is_store)
        if any(done >> j & 1 and found[j][1] not in (-1, got[1]) for j in later):
            return None
    return (content, got) if access.accepts(got[0]) else None


def weaken(threads: Sequence[Thread], name: str) -> list[Thread]:
    return [[replace(a, order=PLAIN) if a.name == name else a for a in thread] for thread in threads]


def drop(threads: Sequence[Thread], name: str) -> list[Thread]:
    return [[a for a in thread if a.name != name] for thread in threads]
