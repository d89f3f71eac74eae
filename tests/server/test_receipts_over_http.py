import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gemma4_model
import pytest
import receipt_tampering as tampering
from repository import TINY
from serving import Running, serving

import gemma_py
from gemma_py.checks.audit import DIVERGED, EQUAL, UNKNOWN
from gemma_py.receipts.receipt import Receipt, output_digests, read

Run = Callable[..., tuple[int, str, str]]
HI = [{"role": "user", "content": "hi"}]
COLOUR = {"type": "object", "properties": {"b": {"enum": ["red", "green"]}, "a": {"type": "integer", "minimum": 1, "maximum": 9}},
          "required": ["b", "a"], "additionalProperties": False}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": COLOUR}}


def receipts_of(document: dict[str, Any]) -> list[Receipt]:
    return [read(receipt, "it") for receipt in document["receipts"]]


def kinds(engine: gemma_py.Engine, receipts: list[Receipt]) -> list[str]:
    return [verdict.message for verdict in tampering.verdicts(engine, receipts)]


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_responses_of_every_endpoint_have_receipts(server: Running, tiny_engine: gemma_py.Engine) -> None:
    options = {"receipt": True, "temperature": 1, "seed": 3}
    chat = server.post("/v1/chat/completions", messages=HI, max_tokens=9, n=2, **options)[1]
    completion = server.post("/v1/completions", prompt=["a", "b"], max_tokens=9, stop=["e"], **options)[1]
    response = server.post("/v1/responses", input="hi", max_output_tokens=9, **options)[1]
    texts = [choice["message"]["content"] for choice in chat["choices"]]
    texts += [choice["text"] for choice in completion["choices"]]
    texts.append("".join(part["text"] for item in response["output"] for part in item["content"]))
    receipts = [receipt for document in (chat, completion, response) for receipt in receipts_of(document)]
    assert [receipt.outputs for receipt in receipts] == [output_digests(text, "", []) for text in texts]
    assert [receipt.asked.sampling["seed"] for receipt in receipts] == ["3", "4", "3", "3", "3"]
    assert kinds(tiny_engine, receipts) == [EQUAL] * 5
    again = server.post("/v1/chat/completions", messages=HI, max_tokens=9, n=2, speculate="off", **options)[1]
    assert again["receipts"] == chat["receipts"] and again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "receipts" not in server.post("/v1/chat/completions", messages=HI, max_tokens=3)[1]


def test_the_answers_that_responses_show_are_audited(server: Running, tiny_engine: gemma_py.Engine) -> None:
    options: dict[str, Any] = {"receipt": True, "temperature": 1, "seed": 3}
    chat = {"messages": HI, "max_tokens": 9, "n": 2, **options}
    completion = {"prompt": ["a b", "▁c"], "max_tokens": 9, "stop": ["e"], "n": 2, **options}
    echo = {**completion, "echo": True}
    ids = {**echo, "prompt": [[2, 300, 301], [300]]}
    files = [tampering.lines_of([server.post("/v1/chat/completions", **chat)[1]])]
    files += [tampering.lines_of([server.post("/v1/completions", **asked)[1]]) for asked in (completion, echo, ids)]
    files.append(tampering.lines_of([server.post("/v1/responses", input="hi", max_output_tokens=9, **options)[1]]))
    for path, asked in (
        ("chat/completions", chat),
        ("completions", completion),
        ("completions", echo),
        ("completions", ids),
    ):
        files.append(tampering.lines_of(events_of(server.post(f"/v1/{path}", **asked, stream=True)[1])))
    stream = server.post("/v1/responses", input="hi", max_output_tokens=9, **options, stream=True)[1]
    files.append(tampering.lines_of(events_of(stream)))
    assert [verdict.kind for verdict in tampering.file_verdicts(tiny_engine, files)] == [EQUAL] * 10
    edited = []
    for data in files:
        documents = [json.loads(line) for line in data.splitlines()]
        # The last event of a stream of /v1/responses has the whole response, which is compared.
        holder, name = [at for at in tampering.shown_texts(documents) if at[0][at[1]]][-1]
        holder[name] += "x"
        edited.append(tampering.lines_of(documents))
    found = tampering.file_verdicts(tiny_engine, edited)
    assert [verdict.stage for verdict in found] == ["text"] * 10, found
    status, text, _ = server.request("POST", "/v1/audit", edited[0])
    verdicts = [event for event in map(json.loads, text.splitlines()) if event["type"] == "verdict"]
    assert status == 200 and sorted(str(event["stage"]) for event in verdicts) == ["None", "text"]
    (wrong,) = (event for event in verdicts if event["stage"] == "text")
    assert wrong["verdict"] == DIVERGED and "choices[1].message.content" in wrong["message"]


