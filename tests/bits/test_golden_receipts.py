"""Receipts have the bytes stored in tests/data, unless RULES changes."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import golden_receipts
import make_receipts
import numpy as np
import pytest
from receipt_tampering import verdicts

import gemma_py
from gemma_py.checks.audit import EQUAL
from gemma_py.generate import evidence, sampling
from gemma_py.kernels.checksum import checksum
from gemma_py.receipts import merkle, receipt, row_digests


@pytest.mark.parametrize("name", golden_receipts.OPTIONS)
def test_a_receipt_made_now_has_the_stored_bytes(tiny_engine: gemma_py.Engine, name: str) -> None:
    golden_receipts.check(tiny_engine, name)
    stored = receipt.parse(golden_receipts.path(name).read_bytes(), name)
    assert [verdict.kind for verdict in verdicts(tiny_engine, [stored])] == [EQUAL]
    assert stored.rules == receipt.RULES and len(stored.answer) == golden_receipts.TOKENS


def checksum_of_first_block(words: np.ndarray, checksums: np.ndarray) -> None:
    checksums[:] = checksum(words[: len(words) // len(checksums)])


def with_other_prefix(leaves: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"\2" + b"".join(leaves)).digest()


honest_uniform: Callable[[int, int], float] = sampling.uniform
EDITS: dict[str, tuple[Any, str, Any]] = {
    "the checksums of a row of logits": (row_digests, "block_checksums", checksum_of_first_block),
    "the digests of logits": (evidence, "row_digest", lambda row: bytes(12)),
    "the digests of keys and values": (evidence, "kv_digests", lambda kv: tuple(bytes(12) for _ in kv)),
    "the tree": (merkle, "root", with_other_prefix),
    "the digests of texts": (evidence, "output_digests", lambda text, reasoning, calls: {"answer": "0" * 64}),
    "how floats are written": (receipt, "number_text", lambda value: f"{value:.9f}"),
    "the random numbers": (sampling, "uniform", lambda seed, position: 1 - honest_uniform(seed, position)),
}


@pytest.mark.parametrize("what", EDITS)
def test_control_an_edit_of_what_is_hashed_asks_for_other_rules(
    tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    module, name, edited = EDITS[what]
    monkeypatch.setattr(module, name, edited)
    with pytest.raises(AssertionError, match="increase RULES"):
        golden_receipts.check(tiny_engine, "sampled")


def test_a_stored_receipt_is_replaced_only_with_other_rules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden_receipts, "DATA", tmp_path)
    assert make_receipts.main() == 0 and len(list(tmp_path.iterdir())) == len(golden_receipts.OPTIONS)
    before = golden_receipts.path("greedy").read_bytes()
    monkeypatch.setattr(golden_receipts, "TOKENS", 5)
    assert make_receipts.main() == 1 and "must be increased" in capsys.readouterr().out
    assert golden_receipts.path("greedy").read_bytes() == before
    monkeypatch.setattr(receipt.Receipt, "__init__", newer(receipt.Receipt.__init__))
    assert make_receipts.main() == 0 and golden_receipts.path("greedy").read_bytes() != before


def newer(honest: Callable[..., None]) -> Callable[..., None]:
    def make(self: receipt.Receipt, *args: Any, **options: Any) -> None:
        honest(self, *args, **options)
        if len(self.answer) == 5:
            object.__setattr__(self, "rules", receipt.RULES + 1)

    return make
