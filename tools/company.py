"""Requests in company: does each get, bit by bit, what it gets alone?

    python tools/company.py [MODEL] [--tokens 10000] [--streams 32] [--parallel 8] [--longest 200] [--threads N] [--seed 1]

Rounds of requests of random lengths, greedy and drawn, that come now and then, begin alike or not, and some of which are
cancelled. Each is generated alone first; tokens, texts and log probabilities are compared. The last line is one JSON object;
exit code 1 if any differed.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from test_scheduler import Crowd

import gemma_py
from gemma_py.scheduler import Scheduler


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gemma-3-270m")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument(
        "--longest", type=int, default=200, help="of the parts of a prompt, and twice that of an answer"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    made, seconds, wrong, seed = 0, 0.0, [], args.seed
    with gemma_py.load(args.model, threads=args.threads) as engine:
        scheduler = Scheduler(engine, args.parallel, args.streams)
        while made < args.tokens:
            crowd = Crowd(engine, args.streams, seed, args.longest)
            start, before = time.monotonic(), scheduler.stats()
            if not crowd.same(scheduler):
                wrong.append(seed)
            seconds += time.monotonic() - start
            made += sum(len(alone) for alone in crowd.alone)
            passes = scheduler.stats().passes - before.passes
            print(f"seed {seed}: {made} tokens, {passes} passes, {len(wrong)} rounds wrong", flush=True)
            seed += 1
        scheduler.close()
        report = {"tokens": made, "seconds": round(seconds, 1), "wrong_seeds": wrong, **asdict(scheduler.stats())}
    print(json.dumps(report))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
