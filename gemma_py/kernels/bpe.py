"""Byte pair encoding: repeatedly merge the neighbouring pair of lowest rank; among pairs of equal rank, the leftmost one."""

from gemma_py.kernels.decorator import inlined, kernel

_NONE = -1


@inlined
def _find_merge(left, right, starts, rights):
    """Return the index of the pair (left, right) in the table of merges, or -1 if the table does not have the pair.

    starts, rights: see `merge`. A binary search is possible, because the table is sorted by left half and then by right half.
    """
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
    """Add an entry to the binary heap. Return the new number of entries.

    heap: int64 [slots, 2] of (key, index of the pair), with the smallest key at the root
    """
    at = size
    while at > 0 and heap[(at - 1) // 2, 0] > key:
        heap[at, 0], heap[at, 1] = heap[(at - 1) // 2, 0], heap[(at - 1) // 2, 1]
        at = (at - 1) // 2
    heap[at, 0], heap[at, 1] = key, pair
    return size + 1


@inlined
def _pop(heap, size):
    """Remove the root of the heap. Return the new number of entries."""
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
    """Push the pair of the piece at `at` and the next piece, if they can merge. Return the new number of entries."""
    if at < 0 or following[at] < 0:
        return size
    pair = _find_merge(ids[at], ids[following[at]], starts, rights)
    return size if pair < 0 else _push(heap, size, ranks[pair] << 32 | at, pair)


@kernel
def merge(ids, starts, rights, ranks, made, following, before, heap):
    """Merge pairs until no pair can merge. The remaining ids are at the front of `ids`; return their number.

    ids: [n] int64, read and written
    following, before: [n] int64, scratch
    heap: [3 n, 2] int64, scratch
    starts: [V + 1] int64, read: pairs starts[v] .. starts[v + 1] - 1 have the left half v
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
        # Skip a pair that no longer exists, because one of its pieces was merged with another piece after the pair was
        # pushed.
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
