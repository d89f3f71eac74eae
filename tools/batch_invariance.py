"""Batch invariance: compare the answers to requests in shared passes, bit by bit, with the answers to each request
alone.

    python tools/batch_invariance.py [MODEL] [--http] [--tokens 10000] [--streams 32] [--parallel 8] [--longest 200]
        [--threads N] [--seed 1]

Each round has requests of random lengths, greedy and sampled, which arrive at random times. Some requests share a
prefix, and some are cancelled. Tokens, texts and log probabilities are compared. With --http the requests are streams
of a server, and some clients disconnect. The last line is one JSON object; the exit code is 1 if an answer differed.
"""

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from crowd import Crowd
from serving import serving

import gemma_py
from gemma_py.generate.scheduler import Scheduler


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gemma-3-270m")
    parser.add_argument("--http", action="store_true", help="send the requests to a server, as streams")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument(
        "--longest",
        type=int,
        default=200,
        help="the most tokens of a prompt; a shared prefix can have twice as many, and an answer half as many",
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    made, seconds, wrong, seed = 0, 0.0, [], args.seed
    with gemma_py.load(args.model, threads=args.threads) as engine:
        with contextlib.ExitStack() as stack:
            if args.http:
                server = stack.enter_context(serving(engine, args.parallel, args.streams))
                scheduler = server.app.service.scheduler
            else:
                scheduler = Scheduler(engine, args.parallel, args.streams)
                stack.callback(scheduler.close)
            while made < args.tokens:
                crowd = Crowd(engine, args.streams, seed, args.longest)
                start, before = time.monotonic(), scheduler.stats()
                if not (crowd.same_over_http(server) if args.http else crowd.same(scheduler)):
                    wrong.append(seed)
                seconds += time.monotonic() - start
                made += sum(len(alone) for alone in crowd.alone)
                passes = scheduler.stats().passes - before.passes
                print(f"seed {seed}: {made} tokens, {passes} passes, {len(wrong)} rounds wrong", flush=True)
                seed += 1
        report = {"tokens": made, "seconds": round(seconds, 1), "wrong_seeds": wrong, **asdict(scheduler.stats())}
    print(json.dumps(report))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
