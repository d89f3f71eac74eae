"""Check that this machine computes the same bits with every number of threads and of shards and every chunk size.

A fixed prompt is computed with each number of threads and of shards and each chunk size; chunks of 1 are decoding token by
token. The logits of all tokens, and all keys and values, must have the same bits in all runs. The logits, keys and values of the
first tokens must also have the bits of the specification (gemma_py.reference). If two runs differ, the layer, phase, position and
worker of the first difference are reported, and the exit code is 1.

With an embedding model, the prompt is cut into texts, and the embeddings of the texts are compared. --chunks then gives the
numbers of texts in a pass.

To compare two machines, write digests of every phase with --trace FILE on one machine, and read this file with --against FILE on
the other machine. With --address, every host of a Ray cluster computes such digests, which are compared with this machine's.

With --json: {"equal", "tokens", "reference_tokens", "runs": [{"threads", "shards", "chunk", "logits", "kv"}], "difference"}, where
logits and kv are digests, and difference is null if all runs are equal. --against adds "against", and --address adds "hosts".
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import gemma_py
from gemma_py.catalog import as_other_processes_name
from gemma_py.checks import trace_file, verify
from gemma_py.checks.host_traces import TraceJob, differences
from gemma_py.cli.common import (
    add_address,
    add_kv,
    add_model,
    add_open_cluster,
    add_quant,
    counts,
    hosts_of,
    natural,
    note_exceptions,
    positive,
    print_json,
)
from gemma_py.cli.progress import LoadProgress, ProgressBar
from gemma_py.cluster.spans import check_shards
from gemma_py.errors import MismatchError
from gemma_py.generate.engine import Engine
from gemma_py.paths import check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_quant(parser)
    add_kv(parser)
    parser.add_argument(
        "--threads",
        type=counts,
        default=(1, 2, 3, 4),
        metavar="N,N",
        help="numbers of worker threads (default: 1,2,3,4)",
    )
    parser.add_argument(
        "--chunks",
        type=counts,
        default=(1, 7, 64, 512),
        metavar="N,N",
        help="chunk sizes in tokens, or for an embedding model numbers of texts in a pass (default: 1,7,64,512)",
    )
    parser.add_argument(
        "--shards",
        type=counts,
        default=(1,),
        metavar="N,N",
        help="numbers of processes among which the layers are divided (default: 1)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"tokens of the prompt (default: {verify.TOKENS}, or as many as fit; with --against as many as FILE has)",
    )
    parser.add_argument(
        "--reference",
        type=natural,
        default=verify.REFERENCE,
        metavar="N",
        help="how many tokens to compare with the specification, which is slow; 0: none (default: %(default)s)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write digests of every phase")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with a trace from another machine")
    add_address(parser)
    add_open_cluster(parser)


def run(args: argparse.Namespace) -> None:
    def open_engine(threads: int, shards: int = 1) -> Engine:
        return gemma_py.load(
            args.model, threads=threads, kv=args.kv, quant=args.quant, progress=LoadProgress(), shards=shards
        )

    with ProgressBar("checking", wanted=not args.json) as progress:
        # Load the model once before the runs, so that invalid arguments are reported early.
        with open_engine(max(args.threads)) as engine:
            note_exceptions(engine)
            if max(args.shards) > 1:
                check_shards(engine.config, max(args.shards))
            wanted, theirs = args.tokens, None
            if args.against is not None:
                theirs = trace_file.read_trace(args.against)
                trace_file.check_comparable(theirs, args.against, engine, wanted)
                wanted = len(theirs["tokens"])
            tokens = verify.prompt_length(wanted, engine.context)
            ids = verify.prompt(tokens, engine.config.vocab_size)
            if args.trace is not None:
                check_writable(args.trace)
        hosts = hosts_of(args)
        report = verify.verify(open_engine, args.threads, args.chunks, tokens, args.reference, progress, args.shards)
        made, on_hosts = None, list[tuple[str, verify.Difference | None]]()
        if report.difference is None and (args.trace or theirs or hosts):
            progress("the trace", 1.0)
            with open_engine(args.threads[0]) as engine:
                made = trace_file.trace_document(engine, ids)
        if made is not None and hosts is not None:
            progress("the hosts", 1.0)
            job = TraceJob(as_other_processes_name(args.model), args.quant, args.kv, ids)
            on_hosts = [(host.name, found) for host, found in differences(hosts.usable(), job, made)]
    if made is not None and args.trace is not None:
        trace_file.write_trace(args.trace, made)
    apart = None
    if made is not None and theirs is not None:
        apart = trace_file.compare(theirs, made, f"this machine and {args.against}")
    show(args, report, apart, on_hosts)
    report.raise_on_mismatch()
    for difference in (apart, *(found for _, found in on_hosts)):
        if difference is not None:
            raise MismatchError(str(difference))


def show(
    args: argparse.Namespace,
    report: verify.VerifyReport,
    apart: verify.Difference | None,
    on_hosts: Sequence[tuple[str, verify.Difference | None]],
) -> None:
    if args.json:
        table = report.as_json()
        if args.against is not None and report.difference is None:
            table["against"] = {"equal": apart is None, "difference": verify.as_table(apart)}
        if args.address is not None:
            table["hosts"] = [
                {"host": name, "equal": found is None, "difference": verify.as_table(found)} for name, found in on_hosts
            ]
        print_json(table)
        return
    print(grid(report))
    if report.difference is None:
        print(equal(report))
        if report.reference_tokens:
            print(f"The first {report.reference_tokens} tokens have the bits of the specification.")
        if args.trace is not None:
            print(f"The trace is in {args.trace}.")
        if args.against is not None and apart is None:
            print(f"Every phase has the bits of {args.against}.")
        equals = [name for name, found in on_hosts if found is None]
        if equals:
            print(f"Every phase has the same bits on {', '.join(equals)}.")


def equal(report: verify.VerifyReport) -> str:
    runs, embeds = len(report.settings), report.settings[0].embeds
    texts = f"{len(report.results[0].rows)} texts with " if embeds else ""
    results = "embeddings" if embeds else "logits"
    checked = f"{runs} run{'s' * (runs > 1)} of {texts}{report.tokens} tokens: all {results} and all keys and values"
    alone = any(setting.chunk == 1 for setting in report.settings)
    apart = "" if not alone else ", each text alone as together" if embeds else ", by single tokens and by chunks"
    return f"{checked} have the same bits{apart}."


def grid(report: verify.VerifyReport) -> str:
    """Return a table with the digest of each run. A star marks a digest that differs from the first run's."""
    chunks, embeds = list(dict.fromkeys(setting.chunk for setting in report.settings)), report.settings[0].embeds
    digests = {setting: result.digest[:8] for setting, result in zip(report.settings, report.results, strict=True)}
    sharded = any(setting.shards > 1 for setting in report.settings)
    head = "shards threads" if sharded else "threads"
    lines = [head + "".join(f"{f'{chunk} a pass' if embeds else f'chunks of {chunk}':>16}" for chunk in chunks)]
    for shards, threads in dict.fromkeys((setting.shards, setting.threads) for setting in report.settings):
        row = [verify.RunSetting(threads, chunk, embeds, shards) for chunk in chunks]
        cells = (f"{'*' if setting in report.different else ''}{digests[setting]}" for setting in row)
        lines.append(
            (f"{shards:6} {threads:7}" if sharded else f"{threads:7}") + "".join(f"{cell:>16}" for cell in cells)
        )
    return "\n".join(lines)
