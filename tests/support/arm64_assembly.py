"""Compiles small kernels, products of quantised weights and loops of attention for ARM64 on any machine, and prints their
assembly as JSON.

A test and tools/estimate_arm64.py run this file as a program.
"""

import json
from collections.abc import Callable

import llvmlite.binding as llvm
import numba
import numpy as np

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.get_process_triple = llvm.get_default_triple = lambda: "aarch64-unknown-linux-gnu"

from gemma_py.kernels import atomics, attention, attention_layout, matmul, panels  # noqa: E402  # numba reads the triple when it is first imported
from gemma_py.kernels.decorator import kernel  # noqa: E402
from gemma_py.kernels.intrinsics import fma  # noqa: E402
from gemma_py.kernels.simd import codes, dots, vectors  # noqa: E402

CELLS, FLOATS, BYTES, WORDS = (numba.typeof(np.empty(1, kind)) for kind in (np.int64, np.float32, np.int8, np.int16))
ROWS = numba.types.NamedTuple([WORDS, BYTES, FLOATS, FLOATS, FLOATS, FLOATS], matmul.CodedRows)
PANELS = numba.types.NamedTuple([BYTES] + [numba.int64] * 10, panels.CodePanels)
RING = numba.types.NamedTuple([FLOATS, FLOATS] + [numba.int64] * 6, attention_layout.Ring)
BUFFER = numba.types.NamedTuple([WORDS, FLOATS, FLOATS], panels.UnpackBuffer)


def load(cells):
    return atomics.load_acquire(cells, 0)


def store(cells):
    atomics.store_release(cells, 0, 1)


def add(cells):
    return atomics.fetch_add(cells, 0, 1)


def exchange(cells):
    return atomics.compare_exchange(cells, 0, 1, 2)


def spin(cells):
    for _ in range(cells.shape[0]):
        atomics.spin_hint()


def product_and_sum(x):
    return x[0] * x[1] + x[2]


def products_and_sums(x):
    value = vectors.load(x, 0)
    vectors.store(x, 0, vectors.add(vectors.mul(value, vectors.load(x, 16)), vectors.load(x, 32)))


def fused(x):
    return fma(x[0], x[1], x[2])


def dot(x, y):
    (total,) = vectors.zero_ints(1)
    pairs = dots.dot_pairs(codes.load_words(x, 0), codes.load_words(x, 64), total)
    vectors.store(y, 0, vectors.to_f32(pairs))


def products(x, w, y, rows, unpacked):
    matmul.matmul_codes(x, w, y, 0, rows, 0, 4, 0, unpacked)


def scores(ring, q, out):
    attention._scores_by_query_lanes(ring, 0, attention_layout.TILE, q, 0, out, 0, 0)


def values(ring, out):
    tile, queries = attention_layout.TILE, attention_layout.QUERY_BLOCK
    attention._add_values_of_many(ring, 0, 0, tile, out, 0, 0, 0, queries, 0, ring.E, 0)


KERNELS: dict[Callable[..., object], tuple[object, ...]] = dict.fromkeys((load, store, add, exchange, spin), (CELLS,))
KERNELS |= dict.fromkeys((product_and_sum, products_and_sums, fused), (FLOATS,))
KERNELS[dot] = BYTES, FLOATS
KERNELS[scores], KERNELS[values] = (RING, FLOATS, FLOATS), (RING, FLOATS)
KERNELS[products] = ROWS, PANELS, FLOATS, numba.int64, BUFFER


def assembly(function, kinds):
    made = kernel(function)
    made.compile(kinds)
    return made.inspect_asm(kinds)


if __name__ == "__main__":
    print(json.dumps({function.__name__: assembly(function, kinds) for function, kinds in KERNELS.items()}))
