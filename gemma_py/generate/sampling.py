"""From logits to a token: penalties, filters, and a draw that depends on the seed and the position alone.

The order is that of transformers: bias, repetition penalty (presence and frequency penalty after it), temperature, top-k,
top-p, min-p. Every sum on the way has one order, and the random number of a position is a hash of seed and position, so a
token does not depend on threads, chunks or the other requests of a pass. Log probabilities are in float64, in a fixed order too.
"""

import math
from collections.abc import Sequence

import numpy as np

from gemma_py.errors import ComputationError, InputError
from gemma_py.generate.options import Sampling
from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.elementary import exp, exp64, log64

_TINY = np.float32(1e-38)  # below every weight but 0
_BLOCK = 64  # logits that are compared at once
_STEPS = 1024  # of a sixteenth, in which logits are put where too many would have to be sorted
ROWS_AT_ONCE = 32  # tokens whose logits are held at a time: of Gemma's vocabulary, 32 MiB
_NO_NUMBERS = "the logits hold NaN: the weights lead to values beyond float32"


# --- random numbers ---------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def _mixed(z: int) -> int:
    """splitmix64's finaliser: every bit of z moves every bit of the result."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), a multiple of 2^-53: the random number of the token at this position."""
    key = _mixed(seed + 0x9E3779B97F4A7C15 & _MASK)
    return (_mixed(key + (position + 1) * 0x9E3779B97F4A7C15 & _MASK) >> 11) * 2.0**-53


# --- kernels ----------------------------------------------------------------------------------------------------------


@inlined
def _before(a, a_id, b, b_id):  # type: ignore[no-untyped-def]
    """Whether a ranks before b."""
    return a > b or (a == b and a_id < b_id)


