"""The verifier that docs/receipts.md prints accepts and refuses the receipts that the package accepts and refuses."""

import ast
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import receipt_tampering as tampering
from pages import fences
from repository import ROOT

import gemma_py
from gemma_py.errors import FormatError
from gemma_py.receipts.receipt import Receipt, canonical, parse
from gemma_py.receipts.row_digests import row_digest

DIGEST, SOURCE = fences((ROOT / "docs" / "receipts.md").read_text(), "python")


@pytest.fixture(scope="module")
def check() -> Callable[[str], str]:
    names: dict[str, Any] = {"__name__": "verifier"}
    exec(compile(SOURCE, "receipts.md", "exec"), names)
    found: Callable[[str], str] = names["check"]
    return found


@pytest.fixture(scope="module")
def receipts(tiny_engine: gemma_py.Engine) -> list[Receipt]:
    return tampering.varied_receipts(tiny_engine, 12)


def test_the_verifier_is_short_and_needs_only_the_standard_library() -> None:
    imported = [
        alias.name for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Import) for alias in node.names
    ]
    assert imported == ["hashlib", "json", "sys"]
    assert sum(bool(line.strip()) for line in SOURCE.splitlines()) <= 60


def test_the_verifier_runs_as_a_program(tmp_path: Path, receipts: list[Receipt]) -> None:
    program = tampering.write(tmp_path / "verifier.py", SOURCE.encode())
    file = tampering.write(tmp_path / "receipt.json", receipts[0].to_bytes() + b"\n")
    command = [sys.executable, str(program), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{len(receipts[0].answer)} tokens after a prompt of {len(receipts[0].prompt)}\n"
    file.write_bytes(receipts[0].to_bytes().replace(b'"stop":[', b'"stop":["x",', 1))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "the Merkle root is another one" in done.stderr
    file.write_bytes(b'{"choices": [], "receipts": []}')
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr == f"{file}: no sound receipt: KeyError('predicate')\n"


def test_the_verifier_agrees_with_the_package(check: Callable[[str], str], receipts: list[Receipt]) -> None:
    rng, refused = random.Random(4), 0
    for receipt in receipts:
        assert check(receipt.to_bytes().decode())
        assert json.loads(receipt.to_bytes()) == receipt.document()
        assert canonical(json.loads(receipt.to_bytes())) == receipt.to_bytes()
    for _ in range(600):
        data = tampering.drawn_bytes(rng, *(rng.choice(receipts).to_bytes() for _ in range(2)))
        try:
            parse(data, "drawn")
            check(data.decode())
        except FormatError:
            refused += 1
            with pytest.raises(
                (AssertionError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
            ):
                check(data.decode())
    assert 500 < refused < 600


@pytest.mark.parametrize("size", [3, 1024, 1536])
def test_the_digest_of_a_row_is_the_documented_one(size: int) -> None:
    names: dict[str, Any] = {}
    exec(compile(DIGEST, "receipts.md", "exec"), names)
    row = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    row[:2] = -0.0, np.inf
    documented = names["row_digest"](row.astype("<f4").tobytes())
    assert row_digest(row) == documented
    for at in range(0, size, 97):
        changed = row.copy()
        changed.view(np.uint32)[at] ^= 1
        assert row_digest(changed) != documented


def test_the_digest_of_a_row_does_not_depend_on_the_bits_of_nan() -> None:
    for at in (0, 1, 5, 1030, 2047):
        rows = np.full((4, 2048), -np.inf, np.float32)
        rows.view(np.uint32)[:, at] = 0x7FC00000, 0x7F800001, 0xFF800001, 0xFFFFFFFF
        digests = {row_digest(row) for row in rows}
        assert len(digests) == 1 and row_digest(np.full(2048, -np.inf, np.float32)) not in digests
