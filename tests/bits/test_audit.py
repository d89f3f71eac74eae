import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import receipt_tampering as tampering
from receipt_tampering import NO_END, PROMPT, made, verdicts
from repository import TINY

import gemma_py
from gemma_py.checks.audit import (
    DIVERGED,
    EQUAL,
    OTHER_MODEL,
    UNKNOWN,
    Audited,
    Auditor,
    CheckedTokens,
)
from gemma_py.checks.trace_file import compare, trace_document
from gemma_py.generate.core import Request
from gemma_py.generate.options import Sampling
from gemma_py.generate.session import Decoder
from gemma_py.receipts.receipt import RULES, Receipt, output_digests
from gemma_py.server.openai.described_constraint import constraint_maker

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def engine() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def receipt(engine: gemma_py.Engine) -> Receipt:
    return tampering.usual_receipt(engine)


def test_untouched_receipts_pass(engine: gemma_py.Engine) -> None:
    receipts = tampering.varied_receipts(engine, 60)
    assert {len(receipt.answer) for receipt in receipts} >= {1, 2, 15}
    assert {receipt.finish_reason for receipt in receipts} == {"stop", "length"}
    found = verdicts(engine, receipts)
    assert [verdict for verdict in found if verdict.kind != EQUAL] == []
    assert [verdict.checked for verdict in found] == [len(receipt.answer) for receipt in receipts]


# --- tampering at one place -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tampering.TAMPERINGS)
def test_each_tampering_is_named_at_its_first_place(engine: gemma_py.Engine, receipt: Receipt, name: str) -> None:
    change, stage, token = tampering.TAMPERINGS[name]
    tampered = change(engine, receipt)
    assert tampered != receipt
    if token == tampering.DRAWN:
        pairs = zip(tampering.generated_anew(engine, tampered).answer, receipt.answer, strict=False)
        token = next(number for number, (ours, theirs) in enumerate(pairs) if ours != theirs)
    (found,) = verdicts(engine, [tampered])
    assert (found.kind, found.stage, found.token) == (DIVERGED, stage, token), found.message
    assert found.position == (None if token is None else len(tampered.prompt) + token)
    assert found.message.startswith(stage) and "\n" not in found.message


@pytest.mark.parametrize(("changes", "kind"), [
    ({"files": ("0" * 64,)}, OTHER_MODEL), ({"quant": "q8_0"}, OTHER_MODEL), ({"kv": "bfloat16"}, OTHER_MODEL),
])  # fmt: skip
def test_another_model_is_not_called_a_difference(
    engine: gemma_py.Engine, receipt: Receipt, changes: dict[str, Any], kind: str
) -> None:
    tampered = dataclasses.replace(receipt, model=dataclasses.replace(receipt.model, **changes))
    (found,) = verdicts(engine, [tampered])
    assert (found.kind, found.stage) == (kind, "model")


def test_a_receipt_of_other_rules_cannot_be_judged(engine: gemma_py.Engine, receipt: Receipt) -> None:
    (found,) = verdicts(engine, [dataclasses.replace(receipt, rules=RULES + 1)])
    assert (found.kind, found.stage) == (UNKNOWN, "model")


def test_quant_and_kv_of_the_receipt_are_loaded_and_compared(run: Run, tmp_path: Path) -> None:
    for options in ({"kv": "bfloat16"}, {"quant": "q8_0"}):
        with gemma_py.load(TINY, **options) as engine:  # type: ignore[arg-type]
            made_here = made(engine, PROMPT, 5)
        file = tampering.write(tmp_path / "receipt.json", made_here.to_bytes())
        assert run("audit", file, TINY)[0] == 0
        plain = dataclasses.replace(made_here, model=dataclasses.replace(made_here.model, kv="float32", quant=None))
        code, out, _ = run("audit", tampering.write(tmp_path / "plain.json", plain.to_bytes()), TINY)
        assert code == 1 and "differs: model: the fingerprint" in out


def test_drawn_tamperings_are_found(engine: gemma_py.Engine) -> None:
    receipts = tampering.varied_receipts(engine, 12)
    wrong, stages = tampering.escaped(engine, receipts, 600, seed=1)
    assert wrong == []
    assert {"structure", "text", "logits", "choice", "finish", "kv"} <= set(stages) and stages.get("true", 0) < 60


