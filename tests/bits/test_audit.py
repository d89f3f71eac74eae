"""The audit: every tampering is named at its first place, wrong bits of the maker are found, and untouched receipts pass."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import receipt_tampering as tampering
from receipt_tampering import NO_END, made, verdicts, with_asked, with_bit, with_entry, with_sampling
from repository import TINY

import gemma_py
from gemma_py.checks.audit import DIVERGED, EQUAL, OTHER_MODEL, UNKNOWN, Audited, Auditor, CheckedTokens
from gemma_py.checks.trace_file import compare, trace_document
from gemma_py.generate.core import Request
from gemma_py.generate.options import Sampling
from gemma_py.generate.session import Decoder
from gemma_py.receipts.receipt import Receipt, output_digests
from gemma_py.receipts.row_digests import row_digest
from gemma_py.server.openai.described_constraint import constraint_maker

Run = Callable[..., tuple[int, str, str]]
PROMPT = "The list of"


@pytest.fixture(scope="module")
def engine() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def receipt(engine: gemma_py.Engine) -> Receipt:
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 11}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.25, "frequency_penalty": 0.25}
    return made(engine, PROMPT, 20, **options, **penalties, logit_bias=NO_END, stop=["no such text"])


def text_of(engine: gemma_py.Engine, ids: tuple[int, ...]) -> dict[str, str]:
    return output_digests(engine.text_tokenizer().decode(list(ids)), "", [])


def test_untouched_receipts_pass(engine: gemma_py.Engine) -> None:
    receipts = tampering.varied_receipts(engine, 60)
    assert {len(receipt.answer) for receipt in receipts} >= {1, 2, 15}
    assert {receipt.finish_reason for receipt in receipts} == {"stop", "length"}
    found = verdicts(engine, receipts)
    assert [verdict for verdict in found if verdict.kind != EQUAL] == []
    assert [verdict.checked for verdict in found] == [len(receipt.answer) for receipt in receipts]


# --- tampering at one place -------------------------------------------------------------------------------------------

DRAWN = -1  # the first token that sampling chooses otherwise
# Each changes one thing and computes the Merkle root again, so that only the stage that checks this thing can find it.
TAMPERINGS: dict[str, tuple[Callable[[gemma_py.Engine, Receipt], Receipt], str, int | None]] = {
    "a prompt id": (lambda e, r: dataclasses.replace(r, prompt=with_entry(r.prompt, 1, 9)), "logits", 0),
    "a longer prompt": (lambda e, r: dataclasses.replace(r, prompt=(*r.prompt, 9)), "logits", 0),
    "an answer id": (lambda e, r: dataclasses.replace(r, answer=with_entry(r.answer, 7, 9)), "text", None),
    "an answer id and the text": (
        lambda e, r: dataclasses.replace(
            r, answer=with_entry(r.answer, 7, 9), outputs=text_of(e, with_entry(r.answer, 7, 9))
        ),
        "choice", 7,
    ),
    "the text": (lambda e, r: dataclasses.replace(r, outputs=output_digests("another text", "", [])), "text", None),
    "a thought": (lambda e, r: dataclasses.replace(r, outputs={**r.outputs, "reasoning": "0" * 64}), "text", None),
    "a row of logits": (lambda e, r: dataclasses.replace(r, logits=with_entry(r.logits, 5, with_bit(r.logits[5]))), "logits", 5),
    "two rows exchanged": (
        lambda e, r: dataclasses.replace(r, logits=(r.logits[0], r.logits[2], r.logits[1], *r.logits[3:])), "logits", 1
    ),
    "a layer's keys and values": (lambda e, r: dataclasses.replace(r, kv=with_entry(r.kv, 1, with_bit(r.kv[1]))), "kv", None),
    "a layer too few": (lambda e, r: dataclasses.replace(r, kv=r.kv[:-1]), "model", None),
    "the seed": (lambda e, r: with_sampling(r, seed="12"), "choice", DRAWN),
    "the temperature": (lambda e, r: with_sampling(r, temperature="2.0"), "choice", DRAWN),
    "a temperature out of range": (lambda e, r: with_sampling(r, temperature="2.5"), "sampling", None),
    "greedy": (lambda e, r: with_sampling(r, temperature="0.0", seed=None, top_k=0, top_p="1.0", min_p="0.0"), "choice", DRAWN),
    "top_k": (lambda e, r: with_sampling(r, top_k=1), "choice", DRAWN),
    "top_p": (lambda e, r: with_sampling(r, top_p="0.01"), "choice", DRAWN),
    "min_p": (lambda e, r: with_sampling(r, min_p="1.0"), "choice", DRAWN),
    "the repetition penalty": (lambda e, r: with_sampling(r, repetition_penalty="50.0"), "choice", DRAWN),
    "the presence penalty": (lambda e, r: with_sampling(r, presence_penalty="-2.0"), "choice", DRAWN),
    "the frequency penalty": (lambda e, r: with_sampling(r, frequency_penalty="-2.0"), "choice", DRAWN),
    "the logit bias": (lambda e, r: with_sampling(r, logit_bias={"9": "100.0"}), "choice", DRAWN),
    "a logit bias outside": (lambda e, r: with_sampling(r, logit_bias={"99999": "1.0"}), "sampling", None),
    "a stop string": (
        lambda e, r: with_asked(r, stop=(e.text_tokenizer().decode(list(r.answer[:4]))[-1],)), "text", None
    ),
    "an end token": (lambda e, r: with_asked(r, ends=tuple(sorted({*r.asked.ends, r.answer[6]}))), "text", None),
    "more tokens allowed": (lambda e, r: with_asked(r, max_tokens=21), "finish", 19),
    "more tokens than the context": (lambda e, r: with_asked(r, max_tokens=1 << 24), "model", None),
    "the finish reason": (lambda e, r: dataclasses.replace(r, finish_reason="stop"), "finish", 19),
    "the answer cut": (
        lambda e, r: dataclasses.replace(r, answer=r.answer[:9], logits=r.logits[:9], outputs=text_of(e, r.answer[:9])),
        "finish", 8,
    ),
    "an id outside the vocabulary": (lambda e, r: dataclasses.replace(r, answer=with_entry(r.answer, 3, 1 << 20)), "model", None),
    "the fingerprint": (
        lambda e, r: dataclasses.replace(r, model=dataclasses.replace(r.model, fingerprint="0" * 64)), "model", None
    ),
    "a constraint": (lambda e, r: with_asked(r, constraint={"kind": "nothing"}), "sampling", None),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERINGS)
def test_each_tampering_is_named_at_its_first_place(engine: gemma_py.Engine, receipt: Receipt, name: str) -> None:
    change, stage, token = TAMPERINGS[name]
    tampered = change(engine, receipt)
    assert tampered != receipt
    if token == DRAWN:
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
    (found,) = verdicts(engine, [dataclasses.replace(receipt, rules=2)])
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
            assert verdicts(engine, [TAMPERINGS[name][0](engine, receipt)])[0].kind == EQUAL


# --- wrong bits of the maker ------------------------------------------------------------------------------------------


def generated(engine: gemma_py.Engine, flip: Callable[[int, np.ndarray, gemma_py.Session], np.ndarray]) -> Receipt:
    """Generate an answer. flip: may change the logits [V] of each token, and the session, by the token's index."""
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
    """A bit of a weight changes after the maker has computed the fingerprint of the model."""
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


