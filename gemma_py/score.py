"""How likely given tokens are, in float64 and in a fixed order."""

import math
from collections.abc import Sequence

import numpy as np

from gemma_py.errors import ComputationError
from gemma_py.kernels.decorator import kernel
from gemma_py.kernels.elementary import exp64, log64


@kernel
def _log_sum(logits: np.ndarray, terms: np.ndarray) -> tuple[np.float64, np.float64]:
    """max, and ln(sum over v of exp(logits[v] - max)), v ascending, in f64.    logits, terms: [V]

    The terms are made in a loop of their own: each is by itself, so several can be made at once.
    """
    largest = np.float64(logits[0])
    for v in range(logits.shape[0]):
        if logits[v] > largest:
            largest = np.float64(logits[v])
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
