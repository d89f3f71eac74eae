"""Accept connections up to a limit. Further connections wait in the kernel's listen queue until a connection closes.

asyncio's own server has no limit. It can use up all file descriptors of the process, so that no file can be opened.
"""

import asyncio
import errno
import logging
import math
import resource
import socket
from collections.abc import Callable
from pathlib import Path

from uvicorn.server import ServerState

MAX_CONNECTIONS = 4096
_SPARE_FILES = 16  # file descriptors that are reserved for purposes other than connections
_ACCEPTED_AT_ONCE = 64  # limit on the connections that are accepted in one turn of the event loop
_PAUSE = 0.05  # seconds to wait before accepting again
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SECONDS_BETWEEN_WARNINGS = 60.0


def max_connections() -> int:
    """Raise the process's limit on file descriptors if needed, and return how many connections the limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/dev/fd").iterdir())) + _SPARE_FILES
    wanted = MAX_CONNECTIONS + used
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(MAX_CONNECTIONS, soft - used)) if soft > 0 else MAX_CONNECTIONS


class Acceptor:
    def __init__(
        self, listening: socket.socket, limit: int, state: ServerState, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._listening, self._limit, self._state, self._protocol = listening, limit, state, protocol
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._warned = -math.inf
        listening.setblocking(False)

    def open(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if len(self._state.connections) + len(self._connecting) >= self._limit:
                self._wait(f"the limit of {self._limit} open connections is reached")
                return
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                self._wait(error.strerror or str(error))
                return
            connection.setblocking(False)
            connecting = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, connection))
            self._connecting.add(connecting)
            connecting.add_done_callback(self._connecting.discard)

    def _wait(self, why: str) -> None:
        """Stop watching the listening socket for a moment. A connection that cannot be accepted would otherwise wake the
        event loop endlessly.
        """
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(_PAUSE, self.open)
        if self._loop.time() > self._warned + _SECONDS_BETWEEN_WARNINGS:
            self._warned = self._loop.time()
            logging.getLogger("uvicorn.error").error("new connections have to wait: %s", why)
