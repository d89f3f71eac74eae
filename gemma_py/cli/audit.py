"""Check receipts: whether answers were made as their receipts say.

A FILE holds a receipt, a signed receipt, a response of the server with receipts, or the output of `gemma_py batch --receipt`. The
answer's logits are computed again, many tokens in a pass, and every field of the receipt is checked. The first difference is named:
signature, structure, model, text, sampling, logits, choice, finish or kv, and the token.

Exit codes: 0 all receipts are equal, 1 a receipt differs, 2 a wrong command line or a receipt of another model, 3 this program
cannot tell, for example because the receipt was made by another version.

With --json: {"receipts": [{"name", "verdict", "stage", "token", "position", "message", "prompt_tokens", "tokens", "signature"}],
"seconds"}.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL, catalogue
from gemma_py.checks.audit import DIVERGED, EQUAL, OTHER_MODEL, UNKNOWN, Audited, Auditor, UndecidableError, Verdict
from gemma_py.cli.common import add_threads, notify, print_json
from gemma_py.cli.progress import LoadProgress, ProgressBar
from gemma_py.errors import ComputationError, GemmaError
from gemma_py.generate.answer import Constraint
from gemma_py.generate.engine import Engine
from gemma_py.hub import PREFIX
from gemma_py.receipts.envelope import Verifier
from gemma_py.receipts.sources import FoundReceipt, read_file

_CODES = {EQUAL: 0, UNKNOWN: 3, OTHER_MODEL: 2, DIVERGED: 1}  # in the order in which they prevail


class _Loaded(NamedTuple):
    """How a receipt's model is loaded."""

    quant: str | None
    kv: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file with receipts")
    # The last FILE is the MODEL if it names a model. argparse itself gives every argument to FILE.
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
    try:
        return _audit(args)
    except ComputationError as error:  # a forward pass failed, which says nothing about the receipts
        notify(str(error))
        return _CODES[UNKNOWN]
    except GemmaError as error:  # a file, a key or a model that cannot be read
        notify(str(error))
        return _CODES[OTHER_MODEL]


def _audit(args: argparse.Namespace) -> int:
    files, model = _files_and_model(args.files)
    began = time.monotonic()
    verifier = None if args.public_key is None else Verifier.load(args.public_key)
    found = [receipt for file in files for receipt in read_file(Path(file))]
    verdicts = [_before(receipt, verifier) for receipt in found]
    groups: dict[_Loaded, list[int]] = {}
    for number, (entry, verdict) in enumerate(zip(found, verdicts, strict=True)):
        if verdict is None and entry.receipt is not None:
            groups.setdefault(_Loaded(entry.receipt.model.quant, entry.receipt.model.kv), []).append(number)
    total = sum(len(entry.receipt.answer) for entry in found if entry.receipt is not None)
    with ProgressBar("auditing", wanted=not args.json) as progress:
        done = 0
        for loaded, numbers in groups.items():
            with gemma_py.load(model, args.threads, progress=LoadProgress(), **loaded._asdict()) as engine:
                for number, event in _events(engine, found, numbers):
                    if isinstance(event, Verdict):
                        verdicts[number] = event
                    else:
                        done += event
                        progress(f"{100 * done // total}% of {total} tokens", done / total)
    rows = [
        _row(entry, verdict, verifier) for entry, verdict in zip(found, verdicts, strict=True) if verdict is not None
    ]
    if args.json:
        print_json({"receipts": rows, "seconds": time.monotonic() - began})
    else:
        for row in rows:
            print(_line(row))
    return _CODES[max((row["verdict"] for row in rows), key=list(_CODES).index)]


def _files_and_model(given: Sequence[str]) -> tuple[Sequence[str], str]:
    """Divide the arguments. The last one is the model if it looks like one, and there are others."""
    last = given[-1]
    is_model = last.startswith(PREFIX) or last.endswith(".gguf") or Path(last).is_dir()
    if len(given) > 1 and (is_model or last in {entry.name for entry in catalogue()}):
        return given[:-1], last
    return given, DEFAULT_MODEL


def _before(entry: FoundReceipt, verifier: Verifier | None) -> Verdict | None:
    """Check signature and structure. Return the verdict if there is a difference."""
    if verifier is not None and (entry.receipt is not None or entry.envelope is not None):
        problem = verifier.problem(entry.envelope)
        if problem:
            return Verdict(DIVERGED, f"signature: {problem}", "signature")
    if entry.receipt is None:
        return Verdict(DIVERGED, f"structure: {entry.error.removeprefix(f'{entry.name}: ')}", "structure")
    return None


def _events(
    engine: Engine, found: Sequence[FoundReceipt], numbers: Sequence[int]
) -> Iterator[tuple[int, Verdict | int]]:
    """Yield the verdict of each receipt, and before it the numbers of tokens that were checked."""
    auditor = Auditor(engine, _constraint_maker(engine))
    for event in auditor.audit([receipt for number in numbers if (receipt := found[number].receipt) is not None]):
        number = numbers[event.receipt]
        yield number, event.verdict if isinstance(event, Audited) else len(event.texts)


def _constraint_maker(engine: Engine) -> Any:
    def make(description: Mapping[str, Any]) -> Constraint:
        try:
            from gemma_py.server.openai.described_constraint import constraint_maker
        except ModuleNotFoundError as error:
            raise UndecidableError(
                f"the answer was constrained, which needs the package {error.name}: pip install 'gemma_py[serve,schema]'"
            ) from None
        return constraint_maker(engine)(description)

    return make


def _row(entry: FoundReceipt, verdict: Verdict, verifier: Verifier | None) -> dict[str, Any]:
    receipt = entry.receipt
    signature = "none" if entry.envelope is None else "not checked" if verifier is None else "valid"
    return {
        "name": entry.name, "verdict": verdict.kind, "stage": verdict.stage, "token": verdict.token,
        "position": verdict.position, "message": verdict.message,
        "prompt_tokens": None if receipt is None else len(receipt.prompt),
        "tokens": None if receipt is None else len(receipt.answer),
        "signature": "invalid" if verdict.stage == "signature" else signature,
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    if row["verdict"] != EQUAL:
        verdict = {DIVERGED: "differs", OTHER_MODEL: "another model", UNKNOWN: "cannot tell"}[row["verdict"]]
        return f"{row['name']}: {verdict}: {row['message']}"
    signed = {"none": "not signed", "not checked": "signature not checked", "valid": "signature valid"}[
        row["signature"]
    ]
    return (
        f"{row['name']}: equal: {row['tokens']:,} tokens after a prompt of {row['prompt_tokens']:,}; logits, choices, text, end, "
        f"keys and values have the same bits; {signed}"
    )
