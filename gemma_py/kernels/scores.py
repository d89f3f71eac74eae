"""Log probabilities of tokens and perplexity, computed in float64 in a fixed order."""

import numpy as np

from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.elementary import exp64, log64


@inlined
def _maximum(x):
    """Return the largest number of x. Four independent maximums hide the latency of a comparison.

    x: [V] f32, read
    """
    a = b = c = d = x[0]
    whole = x.shape[0] // 4 * 4
    for v in range(0, whole, 4):
        a, b = x[v] if x[v] > a else a, x[v + 1] if x[v + 1] > b else b
        c, d = x[v + 2] if x[v + 2] > c else c, x[v + 3] if x[v + 3] > d else d
    a, c = b if b > a else a, d if d > c else c
    a = c if c > a else a
    for v in range(whole, x.shape[0]):
        a = x[v] if x[v] > a else a
    return a


@kernel
def log_sum_exp(logits, terms):
    """Return (max, ln(sum over v of exp(logits[v] - max))) in f64. The terms are summed with v ascending.

    logits: [V] f32, read
    terms: [V] f64, written: the exponentials

    The sum has a loop of its own. In a common loop with the exponentials, the chain of additions would slow them down.
    """
    largest = np.float64(_maximum(logits))
    for v in range(logits.shape[0]):
        terms[v] = exp64(np.float64(logits[v]) - largest)
    total = 0.0
    for v in range(logits.shape[0]):
        total = total + terms[v]
    return largest, log64(total)


@kernel
def exponential(x):
    """Return e^x in f64 for x up to 700. The C library's `exp` would give other bits on some machines."""
    return exp64(x)
