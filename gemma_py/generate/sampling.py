"""Sampling: penalties, filters and a random draw.

The order is that of transformers: logit bias, repetition penalty, presence and frequency penalty, temperature, top-k,
top-p, min-p. A token does not depend on threads, chunk size or other requests, because every sum has a fixed order and
each random number is a hash of the seed and the token's position.
"""

import math
from collections.abc import Sequence

import numpy as np

from gemma_py.errors import ComputationError, InputError
from gemma_py.generate.options import Sampling
from gemma_py.kernels import sampling as kernels
from gemma_py.kernels.scores import exponential, log_sum_exp

_TINY = np.float32(1e-38)  # a limit below every nonzero weight
ROWS_AT_ONCE = 32  # the most rows of logits in memory at once: 32 MiB with Gemma's vocabulary
_NO_NUMBERS = "the logits contain NaN: a value of the forward pass was beyond the range of float32"


# --- random numbers ---------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def _mixed(z: int) -> int:
    """Hash a 64-bit integer with the finaliser of splitmix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """Return the random number for the token at a position: a multiple of 2^-53 in [0, 1)."""
    key = _mixed(seed + 0x9E3779B97F4A7C15 & _MASK)
    return (_mixed(key + (position + 1) * 0x9E3779B97F4A7C15 & _MASK) >> 11) * 2.0**-53


def likeliest(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` largest logits, in descending order, and their token ids. Equal logits are ordered by id."""
    values, ids = np.empty(count, np.float32), np.empty(count, np.int64)
    kernels.top_k(logits, values, ids)
    return values, ids


def warm_up() -> None:
    logits = np.arange(8, dtype=np.float32)
    for top_k in (4, 0):
        Sampler(Sampling(temperature=1.0, top_k=top_k, top_p=0.5, seed=0), len(logits), [0]).choose(logits, [])
    log_probability(logits, 0)


# --- choosing ---------------------------------------------------------------------------------------------------------


class Sampler:
    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Sequence[int]) -> None:
        outside = [token for token in sampling.logit_bias if token >= vocab_size]
        if outside:
            raise InputError(f"logit_bias: token id {outside[0]} is outside the vocabulary of {vocab_size}")
        self.sampling = sampling.seeded()
        self._start, self._prompt = len(prompt), np.array([], np.int64)
        if sampling.repetition_penalty != 1:
            self._prompt = np.unique(np.array(prompt, np.int64))

    def choose(self, logits: np.ndarray, made: Sequence[int]) -> int:
        """Choose the next token.

        logits: [V], not modified   made: the tokens chosen so far
        """
        x = self._penalised(logits, made)
        likeliest = int(np.argmax(x))
        if not np.isfinite(x[likeliest]):
            raise ComputationError(_NO_NUMBERS)
        s = self.sampling
        if s.temperature == 0:
            return likeliest
        if s.temperature != 1:
            x = logits.copy() if x is logits else x
            kernels.divide(x, np.float32(s.temperature))
        assert s.seed is not None
        weights, ids = self._candidates(x, x[likeliest])
        least = max(np.float32(s.min_p), _TINY)  # weights are relative to the likeliest token, whose weight is 1
        sums = _block_sums(weights)
        target = uniform(s.seed, self._start + len(made)) * kernels.running_sums(weights, least, sums)
        chosen = int(kernels.draw(weights, least, target, sums))
        return chosen if ids is None else int(ids[chosen])

    def _penalised(self, logits: np.ndarray, made: Sequence[int]) -> np.ndarray:
        """Return the logits with logit bias and penalties: a copy if one of these options is set, else the argument itself."""
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
        """Apply top-k and top-p. Return the weights and ids of the remaining tokens, likeliest first.

        If top_k is 0, return the weights of the whole vocabulary, with the weight 0 for removed tokens, and None as the ids.
        """
        s = self.sampling
        if 0 < s.top_k < len(x):
            values, ids = likeliest(x, s.top_k)
            weights = np.empty_like(values)
            kernels.softmax_weights(values, largest, weights)
            count = kernels.count_until(weights, s.top_p * _total(weights)) if s.top_p < 1 else len(weights)
            return weights[:count], ids
        weights = np.empty_like(x)
        kernels.softmax_weights(x, largest, weights)
        if s.top_p < 1:
            self._cut(x, largest, weights, s.top_p * _total(weights))
        return weights, None

    @staticmethod
    def _cut(x: np.ndarray, largest: np.float32, weights: np.ndarray, limit: float) -> None:
        """Apply top-p: keep the largest weights that together reach the limit, and set the others to 0.

        Weights are counted in a histogram. Only the bin in which the limit is reached has to be sorted.
        """
        edge, before = kernels.find_edge_bin(x, largest, weights, limit, np.zeros(kernels.BINS))
        members = np.empty(len(x), np.int64)
        members = members[: kernels.zero_below_bin(x, largest, edge, weights, members)]
        members = members[np.lexsort((members, -x[members]))]
        weights[members[kernels.count_until(weights[members], limit - before) :]] = 0


def _block_sums(weights: np.ndarray) -> np.ndarray:
    return np.empty(-(-len(weights) // kernels.SUM_BLOCK))


def _total(weights: np.ndarray) -> float:
    """Return the sum of the weights, added in ascending order of index."""
    return float(kernels.running_sums(weights, np.float32(0), _block_sums(weights)))


# --- log probabilities -------------------------------------------------------------------------------------------------


def log_probabilities(logits: np.ndarray, tokens: Sequence[int]) -> list[float]:
    """Return the natural logarithm of each token's probability. A NaN raises ComputationError."""
    largest, log_sum = log_sum_exp(logits, np.empty(len(logits)))
    values = [float(np.float64(logits[token]) - largest - log_sum) for token in tokens]
    if any(math.isnan(value) for value in values):
        raise ComputationError(_NO_NUMBERS)
    return values


def log_probability(logits: np.ndarray, token: int) -> float:
    return log_probabilities(logits, [token])[0]


def perplexity(nll: Sequence[float]) -> float:
    """Return e to the power of the mean of nll, or infinity if the result overflows."""
    mean = math.fsum(nll) / len(nll)
    return exponential(mean) if mean < 700 else math.inf
