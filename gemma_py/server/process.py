"""The server's process: its socket, its signals, and a shutdown that loses no response.

On SIGTERM or Ctrl-C it accepts no more connections, lets running requests finish until the deadline, and sends an error to
those that have not. A second signal ends the process at once. If the engine fails, every client is sent an error, and the
process ends by itself with one.
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
from gemma_py.server.acceptor import Acceptor, max_connections
from gemma_py.server.app import App
from gemma_py.server.protocol import LimitedProtocol

MAX_HEADERS = 32 << 10  # bytes
_SEND_BUFFER = 256 << 10  # bytes that the kernel buffers for each connection
_SPARE_CONNECTIONS = 8  # beyond those of admitted requests: to refuse others with 429, and for /health
_UNHEALTHY_TICKS = 20  # of 0.1 s, before a failure counts: a process that was stopped and resumed has not failed
_LAST_SECONDS = 5.0  # in which the errors of a shutdown reach the clients


def bind(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # create_server appends the address, which this message names anyway.
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        raise InputError(f"cannot listen on {host}, port {port}: {reason}") from None
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections inherit it
    return made


def address(listening: socket.socket) -> str:
    """The URL at which a browser on this machine finds the server."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, with our acceptor, limits and shutdown.

    drain: seconds that running requests may take after a signal. ready: called when the server accepts requests. ending: called
    after a signal with the number of requests that are running or wait. cut_off: how many of these did not finish.
    interrupted: whether the signal was Ctrl-C. failure: why the engine failed, if it did.
    """

    def __init__(
        self, app: App, asgi: ASGIApp, drain: float, ready: Callable[[], None], ending: Callable[[int], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                asgi, http="h11", ws="none", lifespan="off", loop="asyncio", log_level="error", access_log=False,
                server_header=False, proxy_headers=False, h11_max_incomplete_event_size=MAX_HEADERS,
                timeout_graceful_shutdown=int(drain + _LAST_SECONDS),
            )
        )  # fmt: skip
        self._app, self._drain, self._ready, self._ending = app, drain, ready, ending
        self._acceptors: list[Acceptor] = []
        self._max_connections = max_connections()
        app.limit = min(app.limit, max(1, self._max_connections - _SPARE_CONNECTIONS))
        self._unhealthy = 0
        self.interrupted, self.cut_off = False, 0
        self.failure: str | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does it, but a handled signal is not raised again, so that SIGTERM ends with exit code 0."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        except ValueError:  # in another thread than the main one: should_exit ends it there
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
            acceptor = Acceptor(listening, self._max_connections, self.server_state, self._protocol)
            self._acceptors.append(acceptor)
            acceptor.open()
        self._ready()

    def _protocol(self) -> LimitedProtocol:
        return LimitedProtocol(self.config, self.server_state, self.lifespan.state)

    async def on_tick(self, counter: int) -> bool:
        health = self._app.service.scheduler.health()
        self._unhealthy = self._unhealthy + 1 if health.permanent else 0
        if self._unhealthy >= _UNHEALTHY_TICKS:
            self.failure = health.why
            self._app.ending = True
            self._app.fail(ComputationError(f"the engine has failed: {health.why}"))
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.ending = True
        for acceptor in self._acceptors:
            acceptor.close()
        if self.failure is not None:
            await super().shutdown(sockets)
            return
        scheduler = self._app.service.scheduler
        stats = scheduler.stats()
        self._ending(stats.running + stats.waiting)
        drained = asyncio.to_thread(scheduler.drain, self._drain)
        # By then every request has ended, unless the engine hangs and cannot report it itself.
        late = ComputationError("the engine did not stop when the server ended")
        failing = asyncio.get_running_loop().call_later(self._drain + _LAST_SECONDS / 2, self._app.fail, late)
        self.cut_off, _ = await asyncio.gather(drained, super().shutdown(sockets))
        failing.cancel()
        health = scheduler.health()
        if not health.ok:
            self.failure = health.why
