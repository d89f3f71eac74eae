"""How connections come in: as many at once as there are file descriptors for; the others wait in the kernel's queue.

asyncio would accept until there are none left, and then whatever else opens a file fails: a template, a module.

And a short way to refuse. When hundreds of requests come at once, making a connection of each, and parsing it by all the rules,
takes longer than they should wait for a no.
"""

import asyncio
import contextlib
import errno
import logging
import math
import re
import resource
import socket
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from starlette.responses import Response
from uvicorn.server import ServerState

MOST_CONNECTIONS = 4096
_SPARE_FILES = 16  # for what is opened later, beside connections
_AT_ONCE = 64  # connections, before those that are in have their turn
_PAUSE = 0.05  # seconds until it is looked again whether there is room
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SECONDS_BETWEEN_COMPLAINTS = 60.0
_LARGEST_REFUSED = 64 << 10  # bytes; what is larger goes the long way
_PLAIN_POST = re.compile(rb"POST (/[a-z0-9/]+) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,9})(?=\r\n)", re.IGNORECASE)
# A page can only read an answer that names it. What is neither whole nor plain must not be cut off by closing.
_NOT_PLAIN = re.compile(rb"\r\n(?:origin|expect|transfer-encoding)[ \t]*:", re.IGNORECASE)


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
    """Of a listening socket. most: connections that may be open. refuse: what to answer to a POST of which no more need be
    known than its path; nothing, if it is to be read."""

    def __init__(
        self,
        listening: socket.socket,
        most: int,
        state: ServerState,
        refuse: Callable[[str], Response | None],
        protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        self._listening, self._most, self._state = listening, most, state
        self._refuse, self._protocol = refuse, protocol
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
            if len(self._state.connections) + len(self._entering) >= self._most:
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
            if self._refused(connection):
                continue
            entering = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, connection))
            self._entering.add(entering)
            entering.add_done_callback(self._entering.discard)

    def _refused(self, connection: socket.socket) -> bool:
        """Whether one whole request is here already, and has got its answer."""
        with contextlib.suppress(OSError):
            data = connection.recv(_LARGEST_REFUSED, socket.MSG_PEEK)
            path = _path_of_whole(data)
            response = None if path is None else self._refuse(path)
            if response is not None:
                connection.recv(len(data))  # else closing would be a reset
                connection.send(self._as_bytes(response))
                connection.close()
                return True
        return False

    def _as_bytes(self, response: Response) -> bytes:
        status = HTTPStatus(response.status_code)
        headers = [*self._state.default_headers, *response.raw_headers, (b"connection", b"close")]
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%b: %b" % header for header in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)

    def _wait(self, why: str) -> None:
        """A socket that is ready and left alone would wake the loop again and again."""
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(_PAUSE, self.open)
        if self._loop.time() > self._complained + _SECONDS_BETWEEN_COMPLAINTS:
            self._complained = self._loop.time()
            logging.getLogger("uvicorn.error").error("new connections have to wait: %s", why)


def _path_of_whole(data: bytes) -> str | None:
    """The path of a POST that is here to its last byte, and asks for nothing unusual."""
    head, end, body = data.partition(b"\r\n\r\n")
    head += b"\r\n"
    post, lengths = _PLAIN_POST.match(head), _LENGTH.findall(head)
    if not (post and end and len(lengths) == 1) or int(lengths[0]) != len(body) or _NOT_PLAIN.search(head):
        return None
    return post[1].decode()
