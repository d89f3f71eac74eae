"""How connections come in: as many at once as there are file descriptors for; the others wait in the kernel's queue.

asyncio would accept until there are none left, and then whatever else opens a file fails: a template, a module.
"""

import asyncio
import errno
import logging
import math
import resource
import socket
from collections.abc import Callable, Collection
from pathlib import Path

MOST_CONNECTIONS = 4096
_SPARE_FILES = 16  # for what is opened later, beside connections
_AT_ONCE = 64  # connections, before those that are in have their turn
_PAUSE = 0.05  # seconds until it is looked again whether there is room
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SECONDS_BETWEEN_COMPLAINTS = 60.0


def most_connections() -> int:
    """As many as there are file descriptors for, after asking for all that are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = len(list(Path("/dev/fd").iterdir())) + _SPARE_FILES
    wanted = MOST_CONNECTIONS + own
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(MOST_CONNECTIONS, soft - own)) if soft > 0 else MOST_CONNECTIONS


class Door:
    """Of a listening socket. inside: the connections that are open, of which there may be `most`."""

    def __init__(
        self, listening: socket.socket, most: int, inside: Collection[object], protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._listening, self._most, self._inside, self._protocol = listening, most, inside, protocol
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._complained = -math.inf
        listening.setblocking(False)

    def open(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._inside) + len(self._entering) >= self._most:
                self._wait(f"{self._most} are open, as many as there may be")
                return
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SCARCE:
                    raise
                self._wait(error.strerror or str(error))
                return
            connection.setblocking(False)
            entering = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, connection))
            self._entering.add(entering)
            entering.add_done_callback(self._entering.discard)

    def _wait(self, why: str) -> None:
        """A socket that is ready and left alone would wake the loop again and again."""
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(_PAUSE, self.open)
        if self._loop.time() > self._complained + _SECONDS_BETWEEN_COMPLAINTS:
            self._complained = self._loop.time()
            logging.getLogger("uvicorn.error").error("new connections have to wait: %s", why)
