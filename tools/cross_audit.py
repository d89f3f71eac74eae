"""Make receipts with several instruction sets, and audit them with all other instruction sets.

    python tools/cross_audit.py                        # this machine, AVX2 (haswell) and the oldest x86-64 (generic)
    python tools/cross_audit.py --receipts 12 --machines haswell generic

Each instruction set has its own process. All processes make receipts of equal requests, with float and quantised
weights, KV rows in bfloat16, penalties and a JSON schema. The receipts must have equal bytes. Then each process audits
the receipts of the other processes.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tools")]

import receipt_tampering as tampering
import tiny_checkpoints as tiny
from gguf_files import write_model
from repository import TINY, child_environment
from tiny_models import WIDE

import gemma_py
from gemma_py.checks.audit import EQUAL
from gemma_py.generate.core import Request
from gemma_py.generate.options import Sampling
from gemma_py.receipts.receipt import Receipt, parse
from gemma_py.server.openai.constraint import JsonConstraints

HERE = "this machine"
NUMPY_WITHOUT = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "integer", "maximum": 9, "minimum": 1}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
SAMPLINGS = (
    Sampling(),
    Sampling(1.0, top_k=40, top_p=0.9, seed=7),
    Sampling(0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=8, logit_bias={5: 2.0}),
    Sampling(1.3, min_p=0.05, seed=9),
)
LOADS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tiny", {}), ("tiny", {"kv": "bfloat16"}), ("tiny", {"quant": "q8_0"}), ("gemma4-dense Q8_0", {}), ("gemma3n Q8_0", {}),
    ("gemma4-experts", {"kv": "bfloat16"}),
)  # fmt: skip


@contextmanager
def models() -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory() as scratch:
        paths = {"tiny": TINY}
        for name in ("gemma4-dense", "gemma3n"):
            paths[f"{name} Q8_0"] = write_model(Path(scratch) / f"{name}.gguf", WIDE[name], seed=3, quant="Q8_0")
        paths["gemma4-experts"] = Path(scratch) / "gemma4-experts"
        tiny.write(WIDE["gemma4-experts"], paths["gemma4-experts"], seed=1)
        yield paths


def receipt_of(engine: gemma_py.Engine, number: int) -> Receipt:
    vocabulary, sampling = engine.config.vocab_size, SAMPLINGS[number % len(SAMPLINGS)]
    prompt = [2, *((7 * at + 3 * number) % (vocabulary - 3) + 3 for at in range(3 + 5 * number % 40))]
    request = Request(prompt, 6 + number % 20, sampling, receipt=True)
    if engine.tokenizer is not None and number % 5 == 4:
        compiler = JsonConstraints(engine.tokenizer, vocabulary, engine.end_ids)
        constraint = compiler.compile(SCHEMA, "schema")
        request = dataclasses.replace(request, max_tokens=60, constraint=constraint, ends=engine.end_ids)
    *_, last = engine._answer(request)
    assert last.receipt is not None
    return last.receipt


def work(folder: Path, mine: str, others: list[str], count: int) -> list[str]:
    """Make receipts or, if there are `others`, audit receipts of the others. Return the differences."""
    wrong: list[str] = []
    with models() as paths:
        for number, (name, options) in enumerate(LOADS):
            with gemma_py.load(paths[name], threads=1 + number % 3, **options) as engine:
                numbers = range(number, count, len(LOADS))
                if not others:
                    for receipt in numbers:
                        file = folder / f"{mine} {receipt}.json"
                        file.write_bytes(receipt_of(engine, receipt).to_bytes())
                    continue
                files = [folder / f"{other} {receipt}.json" for other in others for receipt in numbers]
                found = tampering.verdicts(engine, [parse(file.read_bytes(), file.name) for file in files])
                wrong += [
                    f"{file.name} on {mine}: {v.message}"
                    for file, v in zip(files, found, strict=True)
                    if v.kind != EQUAL
                ]
    return wrong


def child(machine: str, folder: Path, others: list[str], count: int) -> list[str]:
    environment = child_environment()
    if machine != HERE:
        # The list of features is empty, because numba otherwise adds this machine's features.
        environment |= {"NUMBA_CPU_NAME": machine, "NUMBA_CPU_FEATURES": "", "NPY_DISABLE_CPU_FEATURES": NUMPY_WITHOUT}
    command = [sys.executable, "-W", "ignore", __file__, "--work", str(folder), machine, json.dumps(others), str(count)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{machine}: {done.stderr[-2000:]}")
    made: list[str] = json.loads(done.stdout)
    return made


def cross_audit(machines: list[str], count: int, say: Any = print) -> tuple[int, list[str]]:
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for machine in machines:
            child(machine, folder, [], count)
            say(f"{machine}: {count} receipts")
        for number in range(count):
            if len({(folder / f"{machine} {number}.json").read_bytes() for machine in machines}) != 1:
                wrong.append(f"receipt {number} has other bytes on another machine")
        for machine in machines:
            others = [other for other in machines if other != machine]
            found = child(machine, folder, others, count)
            say(
                f"{machine}: {len(others) * count - len(found)} of {len(others) * count} receipts of the others are equal"
            )
            wrong += found
    return len(machines) * (len(machines) - 1) * count, wrong


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        folder, machine, others, count = sys.argv[2:]
        print(json.dumps(work(Path(folder), machine, json.loads(others), int(count))))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--machines", nargs="+", default=["haswell", "generic"], metavar="CPU", help="besides this machine"
    )
    parser.add_argument("--receipts", type=int, default=100, metavar="N", help="receipts of each machine")
    args = parser.parse_args()
    if os.uname().machine not in ("x86_64", "AMD64"):
        raise SystemExit("this tool needs an x86-64 machine, because --machines takes instruction sets of x86-64")
    audits, wrong = cross_audit([HERE, *args.machines], args.receipts, lambda text: print(text, flush=True))
    for line in wrong:
        print("differs:", line)
    print(json.dumps({"audits": audits, "differ": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
