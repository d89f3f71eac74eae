"""Compilation of the forward pass in several processes, because numba compiles only one kernel at a time in a process.

Each process runs this module as a program. The process reads names of kernels from stdin, one per line, compiles each
kernel into the cache on disk, and writes the name to stdout when done. As a sign of life, the process also writes an empty
line for each second in which it used the CPU. If a process dies, stops or cannot write to the cache, the main process compiles
the missing kernels itself.
"""

import contextlib
import inspect
import os
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numba
import numpy as np

from gemma_py import machine
from gemma_py.errors import GemmaWarning
from gemma_py.kernels.decorator import CACHE
from gemma_py.kernels.simd.target import TARGET, key_of
from gemma_py.progress import ReportProgress, no_report
from gemma_py.runtime.batch import Batch, new_scratch
from gemma_py.runtime.cells import make_cells
from gemma_py.runtime.forward import forward
from gemma_py.runtime.kv_types import KV_TYPES
from gemma_py.runtime.phases import attention_phase, rows_phase, scores_phase, trace_phase
from gemma_py.runtime.products import matmul_phase
from gemma_py.runtime.program import ModelTables, Sizes
from gemma_py.runtime.trace import NO_TRACE
from gemma_py.weights.pack import PackedArrays

# A share is a tuple of kernels that are compiled in one process, because they call common helper functions. The share that
# takes longest comes first. `forward` calls every kernel of the shares, so it is compiled last.
SHARES = ((matmul_phase,), (attention_phase, scores_phase), (rows_phase, trace_phase))
_KERNELS = {kernel.__name__: kernel for share in (*SHARES, (forward,)) for kernel in share}
# The seconds after which a process without a sign of life is killed. A compilation may take longer, as under emulation, if
# the process gives signs of life.
_SILENCE = 300.0
_BEAT = 1.0  # seconds between signs of life
_LEAST_WORK = 0.05  # a process gives a sign of life only if it used more CPU seconds than this in the last second
_TICK = 0.2  # seconds between two looks of the main process at the compiling processes


def _mark(cache: Path, kv: str) -> Path:
    """Return the file that exists if the cache on disk has the forward pass for KV rows of this type.

    Like numba's cache, the file's name depends on the triple, the CPU name and the features. Otherwise, if machines of two
    kinds share a home directory, the second machine would not notice that the kernels there are for the first machine.
    """
    return cache / f"compiled-{kv}-{key_of(TARGET)}"


def first_time(kv: str) -> bool:
    """Return whether the cache on disk lacks the forward pass for this processor and KV rows of this type."""
    return CACHE is None or not _mark(CACHE, kv).exists()


def mark_compiled(kv: str) -> None:
    if CACHE is not None:
        with contextlib.suppress(OSError):
            _mark(CACHE, kv).touch()


def signature(kernel: Any, kv: str) -> tuple[Any, ...]:
    """Return the types of a kernel's arguments. `forward` has all the arguments of a phase, except the last two."""
    i64 = np.empty(0, np.int64)
    arguments = (
        0, 0, make_cells(1),
        ModelTables(
            PackedArrays(
                _read_only(np.float32), _read_only(np.uint16), _read_only(np.int8),
                _read_only(np.float32), _read_only(np.int64, 2),
            ),
            _read_only(np.float32, 2), _read_only(np.float32), _read_only(np.int64, 2), _read_only(np.int64),
        ),
        new_scratch(Sizes(1, 1, 1, 2, 0, 0, 0, 0), 1, 1),
        Batch(i64, i64.reshape(2, 0), i64.reshape(2, 0), i64.reshape(2, 0, 3), i64.reshape(0, 2), i64.reshape(0, 0, 3),
              np.empty(0, KV_TYPES[kv].dtype), np.empty(0, np.float32)),
        NO_TRACE, 0, 0,
    )  # fmt: skip
    count = len(inspect.signature(kernel.py_func).parameters)
    return tuple(numba.typeof(argument) for argument in arguments[:count])


def _read_only(kind: type, dimensions: int = 1) -> np.ndarray:
    """Return an empty read-only array. numba treats it as another type than a writable array, and weights are read-only."""
    array: np.ndarray = np.empty((0,) * dimensions, kind)
    array.flags.writeable = False
    return array