def test_the_last_chunk_of_a_stream_has_the_receipt(server: Running) -> None:
    asked = {"messages": HI, "max_tokens": 9, "receipt": True, "temperature": 0, "n": 2}
    whole = server.post("/v1/chat/completions", **asked)[1]["receipts"]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = events_of(server.post("/v1/chat/completions", **asked, **options, stream=True)[1])
        assert chunks[-1]["receipts"] == whole and not any("receipts" in chunk for chunk in chunks[:-1])
    asked = {"input": "hi", "max_output_tokens": 9, "receipt": True, "temperature": 0}
    events = events_of(server.post("/v1/responses", **asked, stream=True)[1])
    whole = server.post("/v1/responses", **asked)[1]["receipts"]
    assert events[-1]["response"]["receipts"] == whole
    assert not any("receipts" in event.get("response", {}) for event in events[:-1])


def test_what_cannot_have_a_receipt_is_refused(server: Running) -> None:
    status, document = server.post("/v1/completions", prompt="a", max_tokens=0, receipt=True)
    assert status == 400 and "receipt" in document["error"]["message"]
    status, document = server.post("/v1/completions", prompt="a", max_tokens=1, receipt="yes")
    assert status == 400 and document["error"]["param"] == "receipt"


def test_an_answer_that_follows_a_schema(server: Running, tiny_engine: gemma_py.Engine) -> None:
    pytest.importorskip("llguidance")
    asked = {"messages": HI, "max_tokens": 60, "receipt": True, "temperature": 1, "seed": 1, "response_format": SCHEMA}
    document = server.post("/v1/chat/completions", **asked)[1]
    assert list(json.loads(document["choices"][0]["message"]["content"])) == ["b", "a"]
    (receipt,) = receipts_of(document)
    constraint = receipt.asked.constraint
    assert constraint is not None and json.loads(constraint["schema"]) == COLOUR
    changes: list[tuple[dict[str, Any], str, str]] = [
        ({}, EQUAL, ""),
        ({"schema": constraint["schema"].replace("green", "blue").replace("red", "grey")}, DIVERGED, "choice"),
        ({"schema": constraint["schema"].replace(", ", ",")}, DIVERGED, "sampling"),
        ({"schema": "{"}, DIVERGED, "sampling"),
        ({"schema": 7}, DIVERGED, "sampling"),
        ({"ends": []}, DIVERGED, "sampling"),
        ({"ends": [1, 99999]}, DIVERGED, "sampling"),
        ({"more": 1}, DIVERGED, "sampling"),
        ({"thoughts": 1}, DIVERGED, "sampling"),
        ({"kind": "grammar"}, DIVERGED, "sampling"),
        ({"llguidance": "0.1"}, UNKNOWN, "sampling"),
    ]
    tampered = [tampering.with_asked(receipt, constraint={**constraint, **change}) for change, _, _ in changes]
    tampered.append(tampering.with_asked(receipt, constraint=None))
    found = tampering.verdicts(tiny_engine, tampered)
    wanted = [(kind, stage or None) for _, kind, stage in changes] + [(DIVERGED, "choice")]
    assert [(verdict.kind, verdict.stage) for verdict in found] == wanted, found


def assert_edits_are_found(engine: gemma_py.Engine, documents: tampering.Documents, texts: set[str]) -> None:
    """Audit a response. Then edit each text of the response in turn, and require that the audit finds the edit."""
    edited, seen = [], ""
    for number in range(len(list(answer_places(documents)))):
        made = json.loads(json.dumps(documents))
        holder, name = list(answer_places(made))[number]
        seen += holder[name]
        holder[name] += "x"
        edited.append(made)
    first, *others = tampering.file_verdicts(engine, list(map(tampering.lines_of, [documents, *edited])))
    assert first.kind == EQUAL, first.message
    assert all(text in seen for text in texts), seen
    assert [verdict.stage for verdict in others] == ["text"] * len(edited), others


def answer_places(documents: tampering.Documents) -> list[tuple[Any, Any]]:
    """(object, key) of each text, thought, tool name and tool arguments that the documents show."""
    names, found = ("text", "content", "reasoning_content", "name", "arguments"), []
    for document in documents:
        for field in ("choices", "output"):
            found += [at for at in tampering._places(document.get(field)) if at[1] in names]
    return [at for at in found if isinstance(at[0][at[1]], str) and at[0][at[1]]]


