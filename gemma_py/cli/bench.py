"""Measure the speed of a model on this machine, and compare it with the limits of the machine.

Tests are named as in llama-bench: pp512 is the prefill of a prompt of 512 tokens, tg64 is the generation of 64 tokens, and
"@ d2048" means that the context already holds 2,048 tokens. Tokenisation and sampling are not measured. Figures are medians over
all rounds, with the standard deviation. Ctrl-C ends the measurement and shows the results so far.

GFLOP/s counts the operations of matrix products and attention. GB/s counts the bytes of the weights and the KV cache, read once
in each forward pass. The machine's limits are measured between the tests: float32 multiply-adds, multiply-adds of int16 pairs,
and memory reads. The share of the float32 limit can exceed 100% for quantised weights, because the kernels multiply quantised
weights as int16. The share of the memory limit can exceed 100% for a small model, which fits into the processor's caches.

With an embedding model, only prompts are measured. Each prompt is a text that is embedded in one pass.

--shape NAME measures a model of `gemma_py models` with random weights, without downloading the model.

--speculate measures speculative decoding instead: recorded prompts are continued with and without speculation. The table shows
tokens per pass, accepted draft tokens, tokens per second, and the median and the minimum speed-up. The command fails if
speculation changes an answer. -p, -d, --profile, --shape and --csv are then refused.

With --json: {"model", "bytes", "parameters", "format", "machine", "limits", "tests": [{"threads", "test", "tokens", "depth",
"tokens_per_second", "stdev", "rounds", "gflops", "gbytes_per_second", "of_f32", "of_int16", "of_memory", "digest"}]}; --profile
adds "profile" to each test. With --json --speculate: {"model", "texts": [{"text", "temperature", "tokens", "tokens_a_pass",
"guessed", "accepted", "off_tokens_per_second", "auto_tokens_per_second", "speed", "least"}]}.
"""

import argparse
import csv
import io
from typing import Any

import gemma_py
from gemma_py import machine
from gemma_py.checks import speculation
from gemma_py.checks.measure import Benchmark, BenchTest, report
from gemma_py.checks.shapes import random_checkpoint
from gemma_py.checks.verify import threads_text
from gemma_py.cli.common import (
    add_kv,
    add_model,
    environment_threads,
    markdown,
    naturals,
    positive,
    print_json,
    size,
    teams,
    warn_of_threads,
)
from gemma_py.cli.progress import LoadProgress, ProgressBar
from gemma_py.errors import InputError
from gemma_py.generate.engine import Engine

_SPECULATED_TOKENS = 128
_TESTS = (BenchTest(True, 512), BenchTest(True, 2048), BenchTest(False, 64), BenchTest(False, 64, 2048))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "-p", type=naturals, metavar="N,N", help="prompt lengths to measure; 0: none (default: 512,2048)"
    )
    parser.add_argument(
        "-n",
        type=naturals,
        metavar="N,N",
        help="numbers of tokens to generate; 0: none (default: 64; with --speculate 128)",
    )
    parser.add_argument(
        "-d",
        type=naturals,
        metavar="N,N",
        help="tokens in the context before each test (default: 0, and 2048 for tg64)",
    )
    parser.add_argument(
        "-r", type=positive, default=5, metavar="N", help="rounds of measurements (default: %(default)s)"
    )
    parser.add_argument(
        "-t", "--threads", type=teams, dest="teams", default=environment_threads(), metavar="N,N",
        help="numbers of worker threads (default: GEMMA_PY_THREADS, else the number of usable physical cores)",
    )  # fmt: skip
    add_kv(parser)
    parser.add_argument("--profile", action="store_true", help="show the time of each phase too")
    parser.add_argument(
        "--shape", metavar="NAME", help="use random weights in the shape of a model from `gemma_py models`"
    )
    parser.add_argument(
        "--type",
        default="q4_0",
        metavar="TYPE",
        help="the format of the weight matrices with --shape (default: %(default)s)",
    )
    parser.add_argument(
        "--speculate", action="store_true", help="measure recorded texts with and without speculation instead"
    )
    parser.add_argument("--csv", action="store_true", help="print comma-separated values instead of a table")


def tests(args: argparse.Namespace) -> tuple[BenchTest, ...]:
    if args.p is None and args.n is None and args.d is None:
        return _TESTS
    prompts, new, depths = (
        (512, 2048) if args.p is None else args.p,
        (64,) if args.n is None else args.n,
        args.d or (0,),
    )
    made = tuple(
        BenchTest(prompt, tokens, depth)
        for depth in depths
        for prompt, lengths in ((True, prompts), (False, new))
        for tokens in lengths
        if tokens
    )
    if not made:
        raise InputError("nothing to measure: -p and -n are 0, and at least one of them should be larger")
    return made


