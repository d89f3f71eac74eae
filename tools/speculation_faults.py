"""Inject faults into passes with guesses: stalls, deaths, Ctrl-C, cancellation and SIGTERM.

    python tools/speculation_faults.py [--count 1000] [--seed 0] [--threads 3] [--deadline 1.0] [--kinds death,stall]

After a fault, the tokens so far must be those of the answer without speculation. A failed pass must raise WorkerError or
KeyboardInterrupt within the workers' deadline plus two seconds. The session must hold only tokens of the answer, and stay
usable; after a stall, it may instead refuse further calls, and a new session must work. In shared passes and in
a server, all answers must be complete and equal to those without speculation, unless their clients cancel. The model is
tiny. The last line is a JSON document; the exit code is 1 if anything was lost, differed or did not end.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from answers import Outcome, answers_to, outcome, told
from crowd import Client
from drafters import Eager, drafting
from load_clients import ask, stream
from load_servers import Process, ours, running
from repository import TINY

import gemma_py
from gemma_py.cli.common import positive
from gemma_py.errors import InputError, WorkerError
from gemma_py.generate.core import Request
from gemma_py.generate.events import Finished
from gemma_py.generate.options import Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.generate.session import Decoder, Session
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.runner import Runner, SequenceInput

# fault -> how many of 100 faults are of this kind
SHARES = {
    "death": 25,
    "stall": 15,
    "Ctrl-C": 25,
    "death in shared passes": 13,
    "stall in shared passes": 7,
    "cancel": 13,
    "SIGTERM": 2,
}
_LATE = 2.0  # seconds that a report may come after the deadline, because other processes run too
_PLACES = ("enter", "claim", "publish", "await", "barrier", "anywhere")
_STREAMS, _STREAM_TOKENS = 6, 150


class Wrong(Exception):
    """A fault had an effect that it must not have."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def drawn_plan(rng: random.Random, engine: gemma_py.Engine, fault: str) -> FaultPlan:
    layer = rng.randrange(len(engine.config.layers))
    return FaultPlan(fault=fault, worker=rng.randrange(engine.threads), layer=layer, place=rng.choice(_PLACES))


@contextmanager
def in_pass(
    number: int, owner: type, name: str, before: Callable[[], None], after: Callable[[], None]
) -> Iterator[None]:
    """Call `before` and `after` around the `number`-th pass with guesses. owner, name: the method that computes such
    passes.
    """
    honest, passes = getattr(owner, name), [0]

    def method(self: Any, *arguments: Any) -> Any:
        inputs = arguments[0]
        with_guesses = owner is Session or any(isinstance(part, SequenceInput) and part.guesses for part in inputs)
        passes[0] += with_guesses
        if not with_guesses or passes[0] != number:
            return honest(self, *arguments)
        before()
        try:
            return honest(self, *arguments)
        finally:
            after()

    with mock.patch.object(owner, name, method):
        yield


class Faults:
    def __init__(self, engine: gemma_py.Engine, deadline: float, seed: int) -> None:
        self.engine, self.limit, self.counts = engine, deadline + _LATE, Counter[str]()
        self.longest = 0.0
        rng = random.Random(seed)
        self.asked: list[tuple[Request, Outcome]] = []
        for number in range(8):
            ids = [rng.randrange(engine.config.vocab_size) for _ in range(rng.randint(5, 60))]
            sampling = Sampling(temperature=1.0, top_k=40, seed=number) if number % 2 else Sampling()
            request = Request(ids, 40, sampling)
            self.asked.append((request, outcome(engine, replace(request, speculate="off"))[0]))

    def inject(self, kind: str, rng: random.Random) -> None:
        engine = self.engine
        engine.pace = Eager(rng.choice([1, 4, 15]))
        with drafting(rng.choice(["half", "oracle", "wrong"]), answers_to(self.asked), engine.config.vocab_size):
            if kind in ("death", "stall", "Ctrl-C"):
                self._alone(kind, rng)
            else:
                self._in_shared_passes(kind, rng)
        engine.instruments.fault_plan = None

    def _plan(self, plan: FaultPlan | None) -> Callable[[], None]:
        return lambda: setattr(self.engine.instruments, "fault_plan", plan)

    def _alone(self, kind: str, rng: random.Random) -> None:
        request, want = rng.choice(self.asked)
        engine, made, error = self.engine, list[Any](), None
        generation, session = engine.generation(request), engine.session()
        if kind == "Ctrl-C":
            timer = threading.Timer(rng.random() * 0.004, lambda: os.kill(os.getpid(), signal.SIGINT))
            fault: tuple[Callable[[], None], Callable[[], None]] = timer.start, lambda: timer.join()
        else:
            plan = drawn_plan(rng, engine, "stall" if kind == "stall" else "raise")
            fault = self._plan(plan), self._plan(None)
        with in_pass(rng.randint(1, 4), Session, "verify", *fault):
            start = time.monotonic()
            try:
                logits = session.prefill(generation.prompt)
                for token in generation.tokens(logits, Decoder(session, generation).decode, session.kv_digest):
                    made.append(told(token))
                    start = time.monotonic()
            except (WorkerError, KeyboardInterrupt) as caught:
                error = caught
        seconds = time.monotonic() - start
        self.longest = max(self.longest, seconds)
        expect(seconds < self.limit, f"{error!r} after {seconds:.1f} s")
        expect(made == want.tokens[: len(made)], "other tokens than without speculation")
        expect(error is not None or len(made) == len(want.tokens), "the answer is incomplete")
        expect(session.ids == want.ids[: session.position], "the session has other tokens than the answer")
        expect(
            session.position in range(max(0, len(request.ids) + len(made) - 2), len(want.ids) + 1) or not made,
            "position",
        )
        if error is not None:
            self.counts[f"{kind}: {type(error).__name__}"] += 1
        if session.usable:
            if session.position < len(want.ids):
                session.prefill(want.ids[session.position :])
            expect(session.kv_digest() == want.digest, "the session continues with other KV rows")
        else:
            try:
                session.prefill([1])
            except InputError:
                pass
            else:
                raise Wrong("a session whose worker stalled computed a pass instead of raising an error")
            expect(outcome(engine, request)[0] == want, "the next session's answer differs")

    def _in_shared_passes(self, kind: str, rng: random.Random) -> None:
        plan = drawn_plan(rng, self.engine, "stall" if "stall" in kind else "raise")
        fault = self._plan(plan), self._plan(None)
        asked = rng.sample(self.asked, rng.randint(2, 5))
        scheduler = Scheduler(self.engine, prefix_bytes=rng.choice([0, 600_000]))
        try:
            if kind == "cancel":
                clients = [Client(scheduler, request) for request, _ in asked]
                threading.Timer(rng.random() * 0.05, clients[0].ticket.cancel).start()
            else:
                with in_pass(rng.randint(1, 5), Runner, "run_together", *fault):
                    clients = [Client(scheduler, request) for request, _ in asked]
                    for client in clients:
                        client.end()
            for number, (client, (_, want)) in enumerate(zip(clients, asked, strict=True)):
                end = client.heard[-1] if client.over else client.end()
                made = [told(event.token) for event in client.made]
                expect(isinstance(end, Finished), f"a request ended with {end}")
                cancelled = isinstance(end, Finished) and end.reason == "cancelled" and kind == "cancel" and number == 0
                expect(made == want.tokens[: len(made)], "other tokens than without speculation")
                expect(cancelled or len(made) == len(want.tokens), "an answer is incomplete")
                self.counts["cancelled"] += cancelled
            self.counts[f"{kind}: failed passes"] += scheduler.stats().failed_passes
        finally:
            scheduler.close()


