"""Embed texts with an embedding model.

The texts are arguments, the lines of a text file, or the rows of a JSONL file. A row is a string, a list of token ids or
{"text": ...}. Without --output, each embedding is printed as a row {"index": ..., "embedding": [...]}.

With --json: {"texts", "dimensions", "seconds", "output"}, and "embeddings" if there is no --output.
"""

import argparse
import io
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_py.cli.common import add_engine, note_exceptions, positive, print_json, read_standard_input
from gemma_py.cli.loading import load_engine
from gemma_py.errors import InputError
from gemma_py.paths import atomic_write, check_writable

if TYPE_CHECKING:
    import numpy as np

_SUFFIXES = (".npy", ".safetensors", ".jsonl")
_LIMIT = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(usage_error=parser.error)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a GGUF file, a Hugging Face directory, a name from `gemma_py models`, or hf:owner/name",
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text to embed")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--file", metavar="FILE", help="a file with a text on each line; - for standard input")
    source.add_argument("--jsonl", metavar="FILE", help="a JSONL file of texts or token ids; - for standard input")
    parser.add_argument(
        "--task", metavar="NAME", help="the task whose prompt precedes each text, for example query or document"
    )
    parser.add_argument(
        "--dimensions", type=positive, metavar="N", help="the number of dimensions to keep (default: all)"
    )
    parser.add_argument(
        "--output",
        type=_output,
        metavar="FILE",
        help="write the embeddings to FILE.npy, FILE.safetensors or FILE.jsonl",
    )
    add_engine(parser)


def _output(text: str) -> Path:
    if not text.endswith(_SUFFIXES):
        raise argparse.ArgumentTypeError(f"should end in one of {', '.join(_SUFFIXES)}, found {text!r}")
    return Path(text)


def run(args: argparse.Namespace) -> None:
    texts = _texts(args)
    if args.output is not None:
        check_writable(args.output)
    with load_engine(args) as engine:
        note_exceptions(engine)
        began = time.monotonic()
        made = engine.embed(texts, args.task, args.dimensions)
        seconds = time.monotonic() - began
    if args.output is not None:
        _write(args.output, made)
    if args.json:
        report: dict[str, Any] = {"texts": len(made), "dimensions": made.shape[1], "seconds": seconds}
        report["output"] = None if args.output is None else str(args.output)
        print_json(report if args.output is not None else {**report, "embeddings": made.tolist()})
    elif args.output is None:
        sys.stdout.writelines(_rows(made))
    else:
        print(f"{len(made)} texts, {made.shape[1]} dimensions, {seconds:.1f} s", file=sys.stderr)


def _texts(args: argparse.Namespace) -> list[Any]:
    given = args.file or args.jsonl
    if bool(args.texts) == (given is not None):
        args.usage_error("give texts as arguments, or --file, or --jsonl, and only one of these")
    if given is None:
        return list(args.texts)
    from gemma_py.formats.files import parse_json, read_text  # imported here, because numpy would slow down --help

    text = read_standard_input() if given == "-" else read_text(Path(given), _LIMIT)
    lines = text.removesuffix("\n").split("\n") if text else []
    lines = [line.removesuffix("\r") for line in lines]
    if args.file is not None:
        return list(lines)
    where = "standard input" if given == "-" else given
    return [_of_row(parse_json(line, f"{where}: line {n}"), f"{where}: line {n}") for n, line in enumerate(lines, 1)]


def _of_row(row: Any, where: str) -> Any:
    if isinstance(row, dict):
        row = row.get("text")
    if not isinstance(row, str) and not (isinstance(row, list) and all(type(token) is int for token in row)):
        raise InputError(f'{where}: should be a string, a list of token ids or {{"text": ...}}, found {row!r:.60}')
    return row


def _rows(made: "np.ndarray") -> list[str]:
    return [f"{json.dumps({'index': index, 'embedding': row.tolist()})}\n" for index, row in enumerate(made)]


def _write(path: Path, made: "np.ndarray") -> None:
    """Write float32 [texts, dimensions]: as .npy, as the tensor "embeddings" in .safetensors, or as JSON rows in .jsonl."""
    import numpy as np
    from safetensors.numpy import save

    buffer = io.BytesIO()
    if path.suffix == ".npy":
        np.save(buffer, made)
    elif path.suffix == ".safetensors":
        buffer.write(save({"embeddings": made}))
    else:
        buffer.write("".join(_rows(made)).encode())
    with atomic_write(path) as file:
        file.write(buffer.getvalue())
