"""How likely given tokens are, in float64 and in a fixed order."""

from collections.abc import Sequence

import numpy as np

from gemma_py.kernels.decorator import kernel
from gemma_py.kernels.elementary import exp64, log64


@kernel
def log_probability(logits, token):
    """logits[token] - max - ln(sum over v of exp(logits[v] - max)), v ascending, in f64.    logits: [V]"""
    largest = np.float64(logits[0])
    for v in range(logits.shape[0]):
        if logits[v] > largest:
            largest = np.float64(logits[v])
    total = 0.0
    for v in range(logits.shape[0]):
        total = total + exp64(np.float64(logits[v]) - largest)
    return np.float64(logits[token]) - largest - log64(total)


def log_probabilities(logits: np.ndarray, tokens: Sequence[int]) -> list[float]:
    """One natural logarithm a row of logits: [T, V]."""
    return [log_probability(row, token) for row, token in zip(logits, tokens, strict=True)]
