"""How fast this machine can be: loops that do nothing but one thing. What other kernels reach is a share of it.

Called on every worker of a team, `kernel(worker, workers, cells, ...)`; they neither wait nor claim, so `cells` is not
looked at. Each leaves its sums in `out`, or the compiler would leave out the work.
"""

from gemma_py.kernels.decorator import kernel
from gemma_py.kernels.matmul import CODE_PANELS, CODE_ROWS
from gemma_py.kernels.simd.builders import LANES
from gemma_py.kernels.simd.tiles import add_dots, row_offsets, zero_dots
from gemma_py.kernels.simd.vectors import add, bitcast, fma, load, load_splat, store, sum_lanes, to_f32, zero, zero_ints

CHAINS = (6, 12)  # what fills AVX2's registers, and what hides the delay of AVX-512's
PAIRS = 128  # of codes in the loop of `multiply_pairs`, 20 KB of the first cache


@kernel
def multiply_floats_6(worker, workers, cells, steps, x, out):
    """6 * 16 multiply-adds a step.    x: [2] f32   out: [workers * 16] f32, written"""
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
    """12 * 16 multiply-adds a step, for vectors so wide that six chains wait for themselves."""
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
    """Multiply-adds of int16 that lie in the first cache, in tiles as large as a matmul's.

    x: [CODE_ROWS * PAIRS * 2] int16   w: [PAIRS * CODE_PANELS * 32] int16   out: [workers * 16] f32, written

    Loaded anew each time, as a matmul has to: of operands that never change, the compiler takes the product out.
    """
    places = row_offsets(0, 2 * PAIRS, CODE_ROWS, CODE_ROWS)
    tile = zero_dots(places, CODE_PANELS)
    for _ in range(steps):
        for k in range(0, PAIRS, 8):
            tile = add_dots(x, places, 2 * k, w, k * CODE_PANELS * 2 * LANES, tile)
    (total,) = zero_ints(1)
    for vector in tile:
        total = add(total, vector)
    store(out, worker * LANES, to_f32(total))
    return True


@kernel
def read_memory(worker, workers, cells, values, out):
    """Each worker reads its share of values once, from four places at a time.    values: [n * 64 * workers] f32"""
    share = values.shape[0] // workers
    quarter, (y0, y1, y2, y3) = share // 4, zero_ints(4)
    for at in range(worker * share, worker * share + quarter, LANES):
        y0 = add(bitcast(load(values, at)), y0)
        y1 = add(bitcast(load(values, at + quarter)), y1)
        y2 = add(bitcast(load(values, at + 2 * quarter)), y2)
        y3 = add(bitcast(load(values, at + 3 * quarter)), y3)
    out[worker * LANES] = sum_lanes(add(add(y0, y1), add(y2, y3)))
    return True


def multiply_adds_of_pairs(steps: int) -> int:
    """A worker's."""
    return steps * PAIRS * CODE_ROWS * CODE_PANELS * 2 * LANES
