import asyncio
import contextlib
import http.client
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from repository import TINY, child_environment

import gemma_py
from gemma_py.generate.base_scheduler import BaseScheduler
from gemma_py.generate.core import Request, Token
from gemma_py.server.app import App
from gemma_py.server.auth import Keys
from gemma_py.server.openai.service import Service, new_scheduler
from gemma_py.server.process import Server, address, bind

NO_END = {"1": -100, "6": -100}


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Return (status, JSON document or text, headers). A body that is not bytes is sent as JSON."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            kind = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, {**kind, **(headers or {})})
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(text) if is_json else text, response.headers

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        status, document, _ = self.request("POST", path, body)
        return status, document

    def open_stream(self, max_tokens: int, content: str = "Once") -> socket.socket:
        """Request a stream of exactly `max_tokens` tokens. Return the connection when the stream has begun."""
        asked = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": max_tokens}
        asked["logit_bias"] = NO_END
        connection = self.send("POST", "/v1/chat/completions", json.dumps(asked).encode())
        answer = connection.recv(4096)
        if b"200 OK" not in answer:
            connection.close()
            raise AssertionError(answer)
        return connection

    def send(
        self, method: str, path: str, body: bytes, length: int | None = None, closing: bool = False
    ) -> socket.socket:
        """Send a request over a plain socket. length: the Content-Length, if it shall be wrong. closing: send
        "Connection: close".
        """
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += "Connection: close\r\n" * closing
        length = len(body) if length is None else length
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
        return connection


class Heard:
    """Receives a streamed completion, and disconnects after `most` tokens."""

    def __init__(self, client: Client, request: Request, most: float = math.inf) -> None:
        self.text, self.reason = "", ""
        self.logprobs: list[float] = []
        sampling = request.sampling
        asked = {
            "prompt": request.ids, "max_tokens": request.max_tokens, "temperature": sampling.temperature,
            "top_k": sampling.top_k, "top_p": sampling.top_p, "seed": sampling.seed, "logprobs": 0, "stream": True,
        }  # fmt: skip
        body = json.dumps(asked).encode()
        with client.send("POST", "/v1/completions", body, closing=True) as connection, connection.makefile() as lines:
            events = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
            while len(self.logprobs) < most and (event := next(events, None)):
                choice = event["choices"][0]
                self.text += choice["text"]
                self.logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
                self.reason = choice["finish_reason"] or ""

    def same(self, alone: list[Token]) -> bool:
        """Whether the stream has the tokens and log probabilities of `alone`, up to the end of the stream."""
        told = [token.logprob for token in alone]
        if self.reason != alone[-1].finish_reason:
            told, alone = told[: len(self.logprobs)], alone[: len(self.logprobs)]
        return self.logprobs == told and self.text == "".join(token.text for token in alone)


class Running(Client):
    def __init__(self, app: App, url: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(int(url.rpartition(":")[2]))
        self.app, self.url, self.scheduler, self._loop = app, url, app.service.scheduler, loop


class Process(Client):
    """`python -m gemma_py serve` in a child process. The constructor returns when the server is ready.

    said: what the process wrote to stdout after it was ready; set when the process has ended.
    """

    said = ""

    def __init__(self, *arguments: str, program: Sequence[str] = ("-m", "gemma_py")) -> None:
        command = [sys.executable, *program, "serve", str(TINY), "--port", "0", *arguments]
        environment = child_environment()
        self.child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.child.stdout is not None
        self.ready = self.child.stdout.readline()
        super().__init__(int(re.findall(r"//127.0.0.1:(\d+)", self.ready)[0]))

    def end(self) -> tuple[int, str]:
        self.said, errors = self.child.communicate(timeout=60)
        return self.child.returncode, errors

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.communicate()


@contextlib.contextmanager
def serving(
    engine: gemma_py.Engine,
    parallel: int = 4,
    queue: int = 16,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    host: str = "127.0.0.1",
    names: Sequence[str] = (),
    template: str | None = None,
    scheduler: BaseScheduler[Any, Any] | None = None,
) -> Iterator[Running]:
    scheduler = scheduler or new_scheduler(engine, parallel, queue)
    app = App(Service(engine, scheduler, "tiny", template), scheduler.parallel + scheduler.queue)
    ready: SimpleQueue[asyncio.AbstractEventLoop] = SimpleQueue()
    asgi = app.asgi(host, names, origins, Keys(keys))
    server = Server(app, asgi, 0, lambda: ready.put(asyncio.get_running_loop()), lambda live: None)
    listening = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield Running(app, address(listening), ready.get(timeout=30))
    finally:
        server.should_exit = True
        thread.join(60)
        scheduler.close()
    assert not thread.is_alive()


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"the condition is still false after {seconds} s"
        time.sleep(0.01)


def idle(server: Running) -> bool:
    stats = server.scheduler.stats()
    return stats.running == stats.waiting == 0 and not server.app.event_queues
