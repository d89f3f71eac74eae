"""Processes on this machine, with a channel of two pipes to each.

If the process that started it ends, a process's standard input is closed. Then the process ends too, even in the middle of its
job.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gemma_py.cluster.channel import Ended

_END = 5.0  # seconds to wait for the end of a process
_CLOSE = None  # ends the thread that sends messages


class PipeChannel:
    """Starts a process, and exchanges messages with it. deadline: seconds in which the process sends several heartbeats."""

    start = 10.0

    def __init__(self, deadline: float) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # PYTHONPATH lets the new process find the modules of this process. An empty path stands for the current directory.
        # The new process has a process group of its own, so Ctrl-C does not reach it.
        paths = [path or str(Path.cwd()) for path in sys.path if isinstance(path, str)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gemma_py.cluster.worker", str(deadline)],
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
            threading.Thread(target=work, args=(connection, box), name="gemma_py-channel", daemon=True).start()

    def send(self, message: Any) -> None:
        self._outbox.put(message)

    def receive(self, seconds: float) -> Any:
        message = self._inbox.get(timeout=seconds)
        if isinstance(message, EOFError):
            raise Ended(self._end())
        return message

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the pipe is closed shortly before the process has ended
            self.process.wait(_END)
        self.close()
        code = self.process.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        self._outbox.put(_CLOSE)
        self._kill()


def _kill(process: "subprocess.Popen[bytes]", parent: int) -> None:
    """End a process, unless this process is a fork of `parent`, the process that started it."""
    if os.getpid() == parent:
        process.kill()
        process.wait(_END)


def _send(connection: Connection, outbox: "queue.SimpleQueue[Any]") -> None:
    with connection, contextlib.suppress(OSError):  # the receiving thread reports the end of the process
        while (message := outbox.get()) is not _CLOSE:
            connection.send(message)


def _receive(connection: Connection, inbox: "queue.SimpleQueue[Any]") -> None:
    with connection:
        try:
            while True:
                inbox.put(connection.recv())
        except (EOFError, OSError):
            inbox.put(EOFError())
