"""Stress test: run forward passes with random delays and with a fault at every phase, and compare every result.

    python tools/stress.py [--passes 10000] [--faults 100] [--threads 4] [--seed 1]

The model is tiny and quantised, and a pass has every kind of barrier and wait. A pass that hangs ends at the deadline
and counts as a failure. The seeds of failures are printed, and --seed repeats a failure. The last line is one JSON
object; the exit code is 1 on failures.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from equivalence import PARTS, WIDE, Expected, prompt
from faults import PLACES
from gguf_files import write_model

import gemma_py
from gemma_py.errors import WorkerError
from gemma_py.runtime.fault_injection import FaultPlan


def shaken(engine: gemma_py.Engine, want: Expected, count: int, seed: int) -> list[int]:
    """Return the seeds whose passes gave wrong results or failed. A chunk is a pass."""
    wrong, done = [], 0
    rng = random.Random(seed)
    shown = time.monotonic()
    while done < count:
        seed += 1
        engine.instruments.fault_plan = FaultPlan(seed=seed)
        size = rng.choice([1, 5, 9, 16, len(want.ids)])
        done += -(-len(want.ids) // size)
        try:
            if not want.same(engine, [size]):
                wrong.append(seed)
        except WorkerError as error:
            print(f"seed {seed}: {error}")
            wrong.append(seed)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{done} passes, {len(wrong)} wrong", flush=True)
    return wrong


def faults(engine: gemma_py.Engine, want: Expected, count: int) -> tuple[int, float]:
    """Inject faults. Returns how many were reported right by an engine that stays usable, and the longest time to a
    report.
    """
    good, longest = 0, 0.0
    for number in range(count):
        layer, name = PLACES[number % len(PLACES)]
        phase = engine.program.label(name)
        kind = ("raise", "stall")[number // len(PLACES) % 2]
        worker = number % engine.threads
        engine.instruments.fault_plan = FaultPlan(fault=kind, worker=worker, layer=layer, phase=phase, place="enter")
        start = time.monotonic()
        try:
            # Only decoding has a phase for scores.
            engine.session().prefill(want.ids, chunk=1 if name == "scores" else None)
            reported = False
        except WorkerError as error:
            longest = max(longest, time.monotonic() - start)
            reported = (error.worker, error.layer, error.phase) == (worker, layer, phase)
        engine.instruments.fault_plan = None
        good += reported and want.same(engine, [len(want.ids)])
    return good, longest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=10_000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = write_model(Path(scratch) / "m.gguf", WIDE, seed=4, kinds=dict.fromkeys(PARTS, "Q8_0"))
        with gemma_py.load(path, threads=args.threads) as engine:
            engine.instruments.poison = True
            want = Expected(engine, prompt(engine.config, 40))
            wrong = shaken(engine, want, args.passes, args.seed)
            good, longest = faults(engine, want, args.faults)
    report = {"passes": args.passes, "wrong_seeds": wrong, "faults": args.faults, "reported": good}
    print(json.dumps({**report, "longest_report_seconds": round(longest, 2), "deadline": 5.0}))
    return 0 if not wrong and good == args.faults else 1


if __name__ == "__main__":
    sys.exit(main())
