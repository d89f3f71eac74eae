"""Measurement of the machine's peak rates of computing and of reading memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemma_py import machine
from gemma_py.kernels import peak

Run = Callable[..., Any]

_LEAST_SECONDS = 0.005  # every sample takes at least this long, so that waking the workers adds at most 2%
_MEMORY = 512 << 20  # bytes to read, which do not fit into the processor's caches


@dataclass
class Limits:
    """The peak rates of all threads together, as medians of samples. A multiply-add counts as two operations.

    A real matrix product reaches less, because processors lower their clock during long runs of vector multiplications.
    tools/matrices.py measures the rate at that lower clock.
    """

    threads: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    @property
    def f32(self) -> float:
        """float32 operations per second, in the faster of two loops (see `peak.CHAINS`)."""
        return max(self._median("f32 in 6 chains"), self._median("f32 in 12 chains"))

    @property
    def int16(self) -> float:
        """Operations per second of int16 dot products (`simd.dot_pairs`)."""
        return self._median("int16")

    @property
    def memory(self) -> float:
        return self._median("memory")

    def _median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def sample(self, run: Run, values: np.ndarray) -> None:
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
        """Add one sample of operations per second, summed over all workers.

        operations: the operations of one worker in one step of the loop
        """
        if name not in self.steps:
            steps = 1
            _seconds(run, kernel, steps, *args)
            while _seconds(run, kernel, steps, *args) < _LEAST_SECONDS:
                steps *= 2
            self.steps[name] = steps
        steps = self.steps[name]
        self._note(name, self.threads * operations * steps / _seconds(run, kernel, steps, *args))

    def _note(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)


def memory_to_read() -> np.ndarray:
    """Return the array that the memory test reads: _MEMORY bytes, or less if little memory is free."""
    free = machine.memory()
    size = _MEMORY if free is None else min(_MEMORY, free // 4)
    return np.ones(size // 4, np.float32)


def _seconds(run: Run, kernel: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    run(kernel, *args)
    return time.perf_counter() - start
