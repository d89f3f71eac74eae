"""Load tests of a server, with well-behaved and misbehaving clients. Can also test llama.cpp's server.

    python tools/load.py [SCENARIO ...] [--model gemma-3-270m] [--peer [COMMAND]] [--threads N] [--count N] [--minutes N]

streams     200 streams at once: no stream is lost, or differs from its request alone; the time to their first tokens
overload    ten times as many requests as the server admits: how fast it refuses the excess, and whether /health responds
scaling     tokens per second of 8 streams together and of one alone
cached      time to the first token of a 400-token prompt of which 380 tokens are in the prefix cache
faults      --count (1000) clients that leave, stall or send half a request: their requests end, and other streams do not change
sigterm     --count (50) times: SIGTERM with 10 running streams; all streams finish, and the exit code is 0
batch       --count (50) times: SIGKILL during a batch; no row is lost, and no row is computed twice
soak        --minutes (30) of good and bad clients: memory, threads and file descriptors do not grow

By default all scenarios but soak run. --peer also runs the first three on `python -m llama_cpp.server` (from
llama-cpp-python[server]), or on a COMMAND with that server's options. Needs a quiet machine. The last line is one JSON
object; the exit code is 1 if anything was lost, differed or did not end.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from load_clients import Got, ask, completion, flood, misbehave, places_free, stream
from load_servers import Process, ours, peer, running

_HANDLER_THREADS = 40  # the largest number of threads for HTTP handlers

Start = Callable[..., Process]


def quantile(values: list[float], share: float) -> float | None:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4) if values else None


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
    """Fill the server. Then send ten times as many requests, first within three seconds, then at once."""
    parallel, queue = 8, 64
    places = parallel + queue
    made: dict[str, Any] = {"places": places, "bad": 0}
    path = "/health" if start is ours else "/v1/models"
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        for name, seconds in (("spread", 3.0), ("burst", 0.0)):
            async with running(start(args, "--parallel", parallel, "--queue", queue)) as server:
                # The executor starts its process at the first call, whose time must not count.
                await loop.run_in_executor(apart, flood, server.port, [], 24, 0.0)
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
    """Tokens per second while all streams decode, after short prompts: medians of five rounds.

    Without guesses, because guesses speed up one stream much more than eight.
    """
    one_rates, eight_rates = [], []
    async with running(start(args, "--parallel", 8, "--speculate", "off")) as server:
        await stream(server.port, 0, 8)
        for number in range(5):
            one_rates.append((await stream(server.port, number, 64)).rate)
            got = await asyncio.gather(*(stream(server.port, 10 * number + each, 64) for each in range(8)))
            if not all(one.tokens for one in got):
                raise SystemExit("a stream ended without tokens")
            since, until = max(one.tokens[0] for one in got), min(one.tokens[-1] for one in got)
            made = sum(since <= at <= until for one in got for at in one.tokens)
            if until > since:
                eight_rates.append(made / (until - since))
            else:  # a server that runs one request at a time has no time in which all streams decode
                eight_rates.append(sum(len(one.tokens) for one in got) / max(one.tokens[-1] for one in got))
    one, eight = statistics.median(one_rates), statistics.median(eight_rates)
    return {"one": round(one, 1), "eight": round(eight, 1), "times": round(eight / one, 2), "bad": 0}


async def cached(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    """A prompt has 380 ids that all prompts share, and 20 ids of its own."""
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
    """least_live: the smallest number of streams that were running when the signal was sent."""
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
    """Kill a batch and start it again until all rows are written. Then begin the next batch."""
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
    """Compare the first quarter of the samples with the last quarter, after a minute of warm-up."""
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
                    texts = f"expected {want[number].text!r}, found {got.text!r} {got.error}"
                    print(f"stream {number}: {texts}", file=sys.stderr)
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
    # The number of threads varies, because the pool of HTTP handlers adds and removes threads.
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
        parser.error(f"{unknown[0]}: unknown scenario, expected one of {', '.join(SCENARIOS)}")
    made = asyncio.run(run(args))
    print(json.dumps({"cores": os.cpu_count(), **made}))
    return 1 if any(results["gemma_py"]["bad"] for results in made.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
