"""What several commands share: arguments, input of tokens, output and notices."""

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
    """Adds the options for a prompt, of which one must be given: a text, a text file or a file of token ids."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(text_flag, dest="text", metavar="TEXT", help="the text")
    group.add_argument("--file", type=Path, metavar="FILE", help="a file of UTF-8 text; - for standard input")
    group.add_argument(
        "--ids", type=Path, metavar="FILE", help="a file with a JSON list of token ids, used as they are"
    )


def positive(text: str) -> int:
    """Parses an argument that is a whole number of at least 1."""
    return _number(text, 1)


def natural(text: str) -> int:
    """Parses an argument that is a whole number of at least 0."""
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
    """Parses whole numbers of at least 1, separated by commas, and drops repeated ones."""
    return _numbers(text, 1)


def naturals(text: str) -> tuple[int, ...]:
    """Parses whole numbers of at least 0, separated by commas, and drops repeated ones."""
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
    """The default of --threads. argparse parses it as if it had been given as an argument."""
    return os.environ.get(_THREADS) or None


def _threads(text: str) -> int:
    return _from_environment_too(positive, text)


def teams(text: str) -> tuple[int, ...]:
    """Parses several numbers of threads."""
    return _from_environment_too(counts, text)


def _from_environment_too(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"(or {_THREADS}) {error}") from None


def notify(message: str) -> None:
    """Prints one line to stderr: an error or a warning."""
    print(f"gemma_py: {' '.join(message.split())}", file=sys.stderr, flush=True)


def advice_on_threads(threads: int) -> str | None:
    """A warning where more threads are asked for than this process has cores; None where it is not needed."""
    cores = machine.threads()
    if threads <= cores:
        return None
    return f"{threads} threads are more than the {cores} cores that this process may use, so expect it to be slower"


def warn_of_threads(threads: int) -> None:
    advice = advice_on_threads(threads)
    if advice is not None:
        notify(advice)


def add_quant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quant",
        choices=tuple(QUANTS),
        help="quantise float weights to this format while loading (default: keep them as stored)",
    )


def note_exceptions(engine: "Engine") -> None:
    """Says which parts of the checkpoint are not used, and warns about the weights that --quant could not quantise."""
    left_out = engine.checkpoint.left_out
    if left_out:
        notify(f"only the text model is used; tensors left out: {parts(left_out)}")
    names = engine.kept_float
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        notify(f"rows are not whole blocks of {engine.quant}, left as floats: {names[0]!r:.80}{more}")


def parts(left_out: Mapping[str, int]) -> str:
    """The parts of a multimodal checkpoint that are left out, each with its number of tensors."""
    return ", ".join(f"{name} {count}" for name, count in left_out.items())


def add_engine(parser: argparse.ArgumentParser) -> None:
    add_quant(parser)
    parser.add_argument(
        "--threads",
        type=_threads,
        default=environment_threads(),
        metavar="N",
        help=f"number of worker threads, on which no bit of the output depends (default: {_THREADS}, else as many as there "
        "are physical cores within the process's affinity and quota)",
    )
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="the largest number of tokens in a session (default: the model's limit)",
    )


def read_input(args: argparse.Namespace, engine: "Engine") -> list[int]:
    """The token ids of the prompt that was given. A text gets a BOS token in front; ids are used as they are."""
    from gemma_py.formats.files import read_json, read_text  # imported late because it imports numpy

    if args.ids is not None:
        ids = read_json(args.ids)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InputError(f"{args.ids}: should contain a JSON list of whole numbers")
        return engine.encode(ids)
    if args.file is None:
        return engine.encode(args.text)
    return engine.encode(read_standard_input() if str(args.file) == "-" else read_text(args.file))


def read_standard_input() -> str:
    """All of standard input, unchanged."""
    from gemma_py.formats.files import TEXT_LIMIT  # imported late because it imports numpy

    data = sys.stdin.buffer.read(TEXT_LIMIT + 1)
    if len(data) > TEXT_LIMIT:
        raise InputError(f"standard input is larger than the {TEXT_LIMIT} bytes allowed")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


def print_json(report: Any) -> None:
    """Prints one line of JSON, in which infinite numbers and NaN become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(finite(report), ensure_ascii=False, allow_nan=False))


def size(count: float) -> str:
    """A number of bytes, with its unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table with aligned columns, of which the first `left` are text and the others numbers."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        places = enumerate(zip(cells, widths, strict=True))
        return "| " + " | ".join(cell.ljust(w) if n < left else cell.rjust(w) for n, (cell, w) in places) + " |"

    rule = "|" + "|".join("-" * (w + 2) if n < left else "-" * (w + 1) + ":" for n, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
