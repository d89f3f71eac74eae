"""The embedding of a text: the mean of the text's rows, normalised. Row t of x is x[t * D : (t + 1) * D]."""

import numpy as np

from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.intrinsics import fma, sqrt
from gemma_py.kernels.panels import COLUMNS
from gemma_py.kernels.simd.vectors import add, div, splat
from gemma_py.kernels.vector_math import load_up_to, store_up_to

_F = np.float32


@inlined
def mean_rows(x, D, first, last, y, at):
    """Compute y[at + d] = (sum over t from first to last - 1 of x[t, d]) / (last - first), t ascending.

    x: [T * D] f32, read
    y: f32, written from y[at] to y[at + D - 1]
    """
    count = splat(_F(last - first))
    for d in range(0, D, COLUMNS):
        total = load_up_to(x, first * D + d, first * D + D)
        for t in range(first + 1, last):
            total = add(total, load_up_to(x, t * D + d, t * D + D))
        store_up_to(y, at + d, at + D, div(total, count))


@kernel
def normalise_rows(x, width, y):
    """Compute y[n, d] = x[n, d] / max(length of x[n, :width], 1e-12) in float64. Squares are summed with d ascending.

    x: [N, D] f32, read; D >= width
    y: [N, width] f32, written
    """
    for n in range(y.shape[0]):
        total = 0.0
        for d in range(width):
            value = np.float64(x[n, d])
            total = fma(value, value, total)
        length = max(sqrt(total), 1e-12)
        for d in range(width):
            y[n, d] = _F(np.float64(x[n, d]) / length)
