"""Close the connection of a client that sends its headers too slowly or does not read its response.

uvicorn limits only the sizes of buffers and the time that a connection may be idle.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # time limit for receiving the headers of a request
WRITE_SECONDS = 20.0  # seconds for which the send buffer may stay full before the connection is closed


class LimitedProtocol(H11Protocol):
    header_seconds, write_seconds = HEADER_SECONDS, WRITE_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_limit: asyncio.TimerHandle | None = None
        self._write_limit: asyncio.TimerHandle | None = None

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_limit = self.loop.call_later(self.header_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._header_limit is None and not self._responding:
            self._header_limit = self.loop.call_later(self.header_seconds, self.transport.abort)
        super().data_received(data)
        if self._responding:
            self._lift_header_limit()

    def send_400_response(self, msg: str) -> None:
        """Send a 400 response to a malformed request. If a response has already begun, close the connection instead."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

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
