"""Sampling kernels that read every logit: top-k, softmax weights, top-p and the draw.

V is the size of the vocabulary. Every sum is one chain of float64 additions in a fixed order, so a token has the same
probability on every machine. Equal logits are ranked by token id, the smaller id first.
"""

import numpy as np

from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.elementary import exp

_BLOCK = 64  # the number of logits that `top_k` examines or skips together
SUM_BLOCK = 1024  # the number of weights in a block of `running_sums`
# The number of bins into which logits are sorted by value. The first bin begins at the largest logit. A bin is 1/16 wide,
# except that the last bin has no lower end.
BINS = 1024


@inlined
def _ranks_before(a, a_id, b, b_id):
    """Return whether logit a of token a_id ranks before logit b of token b_id."""
    return a > b or (a == b and a_id < b_id)


@inlined
def _sift_down(values, ids, at, size):
    """Move entry `at` down until the arrays are a heap again. The entry that ranks last is at the root."""
    value, token = values[at], ids[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _ranks_before(values[child], ids[child], values[child + 1], ids[child + 1]):
            child += 1
        if not _ranks_before(value, token, values[child], ids[child]):
            break
        values[at], ids[at] = values[child], ids[child]
        at = child
    values[at], ids[at] = value, token


@kernel
def top_k(x, values, ids):
    """Find the k largest logits of x, in descending order, where k is the length of `values`.

    x: [V] f32, read
    values: [k] f32, written
    ids: [k] int64, written

    The k best logits so far form a heap, with the worst of them at the root. A loop without branches counts the logits of a
    block of 64 that exceed the root. A block in which no logit exceeds the root, as in most blocks, is skipped.
    """
    k = values.shape[0]
    for v in range(k):
        values[v], ids[v] = x[v], v
    for at in range(k // 2 - 1, -1, -1):
        _sift_down(values, ids, at, k)
    worst = values[0]
    for block in range(k, x.shape[0], _BLOCK):
        end, larger = block + _BLOCK, 1
        if end <= x.shape[0]:
            larger = 0
            for v in range(block, block + _BLOCK):
                larger += x[v] > worst
        if larger > 0:
            for v in range(block, min(end, x.shape[0])):
                if x[v] > worst:
                    values[0], ids[0] = x[v], v
                    _sift_down(values, ids, 0, k)
                    worst = values[0]
    for size in range(k - 1, 0, -1):
        values[0], values[size] = values[size], values[0]
        ids[0], ids[size] = ids[size], ids[0]
        _sift_down(values, ids, 0, size)


@kernel
def softmax_weights(x, largest, weights):
    """Compute weights[v] = exp(x[v] - largest).

    x: [V] f32, read
    weights: [V] f32, written
    """
    for v in range(x.shape[0]):
        weights[v] = exp(x[v] - largest)


@kernel
def running_sums(weights, least, sums):
    """Compute the sum of the weights up to the end of each block of 1,024. Return the sum of all weights.

    Weights below `least` count as 0.

    weights: [n] f32, read
    sums: [number of blocks] f64, written
    """
    total = 0.0
    for block in range(sums.shape[0]):
        for v in range(block * SUM_BLOCK, min((block + 1) * SUM_BLOCK, weights.shape[0])):
            total += np.float64(weights[v]) if weights[v] >= least else 0.0
        sums[block] = total
    return total


@kernel
def count_until(weights, limit):
    """Return the smallest k such that the first k weights sum to at least `limit`, or n + 1 if there is no such k.

    weights: [n] f32, read
    """
    total = 0.0
    for count in range(weights.shape[0]):
        total += np.float64(weights[count])
        if total >= limit:
            return count + 1
    return weights.shape[0] + 1


@inlined
def _bin_of(x, largest):
    below = (largest - x) * np.float32(16.0)
    return np.int64(below) if below < np.float32(BINS - 1) else np.int64(BINS - 1)


@kernel
def find_edge_bin(x, largest, weights, limit, masses):
    """Return (edge bin, sum of the weights in the bins before it).

    The first bin begins at the largest logit, and each further bin holds smaller logits. The edge bin is the one in
    which the sum of weights reaches `limit`. Top-p then has to sort only the few logits in the edge bin, not the whole
    vocabulary.

    x, weights: [V] f32, read
    masses: [BINS] f64, zeros on entry, written: the sum of each bin's weights, v ascending
    """
    for v in range(x.shape[0]):
        masses[_bin_of(x[v], largest)] += np.float64(weights[v])
    total = 0.0
    for number in range(BINS - 1):
        if total + masses[number] >= limit:
            return number, total
        total += masses[number]
    return BINS - 1, total


@kernel
def zero_below_bin(x, largest, edge, weights, members):
    """Set the weights of logits below bin `edge` to 0. Return how many logits are in bin `edge`.

    x: [V] f32, read
    weights: [V] f32, written
    members: [V] int64, written: begins with the token ids of the logits in bin `edge`
    """
    count = 0
    for v in range(x.shape[0]):
        number = _bin_of(x[v], largest)
        if number > edge:
            weights[v] = np.float32(0.0)
        elif number == edge:
            members[count] = v
            count += 1
    return count


@kernel
def draw(weights, least, target, sums):
    """Return the first index at which the running sum of the weights exceeds `target`.

    Weights below `least` count as 0. If no sum exceeds `target`, return the last index with a weight of at least `least`.

    weights: [n] f32, read
    sums: [number of blocks] f64, read: what `running_sums` computed, so that only one block has to be searched
    """
    first, reached, chosen = 0, 0.0, 0
    for block in range(sums.shape[0]):
        if sums[block] > target:
            first, reached = block * SUM_BLOCK, sums[block - 1] if block > 0 else 0.0
            break
    for v in range(first, weights.shape[0]):
        if weights[v] >= least:
            reached += np.float64(weights[v])
            chosen = v
            if reached > target:
                break
    return chosen


@kernel
def divide(x, temperature):
    for v in range(x.shape[0]):
        x[v] = x[v] / temperature
