"""How fast prefill and decode are, by threads; medians of interleaved rounds.

    python tools/speed.py [MODEL] [--threads 1,2] [--tokens 512] [--decode 64] [--rounds 5]

Wants a quiet machine. The same bits are checked as it goes. The last line is one JSON object.
"""

import argparse
import json
import random
import statistics
import sys
import time

import numpy as np

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL


def once(engine: gemma_py.Engine, ids: list[int], count: int) -> tuple[float, float, list[str]]:
    """(prefill tokens a second, decode tokens a second, digests)"""
    session = engine.session()
    start = time.perf_counter()
    logits = session.prefill(ids)
    middle = time.perf_counter()
    for _ in range(count):
        logits = session.decode(int(np.argmax(logits)))
    end = time.perf_counter()
    return len(ids) / (middle - start), count / (end - middle), session.kv_digest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engines = [gemma_py.load(args.model, threads=int(part)) for part in args.threads.split(",")]
    rng = random.Random(1)
    ids = [2, *(rng.randrange(300, engines[0].config.vocab_size) for _ in range(args.tokens - 1))]
    figures: dict[int, list[tuple[float, float]]] = {engine.threads: [] for engine in engines}
    digests = set()
    for number in range(args.rounds + 1):  # the first warms up
        for engine in engines:
            prefill, decode, digest = once(engine, ids, args.decode)
            digests.add(tuple(digest))
            if number:
                figures[engine.threads].append((prefill, decode))
    report = {}
    for threads, rows in figures.items():
        for name, column in ((f"prefill {args.tokens}", 0), ("decode", 1)):
            values = [row[column] for row in rows]
            report[f"{name}, {threads} threads"] = round(statistics.median(values), 1)
            print(
                f"{name}, {threads} threads: {statistics.median(values):7.1f} tok/s ({min(values):.1f} to {max(values):.1f})"
            )
    print(json.dumps({**report, "same_bits": len(digests) == 1}))
    return 0 if len(digests) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
