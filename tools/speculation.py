"""Measure speculation: tokens a pass, accepted guesses, and the speed of `auto` as a multiple of the speed of `off`.

    python tools/speculation.py [MODEL] [--tokens 128] [--rounds 3] [--threads N] [--temperatures 0,0.8] [--kinds edit,json]
        [--streams 8] [--draft MODEL --right 0,0.5,0.9]

The kinds are the recorded prompts of `bench --speculate`. Two kinds more repeat the chat with guesses that are always right
(`oracle`) and always wrong (`wrong`), also for models with random weights. `streams` answers --streams of the recorded
prompts at once, and measures from the first request to the last answer. The last line is a JSON document.

With --draft, only the draft model guesses, and only the chat is measured. The draft model computes its guesses, but each is
then replaced by a guess that is right with the given probability. So random weights show the speed of a draft model whose
guesses are right this often.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from answers import told
from crowd import Client
from drafters import KINDS, draft_model_right, drafting

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.checks.speculation import HEADER, PROMPTS, Case, Tokens, cells, measured
from gemma_py.cli.common import markdown, positive
from gemma_py.errors import ComputationError
from gemma_py.generate.core import Request
from gemma_py.generate.scheduler import Scheduler
from gemma_py.generate.speculation import Pace


def guessing(kind: str, vocabulary: int, request: Request, known: Tokens) -> AbstractContextManager[Any]:
    """Let the request have the drafter of this kind. A number is the probability that a guess of the draft model is right."""
    if kind in PROMPTS:
        return nullcontext()
    answers = {tuple(request.ids): [token for token, *_ in known]}
    if kind in KINDS:
        return drafting(kind, answers, vocabulary)
    return draft_model_right(float(kind), answers, vocabulary)


def streams(engine: gemma_py.Engine, count: int, case: Case) -> dict[str, Any]:
    """Answer `count` of the recorded prompts at once, with `off` and with `auto` in turns. Return what `measured` returns."""
    prompts = [engine.encode(text) for text in islice(cycle(PROMPTS.values()), count)]
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    passes = guessed = accepted = 0
    for number in range(case.rounds):
        answers = {}
        for mode in ("off", "auto") if number % 2 else ("auto", "off"):
            with closing(Scheduler(engine, parallel=count, prefix_bytes=0)) as scheduler:
                begin = time.perf_counter()
                clients = [
                    Client(scheduler, Request(ids, case.tokens, case.sampling(seed), logprobs=False, speculate=mode))
                    for seed, ids in enumerate(prompts, number * count)
                ]
                for client in clients:
                    client.end()
                rates[mode].append(count * case.tokens / (time.perf_counter() - begin))
                answers[mode] = [[told(event.token) for event in client.made] for client in clients]
                if mode == "auto":
                    stats = scheduler.stats()
                    passes, guessed = passes + stats.passes, guessed + stats.guessed_tokens
                    accepted += stats.accepted_tokens
        if answers["off"] != answers["auto"]:
            raise ComputationError("speculation changed an answer; please report this with the model")
    ratios = [auto / off for off, auto in zip(rates["off"], rates["auto"], strict=True)]
    tokens = case.rounds * count * case.tokens
    return {
        "temperature": case.temperature, "tokens": tokens, "tokens_a_pass": tokens / passes,
        "guessed": guessed, "accepted": accepted,
        "off_tokens_per_second": statistics.median(rates["off"]),
        "auto_tokens_per_second": statistics.median(rates["auto"]),
        "speed": statistics.median(ratios), "least": min(ratios),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=positive, default=128, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="answers of each kind (default: %(default)s)")
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--temperatures", default="0,0.8", help="separated by commas (default: %(default)s)")
    parser.add_argument(
        "--kinds", default=",".join([*PROMPTS, "oracle", "wrong", "streams"]), help="(default: %(default)s)"
    )
    parser.add_argument("--streams", type=positive, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--draft", metavar="MODEL", help="a draft model; measures --right instead of --kinds")
    parser.add_argument("--right", default="0,0.5,0.7,0.8,0.9,1", help="probabilities (default: %(default)s)")
    args = parser.parse_args()
    kinds = (args.right if args.draft else args.kinds).split(",")
    try:
        known = (
            all(0 <= float(kind) <= 1 for kind in kinds) if args.draft else {*kinds} <= {*PROMPTS, *KINDS, "streams"}
        )
    except ValueError:
        known = False
    if not known:
        parser.error("--right should be probabilities" if args.draft else f"--kinds: unknown kind in {args.kinds}")
    rows = []
    with gemma_py.load(args.model, threads=args.threads, draft=args.draft) as engine:
        for temperature in args.temperatures.split(","):
            for kind in kinds:
                # The old pace learned from guesses that were right with another probability.
                if engine.draft is not None:
                    engine.pace = Pace()
                    engine.pace.draft_share = engine.draft.share
                case = Case(PROMPTS.get(kind, PROMPTS["chat"]), float(temperature), args.tokens, args.rounds)
                if kind == "streams":
                    figures = streams(engine, args.streams, case)
                else:
                    figures = measured(engine, case, partial(guessing, kind, engine.config.vocab_size))
                rows.append({"kind": f"{float(kind):.0%} right" if args.draft else kind, **figures})
    print(markdown(("kind", *HEADER), [[row["kind"], *cells(row)] for row in rows]))
    print(json.dumps({"model": str(args.model), "rows": rows}))


if __name__ == "__main__":
    main()
