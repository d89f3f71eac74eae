"""How likely given tokens are, in float64 and in a fixed order."""

import math
from collections.abc import Sequence

import numpy as np

from gemma_py.errors import ComputationError
from gemma_py.kernels.scores import log_sum_exp

ROWS_AT_ONCE = 32  # tokens whose logits are held at a time: of Gemma's vocabulary, 32 MiB


def log_probabilities(logits: np.ndarray, tokens: Sequence[int]) -> list[float]:
    """Natural logarithms of the tokens' probabilities. Logits that are no numbers are an error, not a score."""
    largest, log_sum = log_sum_exp(logits, np.empty(len(logits)))
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
