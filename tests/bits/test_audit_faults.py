import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import receipt_tampering as tampering
from receipt_tampering import NO_END, PROMPT, made, verdicts
from repository import TINY

import gemma_py
from gemma_py.checks import audit
from gemma_py.checks.audit import DIVERGED, EQUAL, UNKNOWN, UNREADABLE, Audited, Auditor
from gemma_py.errors import ComputationError, FormatError
from gemma_py.generate.core import Generation, Token
from gemma_py.receipts.receipt import Receipt
from gemma_py.runtime.runner import CHUNK
from gemma_py.server.openai.described_constraint import constraint_maker


@pytest.fixture(scope="module")
def engine() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def receipt(engine: gemma_py.Engine) -> Receipt:
    return tampering.usual_receipt(engine)


def test_a_machine_that_disagrees_with_itself_is_accused(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, passes = engine.run_together, 0

    def faulty(inputs: Any) -> Any:
        nonlocal passes
        passes += 1
        results = honest(inputs)
        if any(len(rows) for rows in results):
            results = [rows.copy() for rows in results]
            results[0].view(np.uint32)[2, 5] ^= 1
        return results

    monkeypatch.setattr(engine, "run_together", faulty)
    (found,) = verdicts(engine, [receipt])
    assert (found.kind, found.stage, found.token) == (UNKNOWN, "logits", 2)
    assert "this machine disagrees with itself" in found.message and engine.threads == 2


def stage_of_one(engine: gemma_py.Engine, receipt: Receipt) -> str | None:
    (found,) = verdicts(engine, [receipt])
    assert found.kind == UNKNOWN and "but this machine disagrees with itself" in found.message and engine.threads == 2
    return found.stage


def test_a_wrong_fingerprint_of_this_machine_is_no_difference(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(engine.identity(), fingerprint="0" * 64)
    monkeypatch.setattr(engine, "identity", lambda: wrong)
    assert stage_of_one(engine, receipt) == "model"


def test_a_wrong_draw_of_this_machine_is_no_difference(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemma_py.generate import sampling

    honest, draws = sampling.uniform, 0

    def faulty(seed: int, position: int) -> float:
        nonlocal draws
        draws += 1
        return 1 - honest(seed, position) if draws == 1 else honest(seed, position)

    monkeypatch.setattr(sampling, "uniform", faulty)
    assert stage_of_one(engine, receipt) == "choice"


def test_a_wrong_end_of_this_machine_is_no_difference(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, count = Generation.next, 0

    def faulty(self: Generation, logits: np.ndarray) -> Token:
        nonlocal count
        count += 1
        token = honest(self, logits)
        return dataclasses.replace(token, finish_reason="stop") if count == 6 else token

    monkeypatch.setattr(Generation, "next", faulty)
    assert stage_of_one(engine, receipt) == "finish"


def test_a_wrong_kv_row_of_this_machine_is_no_difference(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Auditor._check_kv

    def faulty(self: Auditor, sequence: Any) -> None:
        layer = sequence.cache.layers[0]
        layer.values.view(np.uint32)[0, (sequence.cache.position - 2) % layer.capacity, 3] ^= 1
        honest(self, sequence)

    monkeypatch.setattr(Auditor, "_check_kv", faulty)
    assert stage_of_one(engine, receipt) == "kv"


@pytest.mark.parametrize("alone", [True, False])
def test_only_an_audit_without_other_requests_traces_a_difference(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """A trace would also record the passes of other requests."""
    traced: list[bool] = []
    honest = audit.compute

    def counted(*args: Any, **options: Any) -> Any:
        traced.append(options["trace"])
        return honest(*args, **options)

    wrong = dataclasses.replace(receipt.model, fingerprint="0" * 64)
    monkeypatch.setattr(audit, "compute", counted)
    monkeypatch.setattr(engine, "identity", lambda: wrong)
    (found,) = Auditor(engine, constraint_maker(engine), alone).audit([receipt])
    assert isinstance(found, Audited) and found.verdict.kind == UNKNOWN
    assert traced == ([True, True] if alone else [])


@pytest.mark.parametrize("alone", [True, False])
def test_a_difference_is_computed_again_with_other_threads_and_chunks(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    for name in (
        "the fingerprint",
        "a row of logits",
        "an answer id and the text",
        "the finish reason",
        "a layer's keys and values",
    ):
        settings: list[tuple[int, int | None]] = []
        honest = gemma_py.Session.prefill

        def counted(self: gemma_py.Session, ids: Any, chunk: int | None = None, all_logits: bool = False) -> Any:
            settings.append((self.engine.threads, chunk))  # noqa: B023  (called within the loop)
            return honest(self, ids, chunk, all_logits)  # noqa: B023  (called within the loop)

        with monkeypatch.context() as patch:
            patch.setattr(gemma_py.Session, "prefill", counted)
            auditor = Auditor(engine, constraint_maker(engine), alone)
            *_, last = auditor.audit([tampering.TAMPERINGS[name][0](engine, receipt)])
        assert isinstance(last, Audited) and last.verdict.kind == DIVERGED
        assert last.verdict.message.endswith(
            "; this machine gave the same bits again, token by token, so the receipt is at fault"
        )
        assert set(settings) == {(2, CHUNK), (3 if alone else 2, 1)}, name


def test_a_pass_that_fails_when_a_difference_is_computed_again_is_no_difference(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise ComputationError("worker 1 stalled")

    monkeypatch.setattr(gemma_py.Session, "prefill", failing)
    for name, stage in (
        ("a row of logits", "logits"),
        ("a layer's keys and values", "kv"),
        ("the fingerprint", "model"),
    ):
        (found,) = verdicts(engine, [tampering.TAMPERINGS[name][0](engine, receipt)])
        assert (found.kind, found.stage) == (UNKNOWN, stage) and "worker 1 stalled" in found.message


# --- what cannot be checked -------------------------------------------------------------------------------------------


def test_a_smaller_context_cannot_tell(engine: gemma_py.Engine, receipt: Receipt) -> None:
    """The audit names the first stage that cannot be checked, although a later stage would find a difference."""
    short, forged = made(engine, PROMPT, 5), tampering.TAMPERINGS["the text"][0](engine, receipt)
    unknown = tampering.TAMPERINGS["more tokens than the context"][0](engine, receipt)
    needed = len(receipt.prompt) + receipt.asked.max_tokens
    with gemma_py.load(TINY, threads=2, context=needed - 1) as smaller:
        found = verdicts(smaller, [receipt, short, forged, unknown])
        assert [(verdict.kind, verdict.stage) for verdict in found] == [
            (UNKNOWN, "model"), (EQUAL, None), (UNKNOWN, "model"), (DIVERGED, "model"),
        ]  # fmt: skip
        assert f"need a context of {needed} tokens, and here the context is {needed - 1}" in found[0].message
    with gemma_py.load(TINY, threads=2, context=needed) as enough:
        assert [verdict.kind for verdict in verdicts(enough, [receipt])] == [EQUAL]


def test_a_failed_pass_says_nothing_about_its_receipts_and_the_others_are_checked(
    engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = [made(engine, "return " * number + PROMPT, 12, logit_bias=NO_END) for number in (1, 40, 80, 120)]
    honest, passes = engine.run_together, 0

    def failing(inputs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 1:
            raise ComputationError("worker 1 stalled")
        return honest(inputs)

    monkeypatch.setattr(engine, "run_together", failing)
    found = verdicts(engine, receipts)
    assert {verdict.kind for verdict in found} == {UNKNOWN, EQUAL}
    assert {verdict.message for verdict in found} == {"equal", "logits: a forward pass failed: worker 1 stalled"}
    assert {verdict.stage for verdict in found if verdict.kind == UNKNOWN} == {"logits"}


def test_files_of_the_model_that_cannot_be_read_are_no_difference(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, kind in ((OSError("no such file"), UNREADABLE), (FormatError("not a file"), UNREADABLE), (
        ComputationError("worker 1 stalled"), UNKNOWN)):  # fmt: skip
        monkeypatch.setattr(engine, "identity", raising(error))
        (found,) = verdicts(engine, [receipt])
        assert (found.kind, found.stage) == (kind, "model") and str(error) in found.message


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail
