"""Kill and stop the processes of replicas at random while streams run. All answers must equal those of one engine.

    python tools/replica_faults.py [MODEL] [--replicas 3] [--streams 12] [--tokens 10000] [--every 100] [--deadline 2.0]
        [--seed 0]

A fault comes after EVERY tokens on average. Every third fault is followed by another one within a second, which often
hits a process that is only just starting. The JSON document on the last line has the number of faults, the numbers of
the answers that differ, the answers that fail with their errors, the processes that are left at the end, and the
longest time in which no stream got a token. The exit code is 1 if an answer differs or fails, or if a process is left.
Linux only.
"""

import argparse
import json
import queue
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from repository import TINY
from shard_faults import Faults, requests_of, shard_processes

import gemma_py
from gemma_py.cli.common import positive
from gemma_py.cluster.hosts import ThisMachine
from gemma_py.generate.base_scheduler import BaseScheduler
from gemma_py.generate.core import Request
from gemma_py.generate.events import Event, Failed, Finished, Generated
from gemma_py.generate.scheduler import Scheduler
from gemma_py.replicas.pool import Pool, ReplicaOptions

_ANSWER = 100  # tokens
_WAIT = 120.0  # seconds without an event, after which a run counts as hung
_CONSTRAINTS = "gemma_py.server.openai.described_constraint:constraint_maker"


def answers(
    scheduler: BaseScheduler[Any, Any], requests: list[Request], fault: Callable[[], None]
) -> tuple[list[Any], float]:
    """Return each request's tokens, or its error, and the longest time in seconds without any token.

    fault: called after each token
    """
    heard = queue.SimpleQueue[tuple[int, Event]]()

    def put(number: int, event: Event) -> None:
        heard.put((number, event))

    made: list[Any] = [[] for _ in requests]
    running, longest, last = len(requests), 0.0, time.monotonic()
    for number, request in enumerate(requests):
        scheduler.submit(request, partial(put, number))
    while running:
        number, event = heard.get(timeout=_WAIT)
        if isinstance(event, Generated):
            made[number].append(event.token.id)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            fault()
        elif isinstance(event, Failed):
            made[number] = str(event.error)
        running -= isinstance(event, Finished | Failed)
    return made, longest


def run(model: str, replicas: int, streams: int, tokens: int, every: int, deadline: float, seed: int) -> dict[str, Any]:
    with gemma_py.load(model) as engine:
        requests = requests_of(engine, -(-tokens // _ANSWER), seed)
        alone = Scheduler(engine, parallel=streams, queue=len(requests))
        try:
            wanted, undisturbed = answers(alone, requests, lambda: None)
        finally:
            alone.close()
        faults = Faults(every, seed)
        options = ReplicaOptions(replicas, model, _CONSTRAINTS, deadline=deadline)
        pool = Pool(engine, options, ThisMachine(), -(-streams // replicas), len(requests))
        try:
            made, longest = answers(pool, requests, faults.after_token)
            faults.end()
        finally:
            pool.close()
    failed = {number: got for number, got in enumerate(made) if isinstance(got, str)}
    wrong = [number for number, got in enumerate(made) if number not in failed and got != wanted[number]]
    return {
        "tokens": sum(map(len, wanted)), "faults": faults.counts, "wrong": wrong, "failed": failed,
        "left": shard_processes(), "longest_seconds": round(longest, 2),
        "longest_seconds_of_one_engine": round(undisturbed, 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY))
    parser.add_argument("--replicas", type=positive, default=3)
    parser.add_argument("--streams", type=positive, default=12)
    parser.add_argument("--tokens", type=positive, default=10000)
    parser.add_argument("--every", type=positive, default=100, help="tokens between two faults on average")
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds after which a stopped replica is replaced")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report = run(args.model, args.replicas, args.streams, args.tokens, args.every, args.deadline, args.seed)
    print(json.dumps(report))
    return 1 if report["wrong"] or report["failed"] or report["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
