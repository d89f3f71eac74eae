"""Measure how prefill speed, decode time and memory grow with the context. Print a table and JSON, and draw a figure.

    python tools/growth.py [MODEL] [--threads N] [--tokens 128,256,...,16384] [--decode 16] [--rounds 3]
        [--plot FILE.png]

Each round runs a prompt of each length in a new session and then decodes some tokens. Needs an idle machine and, with
the defaults, some minutes. The last line is one JSON object. The figure needs matplotlib (extra `plot`).
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gemma_py
from gemma_py import machine
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.checks import plot
from gemma_py.checks.cost import BYTES, FLOP, pass_cost
from gemma_py.checks.verify import prompt
from gemma_py.cli.common import counts, markdown, positive
from gemma_py.cli.progress import ProgressBar
from gemma_py.runtime.kv_types import KV_TYPES

LENGTHS = tuple(1 << n for n in range(7, 15))


def process_bytes() -> int | None:
    table = Path("/proc/self/statm")
    return int(table.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if table.exists() else None


def once(engine: gemma_py.Engine, ids: list[int], length: int) -> dict[str, Any]:
    session = engine.session()
    start = time.perf_counter()
    session.prefill(ids[:length])
    prefill = time.perf_counter() - start
    steps = []
    for token in ids[length:]:
        start = time.perf_counter()
        session.decode(token)
        steps.append(time.perf_counter() - start)
    return {
        "prefill_seconds": prefill,
        "decode_seconds": statistics.median(steps),
        "kv_bytes": session._cache.nbytes,
        "process_bytes": process_bytes(),
    }


def counted(engine: gemma_py.Engine, length: int) -> dict[str, Any]:
    """Operations per prompt token and bytes per decoded token, computed instead of measured."""
    kv = KV_TYPES[engine.kv_type]
    prefill, decode = pass_cost(engine.program, kv, 0, length), pass_cost(engine.program, kv, length, 1)
    return {"prefill_flop_per_token": int(prefill[:, FLOP].sum()) / length, "decode_bytes": int(decode[:, BYTES].sum())}


def summary(length: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds, and the memory after the last round."""
    prefill = statistics.median(made["prefill_seconds"] for made in rounds)
    return {
        "tokens": length,
        "prefill_tokens_per_second": length / prefill,
        "decode_milliseconds": 1e3 * statistics.median(made["decode_seconds"] for made in rounds),
        "kv_bytes": rounds[-1]["kv_bytes"],
        "process_bytes": rounds[-1]["process_bytes"],
    }


def draw(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    figure, (prefill, decode, memory) = plot.panels(3, title)
    lengths = [row["tokens"] for row in rows]
    plot.draw(prefill, "prefill", lengths, [row["prefill_tokens_per_second"] for row in rows])
    plot.finish(prefill, "prefill", "tokens of the prompt", "tokens a second", lengths, log=True)
    plot.draw(decode, "decode", lengths, [row["decode_milliseconds"] for row in rows])
    plot.finish(decode, "decode", "tokens in the context", "milliseconds a token", lengths, log=True)
    plot.draw(memory, "keys and values", lengths, [row["kv_bytes"] / 2**20 for row in rows])
    if rows[0]["process_bytes"] is not None:
        plot.draw(memory, "the whole process", lengths, [row["process_bytes"] / 2**20 for row in rows])
    plot.finish(memory, "memory", "tokens in the context", "MiB", lengths, log=True)
    plot.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--tokens", type=counts, default=LENGTHS)
    parser.add_argument("--decode", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.plot is not None:
        plot.check_drawable(args.plot)
    measured: dict[int, list[dict[str, Any]]] = {length: [] for length in sorted(args.tokens)}
    with gemma_py.load(args.model, threads=args.threads) as engine, ProgressBar("measuring", wanted=True) as progress:
        ids = prompt(max(measured) + args.decode, engine.config.vocab_size)
        once(engine, ids[: 1 + args.decode], 1)
        done, total = 0, args.rounds * sum(measured)
        for number in range(args.rounds):
            for length, rounds in measured.items():
                progress(f"{length} tokens, round {number + 1} of {args.rounds}", done / total)
                rounds.append(once(engine, ids[: length + args.decode], length))
                done += length
        threads, name = engine.threads, engine.path.name
        rows = [summary(length, rounds) | counted(engine, length) for length, rounds in measured.items()]
    table = [
        [f"{row['tokens']:,}", f"{row['prefill_flop_per_token'] / 1e9:.3f}", f"{row['prefill_tokens_per_second']:.0f}",
         f"{row['decode_bytes'] / 2**20:.1f}", f"{row['decode_milliseconds']:.2f}", f"{row['kv_bytes'] / 2**20:.1f}"]
        for row in rows
    ]  # fmt: skip
    print(
        markdown(
            ["tokens", "GFLOP a prompt token", "prefill tok/s", "MiB a decoded token", "decode ms", "KV MiB"],
            table,
            left=0,
        )
    )
    if args.plot is not None:
        draw(args.plot, f"{name}, {threads} threads, {machine.name()}", rows)
    print(json.dumps({"model": name, "threads": threads, "rounds": args.rounds, "points": rows}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except gemma_py.GemmaError as error:
        sys.exit(f"growth: {error}")
