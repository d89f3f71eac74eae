"""Kill and stop the processes of shards at random while streams run. All answers must equal those of an engine without shards.

    python tools/shard_faults.py [MODEL] [--shards 3] [--streams 8] [--tokens 10000] [--every 100] [--deadline 2.0]
        [--seed 0]

A fault comes after EVERY tokens on average. Every third fault is followed by another one within a second, which often
hits a process that is only just starting. The JSON document on the last line has the number of faults, the numbers of
the answers that differ, the answers that fail with their errors, the processes that are left at the end, and the
longest time in which no stream got a token. The exit code is 1 if an answer differs or fails, or if a process is left.
Linux only.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import queue
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from repository import TINY

import gemma_py
from gemma_py.cli.common import positive
from gemma_py.generate.core import Request
from gemma_py.generate.events import Event, Failed, Finished, Generated
from gemma_py.generate.options import Sampling
from gemma_py.generate.scheduler import Scheduler

_ANSWER = 100  # tokens
_WAIT = 120.0  # seconds without an event, after which a run counts as hung


def requests_of(engine: gemma_py.Engine, count: int, seed: int) -> list[Request]:
    """Every second request draws at temperature 1. Some prompts begin alike, so that the prefix caches are used."""
    rng, made = random.Random(seed), list[Request]()
    common = [rng.randrange(engine.config.vocab_size) for _ in range(48)]
    for number in range(count):
        own = [rng.randrange(engine.config.vocab_size) for _ in range(rng.randint(1, 60))]
        sampling = Sampling(temperature=1.0, seed=number) if number % 2 else Sampling()
        made.append(Request(common + own if number % 3 else own, _ANSWER, sampling, ends=frozenset()))
    return made


def answers(
    engine: gemma_py.Engine, requests: list[Request], streams: int, fault: Callable[[], None]
) -> tuple[list[Any], float]:
    """Return each request's tokens, or its error, and the longest time in seconds without any token.

    fault: called after each token
    """
    scheduler, heard = Scheduler(engine, parallel=streams, queue=len(requests)), queue.SimpleQueue[tuple[int, Event]]()

    def put(number: int, event: Event) -> None:
        heard.put((number, event))

    made: list[Any] = [[] for _ in requests]
    running, longest, last = len(requests), 0.0, time.monotonic()
    try:
        for number, request in enumerate(requests):
            scheduler.submit(request, partial(put, number))
        while running:
            try:
                number, event = heard.get(timeout=_WAIT)
            except queue.Empty:
                faulthandler.dump_traceback()
                raise
            if isinstance(event, Generated):
                made[number].append(event.token.id)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
                fault()
            elif isinstance(event, Failed):
                made[number] = str(event.error)
                longest = max(longest, time.monotonic() - last)
            running -= isinstance(event, Finished | Failed)
    finally:
        scheduler.close()
    return made, longest


def shard_processes() -> list[int]:
    """Return the ids of the shards' processes, those that are only just starting too."""
    made = list[int]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread or a process that has just ended
            for child in (task / "children").read_text().split():
                if b"gemma_py.cluster.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    made.append(int(child))
    return made


class Faults:
    """Kills or stops the process of a shard from time to time."""

    def __init__(self, every: int, seed: int) -> None:
        self.counts = Counter[str]()
        self._every, self._rng, self._last = every, random.Random(seed), threading.Timer(0, int)

    def after_token(self) -> None:
        if self._rng.random() < 1 / self._every:
            self._fault()
            if self._rng.random() < 1 / 3:
                self._last = threading.Timer(self._rng.random(), self._fault)
                self._last.start()

    def _fault(self) -> None:
        kind = self._rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        with contextlib.suppress(OSError, IndexError):  # a process that has just ended, or no process
            os.kill(self._rng.choice(shard_processes()), kind)
            self.counts[kind.name] += 1

    def end(self) -> None:
        self._last.cancel()


def run(model: str, shards: int, streams: int, tokens: int, every: int, deadline: float, seed: int) -> dict[str, Any]:
    with gemma_py.load(model) as engine:
        requests = requests_of(engine, -(-tokens // _ANSWER), seed)
        wanted, undisturbed = answers(engine, requests, streams, lambda: None)
    with gemma_py.load(model, shards=shards, deadline=deadline) as engine:
        faults = Faults(every, seed)
        made, longest = answers(engine, requests, streams, faults.after_token)
        faults.end()
    failed = {number: got for number, got in enumerate(made) if isinstance(got, str)}
    wrong = [number for number, got in enumerate(made) if number not in failed and got != wanted[number]]
    return {
        "tokens": sum(map(len, wanted)), "faults": faults.counts, "wrong": wrong, "failed": failed,
        "left": shard_processes(), "longest_seconds": round(longest, 2),
        "longest_seconds_without_shards": round(undisturbed, 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY))
    parser.add_argument("--shards", type=positive, default=3)
    parser.add_argument("--streams", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=10000)
    parser.add_argument("--every", type=positive, default=100, help="tokens between two faults on average")
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds after which a stopped shard is replaced")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report = run(args.model, args.shards, args.streams, args.tokens, args.every, args.deadline, args.seed)
    print(json.dumps(report))
    return 1 if report["wrong"] or report["failed"] or report["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