@inlined
def _sink(values, ids, at, size):  # type: ignore[no-untyped-def]
    """Restore the heap whose root is its last in rank, below `at`."""
    value, token = values[at], ids[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _before(values[child], ids[child], values[child + 1], ids[child + 1]):
            child += 1
        if not _before(value, token, values[child], ids[child]):
            break
        values[at], ids[at] = values[child], ids[child]
        at = child
    values[at], ids[at] = value, token


@kernel
def _largest(x, values, ids):  # type: ignore[no-untyped-def]
    """The largest of x, in order; of equal ones the smaller index first.    x: [V]   values, ids: [k], written

    A heap of the k best so far, whose root is the worst of them: nearly all of x is only compared with it, and most of it
    in blocks, which take one decision for many.
    """
    k = values.shape[0]
    for v in range(k):
        values[v], ids[v] = x[v], v
    for at in range(k // 2 - 1, -1, -1):
        _sink(values, ids, at, k)
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
                    _sink(values, ids, 0, k)
                    worst = values[0]
    for size in range(k - 1, 0, -1):
        values[0], values[size] = values[size], values[0]
        ids[0], ids[size] = ids[size], ids[0]
        _sink(values, ids, 0, size)


@kernel
def _weigh(x, largest, weights):  # type: ignore[no-untyped-def]
    """weights[v] = exp(x[v] - largest); their sum, v ascending, in f64.    x, weights: [V]"""
    total = 0.0
    for v in range(x.shape[0]):
        weights[v] = exp(x[v] - largest)
    for v in range(x.shape[0]):
        total += np.float64(weights[v])
    return total


@kernel
def _head(weights, limit):  # type: ignore[no-untyped-def]
    """How many of the weights, in order, until their sum reaches the limit; one more than all if it does not."""
    total = 0.0
    for count in range(weights.shape[0]):
        total += np.float64(weights[count])
        if total >= limit:
            return count + 1
    return weights.shape[0] + 1


@inlined
def _step(x, largest):  # type: ignore[no-untyped-def]
    """How many sixteenths x lies below the largest, STEPS - 1 at most."""
    below = (largest - x) * np.float32(16.0)
    return np.int64(below) if below < np.float32(_STEPS - 1) else np.int64(_STEPS - 1)


@kernel
def _edge(x, largest, weights, limit, masses):  # type: ignore[no-untyped-def]
    """The step at which the sum of the weights, from the largest down, reaches the limit, and the sum before it.

    x, weights: [V]   masses: [STEPS], all 0, written: the sum of each step's weights, v ascending
    """
    for v in range(x.shape[0]):
        masses[_step(x[v], largest)] += np.float64(weights[v])
    total = 0.0
    for step in range(_STEPS - 1):
        if total + masses[step] >= limit:
            return step, total
        total += masses[step]
    return _STEPS - 1, total


@kernel
def _keep_above(x, largest, edge, weights, members):  # type: ignore[no-untyped-def]
    """Weights below the step `edge` become 0; how many lie on it, and which.    members: [V], written from the front"""
    count = 0
    for v in range(x.shape[0]):
        step = _step(x[v], largest)
        if step > edge:
            weights[v] = np.float32(0.0)
        elif step == edge:
            members[count] = v
            count += 1
    return count


@kernel
def _draw(weights, least, u):  # type: ignore[no-untyped-def]
    """The index at which the weights of at least `least`, summed in order, pass the share u of their sum."""
    total = 0.0
    for v in range(weights.shape[0]):
        if weights[v] >= least:
            total += np.float64(weights[v])
    target, reached, chosen = u * total, 0.0, 0
    for v in range(weights.shape[0]):
        if weights[v] >= least:
            reached += np.float64(weights[v])
            chosen = v
            if reached > target:
                break
    return chosen


@kernel
def _scale(x, temperature):  # type: ignore[no-untyped-def]
    """x /= temperature, in place"""
    for v in range(x.shape[0]):
        x[v] = x[v] / temperature


@inlined
def _maximum(logits: np.ndarray) -> np.float32:
    """The largest number, in four turns, since each comparison waits for the one before."""
    a = b = c = d = logits[0]
    whole = logits.shape[0] // 4 * 4
    for v in range(0, whole, 4):
        a, b = logits[v] if logits[v] > a else a, logits[v + 1] if logits[v + 1] > b else b
        c, d = logits[v + 2] if logits[v + 2] > c else c, logits[v + 3] if logits[v + 3] > d else d
    a, c = b if b > a else a, d if d > c else c
    a = c if c > a else a
    for v in range(whole, logits.shape[0]):
        a = logits[v] if logits[v] > a else a
    return a


@kernel
def _log_sum(logits: np.ndarray, terms: np.ndarray) -> tuple[np.float64, np.float64]:
    """max, and ln(sum over v of exp(logits[v] - max)), v ascending, in f64.    logits, terms: [V]

    The terms are made in a loop of their own: each is by itself, so several can be made at once.
    """
    largest = np.float64(_maximum(logits))
    for v in range(logits.shape[0]):
        terms[v] = exp64(np.float64(logits[v]) - largest)
    total = 0.0
    for v in range(logits.shape[0]):
        total = total + terms[v]
    return largest, log64(total)


def likeliest(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest logits, in order, and their tokens; of equal ones the smaller token first."""
    values, ids = np.empty(count, np.float32), np.empty(count, np.int64)
    _largest(logits, values, ids)
    return values, ids


def warm_up() -> None:
    """Run every kernel once, so that the first token of an answer does not wait for a compiler."""
    logits = np.arange(8, dtype=np.float32)
    for top_k in (4, 0):
        Sampler(Sampling(temperature=1.0, top_k=top_k, top_p=0.5, seed=0), len(logits), [0]).choose(logits, [])
    log_probability(logits, 0)


# --- choosing ---------------------------------------------------------------------------------------------------------


class Sampler:
    """Chooses the tokens that follow a prompt."""

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Sequence[int]) -> None:
        outside = [token for token in sampling.logit_bias if token >= vocab_size]
        if outside:
            raise InputError(f"logit_bias: token id {outside[0]} is outside the vocabulary of {vocab_size}")
        self.sampling = sampling.seeded()
        self._start, self._prompt = len(prompt), np.array([], np.int64)
        if sampling.repetition_penalty != 1:
            self._prompt = np.unique(np.array(prompt, np.int64))

    def choose(self, logits: np.ndarray, made: Sequence[int]) -> int:
        """The token after the prompt and those made since.    logits: [V], not written"""
        x = self._penalised(logits, made)
        likeliest = int(np.argmax(x))
        if not np.isfinite(x[likeliest]):
            raise ComputationError(_NO_NUMBERS)
        s = self.sampling
        if s.temperature == 0:
            return likeliest
        if x is logits:
            x = logits.copy()
        _scale(x, np.float32(s.temperature))
        assert s.seed is not None
        weights, ids = self._candidates(x, x[likeliest])
        least = max(np.float32(s.min_p), _TINY)  # min_p is a share of the likeliest's weight, which is 1
        chosen = int(_draw(weights, least, uniform(s.seed, self._start + len(made))))
        return chosen if ids is None else int(ids[chosen])

    def _penalised(self, logits: np.ndarray, made: Sequence[int]) -> np.ndarray:
        """A copy where anything is to be changed."""
        s, x = self.sampling, logits
        if s.logit_bias or s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
            x = logits.copy()
        if s.logit_bias:
            x[list(s.logit_bias)] += np.array(list(s.logit_bias.values()), np.float32)
        if s.repetition_penalty != 1:
            seen = np.union1d(self._prompt, np.array(made, np.int64))
            penalty = np.float32(s.repetition_penalty)
            x[seen] = np.where(x[seen] < 0, x[seen] * penalty, x[seen] / penalty)
        if made and (s.presence_penalty or s.frequency_penalty):
            seen, counts = np.unique(np.array(made, np.int64), return_counts=True)
            x[seen] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * counts.astype(np.float32)
        return x

    def _candidates(self, x: np.ndarray, largest: np.float32) -> tuple[np.ndarray, np.ndarray | None]:
        """Weights and ids of what top-k and top-p leave, likeliest first; or all weights by id, and None."""
        s = self.sampling
        if 0 < s.top_k < len(x):
            values, ids = likeliest(x, s.top_k)
            weights = np.empty_like(values)
            total = _weigh(values, largest, weights)
            count = _head(weights, s.top_p * total) if s.top_p < 1 else len(weights)
            return weights[:count], ids
        weights = np.empty_like(x)
        total = _weigh(x, largest, weights)
        if s.top_p < 1:
            self._cut(x, largest, weights, s.top_p * total)
        return weights, None

    @staticmethod
    def _cut(x: np.ndarray, largest: np.float32, weights: np.ndarray, limit: float) -> None:
        """Weights become 0 but for the likeliest, as many as reach the limit. Only those close to the edge are sorted."""
        edge, before = _edge(x, largest, weights, limit, np.zeros(_STEPS))
        members = np.empty(len(x), np.int64)
        members = members[: _keep_above(x, largest, edge, weights, members)]
        members = members[np.lexsort((members, -x[members]))]
        weights[members[_head(weights[members], limit - before) :]] = 0


# --- log probabilities -------------------------------------------------------------------------------------------------


def log_probabilities(logits: np.ndarray, tokens: Sequence[int]) -> list[float]:
    """Natural logarithms of the tokens' probabilities. Logits that are no numbers are an error, not a score."""
    largest, log_sum = _log_sum(logits, np.empty(len(logits)))
    values = [float(np.float64(logits[token]) - largest - log_sum) for token in tokens]
    if any(math.isnan(value) for value in values):
        raise ComputationError(_NO_NUMBERS)
    return values


def log_probability(logits: np.ndarray, token: int) -> float:
    """The same of one token."""
    return log_probabilities(logits, [token])[0]


def perplexity(nll: Sequence[float]) -> float:
    """e^(mean NLL); infinite where that is beyond a float."""
    mean = math.fsum(nll) / len(nll)
    return math.exp(mean) if mean < 700 else math.inf
