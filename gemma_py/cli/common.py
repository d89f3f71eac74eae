"""What several commands share: the MODEL argument, input of tokens, and output."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.engine import Engine
from gemma_py.errors import InputError
from gemma_py.formats.files import TEXT_LIMIT, read_json, read_text


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a GGUF file, a Hugging Face directory, or a name from `gemma_py models` (default: %(default)s)",
    )


def add_input(parser: argparse.ArgumentParser, text_flag: str) -> None:
    """One of text, a text file, a file of ids."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(text_flag, dest="text", metavar="TEXT", help="the text itself")
    group.add_argument("--file", type=Path, metavar="FILE", help="a file of UTF-8 text; - for standard input")
    group.add_argument("--ids", type=Path, metavar="FILE", help="a JSON list of token ids, used as it is")


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1, found {value}")
    return value


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="worker threads; no bit depends on it (default: all)"
    )
    parser.add_argument(
        "--context", type=positive, metavar="N", help="tokens a session may hold (default: the model's)"
    )


def read_input(args: argparse.Namespace, engine: Engine) -> list[int]:
    """Ids of whichever input was given. A text gets the begin token; ids are taken as they are."""
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