def open_engine(args: argparse.Namespace, threads: int, wanted: tuple[BenchTest, ...]) -> Engine:
    if args.shape is None:
        return gemma_py.load(args.model, threads=threads, kv=args.kv, progress=LoadProgress())
    longest = max(test.tokens + test.depth for test in wanted)
    return Engine(random_checkpoint(args.shape, args.type, longest), threads, kv=args.kv, progress=LoadProgress())


def measure_speculation(args: argparse.Namespace) -> None:
    others = {"-p": args.p, "-d": args.d, "--profile": args.profile, "--shape": args.shape, "--csv": args.csv}
    refused = [name for name, given in others.items() if given]
    if refused or len(args.n or ()) > 1 or len(args.teams or ()) > 1 or args.n == (0,):
        raise InputError(
            f"--speculate takes only one number for -n and for -t, and cannot be combined with {', '.join(refused or others)}"
        )
    threads, tokens = (args.teams or (None,))[0], (args.n or (_SPECULATED_TOKENS,))[0]
    cases = {
        (name, temperature): speculation.Case(text, temperature, tokens, args.r)
        for temperature in (0.0, 0.8)
        for name, text in speculation.PROMPTS.items()
    }
    rows = []
    with (
        gemma_py.load(args.model, threads=threads, kv=args.kv, progress=LoadProgress()) as engine,
        ProgressBar("measuring", wanted=not args.json) as progress,
    ):
        for number, ((name, temperature), case) in enumerate(cases.items()):
            progress(f"{name}, temperature {temperature:g}", number / len(cases))
            rows.append({"text": name, **speculation.measured(engine, case)})
    if args.json:
        print_json({"model": str(args.model), "texts": rows})
    else:
        print(markdown(("text", *speculation.HEADER), [[row["text"], *speculation.cells(row)] for row in rows]))


def run(args: argparse.Namespace) -> None:
    if args.speculate:
        measure_speculation(args)
        return
    wanted = tests(args)
    sizes: tuple[int, ...] = args.teams or (machine.threads(),)
    warn_of_threads(max(sizes))
    interrupted = None
    with open_engine(args, max(sizes), wanted) as engine:
        # Without -n, an embedding model runs no generation tests, because the model generates no text.
        if engine.config.embedding is not None and args.n is None:
            wanted = tuple(test for test in wanted if test.prompt)
        bench = Benchmark(engine, sizes, wanted)
        with ProgressBar("measuring", wanted=not args.json and not args.csv) as progress:
            try:
                bench.run(args.r, args.profile, progress)
            except KeyboardInterrupt as signal:  # show the results so far, then raise the signal again
                interrupted = signal
        made = report(engine, bench)
    if args.json:
        print_json(made)
    elif args.csv:
        print(as_csv(made), end="")
    else:
        print(as_markdown(made))
    if interrupted is not None:
        raise interrupted


def as_csv(made: dict[str, Any]) -> str:
    common = ("model", "bytes", "parameters")
    rows = [
        {name: made[name] for name in common}
        | {name: value for name, value in test.items() if isinstance(value, str | int | float)}
        for test in made["tests"]
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else common, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


_RATES = ("GFLOP/s", "of f32", "GB/s", "of memory")


def rates(entry: dict[str, Any]) -> list[str]:
    if "gflops" not in entry:
        return [""] * len(_RATES)
    return [
        f"{entry['gflops']:.1f}",
        f"{entry['of_f32']:.0%}",
        f"{entry['gbytes_per_second']:.1f}",
        f"{entry['of_memory']:.0%}",
    ]


def as_markdown(made: dict[str, Any]) -> str:
    described = [made["model"], size(made["bytes"]), f"{made['parameters'] / 1e6:,.1f} M"]
    rows = [
        [
            *described,
            str(test["threads"]),
            test["test"],
            f"{test['tokens_per_second']:.1f} ± {test['stdev']:.1f}",
            *rates(test),
        ]
        for test in made["tests"]
    ]
    parts = [markdown(["model", "size", "params", "threads", "test", "t/s", *_RATES], rows)]
    for test in made["tests"]:
        if "profile" in test:
            passes = test["passes"]
            parts.append(
                f"{test['test']}, {threads_text(test['threads'])}: where the time of a pass goes ({passes} measured)"
            )
            rows = [
                [entry["phase"], f"{entry['seconds'] / passes * 1e3:.3f}", f"{entry['share']:.1%}", *rates(entry)]
                for entry in test["profile"]
            ]
            parts.append(markdown(["phase", "ms", "share", *_RATES], rows))
    limits = [
        [
            str(limit["threads"]),
            f"{limit['f32_gflops']:.1f}",
            f"{limit['int16_gops']:.1f}",
            f"{limit['memory_gbytes_per_second']:.1f}",
        ]
        for limit in made["limits"]
    ]
    processor = made["machine"]
    parts.append(
        f"The limits of this machine ({processor['processor']}, {processor['cores']} cores usable), measured now:"
    )
    parts.append(markdown(["threads", "f32 GFLOP/s", "int16 GOP/s", "memory GB/s"], limits))
    return "\n\n".join(parts)
