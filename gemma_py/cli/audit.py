"""Check receipts: whether answers were made as their receipts say.

A FILE holds a receipt, a signed receipt, a response of the server with receipts, or the output of `gemma_py batch --receipt`. The
answer's logits are computed again, many tokens in a pass, and every field of the receipt is checked. The text, thoughts and tool
calls that a response shows beside its receipt are compared with those that the receipt's token ids give. The first difference is
named: signature, structure, model, text, sampling, logits, choice, finish or kv, and the token.

Every receipt and every file that cannot be read has a verdict, and the exit code is that of the worst verdict, the first of these
that occurs: 1 a receipt differs; 2 a receipt is of another model, or a file or the model cannot be read; 3 this program cannot
tell, because the receipt was made by another version, or because a forward pass failed or this machine is at fault; 0 all
receipts are equal. A wrong command line or public key gives 2 without any verdict.

With --json: {"receipts": [{"name", "verdict", "stage", "token", "position", "message", "prompt_tokens", "tokens", "signature"}],
"seconds"}. A verdict is equal, diverged, other model, unreadable or unknown.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL, catalogue
from gemma_py.checks.audit import (
    DIVERGED,
    EQUAL,
    OTHER_MODEL,
    UNKNOWN,
    UNREADABLE,
    Audited,
    Auditor,
    UndecidableError,
    Verdict,
)
from gemma_py.cli.common import add_threads, notify, print_json
from gemma_py.cli.progress import LoadProgress, ProgressBar
from gemma_py.errors import ComputationError, GemmaError, install_command
from gemma_py.generate.answer import Constraint
from gemma_py.generate.engine import Engine
from gemma_py.hub import PREFIX
from gemma_py.receipts.envelope import Verifier
from gemma_py.receipts.receipt import Receipt
from gemma_py.receipts.sources import FoundReceipt, read_file

_CODES = {EQUAL: 0, UNKNOWN: 3, UNREADABLE: 2, OTHER_MODEL: 2, DIVERGED: 1}  # in the order in which they prevail

_PAUSE = 3.0  # seconds between lines of progress


class _Loaded(NamedTuple):
    """How a receipt's model is loaded."""

    quant: str | None
    kv: str


@dataclass
class _Entry:
    """A receipt and its verdict, which is None until the receipt is checked."""

    found: FoundReceipt
    verdict: Verdict | None = None

    @property
    def receipt(self) -> Receipt:
        assert self.found.receipt is not None
        return self.found.receipt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file with receipts")
    # MODEL is declared for the help text only, because argparse gives every argument to FILE. After parsing, the last FILE is
    # taken as MODEL if it names a model.
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"a GGUF file, a Hugging Face directory, a name or hf:owner/name, after the last FILE (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--public-key",
        type=Path,
        metavar="FILE",
        help="the public key with which every receipt must be signed (default: signatures are not checked)",
    )
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    files, model = _files_and_model(args.files)
    try:
        verifier = None if args.public_key is None else Verifier.load(args.public_key)
    except (GemmaError, OSError) as error:
        notify(str(error))
        return _CODES[UNREADABLE]
    entries = [entry for file in files for entry in _read(Path(file))]
    for entry in entries:
        if entry.verdict is None:
            entry.verdict = _before(entry.found, verifier)
    with ProgressBar("auditing", wanted=not args.json, pause=_PAUSE) as progress:
        _audit(entries, model, args.threads, progress)
    rows = [_row(entry.found, entry.verdict, verifier) for entry in entries if entry.verdict is not None]
    if args.json:
        print_json({"receipts": rows, "seconds": time.monotonic() - began})
    else:
        for entry, row in zip(entries, rows, strict=True):
            print(_line(row, entry.found.missing))
    return _CODES[max((row["verdict"] for row in rows), key=list(_CODES).index)]


def _read(path: Path) -> list[_Entry]:
    try:
        return [_Entry(found) for found in read_file(path)]
    except (GemmaError, OSError) as error:
        message = str(error).removeprefix(f"{path}: ")
        return [_Entry(FoundReceipt(str(path), None), Verdict(UNREADABLE, message))]