def test_a_digest_is_of_the_little_endian_row() -> None:
    import hashlib

    row = np.array([1.5, -0.0, np.inf], np.float32)
    assert row_digest(row) == hashlib.sha256(bytes.fromhex("0000c03f000000800000807f")).digest()[:12]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_checks_files_and_says_what_it_found(run: Run, tmp_path: Path, receipt: Receipt) -> None:
    good = tmp_path / "good.json"
    assert run("generate", TINY, "--prompt", PROMPT, "--max-tokens", 6, "--seed", 4, "--receipt", good)[0] == 0
    bad = tampering.write(tmp_path / "bad.json", TAMPERINGS["a row of logits"][0](None, receipt).to_bytes())  # type: ignore[arg-type]
    naive = tampering.write(tmp_path / "naive.json", good.read_bytes().replace(b'"trim":false', b'"trim":true'))
    other = dataclasses.replace(receipt, model=dataclasses.replace(receipt.model, files=("0" * 64,)))
    foreign = tampering.write(tmp_path / "foreign.json", other.to_bytes())
    newer = tampering.write(tmp_path / "newer.json", dataclasses.replace(receipt, rules=9).to_bytes())
    for files, code in (
        ([good], 0), ([good, bad], 1), ([naive], 1), ([foreign], 2), ([newer, good], 3), ([newer, foreign], 2),
        ([foreign, newer, bad], 1), ([tmp_path / "none.json"], 2),
    ):  # fmt: skip
        assert run("audit", *files, TINY)[0] == code, files
    _, out, _ = run("audit", good, bad, naive, TINY)
    lines = out.splitlines()
    assert lines[0].startswith(f"{good}: equal: 6 tokens after a prompt of ")
    assert lines[1].startswith(
        f"{bad}: differs: logits at token 5 (position {len(receipt.prompt) + 5}): the logits differ"
    )
    assert lines[2].startswith(f"{naive}: differs: structure: predicate.root is ")
    _, out, _ = run("audit", good, bad, TINY, "--json")
    rows = json.loads(out)["receipts"]
    assert [(row["verdict"], row["stage"], row["token"], row["signature"]) for row in rows] == [
        ("equal", None, None, "none"), ("diverged", "logits", 5, "none"),
    ]  # fmt: skip


@pytest.mark.parametrize("data", [
    b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"a":1,"a":1}', b"[" * 100_000, b'{"_type":' + b"9" * 100_000 + b"}",
    b"{}\n{}\n", b'{"payloadType":1}', b'{"receipts":[[[]]]}', b'{"receipts":[1]}', b" " * 1000,
])  # fmt: skip
def test_hostile_files_are_named_in_one_line(run: Run, tmp_path: Path, data: bytes) -> None:
    code, out, err = run("audit", tampering.write(tmp_path / "hostile.json", data), TINY)
    text = out + err
    assert code == 1 and text.count("\n") == len(text.splitlines()) <= 2 and "hostile.json" in text and len(text) < 700


def test_a_file_of_100_mb_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    code, out, err = run("audit", path, TINY)
    assert code == 2 and not out and err.count("\n") == 1 and "larger than" in err
