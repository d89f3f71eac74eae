"""The machine's peak rates, measured in the same run as the results that are compared with them."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemma_py import machine
from gemma_py.kernels import peak

Run = Callable[..., Any]  # calls a kernel, with the arguments after it, on all workers

_LEAST_SECONDS = 0.005  # the shortest sample; waking the workers takes a fiftieth of it
_MEMORY = 512 << 20  # bytes that are read: more than fit into the processor's caches


@dataclass
class Limits:
    """Peak rates of so many threads together: the medians of samples taken between the tests. A multiply-add is two operations.

    A processor lowers its clock while it multiplies wide vectors, and raises it again within milliseconds. So the limit in the
    middle of a matmul is lower than the one measured here; tools/matrices.py measures that one.
    """

    threads: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # steps of each kernel that take _LEAST_SECONDS

    @property
    def f32(self) -> float:
        """FLOP/s of the loop that is faster on this machine."""
        return max(self._median("f32 in 6 chains"), self._median("f32 in 12 chains"))

    @property
    def int16(self) -> float:
        """Operations a second on pairs, as `simd.dot_pairs` does them."""
        return self._median("int16")

    @property
    def memory(self) -> float:
        """Bytes read a second."""
        return self._median("memory")

    def _median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def sample(self, run: Run, values: np.ndarray) -> None:
        """Take one more sample of each limit.    run: `Engine.run_kernel`, with as many threads   values: of `memory_to_read`"""
        out = np.empty(self.threads * peak.LANES, np.float32)
        x = np.array([0.5, 0.25], np.float32)
        rows = np.arange(peak.CODE_ROWS * peak.PAIRS * 2, dtype=np.int16)
        w = np.ones(peak.PAIRS * peak.CODE_PANELS * 2 * peak.LANES, np.int16)
        for kernel, chains in zip((peak.multiply_floats_6, peak.multiply_floats_12), peak.CHAINS, strict=True):
            self._sample(run, f"f32 in {chains} chains", kernel, 2 * chains * peak.LANES, x, out)
        operations = 2 * peak.multiply_adds_of_pairs(1)
        self._sample(run, "int16", peak.multiply_pairs, operations, rows, w, out)
        part = values[: len(values) // (self.threads * 64) * self.threads * 64]
        self._note("memory", part.nbytes / _seconds(run, peak.read_memory, part, out))

    def _sample(self, run: Run, name: str, kernel: Callable[..., Any], operations: int, *args: Any) -> None:
        """Add a sample of the operations a second of all workers together. A step of a worker is `operations` operations."""
        if name not in self.steps:
            steps = 1
            _seconds(run, kernel, steps, *args)  # compiles
            while _seconds(run, kernel, steps, *args) < _LEAST_SECONDS:
                steps *= 2
            self.steps[name] = steps
        steps = self.steps[name]
        self._note(name, self.threads * operations * steps / _seconds(run, kernel, steps, *args))

    def _note(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)


def memory_to_read() -> np.ndarray:
    """The array that the memory limit is measured with; smaller where there is little free memory."""
    free = machine.memory()
    size = _MEMORY if free is None else min(_MEMORY, free // 4)
    return np.ones(size // 4, np.float32)


def _seconds(run: Run, kernel: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    run(kernel, *args)
    return time.perf_counter() - start
