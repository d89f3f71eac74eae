import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import receipt_tampering as tampering
from receipt_tampering import RESPONSES, edited_response, file_verdicts, lines_of, response_around
from repository import TINY

import gemma_py
from gemma_py.checks.audit import DIVERGED, EQUAL
from gemma_py.receipts import sources
from gemma_py.receipts.receipt import Receipt

Run = Callable[..., tuple[int, str, str]]
PATHS = {
    "chat": "choices[0].message.content",
    "completion": "choices[0].text",
    "echo": "choices[0].text",
    "responses": "output[0].content[0].text",
    "stream of a chat": "choices[0].delta.content",
    "stream of a completion": "choices[0].text",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def receipt(engine: gemma_py.Engine) -> Receipt:
    return tampering.made(engine, "The list of", 9, temperature=1.0, seed=3, logit_bias=tampering.NO_END)


def edited(documents: tampering.Documents) -> tampering.Documents:
    made = copy.deepcopy(documents)
    holder, name = next(at for at in reversed(tampering.shown_texts(made)) if at[0][at[1]])
    holder[name] += " not"
    return made


@pytest.mark.parametrize("form", RESPONSES)
@pytest.mark.parametrize("in_batch", [False, True])
def test_the_shown_text_is_compared(engine: gemma_py.Engine, receipt: Receipt, form: str, in_batch: bool) -> None:
    if in_batch and form.startswith("stream"):
        pytest.skip("a batch has no streams")
    documents = response_around(engine, receipt, form, in_batch)
    equal, differs = file_verdicts(engine, [lines_of(documents), lines_of(edited(documents))])
    assert equal.kind == EQUAL, equal.message
    path = f"{'response.body.' if in_batch else ''}{PATHS[form]}"
    assert (differs.kind, differs.stage) == (DIVERGED, "text")
    assert differs.message == f"text: the response shows another {path} than the token ids give"


def test_the_last_chunk_alone_shows_no_answer(engine: gemma_py.Engine, receipt: Receipt) -> None:
    for form in ("stream of a chat", "stream of a completion"):
        last = response_around(engine, receipt, form)[-1:]
        assert file_verdicts(engine, [lines_of(last)])[0].kind == EQUAL


def test_chunks_after_the_receipts_are_named(engine: gemma_py.Engine, receipt: Receipt) -> None:
    documents = response_around(engine, receipt, "stream of a chat")
    forged = {"id": "a", "choices": [{"index": 0, "delta": {"content": " not"}}]}
    late, twice = file_verdicts(engine, [lines_of([*documents, forged]), lines_of(documents * 2)])
    assert (late.kind, late.stage) == (DIVERGED, "structure") and "after the receipts" in late.message
    assert twice.kind == EQUAL, twice.message


def test_a_response_that_is_saved_twice_is_no_stream(engine: gemma_py.Engine, receipt: Receipt) -> None:
    (document,) = response_around(engine, receipt, "completion")
    assert file_verdicts(engine, [lines_of([{"id": "a", **document}] * 2)])[0].kind == EQUAL


def test_a_choice_without_a_receipt_is_named(engine: gemma_py.Engine, receipt: Receipt) -> None:
    (document,) = response_around(engine, receipt, "completion")
    document["choices"].append({"index": 1, "text": "forged"})
    (found,) = file_verdicts(engine, [lines_of([document])])
    assert (found.kind, found.stage) == (DIVERGED, "structure") and "choices[1] has no receipt" in found.message


def test_choices_that_are_exchanged_are_found(engine: gemma_py.Engine, receipt: Receipt) -> None:
    other = tampering.made(engine, "The list of", 9, temperature=1.0, seed=4, logit_bias=tampering.NO_END)
    documents = [response_around(engine, each, "chat")[0] for each in (receipt, other)]
    joined = {name: [document[name][0] for document in documents] for name in ("choices", "receipts")}
    exchanged = {**joined, "choices": joined["choices"][::-1]}
    found = file_verdicts(engine, [lines_of([joined]), lines_of([exchanged])])
    assert [verdict.stage for verdict in found] == [None, "text"]


def test_drawn_edits_are_found(engine: gemma_py.Engine) -> None:
    assert tampering.escaped_responses(engine, tampering.varied_receipts(engine, 12), 200, seed=1) == []


def test_control_an_audit_that_sees_no_answer_lets_edits_pass(
    engine: gemma_py.Engine, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "shown_fields", lambda *_: {})
    documents = response_around(engine, receipt, "chat")
    assert file_verdicts(engine, [lines_of(edited(documents))])[0].kind == EQUAL


def test_responses_of_any_shape_have_a_verdict(engine: gemma_py.Engine, receipt: Receipt) -> None:
    """A random value outside the receipts is replaced. The audit must give a verdict, not an error."""
    rng, files = random.Random(3), []
    for _ in range(300):
        documents = response_around(engine, receipt, rng.choice(list(RESPONSES)), in_batch=rng.random() < 0.3)
        holder: Any = rng.choice(documents)
        places = [at for at in tampering._places(holder) if at[1] != "predicate"]
        holder, name = rng.choice([at for at in places if "_type" not in at[0]])
        holder[name] = rng.choice([None, 7, -1, True, "text", [], {}, [None], [[]], {"content": 1}, {"text": []}])
        files.append(lines_of(documents))
    assert {verdict.kind for verdict in file_verdicts(engine, files)} == {EQUAL, DIVERGED}


def test_the_command_names_the_edited_field(
    run: Run, tmp_path: Path, engine: gemma_py.Engine, receipt: Receipt
) -> None:
    documents = response_around(engine, receipt, "chat", in_batch=True)
    rng = random.Random(1)
    lines = lines_of([*documents, *edited_response(rng, documents, "another text"), *edited(documents)])
    file = tampering.write(tmp_path / "out.jsonl", lines)
    code, out, _ = run("audit", file, TINY)
    first, _, last = out.splitlines()
    assert code == 1 and first.startswith(f"{file}, line 1: equal")
    assert last == (
        f"{file}, line 3: differs: text: the response shows another response.body.choices[0].message.content than the "
        "token ids give"
    )
    pretty = tampering.write(tmp_path / "pretty.json", json.dumps(edited(documents)[0], indent=2).encode())
    assert run("audit", pretty, TINY)[0] == 1
