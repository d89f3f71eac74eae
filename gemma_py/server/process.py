"""The process around the application: the socket, signals, and an end that loses nothing.

SIGTERM or Ctrl-C: no new connections, what runs goes on until the deadline, what is left is told so. A second one ends the
process at once. If the engine fails, every client is told, and the process ends by itself with an error.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from gemma_py.errors import ComputationError, InputError
from gemma_py.server.acceptor import Door, most_connections
from gemma_py.server.app import App
from gemma_py.server.protocol import LimitedProtocol

LARGEST_HEADERS = 32 << 10  # bytes
_SEND_BUFFER = 256 << 10  # bytes of a connection that the kernel holds
_FOR_OTHERS = 8  # connections beside those that wait for answers: to refuse more, and to say how it is
_UNWELL_TICKS = 20  # of a tenth of a second: a process that was stopped and goes on is not yet a failure
_LAST_WORDS = 5.0  # seconds for what is said at the end to reach the clients


def bind(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # create_server adds what is said here anyway.
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        raise InputError(f"cannot listen on {host}, port {port}: {reason}") from None
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections inherit it
    return made


def address(listening: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """drain: seconds that what runs at the end may still take. ready: called when requests and signals are heard. ending: called
    when a signal is obeyed, with the number of answers that are still to come; cut_off: those that did not come to their
    end. failure: why the engine cannot go on, if it cannot."""

    def __init__(
        self, app: App, asgi: ASGIApp, drain: float, ready: Callable[[], None], ending: Callable[[int], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                asgi, http="h11", ws="none", lifespan="off", loop="asyncio", log_level="error", access_log=False,
                server_header=False, proxy_headers=False, h11_max_incomplete_event_size=LARGEST_HEADERS,
                timeout_graceful_shutdown=int(drain + _LAST_WORDS),
            )
        )  # fmt: skip
        self._app, self._drain, self._ready, self._ending = app, drain, ready, ending
        self._doors: list[Door] = []
        self._most = most_connections()
        app.most = min(app.most, max(1, self._most - _FOR_OTHERS))
        self._unwell = 0
        self.interrupted, self.cut_off = False, 0
        self.failure: str | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does it, but a signal that was obeyed is not raised again: SIGTERM ends with 0."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        except ValueError:  # not the main thread: whoever runs it there ends it by should_exit
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.interrupted = sig == signal.SIGINT
        self.should_exit = self._app.ending = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listening in sockets or []:
            door = Door(listening, self._most, self.server_state, self._app.refuse, self._protocol)
            self._doors.append(door)
            door.open()
        self._ready()

    def _protocol(self) -> LimitedProtocol:
        return LimitedProtocol(self.config, self.server_state, self.lifespan.state)

    async def on_tick(self, counter: int) -> bool:
        health = self._app.service.scheduler.health()
        self._unwell = self._unwell + 1 if health.permanent else 0
        if self._unwell >= _UNWELL_TICKS:
            self.failure = health.why
            self._app.ending = True
            self._app.fail(ComputationError(f"the engine has failed: {health.why}"))
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.ending = True
        for door in self._doors:
            door.close()
        if self.failure is not None:
            await super().shutdown(sockets)
            return
        scheduler = self._app.service.scheduler
        stats = scheduler.stats()
        self._ending(stats.running + stats.waiting)
        drained = asyncio.to_thread(scheduler.drain, self._drain)
        # Nobody waits any more by then, unless the engine hangs, and does not say so itself.
        late = ComputationError("the engine did not stop when the server ended")
        telling = asyncio.get_running_loop().call_later(self._drain + _LAST_WORDS / 2, self._app.fail, late)
        self.cut_off, _ = await asyncio.gather(drained, super().shutdown(sockets))
        telling.cancel()
        health = scheduler.health()
        if not health.ok:
            self.failure = health.why
