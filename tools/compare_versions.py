"""Compare the speed of this checkout with the speed of another checkout of gemma_py.

    python tools/compare_versions.py OTHER [MODEL] [--python PYTHON] [--threads 2] [--rounds 21]
        [--work prefill-512,...]

OTHER is the root of the other checkout; PYTHON runs it (default: this Python). Each version has a process of its own,
and the two processes take turns, so that other load on the machine slows both versions alike. The table has the median
milliseconds of each version, and the median and quartiles of old / new. If old / new is above 1, this checkout is
faster. Each version keeps kernels and packed weights in the usual cache directory. Needs a quiet machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STREAMS, STEPS = 8, 8


def pieces(model: str, threads: int) -> dict[str, Callable[[], None]]:
    """{name: a function that does the work to measure}

    decode-512: decode STEPS tokens after 512 tokens.
    streams-8: STEPS passes with a token of each of 8 streams.
    start: a new process that prints one token.
    """
    import gemma_py
    from gemma_py.runtime import runner

    engine = gemma_py.load(model, threads=threads)
    ids = [(7919 * number + 13) % engine.config.vocab_size for number in range(3000)]
    # Older versions of gemma_py have other names for SequenceInput, run_together and new_cache.
    sequence = getattr(runner, "SequenceInput", None) or runner.Part  # type: ignore[attr-defined]
    together = getattr(engine, "run_together", None) or engine.runner.run_together
    new_cache = getattr(engine, "new_cache", None) or engine.runner.cache
    long, caches = engine.session(), [new_cache() for _ in range(STREAMS)]
    long.prefill(ids[:512])
    together([sequence(cache, ids[40 * number :][:128]) for number, cache in enumerate(caches)])

    def prefill(tokens: int) -> None:
        engine.session().prefill(ids[:tokens])

    def decode() -> None:
        for number in range(STEPS):
            long.decode(ids[600 + number])

    def start() -> None:
        command = [sys.executable, "-m", "gemma_py", "generate", model, "--prompt", "a", "--max-tokens", "1"]
        subprocess.run(command, capture_output=True, check=True)

    def streams() -> None:
        for number in range(STEPS):
            together([sequence(cache, [ids[900 + number]]) for cache in caches])

    return {
        "prefill-512": lambda: prefill(512),
        "prefill-2048": lambda: prefill(2048),
        "decode-512": decode,
        "streams-8": streams,
        "start": start,
    }


def worker(model: str, threads: int) -> None:
    """For each line of standard input, do the work that the line names, and print the seconds."""
    works = pieces(model, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        works[line.strip()]()
        print(time.perf_counter() - start, flush=True)


class Version:
    def __init__(self, root: Path, python: str, model: str, threads: int) -> None:
        command = [python, str(ROOT / "tools" / "compare_versions.py"), "--worker", model, str(threads)]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        # If Python may not store bytecode, the start of a process mostly shows how much source code the version has.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the process of a checkout ended early; see the error above")
        return line

    def seconds(self, work: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{work}\n")
        self.process.stdin.flush()
        return float(self.answer())


def compare(old: Version, new: Version, work: str, rounds: int) -> str:
    times: dict[Version, list[float]] = {old: [], new: []}
    for number in range(-1, rounds):
        for version in (old, new) if number % 2 else (new, old):
            spent = version.seconds(work)
            if number >= 0:
                times[version].append(spent)
    ratios = [before / after for before, after in zip(times[old], times[new], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    milliseconds = [1e3 * statistics.median(times[version]) for version in (old, new)]
    return f"{work:14} {milliseconds[0]:10.1f} {milliseconds[1]:10.1f} {middle:10.3f} {low:8.3f} to {high:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("model", nargs="?", default="gemma-3-270m")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--work", default="prefill-512,prefill-2048,decode-512,streams-8,start")
    args = parser.parse_args()
    old = Version(args.other.resolve(), args.python, args.model, args.threads)
    new = Version(ROOT, sys.executable, args.model, args.threads)
    print(f"{'work':14} {'old ms':>10} {'new ms':>10} {'old / new':>10}   quartiles")
    for work in args.work.split(","):
        print(compare(old, new, work, args.rounds), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
    else:
        main()
