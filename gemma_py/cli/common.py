"""Arguments, input, output and warnings that several commands share."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gemma_py import machine
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.errors import InputError, install_command
from gemma_py.formats.blocks import QUANTS
from gemma_py.paths import atomic_write

if TYPE_CHECKING:
    from gemma_py.cluster.hosts import Hosts
    from gemma_py.generate.engine import Engine
    from gemma_py.receipts.envelope import Signer
    from gemma_py.receipts.receipt import Receipt

T = TypeVar("T")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a GGUF file, a Hugging Face directory, a name from `gemma_py models`, or hf:owner/name[/file.gguf][@revision] "
        "(default: %(default)s)",
    )


def add_input(parser: argparse.ArgumentParser, *text_flags: str) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(*text_flags, dest="text", metavar="TEXT", help="the text")
    group.add_argument("--file", type=Path, metavar="FILE", help="a file of UTF-8 text; - for standard input")
    group.add_argument(
        "--ids", type=Path, metavar="FILE", help="a file with a JSON list of token ids; no BOS token is added"
    )


def positive(text: str) -> int:
    return _number(text, 1)


def natural(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"should be a whole number of at least {least}, found {text!r}")
    return value


def counts(text: str) -> tuple[int, ...]:
    return _numbers(text, 1)


def naturals(text: str) -> tuple[int, ...]:
    return _numbers(text, 0)


def _numbers(text: str, least: int) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(_number(part, least) for part in text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"should be whole numbers of at least {least}, separated by commas, found {text!r}"
        ) from None


_THREADS = "GEMMA_PY_THREADS"


def environment_threads() -> str | None:
    """Return the default of --threads, as unparsed text. argparse parses a default that is a string."""
    return os.environ.get(_THREADS) or None


def _threads(text: str) -> int:
    return _from_environment_too(positive, text)


def teams(text: str) -> tuple[int, ...]:
    return _from_environment_too(counts, text)


def _from_environment_too(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"the value, from the command line or {_THREADS}, {error}") from None


def notify(message: str) -> None:
    print(f"gemma_py: {' '.join(message.split())}", file=sys.stderr, flush=True)


def advice_on_threads(threads: int) -> str | None:
    cores = machine.threads()
    if threads <= cores:
        return None
    return f"{threads} threads are more than the {cores} cores that this process may use, which makes the computation slower"


def warn_of_threads(threads: int) -> None:
    advice = advice_on_threads(threads)
    if advice is not None:
        notify(advice)


def add_quant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quant",
        choices=tuple(QUANTS),
        help="quantise float weights to this format while loading (default: keep the stored format)",
    )


def add_kv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv",
        default="float32",
        metavar="TYPE",
        help="the number type of the KV cache: float32, bfloat16 with half the memory, or q8_0 with about a quarter; the "
        "type changes the output (default: %(default)s)",
    )


def note_exceptions(engine: "Engine") -> None:
    left_out = engine.checkpoint.left_out
    if left_out:
        notify(f"only the text model is used; tensors left out: {parts(left_out)}")
    names = engine.kept_float
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        notify(
            f"not quantised, because the row length is not a multiple of the block size of {engine.quant}: {names[0]!r:.80}{more}"
        )


def parts(left_out: Mapping[str, int]) -> str:
    """Format the parts of a checkpoint that are not loaded, with tensor counts, such as "vision 439, audio 800"."""
    return ", ".join(f"{name} {count}" for name, count in left_out.items())


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=_threads,
        default=environment_threads(),
        metavar="N",
        help=f"number of worker threads; the output has the same bits with any number (default: {_THREADS}, else the "
        "number of physical cores within the process's CPU affinity and quota)",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    add_quant(parser)
    add_kv(parser)
    add_threads(parser)
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="the context length in tokens (default: the model's limit)",
    )
    parser.add_argument(
        "--no-pack",
        dest="pack",
        action="store_false",
        help="keep packed weights in memory, not in a file; saves disk space, but every start packs the weights again",
    )


def add_shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shards",
        type=positive,
        default=1,
        metavar="N",
        help="divide the model's layers among N processes; the output has the same bits (default: 1)",
    )


def _replicas(text: str) -> int | str:
    try:
        return text if text == "all" else positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or all") from None


def add_replicas(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas",
        type=_replicas,
        metavar="N",
        help="answer requests in N processes, each with the whole model; the output has the same bits; with --address, all "
        "means one process on each host (default: answer them in this process)",
    )


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="run processes on the hosts of the Ray cluster with this head (extra ray; this machine must be one of the hosts)",
    )


def add_open_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--open", action="store_true", help="with --address, use even a cluster without a token")


def hosts_of(args: argparse.Namespace) -> "Hosts | None":
    """Join the Ray cluster at --address. Return None without --address."""
    if args.address is None:
        return None
    try:
        from gemma_py.cluster import ray_hosts
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise InputError(f"--address needs Ray: {install_command('ray')}") from None
    return ray_hosts.connect(args.address, args.open)


def add_sign(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sign", type=Path, metavar="KEY", help="sign receipts with the private key in this file, which keygen makes"
    )


def signer_of(args: argparse.Namespace) -> "Signer | None":
    from gemma_py.receipts.envelope import Signer  # imported here, because numpy would slow down --help

    return None if args.sign is None else Signer.load(args.sign)


def add_receipt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--receipt",
        type=Path,
        metavar="FILE",
        help="write a receipt, with which anyone who has the model can check how the answer was made: gemma_py audit FILE",
    )
    add_sign(parser)


def write_receipt(path: Path, receipt: "Receipt", signer: "Signer | None") -> None:
    from gemma_py.receipts.receipt import canonical  # imported here, because numpy would slow down --help

    document = receipt.document() if signer is None else signer.envelope(receipt).document()
    with atomic_write(path) as file:
        file.write(canonical(document) + b"\n")


def read_input(args: argparse.Namespace, engine: "Engine") -> list[int]:
    """Return the token ids of the prompt. A BOS token is added to a text, but not to the ids of --ids."""
    from gemma_py.formats.files import read_json, read_text  # imported here, because numpy would slow down --help

    if args.ids is not None:
        ids = read_json(args.ids)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InputError(f"{args.ids}: the file should contain a JSON list of token ids")
        return engine.encode(ids)
    if args.file is None:
        return engine.encode(args.text)
    return engine.encode(read_standard_input() if str(args.file) == "-" else read_text(args.file))


def read_standard_input() -> str:
    from gemma_py.formats.files import TEXT_LIMIT  # imported here, because numpy would slow down --help

    data = sys.stdin.buffer.read(TEXT_LIMIT + 1)
    if len(data) > TEXT_LIMIT:
        raise InputError(f"standard input is larger than the limit of {TEXT_LIMIT} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


def print_json(report: Any) -> None:
    """Print an object as one line of JSON, with null for NaN and infinite numbers."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(finite(report), ensure_ascii=False, allow_nan=False))


def size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        places = enumerate(zip(cells, widths, strict=True))
        return "| " + " | ".join(cell.ljust(w) if n < left else cell.rjust(w) for n, (cell, w) in places) + " |"

    rule = "|" + "|".join("-" * (w + 2) if n < left else "-" * (w + 1) + ":" for n, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
