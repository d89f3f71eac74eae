"""Measure shards and replicas on this machine, and compute what a network would add.

    python tools/cluster_speed.py [MODEL] [--counts 1,2,4] [--rounds 3] [--tokens 48] [--prompt 2048]

Every process has one worker thread and is pinned to a core, one process after another, so on a machine with fewer cores
than processes some share a core. The processes of this machine are connected by pipes. Rounds alternate between the
numbers of processes; the tables have medians, and in parentheses the smallest and the largest figure. `one answer` has
no other request beside it; `8 answers` run at the same time. The last table is arithmetic: the bytes that travel between
two shards, and the time that they take on a network, without the latency of its switches. Linux only.
"""

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from shard_faults import shard_processes

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL, as_other_processes_name
from gemma_py.cli.common import counts, markdown, positive
from gemma_py.cluster.hosts import ThisMachine
from gemma_py.generate.base_scheduler import BaseScheduler
from gemma_py.generate.core import Request
from gemma_py.generate.events import Event, Failed, Finished
from gemma_py.generate.options import Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.replicas.pool import Pool, ReplicaOptions

_STREAMS = 8
_CONSTRAINTS = "gemma_py.server.openai.described_constraint:constraint_maker"
_WIDTHS = {"Gemma 3 270M": 640, "Gemma 3 4B": 2560, "Gemma 3 12B": 3840, "Gemma 3 27B": 5376}  # of the residual stream
_NETWORKS = {"1 GbE": 0.117e9, "10 GbE": 1.17e9}  # bytes a second, without headers
_CHUNK = 512  # tokens


def pin(process: int, core: int) -> None:
    """Pin all threads of a process to a core. Threads that they start later are pinned too."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def pin_all(cores: list[int]) -> None:
    """Pin this process to the first core, and its processes to the next ones."""
    for process, core in zip([os.getpid(), *sorted(shard_processes())], itertools.cycle(cores), strict=False):
        pin(process, core)


def seconds_of(scheduler: BaseScheduler[Any, Any], requests: list[Request]) -> float:
    """Answer requests at the same time. Return the duration."""
    left, over, errors = [len(requests)], threading.Event(), list[Exception]()

    def listen(event: Event) -> None:
        if isinstance(event, Failed):
            errors.append(event.error)
        if isinstance(event, Finished | Failed):
            left[0] -= 1
            if not left[0]:
                over.set()

    start = time.perf_counter()
    for request in requests:
        scheduler.submit(request, listen)
    over.wait()
    if errors:
        raise errors[0]
    return time.perf_counter() - start


def request(engine: gemma_py.Engine, number: int, prompt: int, tokens: int) -> Request:
    ids = [(7919 * (at + 97 * number) + 13) % engine.config.vocab_size for at in range(prompt)]
    return Request(ids, tokens, Sampling(), ends=frozenset(), speculate="off")


def rates(scheduler: BaseScheduler[Any, Any], args: argparse.Namespace, first: int) -> list[float]:
    """Return the tokens per second of a long prompt, of one answer, and of several answers."""
    engine, numbers = scheduler.engine, itertools.count(first)
    prefill = args.prompt / seconds_of(scheduler, [request(engine, next(numbers), args.prompt, 1)])
    one = args.tokens / seconds_of(scheduler, [request(engine, next(numbers), 8, args.tokens)])
    several = [request(engine, next(numbers), 8, args.tokens) for _ in range(_STREAMS)]
    return [prefill, one, _STREAMS * args.tokens / seconds_of(scheduler, several)]


@contextmanager
def sharded(model: str, shards: int) -> Iterator[BaseScheduler[Any, Any]]:
    with gemma_py.load(model, threads=1, shards=shards) as engine:
        scheduler = Scheduler(engine, parallel=_STREAMS)
        try:
            yield scheduler
        finally:
            scheduler.close()


@contextmanager
def pooled(model: str, replicas: int) -> Iterator[BaseScheduler[Any, Any]]:
    options = ReplicaOptions(replicas, as_other_processes_name(model), _CONSTRAINTS, threads=1)
    with gemma_py.load(model, threads=1) as engine:
        pool = Pool(engine, options, ThisMachine(), parallel=_STREAMS)
        try:
            yield pool
        finally:
            pool.close()


def measure(opened: Callable[[str, int], Any], args: argparse.Namespace) -> dict[int, list[list[float]]]:
    """Return for each number of processes the figures of each round."""
    cores = sorted(os.sched_getaffinity(0))
    made: dict[int, list[list[float]]] = {count: [] for count in args.counts}
    for number, count in itertools.product(range(args.rounds), args.counts):
        with opened(args.model, count) as scheduler:
            pin_all(cores)
            rates(scheduler, args, 0)  # the first passes of a process load its weights
            made[count].append(rates(scheduler, args, 100 * (number + 1)))
        pin(os.getpid(), cores[0])
        os.sched_setaffinity(0, cores)
    return made


def shown(figures: dict[int, list[list[float]]], what: str) -> str:
    def cell(values: list[float]) -> str:
        return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"

    rows = [
        [f"{count} {what}{'s' * (count > 1)}", *(cell([round[at] for round in rounds]) for at in range(3))]
        for count, rounds in figures.items()
    ]
    return markdown(["tokens/s", "prompt", "one answer", f"{_STREAMS} answers"], rows)


def network() -> str:
    rows = []
    for name, width in _WIDTHS.items():
        token = 4 * width
        times = [f"{1000 * token / rate:.3f} ms, {1000 * _CHUNK * token / rate:.0f} ms" for rate in _NETWORKS.values()]
        rows.append([name, f"{token:,}", *times])
    return markdown(["", "bytes a token", *(f"{name}: a token, {_CHUNK} tokens" for name in _NETWORKS)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--counts", type=counts, default=(1, 2, 4))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--tokens", type=positive, default=48)
    parser.add_argument("--prompt", type=positive, default=2048)
    args = parser.parse_args()
    print(f"{args.model}, {len(os.sched_getaffinity(0))} cores\n")
    print(shown(measure(sharded, args), "shard"), "\n")
    print(shown(measure(pooled, args), "replica"), "\n")
    print(network())


if __name__ == "__main__":
    main()
