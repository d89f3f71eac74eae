"""Find the fastest number of threads and chunk size, and check that all settings give the same bits.

Each run computes a prompt with one number of threads and one chunk size, then decodes some tokens. Figures are medians over all
rounds. The efficiency in brackets is the speed per thread, relative to the smallest number of threads. A star marks the fastest
setting. A second table shows how long a pass takes that computes guesses of the next tokens, or tokens of several answers, and
in brackets the multiple of a pass of one token. Logits, keys and values are compared after every run; if two runs differ, the
first difference is reported and the exit code is 1. Ctrl-C ends the measurement and shows the results so far.

With --json: {"tokens", "new_tokens", "points": [{"threads", "chunk", "prefill_tokens_per_second", "prefill_rounds",
"prefill_efficiency", "decode_tokens_per_second", "decode_rounds", "decode_efficiency", "pass_seconds": {rows: seconds}}], "best",
"equal", "difference"}.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import gemma_py
from gemma_py import machine
from gemma_py.checks.plot import check_drawable
from gemma_py.checks.sweep import PASSES, Sweep
from gemma_py.checks.verify import threads_text
from gemma_py.cli.common import add_model, counts, environment_threads, markdown, positive, print_json, teams
from gemma_py.cli.progress import LoadProgress, ProgressBar
from gemma_py.generate.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--threads", type=teams, dest="teams", default=environment_threads(), metavar="N,N",
        help="numbers of worker threads (default: up to the cores that this process may use, and all hardware threads)",
    )  # fmt: skip
    parser.add_argument(
        "--chunks", type=counts, default=(32, 128, 512), metavar="N,N", help="chunk sizes (default: 32,128,512)"
    )
    parser.add_argument(
        "--tokens", type=positive, default=512, metavar="N", help="tokens of the prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--new", type=positive, default=32, metavar="N", help="tokens to decode after the prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=positive, default=3, metavar="N", help="rounds of measurements (default: %(default)s)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the result into a .png, .svg or .pdf file (needs matplotlib)"
    )


def default_teams() -> tuple[int, ...]:
    cores, processors = machine.threads(), len(machine.affinity())
    few = range(1, min(cores, 8) + 1)
    return tuple(sorted({*few, *(1 << n for n in range(4, 11) if 1 << n < cores), cores, processors}))


def run(args: argparse.Namespace) -> None:
    if args.plot is not None:
        check_drawable(args.plot)
    threads = args.teams or default_teams()

    def open_engine(count: int, shards: int = 1) -> Engine:
        return gemma_py.load(args.model, threads=count, progress=LoadProgress(), shards=shards)

    interrupted = None
    with open_engine(max(threads)) as engine:
        sweep = Sweep(engine, threads, args.chunks, args.tokens, args.new)
        with ProgressBar("measuring", wanted=not args.json) as progress:
            try:
                sweep.run(args.rounds, open_engine, progress)
            except KeyboardInterrupt as signal:  # show the results so far, then raise the signal again
                interrupted = signal
        if sweep.points and args.plot is not None:
            sweep.draw(args.plot, f"{engine.name} on {machine.name()}")
    if args.json:
        print_json(sweep.as_json())
    elif sweep.points:
        print(table(sweep))
        if args.plot is not None:
            print(f"The figure is in {args.plot}.")
    if interrupted is not None:
        raise interrupted
    sweep.raise_on_mismatch()


def table(sweep: Sweep) -> str:
    setting, decode = sweep.best_prefill(), sweep.best_decode()
    header = ["threads", *(f"prefill in chunks of {chunk}" for chunk in sweep.chunks), "decode"]

    def cell(rate: float | None, share: float | None, best: bool) -> str:
        if rate is None:
            return ""
        return f"{'* ' if best else ''}{rate:.1f}" + ("" if share is None else f" ({share:.0%})")

    rows = [
        [str(count)]
        + [cell(sweep.prefill(count, chunk), sweep.efficiency(count, chunk), (count, chunk) == (setting.threads, setting.chunk))
           for chunk in sweep.chunks]
        + [cell(sweep.decode(count), sweep.efficiency(count, None), count == decode)]
        for count in sweep.threads
    ]  # fmt: skip
    runs = sum(len(point.decode) for point in sweep.points)
    lines = [
        markdown(header, rows),
        "",
        f"Tokens a second; * fastest: prefill on {setting}, decode with {threads_text(decode)}.",
    ]
    passes = [count for count in (1, *PASSES) if any(sweep.pass_seconds(threads, count) for threads in sweep.threads)]
    if len(passes) > 1:
        lines += ["", passes_table(sweep, passes), "", "Milliseconds of a pass after the prompt."]
    if sweep.difference is None:
        lines.append(f"{runs} run{'s' * (runs > 1)} of {sweep.tokens} + {sweep.new} tokens have the same bits.")
    return "\n".join(lines)


def passes_table(sweep: Sweep, passes: Sequence[int]) -> str:
    def cell(seconds: float | None, of_one: float | None) -> str:
        return "" if seconds is None or of_one is None else f"{seconds * 1e3:.1f} ({seconds / of_one:.2f}x)"

    rows = [
        [str(threads)] + [cell(sweep.pass_seconds(threads, count), sweep.pass_seconds(threads, 1)) for count in passes]
        for threads in sweep.threads
    ]
    return markdown(["threads", *(f"{count} token{'s' * (count > 1)}" for count in passes)], rows)
