"""How fast this machine can be: loops that do nothing but one thing. What other kernels reach is a share of it.

Called on every worker of a team, `kernel(worker, workers, cells, ...)`; they neither wait nor claim, so `cells` is not
looked at. Each leaves its sums in `out`, or the compiler would leave out the work.
"""

from gemma_py.kernels.decorator import kernel
from gemma_py.kernels.simd import (
    LANES,
    add,
    bits,
    dot_pairs,
    fma,
    izero,
    load,
    load_pairs,
    splat,
    splat_pair,
    store,
    sum_lanes,
    to_f32,
    zero,
)

CHAINS = (6, 12)  # what fills AVX2's registers, and what hides the delay of AVX-512's
PAIRS = 128  # of codes in the loop of `multiply_pairs`, 8 KB of the first cache
PAIR_ROWS = 5


@kernel
def multiply_floats_6(worker, workers, cells, steps, x, out):
    """6 * 16 multiply-adds a step.    x: [2] f32   out: [workers * 16] f32, written"""
    a, b = splat(x, 0), splat(x, 1)
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
    """12 * 16 multiply-adds a step, for vectors so wide that six chains wait for themselves."""
    a, b = splat(x, 0), splat(x, 1)
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
    """PAIRS * 5 * 32 multiply-adds a step, of int16 that lie in the first cache.

    x: [5 * PAIRS * 2] int16   w: [PAIRS * 32] int16   out: [workers * 16] f32, written

    Loaded anew each time, as a matmul has to: of operands that never change, the compiler takes the product out.
    """
    y0, y1, y2, y3, y4 = izero(), izero(), izero(), izero(), izero()
    row = 2 * PAIRS
    for _ in range(steps):
        for k in range(PAIRS):
            pairs = load_pairs(w, k * 2 * LANES)
            y0 = dot_pairs(splat_pair(x, 2 * k), pairs, y0)
            y1 = dot_pairs(splat_pair(x, 2 * k + row), pairs, y1)
            y2 = dot_pairs(splat_pair(x, 2 * k + 2 * row), pairs, y2)
            y3 = dot_pairs(splat_pair(x, 2 * k + 3 * row), pairs, y3)
            y4 = dot_pairs(splat_pair(x, 2 * k + 4 * row), pairs, y4)
    store(out, worker * LANES, to_f32(add(add(add(y0, y1), add(y2, y3)), y4)))
    return True


@kernel
def read_memory(worker, workers, cells, values, out):
    """Each worker reads its share of values once, from four places at a time.    values: [n * 64 * workers] f32"""
    share = values.shape[0] // workers
    quarter, y0, y1, y2, y3 = share // 4, izero(), izero(), izero(), izero()
    for at in range(worker * share, worker * share + quarter, LANES):
        y0 = add(bits(load(values, at)), y0)
        y1 = add(bits(load(values, at + quarter)), y1)
        y2 = add(bits(load(values, at + 2 * quarter)), y2)
        y3 = add(bits(load(values, at + 3 * quarter)), y3)
    out[worker * LANES] = sum_lanes(add(add(y0, y1), add(y2, y3)))
    return True


def multiply_adds_of_pairs(steps: int) -> int:
    """A worker's."""
    return steps * PAIRS * PAIR_ROWS * 2 * LANES
