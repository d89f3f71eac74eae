"""Kernels that measure the machine's peak rates, with which the speeds of other kernels are compared.

Each worker thread calls a kernel as `kernel(worker, workers, cells, ...)`: with the thread's number, with the number of
workers, and with the variables by which the workers of other kernels wait for each other and share out work
(runtime/cells.py). The kernels here do not use `cells`. Each kernel writes its sums to `out`, because the compiler would
otherwise remove the computation.
"""

from gemma_py.kernels.decorator import kernel
from gemma_py.kernels.matmul import CODE_PANELS, CODE_ROWS
from gemma_py.kernels.simd.builders import LANES
from gemma_py.kernels.simd.tiles import add_dots, row_offsets, zero_dots
from gemma_py.kernels.simd.vectors import (
    add,
    bitcast,
    fma,
    load,
    load_splat,
    prefetch_to_l2,
    store,
    sum_lanes,
    to_f32,
    zero,
    zero_ints,
)

CHAINS = (6, 12)  # numbers of independent sums: 6 fill the registers of AVX2, 12 hide the FMA latency of AVX-512
# The number of int16 pairs that `multiply_pairs` multiplies for each sum, so small that `x` and `w` fit in the L1 cache.
PAIRS = 128
_AHEAD = 1024  # how many values ahead `read_memory` prefetches


@kernel
def multiply_floats_6(worker, workers, cells, steps, x, out):
    """Compute 6 * 16 multiply-adds per step, in six independent sums.

    x: [2] f32, read
    out: [workers * 16] f32, written
    """
    a, b = load_splat(x, 0), load_splat(x, 1)
    y0, y1, y2, y3, y4, y5 = zero(), zero(), zero(), zero(), zero(), zero()
    for _ in range(steps):
        y0, y1, y2, y3, y4, y5 = (
            fma(y0, a, b),
            fma(y1, a, b),
            fma(y2, a, b),
            fma(y3, a, b),
            fma(y4, a, b),
            fma(y5, a, b),
        )
    store(out, worker * LANES, add(add(add(y0, y1), add(y2, y3)), add(y4, y5)))
    return True


@kernel
def multiply_floats_12(worker, workers, cells, steps, x, out):
    """Compute 12 * 16 multiply-adds per step, in 12 independent sums.

    On some machines, the six sums of `multiply_floats_6` are too few to hide the latency of an FMA.
    """
    a, b = load_splat(x, 0), load_splat(x, 1)
    y0, y1, y2, y3, y4, y5 = zero(), zero(), zero(), zero(), zero(), zero()
    z0, z1, z2, z3, z4, z5 = zero(), zero(), zero(), zero(), zero(), zero()
    for _ in range(steps):
        y0, y1, y2, y3, y4, y5 = (
            fma(y0, a, b),
            fma(y1, a, b),
            fma(y2, a, b),
            fma(y3, a, b),
            fma(y4, a, b),
            fma(y5, a, b),
        )
        z0, z1, z2, z3, z4, z5 = (
            fma(z0, a, b),
            fma(z1, a, b),
            fma(z2, a, b),
            fma(z3, a, b),
            fma(z4, a, b),
            fma(z5, a, b),
        )
    y0, y1, y2 = add(y0, z0), add(y1, z1), add(y2, z2)
    store(out, worker * LANES, add(add(add(y0, add(y3, z3)), add(y1, add(y4, z4))), add(y2, add(y5, z5))))
    return True


@kernel
def multiply_pairs(worker, workers, cells, steps, x, w, out):
    """Compute int16 multiply-adds with operands in the L1 cache, in tiles as large as those of a matmul.

    x: [CODE_ROWS * PAIRS * 2] int16, read
    w: [PAIRS * CODE_PANELS * 32] int16, read
    out: [workers * 16] f32, written

    Every step loads `x` and `w` again. Otherwise, the compiler would compute the products only once.
    """
    offsets = row_offsets(0, 2 * PAIRS, CODE_ROWS, CODE_ROWS)
    tile = zero_dots(offsets, CODE_PANELS)
    for _ in range(steps):
        for k in range(0, PAIRS, 8):
            tile = add_dots(x, offsets, 2 * k, w, k * CODE_PANELS * 2 * LANES, tile)
    (total,) = zero_ints(1)
    for vector in tile:
        total = add(total, vector)
    store(out, worker * LANES, to_f32(total))
    return True


@kernel
def read_memory(worker, workers, cells, values, out):
    """Read the values once. Each worker reads one part of the values. Prefetching keeps more loads under way than the hardware
    does by itself.

    values: [n * 64 * workers] f32, read
    out: [workers * 16] f32, written
    """
    share = values.shape[0] // workers
    y0, y1, y2, y3 = zero_ints(4)
    for at in range(worker * share, (worker + 1) * share, 4 * LANES):
        for line in range(4):
            prefetch_to_l2(values, at + _AHEAD + line * LANES)
        y0 = add(bitcast(load(values, at)), y0)
        y1 = add(bitcast(load(values, at + LANES)), y1)
        y2 = add(bitcast(load(values, at + 2 * LANES)), y2)
        y3 = add(bitcast(load(values, at + 3 * LANES)), y3)
    out[worker * LANES] = sum_lanes(add(add(y0, y1), add(y2, y3)))
    return True


def multiply_adds_of_pairs(steps: int) -> int:
    """Return the number of multiply-adds of one worker in `steps` steps of `multiply_pairs`."""
    return steps * PAIRS * CODE_ROWS * CODE_PANELS * 2 * LANES