# --- a server ---------------------------------------------------------------------------------------------------------


def served(threads: int, *options: str) -> Process:
    return ours(argparse.Namespace(model=TINY, threads=threads), "--parallel", _STREAMS, *options)


async def texts_without_speculation(threads: int) -> list[str]:
    async with running(served(threads, "--speculate", "off")) as server:
        return [(await stream(server.port, number, _STREAM_TOKENS)).text for number in range(_STREAMS)]


async def sigterm(threads: int, rng: random.Random, want: Sequence[str]) -> None:
    """Send SIGTERM to a server that has computed guesses and has running streams. All streams must be complete."""
    async with running(served(threads, "--drain", "120")) as server:
        clients = [asyncio.create_task(stream(server.port, number, _STREAM_TOKENS)) for number in range(_STREAMS)]
        while json.loads((await ask(server.port, "GET", "/health")).text)["running"] < _STREAMS:
            await asyncio.sleep(0.005)
        while not await server.metric("gemma_py_guessed_tokens_total"):
            await asyncio.sleep(0.005)
        await asyncio.sleep(rng.random() * 0.02)
        server.child.send_signal(signal.SIGTERM)
        got = await asyncio.gather(*clients)
        code = await asyncio.to_thread(server.child.wait, 120)
    expect(code == 0, f"exit code {code}")
    expect(
        [one.text for one in got] == list(want) and all(one.whole for one in got), "a stream is incomplete or differs"
    )


def run(count: int, seed: int, threads: int, deadline: float, kinds: Sequence[str] = tuple(SHARES)) -> dict[str, Any]:
    rng, wrong, injected = random.Random(seed), [], Counter[str]()
    order = rng.choices(kinds, [SHARES[kind] for kind in kinds], k=count)
    begun = shown = time.monotonic()
    want = asyncio.run(texts_without_speculation(threads)) if "SIGTERM" in order else []
    with gemma_py.load(TINY, threads=threads, context=160, deadline=deadline) as engine:
        engine.instruments.poison = True
        faults = Faults(engine, deadline, seed)
        for number, kind in enumerate(order):
            own = random.Random(f"{seed} {number}")
            try:
                if kind == "SIGTERM":
                    asyncio.run(sigterm(threads, own, want))
                else:
                    faults.inject(kind, own)
            except Exception as error:
                wrong.append(f"{kind}, number {number}: {error!r}")
                print(wrong[-1], file=sys.stderr, flush=True)
            injected[kind] += 1
            if time.monotonic() - shown > 20:
                shown = time.monotonic()
                print(f"{number + 1} faults in {shown - begun:.0f} s", file=sys.stderr, flush=True)
    return {
        "seed": seed, "injected": dict(injected), "reported": dict(sorted(faults.counts.items())),
        "longest_seconds": round(faults.longest, 2), "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=positive, default=1000, help="the number of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=3)
    parser.add_argument(
        "--deadline", type=float, default=1.0, help="the workers' deadline in seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--kinds", default=",".join(SHARES), help="the kinds of faults to inject (default: %(default)s)"
    )
    args = parser.parse_args()
    # A shell that starts the tool in the background makes it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report = run(args.count, args.seed, args.threads, args.deadline, args.kinds.split(","))
    print(json.dumps(report))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
