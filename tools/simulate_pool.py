"""Simulate many replicas behind one front: how many streams can one front serve, and what saturates first?

    python tools/simulate_pool.py [--hosts 1,4,16,64,128] [--streams 10000] [--parallel 64] [--tokens 200] [--prompt 400]
        [--turns 4] [--blocks 65536] [--think 20] [--event-us 60] [--request-ms 2.0] [--pass-ms 8.3] [--row-ms 1.5] [--prefill-ms 0.85]
        [--seconds 60] [--seed 0]

Each of STREAMS clients has conversations of TURNS turns, and thinks for about THINK seconds before each. Requests are routed by
the package's own routing, with the prefixes that each replica knows. A pass of a replica takes --pass-ms for the first row
and --row-ms for each further one; a prompt token that is not in the prefix cache takes --prefill-ms. A prefix cache has
--blocks blocks. The front is one process and takes --event-us for a token that it passes on, and --request-ms for a
request (parsing, tokenizing, routing).

The defaults are those of the demo model on two cores of a Zen 4: passes and prompts as measured; of the 60 µs of the front
for a token, 30 are measured without HTTP, and 30 are assumed for HTTP. For each number of hosts, the tool prints tokens a
second, the busy share of replicas and front, the time to the first token, and the share of cached prompt tokens. A front
that is busy for more than 100% of the time falls behind. All times are simulated, so the result does not depend on this
machine.
"""

import argparse
import heapq
import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gemma_py.cli.common import counts, positive
from gemma_py.replicas.routing import KnownBlocks, block_keys, choose
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS


@dataclass
class Stream:
    """A client. ids: the tokens of its conversation so far."""

    number: int
    turn: int = 0
    ids: list[int] = field(default_factory=list)
    asked: float = 0.0
    answered: int = 0
    uncached: int = 0
    first: bool = True


class Replica:
    """running: the streams of the next pass. waiting: streams that wait for a place."""

    def __init__(self, blocks: int) -> None:
        self.known, self.running, self.waiting = KnownBlocks(blocks), list[Stream](), deque[Stream]()
        self.busy, self.passing = 0.0, False

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)


class Simulation:
    def __init__(self, options: argparse.Namespace, hosts: int) -> None:
        self.options, self.rng = options, random.Random(options.seed)
        self.replicas = [Replica(options.blocks) for _ in range(hosts)]
        self.streams = [Stream(number) for number in range(options.streams)]
        self.events: list[tuple[float, int, str, Any]] = []
        self.number = 0
        self.front_free = self.front_busy = 0.0
        self.tokens = self.prompt_tokens = self.cached = 0
        self.waits: list[float] = []

    def at(self, when: float, kind: str, subject: Any) -> None:
        self.number += 1
        heapq.heappush(self.events, (when, self.number, kind, subject))

    def front(self, now: float, seconds: float) -> float:
        """Let the front work for some time, after the work that it has already. Return when it is done."""
        self.front_free = max(self.front_free, now) + seconds
        self.front_busy += seconds
        return self.front_free

    def run(self) -> dict[str, float]:
        options = self.options
        for stream in self.streams:
            self.at(self.rng.uniform(0, options.think), "ask", stream)
        now = 0.0
        while self.events and now < options.seconds:
            now, _, kind, subject = heapq.heappop(self.events)
            getattr(self, kind)(now, subject)
        waits = sorted(self.waits) or [float("nan")]
        return {
            "hosts": len(self.replicas), "tokens_s": self.tokens / now,
            "replicas_busy": sum(replica.busy for replica in self.replicas) / now / len(self.replicas),
            "front_busy": self.front_busy / now, "first_token_p50": statistics.median(waits),
            "first_token_p99": waits[int(0.99 * (len(waits) - 1))], "cached": self.cached / max(1, self.prompt_tokens),
        }  # fmt: skip

    def ask(self, now: float, stream: Stream) -> None:
        """A client sends the next turn of its conversation."""
        if stream.turn == self.options.turns:
            stream.turn, stream.ids = 0, []
        stream.turn += 1
        stream.ids += [self.rng.randrange(1 << 18) for _ in range(self.options.prompt // self.options.turns)]
        stream.asked, stream.answered, stream.first = now, 0, True
        self.at(self.front(now, self.options.request_ms / 1000), "submit", stream)

    def submit(self, now: float, stream: Stream) -> None:
        keys = block_keys(stream.ids)
        replica = choose(self.replicas, keys, self.options.parallel)
        cached = replica.known.match(keys) * BLOCK_TOKENS
        stream.uncached = len(stream.ids) - cached
        self.prompt_tokens += len(stream.ids)
        self.cached += cached
        replica.known.add(keys)
        replica.waiting.append(stream)
        self.begin(now, replica)

    def begin(self, now: float, replica: Replica) -> None:
        """Begin a pass, unless one is under way."""
        if replica.passing:
            return
        while replica.waiting and len(replica.running) < self.options.parallel:
            replica.running.append(replica.waiting.popleft())
        if not replica.running:
            return
        new = sum(stream.uncached for stream in replica.running)
        for stream in replica.running:
            stream.uncached = 0
        rows = len(replica.running)
        seconds = (self.options.pass_ms + self.options.row_ms * (rows - 1) + self.options.prefill_ms * new) / 1000
        replica.passing = True
        replica.busy += seconds
        self.at(now + seconds, "end", replica)

    def end(self, now: float, replica: Replica) -> None:
        """End a pass, which gives each running stream a token."""
        replica.passing = False
        done = self.front(now, self.options.event_us * len(replica.running) / 1e6)
        left = []
        for stream in replica.running:
            self.tokens += 1
            stream.answered += 1
            stream.ids.append(self.rng.randrange(1 << 18))
            if stream.first:
                self.waits.append(done - stream.asked)
                stream.first = False
            if stream.answered < self.options.tokens:
                left.append(stream)
            else:
                replica.known.add(block_keys(stream.ids[:-1]))
                self.at(done + self.rng.expovariate(1 / self.options.think), "ask", stream)
        replica.running = left
        self.begin(now, replica)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=counts, default=(1, 4, 16, 64, 128))
    for name, value in (
        ("streams", 10000),
        ("parallel", 64),
        ("tokens", 200),
        ("prompt", 400),
        ("turns", 4),
        ("blocks", 65536),
    ):
        parser.add_argument(f"--{name}", type=positive, default=value)
    for name, number in (
        ("think", 20.0), ("event-us", 60.0), ("request-ms", 2.0), ("pass-ms", 8.3), ("row-ms", 1.5), ("prefill-ms", 0.85),
        ("seconds", 60.0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=float, default=number)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("hosts  tokens/s  replicas busy  front busy  first token p50, p99 (s)  cached")
    for hosts in options.hosts:
        made = Simulation(options, hosts).run()
        print(
            f"{hosts:5} {made['tokens_s']:9,.0f} {made['replicas_busy']:14.0%} {made['front_busy']:11.0%} "
            f"{made['first_token_p50']:17.2f} {made['first_token_p99']:6.2f} {made['cached']:7.0%}"
        )


if __name__ == "__main__":
    main()
