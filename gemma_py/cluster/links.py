"""The link to a shard in another process on this machine, by two pipes.

    this process  --(number, orders, rows)-->  the shard's process
                  <--(number, results)--  or  <--(number, error's type, error's message)--

A thread of the shard's process sends several beats in each deadline, even before the process imports numba and loads
weights. The call raises ShardError if the pipe closes, because the process has ended, or if the beats stop, because the
process stalls. A late reply to an interrupted call has an old number and is ignored.
"""

import contextlib
import hashlib
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from gemma_py.cluster import BEAT
from gemma_py.cluster.shard import Order, Rows, SetThreads
from gemma_py.errors import ContextError, InputError, ShardError
from gemma_py.kernels.simd.target import TARGET
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.pack import LAYOUT
from gemma_py.weights.store import file_digests

_TICKS = 20  # a reply is awaited in this many waits of deadline / _TICKS
_START = 10.0  # the least seconds to wait for the first beat, because Python has to start before it
_END = 5.0  # seconds to wait for the end of a process
_SAME_ERRORS = {error.__name__: error for error in (InputError, ContextError)}


class Identity(NamedTuple):
    """The files, code and packing that determine a shard's bits. All shards of a model must have equal identities."""

    model: tuple[str, ...]  # the sha256 of each of the model's files
    package: str  # a sha256 of the sources of gemma_py
    layout: str  # how weights are packed, and the processor for which kernels are compiled


class Join(NamedTuple):
    """The first message to a shard's process, which says what to load."""

    path: Path
    cacheable: bool
    quant: str | None
    kv: str
    threads: int
    deadline: float
    cuts: tuple[int, ...]
    number: int
    identity: Identity


def identity_of(checkpoint: Checkpoint) -> Identity:
    sources, package = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(package.rglob("*.py")):
        sources.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return Identity(file_digests(checkpoint), sources.hexdigest(), f"layout {LAYOUT}, {TARGET!r}")


class PipeLink:
    """Starts a shard's process, and carries orders to it. See `Link` in shards.py."""

    def __init__(self, join: Join, span: str, shards: int) -> None:
        self._join, self._span, self._shards = join, span, shards
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = 0
        self._heard = False  # whether the process has sent anything
        self.usable = True
        # PYTHONPATH lets the new process find the modules of this process. An empty path stands for the current directory.
        # The new process has a process group of its own, so Ctrl-C does not reach it.
        paths = [path or str(Path.cwd()) for path in sys.path if isinstance(path, str)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gemma_py.cluster.worker", str(join.deadline)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._kill = weakref.finalize(self, _kill, self.process, os.getpid())  # for an engine that is never closed
        assert self.process.stdin is not None and self.process.stdout is not None
        # Two threads own the pipes' ends. So a write to a stalled process blocks a thread, but not a call.
        ends = os.dup(self.process.stdin.fileno()), os.dup(self.process.stdout.fileno())
        self.process.stdin.close()
        self.process.stdout.close()
        for work, connection in (
            (_send, Connection(ends[0], readable=False)),
            (_receive, Connection(ends[1], writable=False)),
        ):
            box = self._outbox if work is _send else self._inbox
            threading.Thread(target=work, args=(connection, box), name="gemma_py-shard", daemon=True).start()
        try:
            self._request((join,))
        except BaseException:
            self.close()
            raise

    def call(self, orders: Sequence[Order], rows: Rows) -> list[Any]:
        results: list[Any] = self._request((list(orders), rows))
        return results

    def set_threads(self, threads: int) -> None:
        self._join = self._join._replace(threads=threads)
        self.call([SetThreads(threads)], ())

    def _request(self, message: tuple[Any, ...]) -> Any:
        """Send a message, and wait for the reply as long as the process gives signs of life.

        Silence is counted in short waits. If this process is suspended, only one wait expires, which is no stall.
        """
        if not self.usable:
            raise self._error("is no longer running")
        self._call += 1
        self._outbox.put((self._call, *message))
        silent = 0
        while True:
            deadline = self._join.deadline if self._heard else max(self._join.deadline, _START)
            try:
                reply = self._inbox.get(timeout=deadline / _TICKS)
            except queue.Empty:
                silent += 1
                if silent > _TICKS:
                    self.close()
                    raise self._error(f"gave no sign of life for {deadline:g} s") from None
                continue
            silent, self._heard = 0, True
            if isinstance(reply, EOFError):
                raise self._error(self._end())
            if reply is BEAT or reply[0] != self._call:
                continue
            if len(reply) == 2:
                return reply[1]
            _, kind, text = reply
            if kind in _SAME_ERRORS:
                raise _SAME_ERRORS[kind](text)
            self.close()
            raise self._error(f"failed: {text}")

    def _error(self, what: str) -> ShardError:
        return ShardError(self._join.number, self._shards, self._span, what)

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the pipe is closed shortly before the process has ended
            self.process.wait(_END)
        self.close()
        code = self.process.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """End the process. Its KV rows can be computed again."""
        self.usable = False
        self._outbox.put(BEAT)  # ends the sending thread
        self._kill()


def _kill(process: "subprocess.Popen[bytes]", parent: int) -> None:
    """End a process, unless this process is a fork of `parent`, the process that started it."""
    if os.getpid() == parent:
        process.kill()
        process.wait(_END)


def _send(connection: Connection, outbox: "queue.SimpleQueue[Any]") -> None:
    with connection, contextlib.suppress(OSError):  # the receiving thread reports the end of the process
        while (message := outbox.get()) is not BEAT:
            connection.send(message)


def _receive(connection: Connection, inbox: "queue.SimpleQueue[Any]") -> None:
    with connection:
        try:
            while True:
                inbox.put(connection.recv())
        except (EOFError, OSError):
            inbox.put(EOFError())
