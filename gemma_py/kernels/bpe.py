"""Byte pair encoding: neighbours merge, the best ranked pair first, of one rank the leftmost."""

from gemma_py.kernels.decorator import inlined, kernel

_NONE = -1


@inlined
def _find(left, right, starts, rights):
    """Where the pair stands in the table of merges, or -1. Those of one left half are sorted by the right one."""
    low, high = starts[left], starts[left + 1]
    while low < high:
        middle = (low + high) // 2
        if rights[middle] < right:
            low = middle + 1
        else:
            high = middle
    return low if low < starts[left + 1] and rights[low] == right else _NONE


@inlined
def _push(heap, size, key, pair):
    """heap: int64 [slots, 2] of (key, place of the pair in the table), the smallest key first; gives the new size"""
    at = size
    while at > 0 and heap[(at - 1) // 2, 0] > key:
        heap[at, 0], heap[at, 1] = heap[(at - 1) // 2, 0], heap[(at - 1) // 2, 1]
        at = (at - 1) // 2
    heap[at, 0], heap[at, 1] = key, pair
    return size + 1


@inlined
def _pop(heap, size):
    """Take the root away; gives the new size."""
    size -= 1
    key, pair, at = heap[size, 0], heap[size, 1], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1, 0] < heap[child, 0]:
            child += 1
        if heap[child, 0] >= key:
            break
        heap[at, 0], heap[at, 1] = heap[child, 0], heap[child, 1]
        at = child
    heap[at, 0], heap[at, 1] = key, pair
    return size


@inlined
def _offer(ids, at, following, starts, rights, ranks, heap, size):
    """Put the pair that begins at `at` on the heap, if it is one that merges; gives the new size."""
    if at < 0 or following[at] < 0:
        return size
    pair = _find(ids[at], ids[following[at]], starts, rights)
    return size if pair < 0 else _push(heap, size, ranks[pair] << 32 | at, pair)


@kernel
def merge(ids, starts, rights, ranks, made, following, before, heap):
    """Merge until no pair is left; gives how many ids remain, in front.

    ids: [n] int64, read and written     starts: [V + 1], rights, ranks, made: [M] int64, the table by left half
    following, before: [n] int64, heap: [3 n, 2] int64, all scratch
    """
    n, size = ids.shape[0], 0
    for i in range(n):
        following[i], before[i] = i + 1 if i + 1 < n else _NONE, i - 1
    for i in range(n - 1):
        size = _offer(ids, i, following, starts, rights, ranks, heap, size)
    while size > 0:
        at, pair = heap[0, 0] & 0xFFFFFFFF, heap[0, 1]
        size = _pop(heap, size)
        # What is on the heap may be out of date: its halves may have merged with others since.
        if ids[at] < 0 or following[at] < 0:
            continue
        right = following[at]
        now = _find(ids[at], ids[right], starts, rights)
        if now < 0 or made[now] != made[pair]:
            continue
        ids[at], ids[right] = made[pair], _NONE
        following[at] = following[right]
        if following[at] >= 0:
            before[following[at]] = at
        size = _offer(ids, before[at], following, starts, rights, ranks, heap, size)
        size = _offer(ids, at, following, starts, rights, ranks, heap, size)
    count, at = 0, 0
    while at >= 0 and n > 0:
        ids[count] = ids[at]
        count += 1
        at = following[at]
    return count