class Compilation:
    """A context manager that starts the compiling processes, and kills them on exit.

    If the kernels are in the cache on disk, or if there is no such cache, no process is started.
    """

    def __init__(
        self,
        kv: str,
        progress: ReportProgress = no_report,
        shares: Sequence[Sequence[Any]] = SHARES,
        last: Any = forward,
    ) -> None:
        self._progress = progress
        self._kv, self._shares, self._last = kv, list(shares), last
        self._lock = threading.Lock()
        self._busy, self._done, self._total = 0, 0, sum(map(len, shares)) + 1
        self.processes: list[subprocess.Popen[bytes]] = []
        self._heard: dict[subprocess.Popen[bytes], float] = {}  # the time of the last line from each process
        self._feeders: list[threading.Thread] = []

    def __enter__(self) -> "Compilation":
        if not first_time(self._kv):
            return self
        self._progress("compiling kernels", 0, self._total, "kernels")
        try:
            self._start()
        except BaseException as error:  # an exception in `__enter__`, after which Python does not call `__exit__`
            self.__exit__(type(error), error, None)
            raise
        return self

    def _start(self) -> None:
        if CACHE is not None and sys.executable:
            command = [sys.executable, "-P", "-m", "gemma_py.runtime.compiling", str(CACHE), self._kv]
            with contextlib.suppress(OSError):  # if no process starts, the main process compiles the kernels
                # PYTHONPATH lets the processes find the modules of this process. An empty path stands for the current
                # directory. The processes have a process group of their own, so Ctrl-C does not reach them.
                paths = [path or str(Path.cwd()) for path in sys.path if isinstance(path, str)]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
                for _ in range(min(machine.threads(), len(self._shares))):
                    self.processes.append(
                        subprocess.Popen(
                            command, env=environment, process_group=0, bufsize=0,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                        )
                    )  # fmt: skip
        feeders = [threading.Thread(target=self._feed, args=(process,), daemon=True) for process in self.processes]
        self._busy = len(feeders)
        self._heard = dict.fromkeys(self.processes, time.monotonic())
        for feeder in feeders:
            self._feeders.append(feeder)  # before the start, because an interrupt may come between the two
            feeder.start()

    def _feed(self, process: "subprocess.Popen[bytes]") -> None:
        """Let a process compile one share after another. The process that compiles the last share then also compiles
        `forward`.
        """
        alive = True
        while alive and (share := self._next()) is not None:
            for kernel in share:
                alive = alive and self._compiled(process, kernel)
        with self._lock:
            self._busy -= 1
            last = self._busy == 0
        if alive and last:
            self._compiled(process, self._last)

    def _next(self) -> Sequence[Any] | None:
        with self._lock:
            return self._shares.pop(0) if self._shares else None

    def _compiled(self, process: "subprocess.Popen[bytes]", kernel: Any) -> bool:
        """Let the process compile a kernel. Return False if the process has died."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{kernel.__name__}\n".encode())
            while (line := process.stdout.readline()) == b"\n":
                self._heard[process] = time.monotonic()
            done = line != b""
        except (OSError, ValueError):  # ValueError: `__exit__` has closed the pipes
            done = False
        self._heard[process] = time.monotonic()
        with self._lock:
            self._done += done
        return done

    def wait(self) -> None:
        """Wait until every kernel is compiled or every process has ended. Kill processes that show no sign of life."""
        if not self._feeders:
            return
        seen = -1
        while any(feeder.is_alive() for feeder in self._feeders):
            if self._done != seen:
                seen = self._done
                self._progress("compiling kernels", seen, self._total, "kernels")
            for process, heard in self._heard.items():
                if time.monotonic() - heard > _SILENCE:
                    process.kill()
            time.sleep(_TICK)
        self._progress("compiling kernels", self._total, self._total, "kernels")
        if self._done < self._total:
            message = "a process that compiles kernels ended early; the main process compiles the remaining kernels"
            warnings.warn(message, GemmaWarning, stacklevel=2)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kill()
        for feeder in self._feeders:
            if feeder.is_alive():  # not if an interrupt prevented its start
                feeder.join()
        for process in self.processes:
            with process:
                pass  # at the end of `with`, the pipes are closed, and Python waits for the process


def main() -> None:
    cache, kv = sys.argv[1:]
    wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(wanted,), daemon=True).start()
    threading.Thread(target=_show_life, daemon=True).start()
    while str(CACHE) == cache:  # the parent would not find the kernels if this process had another cache directory
        kernel = _KERNELS[wanted.get()]
        kernel.compile(signature(kernel, kv))
        os.write(1, f"{kernel.__name__}\n".encode())


def _listen(wanted: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        wanted.put(line.strip())
    os._exit(0)  # the parent process has ended; end too, even in the middle of a compilation


def _show_life() -> None:
    """Write an empty line for each second in which this process used the CPU."""
    used = 0.0
    while True:
        time.sleep(_BEAT)
        before, used = used, time.process_time()
        if used - before > _LEAST_WORK:
            os.write(1, b"\n")


if __name__ == "__main__":
    main()
