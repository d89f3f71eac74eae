"""Measure the speed of each kind of matrix product of a model, and the machine's float limit right after each product.

    python tools/matrices.py [MODEL] [--type f32] [--threads 1,2] [--rows 512] [--rounds 5]

A processor lowers its clock during vector multiplications, some by a fifth, and raises it again within milliseconds. So
the limit, a loop of multiply-adds in registers, is measured right after each product. Consecutive products are of
different layers, so that weights come from memory, as in a pass. With --type, MODEL names a shape of the catalogue, and
the weights are random.

Prints the median share of the limit, and the smallest and the largest share. Needs an idle machine.
"""

import argparse
import statistics
from collections import defaultdict

import numpy as np

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.checks.shapes import random_checkpoint
from gemma_py.checks.verify import prompt
from gemma_py.cli.common import markdown, naturals, positive
from gemma_py.generate.engine import Engine
from gemma_py.kernels import peak
from gemma_py.kernels.atomics import nanoseconds
from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.memory import aligned
from gemma_py.kernels.simd.target import USES_ZMM
from gemma_py.models.program import ALL, MATMUL
from gemma_py.runtime import program as p
from gemma_py.runtime.products import matmul_phase
from gemma_py.runtime.program import ModelTables
from gemma_py.runtime.runner import SequenceInput, _batch
from gemma_py.runtime.sync import barrier
from gemma_py.runtime.trace import NO_TRACE
from gemma_py.weights.pack import INPUTS, ROWS
from gemma_py.weights.tensors import matrices_of

_STEPS = 100_000  # steps of the loop that measures the limit, about 0.25 ms
_limit, _CHAINS = (peak.multiply_floats_12, 12) if USES_ZMM else (peak.multiply_floats_6, 6)
_loop = inlined(_limit.py_func)  # a kernel cannot call another kernel


@kernel
def product_and_limit(worker, workers, cells, m, s, batch, trace, at, sample, out, times):
    """Compute a matrix product as in a pass, and then run the loop that measures the limit.

    times: int64 [workers, 2], nanoseconds of the product and of the loop, written
    """
    if not barrier(cells, worker, workers):
        return False
    start = nanoseconds()
    matmul_phase(worker, workers, cells, m, s, batch, trace, at, at + 1)
    if not barrier(cells, worker, workers):
        return False
    middle = nanoseconds()
    _loop(worker, workers, cells, _STEPS, sample, out)
    times[worker, 0], times[worker, 1] = middle - start, nanoseconds() - middle
    return True


def products_of(m: ModelTables) -> list[int]:
    """Indices of the matrix products, grouped by kind and ordered by layer."""
    found = [number for number, op in enumerate(m.ops) if op[p.OP] == MATMUL and op[p.ROWS_OF] == ALL]
    return sorted(found, key=lambda number: (m.ops[number, p.LABEL], m.ops[number, p.TARGET]))


def measure(engine: Engine, T: int, rounds: int) -> list[list[str]]:
    """A table row for each shape and type. The inputs of the products are the buffers of an earlier pass."""
    runner, found = engine.runner, defaultdict(list)
    m, workers = engine.program.model, engine.threads
    engine.session().prefill(prompt(T, engine.config.vocab_size), T)
    s, logits = runner._scratch_for(T, 1), np.empty(0, np.float32)
    batch = _batch([SequenceInput(engine.new_cache(), [0] * T)], logits)
    stored = engine.checkpoint.stored_weights(engine.quant)
    names = [matrix.tensor.type.name for matrix in matrices_of(stored)]
    times = np.zeros((workers, 2), np.int64)
    sample, out = np.array([0.5, 0.25], np.float32), aligned(workers * peak.LANES)
    for _ in range(rounds):
        for at in products_of(m):
            number = int(m.ops[at, p.MATRIX])
            N, K = (int(value) for value in m.weights.matrices[number, [ROWS, INPUTS]])
            claims = engine.program.phases
            engine.run_kernel(product_and_limit, m, s, batch, NO_TRACE, at, sample, out, times, counters=claims)
            limit = sum(2 * _STEPS * _CHAINS * peak.LANES / spent for spent in times[:, 1])
            found[names[number], N, K].append((2 * T * N * K / times[:, 0].max(), limit))
    table = []
    for (name, N, K), pairs in sorted(found.items()):
        rate, beside = (statistics.median(values) for values in zip(*pairs, strict=True))
        shares = [rate / limit for rate, limit in pairs]
        middle = f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"
        table.append([name, f"{N:,} x {K:,}", str(workers), str(len(pairs)), f"{rate:.0f}", f"{beside:.0f}", middle])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--type", help="use random weights of this type in the shape of MODEL")
    parser.add_argument("--threads", type=naturals, default=(1, 2))
    parser.add_argument("--rows", type=positive, default=512)
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args()
    rows = []
    with (
        gemma_py.load(args.model) if args.type is None else Engine(random_checkpoint(args.model, args.type, args.rows))
    ) as engine:
        for threads in args.threads:
            engine.set_threads(threads)
            rows += measure(engine, args.rows, args.rounds)
    header = ["type", "matrix", "threads", "products", "GFLOP/s", "f32 limit beside", "share"]
    print(markdown(header, rows, left=2))


if __name__ == "__main__":
    main()
