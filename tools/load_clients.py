"""HTTP clients for load.py. Well-behaved clients measure. Misbehaving clients disconnect, stall or send invalid
data.
"""

import asyncio
import contextlib
import json
import random
import re
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

WORDS = [
    "the",
    "first",
    "thing",
    "that",
    "comes",
    "to",
    "mind",
    "when",
    "one",
    "thinks",
    "of",
    "a",
    "river",
    "list",
    "long",
    "road",
]
KINDS = (
    "leaves",
    "leaves",
    "resets",
    "half head",
    "half body",
    "reads slowly",
    "sends slowly",
    "too large",
    "nonsense",
)
_TEXT = re.compile(rb'"text": ?("(?:[^"\\]|\\.)*")')


@dataclass
class Got:
    """The result of a request.

    status: the HTTP status, or 0 without a response.
    headers: seconds until the headers.
    tokens: seconds until each token.
    whole: whether the stream ended with [DONE].
    error: the error event of the stream.
    """

    status: int = 0
    text: str = ""
    headers: float = 0.0
    tokens: list[float] = field(default_factory=list)
    whole: bool = False
    error: str = ""

    @property
    def rate(self) -> float:
        return (len(self.tokens) - 1) / (self.tokens[-1] - self.tokens[0]) if len(self.tokens) > 1 else 0.0


# --- well-behaved clients ---------------------------------------------------------------------------------------------


def head(method: str, path: str, body: bytes) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode()


async def ask(port: int, method: str, path: str, **asked: Any) -> Got:
    got, began = Got(), time.perf_counter()
    body = json.dumps(asked).encode() if asked else b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return got
    try:
        writer.write(head(method, path, body) + body)
        text = b""
        async with asyncio.timeout(900):
            got.status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
            got.headers = time.perf_counter() - began
            while part := await reader.read(1 << 16):
                now = time.perf_counter() - began
                text += part
                *whole, text = text.split(b"\n\n")
                for event in whole:
                    got.whole |= b"[DONE]" in event
                    if b'"error"' in event:
                        got.error = event.decode()
                    found = _TEXT.search(event)
                    if found and found[1] != b'""':
                        got.tokens.append(now)
                        got.text += json.loads(found[1])
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        got.status = 0
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if not got.tokens:
        got.text = text.decode("utf-8", "replace")
    return got


def completion(number: int, tokens: int, words: int = 12) -> dict[str, Any]:
    rng = random.Random(number)
    prompt = f"{number}. " + " ".join(rng.choice(WORDS) for _ in range(words))
    return {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}


async def stream(port: int, number: int, tokens: int, words: int = 12) -> Got:
    return await ask(port, "POST", "/v1/completions", **completion(number, tokens, words))


def flood(port: int, numbers: list[int], tokens: int, seconds: float) -> list[Got]:
    """Send a request for each number, spread over some seconds. A child process runs this function, so that it does not
    delay the clients of this process.
    """
    bodies = [json.dumps(completion(number, tokens)).encode() for number in numbers]
    asked = [head("POST", "/v1/completions", body) + body for body in bodies]
    got, began, waiting = [Got() for _ in numbers], [0.0] * len(numbers), selectors.DefaultSelector()
    start, sent, over = time.perf_counter(), 0, 0
    while over < len(numbers):
        until = start + seconds * sent / len(numbers)
        if sent < len(numbers) and time.perf_counter() >= until:
            began[sent] = time.perf_counter()
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(asked[sent])
            waiting.register(connection, selectors.EVENT_READ, sent)
            sent += 1
            continue
        for key, _ in waiting.select(max(0.0, until - time.perf_counter()) if sent < len(numbers) else None):
            assert isinstance(key.fileobj, socket.socket)
            one, now = got[key.data], time.perf_counter() - began[key.data]
            part = b""
            with contextlib.suppress(OSError):
                part = key.fileobj.recv(1 << 16)
            if part and not one.status:
                one.status, one.headers = int(part.split(b" ", 2)[1]), now
            one.whole |= b"[DONE]" in part
            if not part:
                waiting.unregister(key.fileobj)
                key.fileobj.close()
                over += 1
    return got


# --- misbehaving clients ----------------------------------------------------------------------------------------------


async def misbehave(port: int, rng: random.Random) -> str:
    kind = rng.choice(KINDS)
    body = json.dumps(completion(rng.randrange(1 << 20), rng.choice((8, 400)), rng.choice((3, 300)))).encode()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return "refused"
    try:
        async with asyncio.timeout(60):
            if kind in ("leaves", "resets"):
                writer.write(head("POST", "/v1/completions", body) + body)
                await asyncio.sleep(rng.random() * rng.choice((0.005, 0.05, 0.5)))
                if kind == "resets":
                    writer.transport.abort()
            elif kind == "half head":
                writer.write(head("POST", "/v1/completions", body)[: rng.randrange(90)])
                await asyncio.sleep(rng.random())
            elif kind == "half body":
                writer.write(head("POST", "/v1/completions", body) + body[: rng.randrange(len(body))])
                await asyncio.sleep(rng.random())
            elif kind == "reads slowly":
                writer.write(head("POST", "/v1/completions", body) + body)
                for _ in range(rng.randrange(20)):
                    await reader.read(16)
                    await asyncio.sleep(0.02)
            elif kind == "sends slowly":
                for at in range(0, len(body), 40):
                    if writer.transport.is_closing():  # the server has refused the request
                        break
                    writer.write(head("POST", "/v1/completions", body) * (at == 0) + body[at : at + 40])
                    await asyncio.sleep(0.005)
                await reader.read(100)
            elif kind == "too large":
                writer.write(head("POST", "/v1/completions", b" " * (1 << 30))[:-1] + b"\n" + b" " * 100_000)
                await reader.read(100)
            else:
                writer.write(bytes(rng.randrange(256) for _ in range(2000)) + b"\r\n\r\n")
                await reader.read(100)
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return kind


async def places_free(port: int, seconds: float = 30.0) -> float | None:
    """The seconds until no request runs or waits, or None after `seconds`."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        told = json.loads((await ask(port, "GET", "/health")).text)
        if told["running"] == told["waiting"] == 0:
            return round(time.perf_counter() - began, 3)
        await asyncio.sleep(0.01)
    return None