def _audit(entries: Sequence[_Entry], model: str, threads: int | None, progress: ProgressBar) -> None:
    """Check the receipts that have no verdict yet, with a model for each pair of `quant` and `kv`."""
    groups: dict[_Loaded, list[_Entry]] = {}
    for entry in entries:
        if entry.verdict is None and entry.found.receipt is not None:
            identity = entry.found.receipt.model
            groups.setdefault(_Loaded(identity.quant, identity.kv), []).append(entry)
    total = sum(len(entry.receipt.answer) for group in groups.values() for entry in group)
    done = 0
    for loaded, group in groups.items():
        try:
            with gemma_py.load(model, threads, progress=LoadProgress(), **loaded._asdict()) as engine:
                auditor = Auditor(engine, _constraint_maker(engine))
                for event in auditor.audit([entry.receipt for entry in group], [entry.found.shown for entry in group]):
                    if isinstance(event, Audited):
                        group[event.receipt].verdict = event.verdict
                    else:
                        done += len(event.texts)
                        progress(f"{100 * done // total}% of {total} tokens", done / total)
        except (GemmaError, OSError, MemoryError) as error:
            unsure = isinstance(error, ComputationError | MemoryError)
            message = f"model: {'out of memory' if isinstance(error, MemoryError) else error}"
            for entry in group:
                entry.verdict = entry.verdict or Verdict(UNKNOWN if unsure else UNREADABLE, message, "model")


def _files_and_model(given: Sequence[str]) -> tuple[Sequence[str], str]:
    """Divide the arguments. The last one is the model if it looks like one, and there are others."""
    last = given[-1]
    is_model = last.startswith(PREFIX) or last.endswith(".gguf") or Path(last).is_dir()
    if len(given) > 1 and (is_model or last in {entry.name for entry in catalogue()}):
        return given[:-1], last
    return given, DEFAULT_MODEL


def _before(entry: FoundReceipt, verifier: Verifier | None) -> Verdict | None:
    """Check signature and structure. Return the verdict if there is a difference."""
    if verifier is not None:
        unread = entry.receipt is None and entry.envelope is None
        problem = f"no signed receipt can be read: {entry.problem}" if unread else verifier.problem(entry.envelope)
        if problem:
            return Verdict(DIVERGED, f"signature: {problem}", "signature")
    return Verdict(DIVERGED, entry.problem, "structure") if entry.receipt is None else None


def _constraint_maker(engine: Engine) -> Any:
    def make(description: Mapping[str, Any]) -> Constraint:
        try:
            from gemma_py.server.openai.described_constraint import constraint_maker
        except ModuleNotFoundError as error:
            raise UndecidableError(
                f"the answer was constrained, which needs the package {error.name}: {install_command('serve,schema')}"
            ) from None
        return constraint_maker(engine)(description)

    return make


def _row(entry: FoundReceipt, verdict: Verdict, verifier: Verifier | None) -> dict[str, Any]:
    receipt = entry.receipt
    checked = "invalid" if verdict.stage == "signature" else "valid"
    return {
        "name": entry.name, "verdict": verdict.kind, "stage": verdict.stage, "token": verdict.token,
        "position": verdict.position, "message": verdict.message,
        "prompt_tokens": None if receipt is None else len(receipt.prompt),
        "tokens": None if receipt is None else len(receipt.answer),
        "signature": "none" if entry.envelope is None else "not checked" if verifier is None else checked,
    }  # fmt: skip


def _line(row: dict[str, Any], missing: bool) -> str:
    """Return what a person reads. missing: whether the file holds no receipt."""
    if missing and row["stage"] == "structure":
        return f"{row['name']}: {row['message']}"
    if row["verdict"] != EQUAL:
        verdict = {
            DIVERGED: "differs",
            OTHER_MODEL: "another model",
            UNREADABLE: "cannot be read",
            UNKNOWN: "cannot tell",
        }[row["verdict"]]
        return f"{row['name']}: {verdict}: {row['message']}"
    signed = {"none": "not signed", "not checked": "signature not checked", "valid": "signature valid"}[
        row["signature"]
    ]
    return (
        f"{row['name']}: equal: {row['tokens']:,} tokens after a prompt of {row['prompt_tokens']:,}; logits, choices, text, end, "
        f"keys and values have the same bits; {signed}"
    )
