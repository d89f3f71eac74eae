"""HTTP with limits on time: a client that sends its headers slowly, or does not read its answer, loses its connection.

uvicorn bounds how much it buffers, and how long an idle connection is kept, but not these.

And a short way to refuse. When hundreds of requests come at once, parsing each by the rules takes longer than they should wait
for a no.
"""

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # from the first byte of a request (or the connection) to the end of its headers
WRITE_SECONDS = 20.0  # that a full send buffer may stay full
_PLAIN_POST = re.compile(rb"POST (/[a-z0-9/]+) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,9})(?=\r\n)", re.IGNORECASE)
# A page can only read an answer that names it. What is neither whole nor plain must not be cut off by closing.
_NOT_PLAIN = re.compile(rb"\r\n(?:origin|expect|transfer-encoding)[ \t]*:", re.IGNORECASE)


class LimitedProtocol(H11Protocol):
    """refuse: what to answer to a POST of which no more need be known than its path; nothing, if it is to be read."""

    header_seconds, write_seconds = HEADER_SECONDS, WRITE_SECONDS

    def __init__(self, refuse: Callable[[str], Response | None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refuse = refuse
        self._header_limit: asyncio.TimerHandle | None = None
        self._write_limit: asyncio.TimerHandle | None = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_limit = self.loop.call_later(self.header_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._at_a_beginning and self._refused(data):
            return
        if self._header_limit is None and not self._answering:
            self._header_limit = self.loop.call_later(self.header_seconds, self.transport.abort)
        super().data_received(data)
        if self._answering:
            self._lift_header_limit()

    @property
    def _at_a_beginning(self) -> bool:
        """Of a request: nothing of it is here yet, and those before it are over."""
        return self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and not self.conn.trailing_data[0]

    def _refused(self, data: bytes) -> bool:
        """Whether it was one whole request, and has got its answer."""
        path = _path_of_whole(data)
        response = None if path is None else self._refuse(path)
        if response is None:
            return False
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        status = HTTPStatus(response.status_code)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%b: %b" % header for header in headers)]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
        self.transport.close()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_limit = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._lift_write_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lift_header_limit()
        self._lift_write_limit()
        super().connection_lost(exc)

    def _lift_header_limit(self) -> None:
        if self._header_limit is not None:
            self._header_limit.cancel()
        self._header_limit = None

    def _lift_write_limit(self) -> None:
        if self._write_limit is not None:
            self._write_limit.cancel()
        self._write_limit = None


def _path_of_whole(data: bytes) -> str | None:
    """The path of a POST that is here to its last byte, and asks for nothing unusual."""
    head, end, body = data.partition(b"\r\n\r\n")
    head += b"\r\n"
    post, lengths = _PLAIN_POST.match(head), _LENGTH.findall(head)
    if not (post and end and len(lengths) == 1) or int(lengths[0]) != len(body) or _NOT_PLAIN.search(head):
        return None
    return post[1].decode()
