"""How likely given tokens are, in float64 and in a fixed order."""

import math
from collections.abc import Sequence

import numpy as np

from gemma_py.errors import ComputationError
from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.elementary import exp64, log64

ROWS_AT_ONCE = 32  # tokens whose logits are held at a time: of Gemma's vocabulary, 32 MiB


@inlined
def _largest(logits: np.ndarray) -> np.float32:
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
    largest = np.float64(_largest(logits))
    for v in range(logits.shape[0]):
        terms[v] = exp64(np.float64(logits[v]) - largest)
    total = 0.0
    for v in range(logits.shape[0]):
        total = total + terms[v]
    return largest, log64(total)


def log_probabilities(logits: np.ndarray, tokens: Sequence[int]) -> list[float]:
    """Natural logarithms of the tokens' probabilities. Logits that are no numbers are an error, not a score."""
    largest, log_sum = _log_sum(logits, np.empty(len(logits)))
    values = [float(np.float64(logits[token]) - largest - log_sum) for token in tokens]
    if any(math.isnan(value) for value in values):
        raise ComputationError("the logits hold NaN: the weights lead to values beyond float32")
    return values


def log_probability(logits: np.ndarray, token: int) -> float:
    """The same of one token."""
    return log_probabilities(logits, [token])[0]


def perplexity(nll: Sequence[float]) -> float:
    """e^(mean NLL); infinite where that is beyond a float."""
    mean = math.fsum(nll) / len(nll)
    return math.exp(mean) if mean < 700 else math.inf