def test_control_an_audit_that_skips_a_stage_lets_tamperings_pass(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for guard, name in (("_check_text", "the text"), ("_check_kv", "a layer's keys and values")):
        with monkeypatch.context() as patch:
            patch.setattr(Auditor, guard, lambda *_: None)
            assert verdicts(engine, [tampering.TAMPERINGS[name][0](engine, receipt)])[0].kind == EQUAL


# --- wrong bits of the maker ------------------------------------------------------------------------------------------


def generated(engine: gemma_py.Engine, flip: Callable[[int, np.ndarray, gemma_py.Session], np.ndarray]) -> Receipt:
    """Generate an answer. flip(token index, logits, session) returns the logits to use, and may change the session."""
    sampling = Sampling(1.0, top_k=40, seed=3, logit_bias=NO_END)
    generation = engine.generation(Request(engine.encode(PROMPT), 16, sampling, speculate="off", receipt=True))
    session = engine.session()
    decoder = Decoder(session, generation)

    def decode(token: int) -> np.ndarray:
        return flip(len(generation.generated), decoder.decode(token), session)

    *_, last = generation.tokens(flip(0, session.prefill(generation.prompt), session), decode, session.kv_digest)
    assert last.receipt is not None
    return last.receipt


def test_a_wrong_bit_of_a_logit_is_named(engine: gemma_py.Engine) -> None:
    def flip(index: int, logits: np.ndarray, session: gemma_py.Session) -> np.ndarray:
        if index == 9:
            logits = logits.copy()
            logits.view(np.uint32)[77] ^= 1
        return logits

    (found,) = verdicts(engine, [generated(engine, flip)])
    assert (found.stage, found.token, found.checked) == ("logits", 9, 9)


def test_a_wrong_bit_of_a_kv_row_is_named(engine: gemma_py.Engine) -> None:
    def flip(index: int, logits: np.ndarray, session: gemma_py.Session) -> np.ndarray:
        if index == 5:
            layer = session._cache.layers[2]
            layer.keys.view(np.uint32)[0, (session.position - 1) % layer.capacity, 3] ^= 1 << 22
        return logits

    (found,) = verdicts(engine, [generated(engine, flip)])
    assert (found.stage, found.token) == ("logits", 6)

    def flip_last(index: int, logits: np.ndarray, session: gemma_py.Session) -> np.ndarray:
        if index == 15:
            layer = session._cache.layers[2]
            layer.values.view(np.uint32)[0, (session.position - 2) % layer.capacity, 3] ^= 1
        return logits

    (found,) = verdicts(engine, [generated(engine, flip_last)])
    assert found.stage == "kv" and "layer 2 differ" in found.message


def test_a_wrong_draw_is_named(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemma_py.generate import sampling

    honest, position = sampling.uniform, len(engine.encode(PROMPT)) + 4
    with monkeypatch.context() as patch:
        patch.setattr(
            sampling, "uniform", lambda seed, at: honest(seed, at) if at != position else 1 - honest(seed, at)
        )
        wrong = generated(engine, lambda _, logits, session: logits)
    (found,) = verdicts(engine, [wrong])
    assert (found.stage, found.token, found.position) == ("choice", 4, position)


def test_a_wrong_bit_of_a_weight_is_named(engine: gemma_py.Engine) -> None:
    """The bit changes after the fingerprint of the weights was computed."""
    with gemma_py.load(TINY, threads=1, pack=False) as maker:
        maker.identity()
        arrays = maker.program.model.weights
        weights = max((arrays.floats, arrays.bf16, arrays.codes), key=len)
        weights.flags.writeable = True
        weights.view(f"u{weights.itemsize}")[len(weights) * 3 // 4] ^= 1 << 8 * weights.itemsize - 4
        weights.flags.writeable = False
        wrong = generated(maker, lambda _, logits, session: logits)
        ids = [*wrong.prompt, *wrong.answer[:-1]]
        trace = trace_document(maker, ids)
    (found,) = verdicts(engine, [wrong])
    assert (found.kind, found.stage) == (DIVERGED, "logits") and found.token is not None
    difference = compare(trace, trace_document(engine, ids), "the maker and the auditor")
    assert difference is not None and difference.layer is not None and difference.phase


# --- how it is computed -----------------------------------------------------------------------------------------------


def test_receipts_share_passes_and_prefixes(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = "return " * 60
    receipts = [made(engine, begin + end, 12, logit_bias=NO_END) for end in "abcdefgh"]
    rows: list[tuple[int, int]] = []
    honest = engine.run_together

    def counted(inputs: Any) -> Any:
        rows.append((sum(len(part.tokens) for part in inputs), sum(part.logits for part in inputs)))
        return honest(inputs)

    monkeypatch.setattr(engine, "run_together", counted)
    assert {verdict.kind for verdict in verdicts(engine, receipts)} == {EQUAL}
    total = sum(len(receipt.prompt) + len(receipt.answer) - 1 for receipt in receipts)
    assert len(rows) < len(receipts) and sum(tokens for tokens, _ in rows) < total / 2
    assert sum(logits for _, logits in rows) == 8 * 12


def test_the_logits_of_a_pass_are_limited(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemma_py.checks.audit._MOST_LOGITS", 4 * 5 * engine.program.outputs)
    receipts = [made(engine, PROMPT, 23, logit_bias=NO_END), made(engine, "def", 9, logit_bias=NO_END)]
    most = 0
    honest = engine.run_together

    def counted(inputs: Any) -> Any:
        nonlocal most
        most = max(most, sum(part.logits for part in inputs))
        return honest(inputs)

    monkeypatch.setattr(engine, "run_together", counted)
    events = list(Auditor(engine, constraint_maker(engine)).audit(receipts))
    assert most == 5 and all(event.verdict.kind == EQUAL for event in events if isinstance(event, Audited))
    texts = [
        "".join(text for e in events if isinstance(e, CheckedTokens) and e.receipt == n for text in e.texts)
        for n in (0, 1)
    ]
    assert [output_digests(text, "", []) for text in texts] == [receipt.outputs for receipt in receipts]


def test_64_mib_hold_the_rows_of_gemmas_vocabulary() -> None:
    from gemma_py.checks import audit

    assert 32 * 4 * 262_144 <= audit._MOST_LOGITS <= 64 << 20
