"""Load a server as many clients would, and break it as bad ones do; llama.cpp's server beside it, by the same client.

    python tools/load.py [SCENARIO ...] [--model gemma-3-270m] [--peer [COMMAND]] [--threads N] [--count N] [--minutes N]

streams     200 streams at once: none lost, none other than alone, how long until their first tokens
overload    ten times as many requests as there are places: how soon the others are refused, and /health answers
scaling     tokens a second of 8 streams together, and of one
cached      time to the first token of a 400-token prompt whose first 380 tokens were seen before
faults      --count (1000) clients that leave, stall or send half a request: places free again, others' tokens the same
sigterm     --count (50) times: SIGTERM with 10 live streams; all end whole, exit code 0
batch       --count (50) times: SIGKILL in a batch; nothing lost, nothing twice
soak        --minutes (30) of all that mixed: memory, threads and file descriptors stay flat

All but soak, if none is named. --peer runs the first three on `python -m llama_cpp.server` too (llama-cpp-python[server]), or on
what COMMAND starts with its options. Run it on a quiet machine. The last line is one JSON object; the exit code is 1 if anything
was lost, differed or was not freed.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import selectors
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_py.catalog import resolve

WORDS = (
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
)
_HANDLER_THREADS = 40
_TEXT = re.compile(rb'"text": ?("(?:[^"\\]|\\.)*")')


@dataclass
class Got:
    """What came of a request: status (0: no answer), text, seconds to the headers and to each token, an error within a stream."""

    status: int = 0
    text: str = ""
    headers: float = 0.0
    tokens: list[float] = field(default_factory=list)
    whole: bool = False
    error: str = ""

    @property
    def rate(self) -> float:
        return (len(self.tokens) - 1) / (self.tokens[-1] - self.tokens[0]) if len(self.tokens) > 1 else 0.0


class Process:
    """A server in a process of its own, on a free port."""

    def __init__(self, command: list[str], port: int) -> None:
        self.port = port
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe that nobody reads fills up)
        self.child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._said, process_group=0)

    async def ready(self) -> "Process":
        for _ in range(3000):
            if self.child.poll() is not None:
                raise SystemExit(f"the server did not start: {' / '.join(self.complaints())[-2000:]}")
            with contextlib.suppress(OSError):
                if (await ask(self.port, "GET", "/v1/models")).status == 200:
                    return self
            await asyncio.sleep(0.1)
        raise SystemExit("the server did not start in five minutes")

    async def metric(self, name: str) -> float:
        metrics = (await ask(self.port, "GET", "/metrics")).text
        return float(next(line for line in metrics.splitlines() if line.startswith(f"{name} ")).split()[1])

    async def usage(self) -> tuple[float, int, int]:
        """Resident MB beside what the prefix cache holds, threads, open files."""
        prefixes = await self.metric("gemma_py_prefix_bytes")
        base = Path(f"/proc/{self.child.pid}")
        status = dict(line.split(":", 1) for line in (base / "status").read_text().splitlines())
        return (
            int(status["VmRSS"].split()[0]) / 1024 - prefixes / 2**20,
            int(status["Threads"]),
            len(list((base / "fd").iterdir())),
        )

    def complaints(self) -> list[str]:
        self._said.seek(0)
        return self._said.read().decode().splitlines()

    def stop(self) -> int:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return self.child.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def ours(args: argparse.Namespace, *options: object) -> Process:
    port = free_port()
    threads = ["--threads", args.threads] if args.threads else []
    command = [sys.executable, "-m", "gemma_py", "serve", args.model, "--port", port, "--name", "m", *threads, *options]
    return Process([str(part) for part in command], port)


def peer(args: argparse.Namespace, *options: object) -> Process:
    """llama.cpp's: one request at a time, the others wait for a lock; by default a new one interrupts the old, not here."""
    port = free_port()
    threads = ["--n_threads", args.threads, "--n_threads_batch", args.threads] if args.threads else []
    command = [*shlex.split(args.peer), "--model", resolve(args.model), "--port", port, "--n_ctx", 4096,
               "--host", "127.0.0.1", "--verbose", "false", "--interrupt_requests", "false", "--model_alias", "m", *threads]  # fmt: skip
    return Process([str(part) for part in command], port)


@contextlib.asynccontextmanager
async def running(process: Process) -> AsyncIterator[Process]:
    try:
        yield await process.ready()
    finally:
        process.stop()


# --- a client ---------------------------------------------------------------------------------------------------------


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
    """The likeliest continuation of a prompt of its own."""
    rng = random.Random(number)
    prompt = f"{number}. " + " ".join(rng.choice(WORDS) for _ in range(words))
    return {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}


async def stream(port: int, number: int, tokens: int, words: int = 12) -> Got:
    return await ask(port, "POST", "/v1/completions", **completion(number, tokens, words))


def flood(port: int, numbers: list[int], tokens: int, seconds: float) -> list[Got]:
    """As many streams, begun within so many seconds. For a process that does nothing else: then the times are the server's."""
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


def quantile(values: list[float], share: float) -> float | None:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4) if values else None


# --- scenarios --------------------------------------------------------------------------------------------------------

Start = Callable[..., Process]


async def streams(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    count, tokens = args.streams, 24
    async with running(start(args, "--queue", count)) as server:
        alone = {number: await stream(server.port, number, tokens) for number in range(0, count, max(1, count // 10))}
        began = time.perf_counter()
        got = await asyncio.gather(*(stream(server.port, number, tokens) for number in range(count)))
        seconds = time.perf_counter() - began
    whole = [one for one in got if one.status == 200 and one.whole]
    differing = [number for number, one in alone.items() if got[number].text != one.text]
    first = [one.tokens[0] for one in whole if one.tokens]
    return {
        "streams": count, "lost": count - len(whole), "differ": len(differing), "compared": len(alone), "seconds": round(seconds, 1),
        "tokens_per_second": round(sum(len(one.tokens) for one in whole) / seconds, 1),
        "first_token_p50": quantile(first, 0.5), "first_token_p99": quantile(first, 0.99),
        "bad": count - len(whole) + len(differing),
    }  # fmt: skip


async def overload(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    """All places are taken; then ten times as many requests come within three seconds, and as many again all at once."""
    parallel, queue = 8, 64
    places = parallel + queue
    made: dict[str, Any] = {"places": places, "bad": 0}
    path = "/health" if start is ours else "/v1/models"
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        for name, seconds in (("spread", 3.0), ("burst", 0.0)):
            async with running(start(args, "--parallel", parallel, "--queue", queue)) as server:
                await loop.run_in_executor(apart, flood, server.port, [], 24, 0.0)  # the process is there
                taken = [asyncio.create_task(stream(server.port, 10_000 + number, 48)) for number in range(places)]
                await asyncio.sleep(0.5)
                health: list[Got] = []
                coming = loop.run_in_executor(apart, flood, server.port, list(range(10 * places)), 24, seconds)
                while not coming.done():
                    health.append(await ask(server.port, "GET", path))
                    await asyncio.wait((coming,), timeout=0.05)
                got = [*await coming, *await asyncio.gather(*taken)]
            refused = [one.headers for one in got if one.status in (429, 503)]
            answered = sum(one.status == 200 and one.whole for one in got)
            told = [one.headers for one in health]
            made |= {
                f"{name}_answered": answered, f"{name}_refused": len(refused),
                f"{name}_refused_p50": quantile(refused, 0.5), f"{name}_refused_p99": quantile(refused, 0.99),
                f"{name}_health_p50": quantile(told, 0.5), f"{name}_health_p99": quantile(told, 0.99),
            }  # fmt: skip
            made["bad"] += len(got) - answered - len(refused) + sum(one.status != 200 for one in health)
    return made


async def scaling(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    """Of the time in which all decode; the prompts are short. Medians of five rounds, in turn."""
    one_rates, eight_rates = [], []
    async with running(start(args, "--parallel", 8)) as server:
        await stream(server.port, 0, 8)
        for number in range(5):
            one_rates.append((await stream(server.port, number, 64)).rate)
            got = await asyncio.gather(*(stream(server.port, 10 * number + each, 64) for each in range(8)))
            if not all(one.tokens for one in got):
                raise SystemExit("a stream came without tokens")
            since, until = max(one.tokens[0] for one in got), min(one.tokens[-1] for one in got)
            made = sum(since <= at <= until for one in got for at in one.tokens)
            if until > since:
                eight_rates.append(made / (until - since))
            else:  # one after the other
                eight_rates.append(sum(len(one.tokens) for one in got) / max(one.tokens[-1] for one in got))
    one, eight = statistics.median(one_rates), statistics.median(eight_rates)
    return {"one": round(one, 1), "eight": round(eight, 1), "times": round(eight / one, 2), "bad": 0}


async def cached(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    """Prompts of ids: 380 that are shared, 20 of their own."""
    rng = random.Random(5)
    shared = [rng.randrange(300, 1400) for _ in range(380)]
    firsts: list[float] = []
    cold: list[float] = []
    async with running(start(args)) as server:
        for number in range(10):
            own = [rng.randrange(300, 1400) for _ in range(20)]
            for prompt, times in (([2, *reversed(own), *shared[::-1], number], cold), ([2, *shared, *own], firsts)):
                asked = {"model": "m", "prompt": prompt[:400], "max_tokens": 2, "temperature": 0, "stream": True}
                times.append((await ask(server.port, "POST", "/v1/completions", **asked)).tokens[0])
    return {"cached_median": round(statistics.median(firsts[1:]), 4), "cached_most": round(max(firsts[1:]), 4),
            "cold_median": round(statistics.median(cold), 4), "bad": 0}  # fmt: skip


async def misbehave(port: int, rng: random.Random) -> str:
    """One bad client, of a kind that is drawn."""
    kind = rng.choice(
        (
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
    )
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
                    if writer.transport.is_closing():  # it was refused
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
    """How long until nothing runs or waits; None if that does not come."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        told = json.loads((await ask(port, "GET", "/health")).text)
        if told["running"] == told["waiting"] == 0:
            return round(time.perf_counter() - began, 3)
        await asyncio.sleep(0.01)
    return None


async def faults(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    count, rng = args.count or 1000, random.Random(7)
    kinds: dict[str, int] = {}
    freed: list[float | None] = []
    async with running(start(args)) as server:
        want = await stream(server.port, 1, 48)
        wrong = 0
        for first in range(0, count, 20):
            honest = asyncio.create_task(stream(server.port, 1, 48))
            for kind in await asyncio.gather(*(misbehave(server.port, rng) for _ in range(min(20, count - first)))):
                kinds[kind] = kinds.get(kind, 0) + 1
            got = await honest
            wrong += got.text != want.text and got.status != 429
            freed.append(await places_free(server.port))
        code, said = server.stop(), server.complaints()
    stuck = freed.count(None)
    longest = max((at for at in freed if at is not None), default=None)
    return {"clients": count, "kinds": kinds, "wrong": wrong, "stuck": stuck, "freed_after_most": longest, "exit_code": code,
            "complaints": said, "bad": wrong + stuck + (code != 0) + len(said)}  # fmt: skip


async def sigterm(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    """least_live: streams that were running when the signal was sent."""
    count, rng, whole, least = args.count or 50, random.Random(9), 0, 10
    for _ in range(count):
        async with running(start(args, "--parallel", 10, "--drain", 120)) as server:
            clients = [asyncio.create_task(stream(server.port, number, 150)) for number in range(10)]
            while json.loads((await ask(server.port, "GET", "/health")).text)["running"] < 10:
                await asyncio.sleep(0.005)
            await asyncio.sleep(rng.random() * 0.05)
            server.child.send_signal(signal.SIGTERM)
            least = min(least, sum(not client.done() for client in clients))
            got = await asyncio.gather(*clients)
            code = await asyncio.to_thread(server.child.wait, 120)
            whole += code == 0 and all(one.whole and one.status == 200 for one in got)
    return {"times": count, "whole": whole, "least_live": least, "bad": count - whole + (least < 10)}


async def batch(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    """A batch is killed again and again until it has survived; whenever it is done, a new one begins."""
    kills, batches, bad, rng = 0, 0, 0, random.Random(11)
    while kills < (args.count or 50):
        with tempfile.TemporaryDirectory() as scratch:
            source, out = Path(scratch) / "in.jsonl", Path(scratch) / "out.jsonl"
            bodies = ({**completion(number, 8), "stream": False} for number in range(200))
            rows = [
                {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}
                for n, body in enumerate(bodies)
            ]
            source.write_text("".join(json.dumps(row) + "\n" for row in rows))
            command = [sys.executable, "-m", "gemma_py", "batch", str(source), str(out), args.model, "--name", "m"]
            kept = b""
            while True:
                child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
                while child.poll() is None and not (out.exists() and out.stat().st_size > len(kept) + 2000):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(rng.random() * 0.3)
                child.kill()
                killed = child.wait() != 0
                kills += killed
                now = out.read_bytes()
                bad += not now.startswith(kept)
                kept = now[: now.rfind(b"\n") + 1]
                if not killed:
                    break
            batches += 1
            names = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
            bad += sorted(names) != sorted(str(row["custom_id"]) for row in rows)
    return {"kills": kills, "batches": batches, "bad": bad}


async def soak(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    """Samples of the first and of the last quarter, after a minute of warming up."""
    rng, samples, wrong, served = random.Random(13), [], 0, 0
    async with running(start(args)) as server:
        want = {number: await stream(server.port, number, 32) for number in range(4)}
        began = time.monotonic()
        while (spent := time.monotonic() - began) < 60 * args.minutes:
            honest = [asyncio.create_task(stream(server.port, number, 32)) for number in want]
            await asyncio.gather(*(misbehave(server.port, rng) for _ in range(rng.randrange(20))))
            for number, task in zip(want, honest, strict=True):
                got = await task
                served += got.status == 200
                if got.status == 200 and got.text != want[number].text:
                    wrong += 1
                    print(f"stream {number}: {got.text!r} and not {want[number].text!r} {got.error}", file=sys.stderr)
            stuck = await places_free(server.port) is None
            wrong += stuck
            if spent > min(60, 15 * args.minutes):
                samples.append(await server.usage())
                print(f"{spent:.0f} s: {served} served, {wrong} wrong, {samples[-1]}", file=sys.stderr, flush=True)
        failed = await server.metric("gemma_py_failed_passes_total")
        server.stop()
        said = server.complaints()
    quarter = max(1, len(samples) // 4)
    names = ("rss_mb", "threads", "files")
    early = [statistics.median(column) for column in zip(*samples[:quarter], strict=True)]
    late = [statistics.median(column) for column in zip(*samples[-quarter:], strict=True)]
    # Handlers have a pool of threads that comes and goes.
    grown = late[0] > 1.05 * early[0] + 16 or late[1] > early[1] + _HANDLER_THREADS or late[2] > early[2] + 4
    return {
        "minutes": args.minutes, "served": served, "wrong": wrong, "failed_passes": failed, "complaints": said,
        "early": dict(zip(names, early, strict=True)), "late": dict(zip(names, late, strict=True)), "bad": wrong + grown + len(said),
    }  # fmt: skip


SCENARIOS = {
    "streams": streams, "overload": overload, "scaling": scaling, "cached": cached, "faults": faults, "sigterm": sigterm,
    "batch": batch, "soak": soak,
}  # fmt: skip
_FOR_PEERS = ("streams", "overload", "scaling")


async def run(args: argparse.Namespace) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in args.scenarios or [name for name in SCENARIOS if name != "soak"]:
        for who, start in (("gemma_py", ours), ("llama.cpp", peer)):
            if who == "llama.cpp" and not (args.peer and name in _FOR_PEERS):
                continue
            result = await SCENARIOS[name](args, start)
            made.setdefault(name, {})[who] = result
            shown = ", ".join(f"{key} {value}" for key, value in result.items())
            print(f"{name:9} {who:9} {shown}", flush=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO")
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--peer", nargs="?", const=f"{sys.executable} -m llama_cpp.server", metavar="COMMAND")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--count", type=int)
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    unknown = [name for name in args.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"{unknown[0]}: no such scenario; there are {', '.join(SCENARIOS)}")
    made = asyncio.run(run(args))
    print(json.dumps({"cores": os.cpu_count(), **made}))
    return 1 if any(results["gemma_py"]["bad"] for results in made.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
