"""The machine's own limits, measured in the same run as what is compared with them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_py import machine
from gemma_py.kernels import limits
from gemma_py.runtime.team import Team

_LEAST_SECONDS = 0.02  # of a measurement: waking the workers takes a ten-thousandth of a second
_ATTEMPTS = 5
_MEMORY = 512 << 20  # bytes that are read: more than caches hold


@dataclass
class Limits:
    """Of so many threads at once, the best that has been seen. Operations are two a multiply-add."""

    threads: int
    f32: float = 0.0  # FLOP/s
    int16: float = 0.0  # operations a second on pairs, as `simd.dot_pairs` does them
    memory: float = 0.0  # bytes read a second


def measure(found: Limits, values: np.ndarray) -> None:
    """Raise the limits to what is reached now.    values: of `memory_to_read`"""
    threads = found.threads
    out = np.empty(threads * limits.LANES, np.float32)
    x = np.array([0.5, 0.25], np.float32)
    rows = np.arange(limits.CODE_ROWS * limits.PAIRS * 2, dtype=np.int16)
    w = np.ones(limits.PAIRS * limits.CODE_PANELS * 2 * limits.LANES, np.int16)
    with Team(threads) as team:
        for kernel, chains in zip((limits.multiply_floats_6, limits.multiply_floats_12), limits.CHAINS, strict=True):
            found.f32 = max(found.f32, _best(team, kernel, 2 * chains * limits.LANES, x, out))
        operations = 2 * limits.multiply_adds_of_pairs(1)
        found.int16 = max(found.int16, _best(team, limits.multiply_pairs, operations, rows, w, out))
        part = values[: len(values) // (threads * 64) * threads * 64]
        seconds = min(_seconds(team, limits.read_memory, part, out) for _ in range(_ATTEMPTS + 1))
        found.memory = max(found.memory, part.nbytes / seconds)


def memory_to_read() -> np.ndarray:
    """Less than wanted where there is little memory."""
    free = machine.memory()
    size = _MEMORY if free is None else min(_MEMORY, free // 4)
    return np.ones(size // 4, np.float32)


def _seconds(team: Team, kernel: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    team.run(kernel, *args)
    return time.perf_counter() - start


def _best(team: Team, kernel: Callable[..., Any], operations: int, *args: Any) -> float:
    """Operations a second of all workers together, of `operations` a step and worker."""
    steps = 1
    _seconds(team, kernel, steps, *args)  # compiles
    while _seconds(team, kernel, steps, *args) < _LEAST_SECONDS:
        steps *= 2
    seconds = min(_seconds(team, kernel, steps, *args) for _ in range(_ATTEMPTS))
    return team.workers * operations * steps / seconds
