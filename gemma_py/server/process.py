"""The server's process: the listening socket, the signals and the shutdown.

After SIGTERM or Ctrl-C, the server accepts no more connections and waits for running requests. Requests that are still running
at the deadline get an error. A second signal ends the process at once. If the engine fails, every client gets an error, and the
process exits with an error.
"""

import asyncio
import contextlib
import errno
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
_SEND_BUFFER = 256 << 10  # bytes of each connection's send buffer in the kernel
# The server accepts this many connections more than requests, for /health and for responses with status 429.
_SPARE_CONNECTIONS = 8
# After this many failed health checks in a row, 0.1 s apart, the engine counts as failed. Fewer failed checks in a row can
# mean that the process was stopped by SIGSTOP and resumed.
_UNHEALTHY_TICKS = 20
_LAST_SECONDS = 5.0  # seconds after the shutdown deadline for sending errors to clients


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # create_server appends the address to its error message. The message below has the address already.
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        other = "; --port 0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        raise InputError(f"cannot listen on {host}, port {port}: {reason}{other}") from None
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # accepted connections inherit this size
    return made


def address(listening: socket.socket) -> str:
    """Return the server's URL for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, with this package's acceptor, time limits and shutdown.

    drain: seconds in which running requests can finish after a signal
    ready: called when the server accepts requests
    ending: called after a signal, with the number of running and waiting requests
    cut_off: the number of requests that did not finish in time
    interrupted: whether the signal was Ctrl-C
    failure: why the engine failed, or None
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
        """Handle SIGTERM and SIGINT. uvicorn's own method raises the signal again after the shutdown. A process that ends
        after SIGTERM would then not have exit code 0.
        """
        numbers = (signal.SIGTERM, signal.SIGINT)
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        except ValueError:  # only the main thread can set signal handlers
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
        # The timer fires only if the engine hangs. Otherwise `drain` ends every request before the timer fires.
        late = ComputationError("the engine did not finish the request before the server shut down")
        failing = asyncio.get_running_loop().call_later(self._drain + _LAST_SECONDS / 2, self._app.fail, late)

        async def drain() -> int:
            cut_off = await asyncio.to_thread(scheduler.drain, self._drain)
            left = scheduler.stats()
            if left.running == left.waiting == 0:
                failing.cancel()  # a client that still reads a complete answer must not receive an error
            return cut_off

        self.cut_off, _ = await asyncio.gather(drain(), super().shutdown(sockets))
        health = scheduler.health()
        if not health.ok:
            self.failure = health.why
