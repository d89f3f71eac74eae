import json
from typing import Any

import numpy as np
import pytest
from serving import Running

import gemma_py
from gemma_py.server.openai.constraint import JsonConstraints
from gemma_py.server.openai.errors import ApiError

pytest.importorskip("llguidance")
COLOURS = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def constraints(tiny_engine: gemma_py.Engine) -> JsonConstraints:
    return JsonConstraints(
        tiny_engine.text_tokenizer(), tiny_engine.config.vocab_size, tiny_engine.config.eos_token_ids
    )


def test_the_prepared_tokenizer_of_constraints_is_reused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.app.service.prepare()
    monkeypatch.setattr("llguidance.LLTokenizer", lambda *_, **__: 1 / 0)
    status, _ = server.post("/v1/completions", prompt="a", max_tokens=2, response_format=formatted(COLOURS))
    assert status == 200


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_forced_tokens_are_the_only_ones_that_the_schema_allows(
    tiny_engine: gemma_py.Engine, constraints: JsonConstraints
) -> None:
    rng = np.random.default_rng(1)
    logits = np.zeros(tiny_engine.config.vocab_size, np.float32)
    chains = set()
    for _ in range(4):
        constraint, asked_nothing = (constraints.compile(COLOURS, "") for _ in range(2))
        pending: list[int] = []  # forced tokens that the constraint has returned
        while not constraint.finished:
            most = int(rng.choice([0, 1, 3, 50]))
            forced = constraint.forced(most)
            assert forced[: len(pending)] == pending[:most]
            pending = max(pending, forced, key=len)
            allowed = asked_nothing.allowed(logits)
            assert np.array_equal(constraint.allowed(logits), allowed)
            tokens = np.flatnonzero(np.isfinite(allowed))
            assert (len(tokens) == 1) == bool(pending) or most == 0
            token = int(rng.choice(tokens))
            if pending:
                assert pending.pop(0) == token
            chains.add(len(forced))
            constraint.accept(token)
            asked_nothing.accept(token)
        assert constraint.forced(9) == [] and asked_nothing.finished
    assert max(chains) > 3


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_that_talks_nonsense_keeps_to_the_schema(server: Running, temperature: int) -> None:
    asked = {
        "messages": [{"role": "user", "content": "x"}],
        "temperature": temperature,
        "seed": 1,
        "max_tokens": 400,
        "n": 3,
    }
    status, made = server.post("/v1/chat/completions", **asked, response_format=formatted(COLOURS))
    assert status == 200
    for choice in made["choices"]:
        answer = json.loads(choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
        assert set(answer) == {"colour", "count", "tags"}
        assert answer["colour"] in ("red", "green") and 1 <= answer["count"] <= 9
        assert len(answer["tags"]) <= 2 and all(len(tag) <= 3 for tag in answer["tags"])
    assert (
        server.post("/v1/chat/completions", **asked, response_format=formatted(COLOURS))[1]["choices"]
        == made["choices"]
    )


def test_any_object_and_the_form_of_responses(server: Running) -> None:
    short = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    _, made = server.post(
        "/v1/responses", input="x", text={"format": {"type": "json_schema", "name": "n", "schema": short}}
    )
    assert json.loads(made["output"][0]["content"][0]["text"])["a"] in (True, False)
    assert made["status"] == "completed" and made["text"]["format"]["schema"] == short
    _, made = server.post(
        "/v1/completions", prompt="x", response_format={"type": "json_object"}, max_tokens=30, temperature=0
    )
    assert made["choices"][0]["text"].startswith("{")


def test_only_tokens_that_the_grammar_allows_have_logits(
    constraints: JsonConstraints, tiny_engine: gemma_py.Engine
) -> None:
    """The document is written in tokens of one letter. At its end, only the end token is allowed."""
    constraint = constraints.compile({"const": [1]}, "schema")
    tokenizer = tiny_engine.text_tokenizer()
    logits = np.linspace(-1, 1, tiny_engine.config.vocab_size, dtype=np.float32)
    for character in "[1]":
        token = tokenizer.token_id(character)
        assert token is not None and not constraint.finished
        allowed = constraint.allowed(logits)
        possible = {tokenizer.piece(int(number)) for number in np.flatnonzero(np.isfinite(allowed))}
        assert character in possible and all(piece is not None and "[1]".find(piece) >= 0 for piece in possible)
        assert allowed[token] == logits[token]
        constraint.accept(token)
    assert constraint.finished


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "nothing"},
        {"$ref": "http://example.org/schema"},
        {"$ref": "#/$defs/none"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "pattern": "("},
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(5000)}},
        {"allOf": [{"anyOf": [{"properties": {f"p{a}_{b}": {}}} for a in range(10)]} for b in range(6)]},
        {"const": "\ud800"},
        {"unknown-keyword-of-nobody": 1, "type": "object", "if": {"type": "string"}, "then": False},
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(server: Running, schema: dict[str, Any]) -> None:
    status, made = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], response_format=formatted(schema)
    )
    assert (status, made["error"]["param"]) == (400, "response_format.json_schema.schema")


def test_depth_is_limited_before_anything_recurses(constraints: JsonConstraints) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"properties": {"p": schema}}
    with pytest.raises(ApiError, match="more than 64 levels"):
        constraints.compile(schema, "schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(a+)+b$"},
        {"type": "string", "pattern": "(x+x+)+" + "y" * 200},
        {"type": "string", "pattern": ".*a.{200}"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    ],
)
def test_a_schema_that_needs_endless_work_ends_at_the_limits(
    constraints: JsonConstraints, tiny_engine: gemma_py.Engine, schema: dict[str, Any]
) -> None:
    """The schema may be refused or obeyed, but the server must not hang."""
    try:
        constraint = constraints.compile(schema, "schema")
    except ApiError:
        return
    logits = np.random.default_rng(1).standard_normal(tiny_engine.config.vocab_size).astype(np.float32)
    for _ in range(50):
        allowed = constraint.allowed(logits)
        if constraint.finished:
            break
        constraint.accept(int(np.argmax(allowed)))