@pytest.mark.parametrize("required", [False, True])
def test_thoughts_and_tool_calls_are_checked(tmp_path: Path, required: bool) -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with gemma4_model.load(gemma4_model.write_checkpoint(tmp_path / "model")) as engine, serving(engine) as server:
        call = ["<|tool_call>", "call:f{x:1}", "<tool_call|>", "<turn|>"]
        thought = [] if required else ["<|channel>", "thought\nWell", "<channel|>", "So:"]
        ids = gemma4_model.answer_ids(engine.text_tokenizer(), *thought, *call)
        asked = {"messages": HI, "max_tokens": 60, "receipt": True, "temperature": 0, "tools": [tool],
                 "tool_choice": "required" if required else "auto"}  # fmt: skip
        with gemma4_model.scripted(ids):
            document = server.post("/v1/chat/completions", **asked)[1]
            (receipt,) = receipts_of(document)
            assert document["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
            assert set(receipt.outputs) == {"answer", "tool_calls"} | (set() if required else {"reasoning"})
            assert (receipt.asked.constraint is not None) == required
            assert kinds(engine, [receipt]) == [EQUAL]
            flat = [{"type": "function", **tool["function"]}]
            options = {"input": "hi", "max_output_tokens": 60, "receipt": True, "temperature": 0, "tools": flat}
            response = server.post("/v1/responses", **options, tool_choice=asked["tool_choice"])[1]
            chunks = events_of(server.post("/v1/chat/completions", **asked, stream=True)[1])
            for documents in ([document], [response], chunks):
                assert_edits_are_found(engine, documents, {"f", '{"x": 1}', *(() if required else ("Well", "So:"))})
            assert receipt.asked.marks is not None
            for name in ("call", "channel"):
                marks = {**receipt.asked.marks, name: None}
                (found,) = tampering.verdicts(engine, [tampering.with_asked(receipt, marks=marks)])
                if name == "call" or not required:
                    assert (found.kind, found.stage) == (DIVERGED, "text")
            other = dataclasses.replace(receipt, outputs={**receipt.outputs, "tool_calls": "0" * 64})
            assert tampering.verdicts(engine, [other])[0].stage == "text"


def test_a_batch_adds_receipts_which_audit_reads(run: Run, tmp_path: Path) -> None:
    rows = [
        {"custom_id": str(n), "url": "/v1/completions", "body": {"prompt": "a" * n, "max_tokens": n}} for n in (1, 5, 9)
    ]
    rows += [{"custom_id": "wrong", "url": "/v1/completions", "body": {"prompt": 1}}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("batch", source, out, TINY, "--receipt")[0] == 0
    code, text, _ = run("audit", out, TINY)
    assert code == 0 and [line.split(": ")[1] for line in text.splitlines()] == ["equal"] * 3
    assert {line.split(": ")[0] for line in text.splitlines()} < {f"{out}, line {n}" for n in (1, 2, 3, 4)}
    lines = out.read_text().splitlines()
    damaged = next(n for n, line in enumerate(lines) if '"receipts"' in line)
    lines[damaged] = lines[damaged].replace('"trim": false', '"trim": true')
    out.write_text("\n".join(lines))
    code, text, _ = run("audit", out, TINY)
    assert code == 1 and text.count("equal") == 2 and f"{out}, line {damaged + 1}: differs: structure" in text


def test_a_server_signs_its_receipts(tmp_path: Path, tiny_engine: gemma_py.Engine, run: Run) -> None:
    pytest.importorskip("cryptography")
    from gemma_py.receipts.envelope import Signer, new_key

    key = tmp_path / "key.pem"
    new_key(key)
    with serving(tiny_engine) as server:
        server.app.service.signer = Signer.load(key)
        document = server.post("/v1/completions", prompt="a", max_tokens=5, receipt=True)[1]
    file = tampering.write(tmp_path / "response.json", json.dumps(document).encode())
    assert run("audit", file, TINY, "--public-key", tmp_path / "key.pem.pub")[0] == 0


def test_a_chat_writes_the_receipt_of_its_last_answer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    file = tmp_path / "answer.json"
    said = f"Hello\n/receipt {file}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said.encode()), "utf-8"))
    with contextlib.suppress(SystemExit):
        assert run("chat", TINY, "--max-tokens", 8, "--temperature", 0)[0] == 0
    code, out, _ = run("audit", file, TINY)
    assert code == 0 and "equal: 8 tokens" in out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"/receipt {file}\n".encode()), "utf-8"))
    code, _, err = run("chat", TINY)
    assert code == 1 and "no complete answer" in err
