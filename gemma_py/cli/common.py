"""What several commands share: the MODEL argument, input of tokens, and output."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gemma_py import machine
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.errors import InputError
from gemma_py.formats.blocks import QUANTS

if TYPE_CHECKING:
    from gemma_py.generate.engine import Engine

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


def add_input(parser: argparse.ArgumentParser, text_flag: str) -> None:
    """One of text, a text file, a file of ids."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(text_flag, dest="text", metavar="TEXT", help="the text itself")
    group.add_argument("--file", type=Path, metavar="FILE", help="a file of UTF-8 text; - for standard input")
    group.add_argument("--ids", type=Path, metavar="FILE", help="a JSON list of token ids, used as it is")


def positive(text: str) -> int:
    """An argument that counts something."""
    return _number(text, 1)


def natural(text: str) -> int:
    """The same, or 0."""
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"should be a whole number, at least {least}, found {text!r}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Numbers above 0, separated by commas; each once."""
    return _numbers(text, 1)


def naturals(text: str) -> tuple[int, ...]:
    """The same, or 0."""
    return _numbers(text, 0)


def _numbers(text: str, least: int) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(_number(part, least) for part in text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"should be whole numbers, at least {least}, with commas between, found {text!r}"
        ) from None


_THREADS = "GEMMA_PY_THREADS"


def environment_threads() -> str | None:
    """What a flag beats; argparse reads it as if it had been given."""
    return os.environ.get(_THREADS) or None


def _threads(text: str) -> int:
    return _from_environment_too(positive, text)


def teams(text: str) -> tuple[int, ...]:
    """Several numbers of threads, to be compared."""
    return _from_environment_too(counts, text)


def _from_environment_too(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"(or {_THREADS}) {error}") from None


def advice_on_threads(threads: int) -> str | None:
    """Where more workers are asked for than compute fastest; results do not depend on it."""
    cores = machine.threads()
    if threads <= cores:
        return None
    return (
        f"{threads} threads asked for, but this process has {cores} cores' worth of processor: expect it to be slower"
    )


def warn_of_threads(threads: int) -> None:
    advice = advice_on_threads(threads)
    if advice is not None:
        print(f"gemma_py: {advice}", file=sys.stderr)


def add_quant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quant", choices=tuple(QUANTS), help="pack float weights to these blocks while loading (default: as stored)"
    )


def note_kept_float(engine: "Engine") -> None:
    """Says on stderr what --quant could not pack."""
    names = engine.kept_float
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"gemma_py: rows are not whole blocks of {engine.quant}, left as floats: {names[0]!r:.80}{more}",
              file=sys.stderr)  # fmt: skip


def add_engine(parser: argparse.ArgumentParser) -> None:
    add_quant(parser)
    parser.add_argument(
        "--threads",
        type=_threads,
        default=environment_threads(),
        metavar="N",
        help=f"worker threads; no bit depends on it (default: {_THREADS}, else physical cores within affinity and quota)",
    )
    parser.add_argument(
        "--context", type=positive, metavar="N", help="tokens a session may hold (default: the model's)"
    )


def read_input(args: argparse.Namespace, engine: "Engine") -> list[int]:
    """Ids of whichever input was given. A text gets the begin token; ids are taken as they are."""
    from gemma_py.formats.files import read_json, read_text  # numpy comes with it

    if args.ids is not None:
        ids = read_json(args.ids)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InputError(f"{args.ids}: should hold a JSON list of whole numbers")
        return engine.encode(ids)
    if args.file is None:
        return engine.encode(args.text)
    return engine.encode(read_standard_input() if str(args.file) == "-" else read_text(args.file))


def read_standard_input() -> str:
    """All of it, to the letter."""
    from gemma_py.formats.files import TEXT_LIMIT  # numpy comes with it

    data = sys.stdin.buffer.read(TEXT_LIMIT + 1)
    if len(data) > TEXT_LIMIT:
        raise InputError(f"standard input is larger than the {TEXT_LIMIT} bytes allowed")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


def print_json(report: Any) -> None:
    """One line of JSON; what is infinite has no form there and becomes null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(finite(report), ensure_ascii=False, allow_nan=False))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table that reads well as it is, too; the first `left` columns are words."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        places = enumerate(zip(cells, widths, strict=True))
        return "| " + " | ".join(cell.ljust(w) if n < left else cell.rjust(w) for n, (cell, w) in places) + " |"

    rule = "|" + "|".join("-" * (w + 2) if n < left else "-" * (w + 1) + ":" for n, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
