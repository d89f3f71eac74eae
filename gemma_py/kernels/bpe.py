"""Byte pair encoding: neighbours merge, the best ranked pair first; of equally ranked pairs, the leftmost."""

from gemma_py.kernels.decorator import inlined, kernel

_NONE = -1


@inlined
def _find_merge(left, right, starts, rights):
    """The number of a pair in the table of merges, or -1. Pairs with the same left half are sorted by their right half."""
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
    """Add an entry to the heap and return its new size.    heap: int64 [slots, 2] of (key, number of the pair), smallest key first"""
    at = size
    while at > 0 and heap[(at - 1) // 2, 0] > key:
        heap[at, 0], heap[at, 1] = heap[(at - 1) // 2, 0], heap[(at - 1) // 2, 1]
        at = (at - 1) // 2
    heap[at, 0], heap[at, 1] = key, pair
    return size + 1


@inlined
def _pop(heap, size):
    """Remove the root and return the new size."""
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
def _push_pair(ids, at, following, starts, rights, ranks, heap, size):
    """Push the pair that begins at `at`, if it is one that merges, and return the heap's new size."""
    if at < 0 or following[at] < 0:
        return size
    pair = _find_merge(ids[at], ids[following[at]], starts, rights)
    return size if pair < 0 else _push(heap, size, ranks[pair] << 32 | at, pair)


@kernel
def merge(ids, starts, rights, ranks, made, following, before, heap):
    """Merge until no pair merges any more; returns how many ids are left, at the front of `ids`.

    ids: [n] int64, read and written   following, before: [n] int64, scratch   heap: [3 n, 2] int64, scratch
    starts: [V + 1] int64, read: pairs starts[v] .. starts[v + 1] - 1 have left half v
    rights, ranks, made: [M] int64, read: right half, rank and merged id of each pair
    """
    n, size = ids.shape[0], 0
    for i in range(n):
        following[i], before[i] = i + 1 if i + 1 < n else _NONE, i - 1
    for i in range(n - 1):
        size = _push_pair(ids, i, following, starts, rights, ranks, heap, size)
    while size > 0:
        at, pair = heap[0, 0] & 0xFFFFFFFF, heap[0, 1]
        size = _pop(heap, size)
        # An entry may be stale: its halves may have merged with others since it was pushed.
        if ids[at] < 0 or following[at] < 0:
            continue
        right = following[at]
        now = _find_merge(ids[at], ids[right], starts, rights)
        if now < 0 or made[now] != made[pair]:
            continue
        ids[at], ids[right] = made[pair], _NONE
        following[at] = following[right]
        if following[at] >= 0:
            before[following[at]] = at
        size = _push_pair(ids, before[at], following, starts, rights, ranks, heap, size)
        size = _push_pair(ids, at, following, starts, rights, ranks, heap, size)
    count, at = 0, 0
    while at >= 0 and n > 0:
        ids[count] = ids[at]
        count += 1
        at = following[at]
    return count
