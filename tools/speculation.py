"""Measure speculation: tokens a pass, accepted guesses, and the speed of `auto` as a multiple of the speed of `off`.

    python tools/speculation.py [MODEL] [--tokens 128] [--rounds 3] [--threads N] [--temperatures 0,0.8] [--kinds edit,json]

The kinds are the recorded prompts of `bench --speculate`. Two kinds more repeat the chat with guesses that are always right
(`oracle`) and always wrong (`wrong`), also for models with random weights. The last line is a JSON document.
"""

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from drafters import drafting

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.checks.speculation import HEADER, PROMPTS, Case, Tokens, cells, measured
from gemma_py.cli.common import markdown, positive
from gemma_py.generate.core import Request


def guessing(kind: str, vocabulary: int, request: Request, known: Tokens) -> AbstractContextManager[Any]:
    """Let the request have the drafter of this kind."""
    if kind in PROMPTS:
        return nullcontext()
    return drafting(kind, {tuple(request.ids): [token for token, *_ in known]}, vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=positive, default=128, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="answers of each kind (default: %(default)s)")
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--temperatures", default="0,0.8", help="separated by commas (default: %(default)s)")
    parser.add_argument("--kinds", default=",".join([*PROMPTS, "oracle", "wrong"]), help="(default: %(default)s)")
    args = parser.parse_args()
    rows = []
    with gemma_py.load(args.model, threads=args.threads) as engine:
        for temperature in args.temperatures.split(","):
            for kind in args.kinds.split(","):
                case = Case(PROMPTS.get(kind, PROMPTS["chat"]), float(temperature), args.tokens, args.rounds)
                around = partial(guessing, kind, engine.config.vocab_size)
                rows.append({"kind": kind, **measured(engine, case, around)})
    print(markdown(("kind", *HEADER), [[row["kind"], *cells(row)] for row in rows]))
    print(json.dumps({"model": str(args.model), "rows": rows}))


if __name__ == "__main__":
    main()
