from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from serving import Running

import gemma_py
from gemma_py.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
)

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({}, 400, "messages", "missing_required_parameter"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": "hi"}, 400, "messages", "invalid_type"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "king", "content": ""}]}, 400, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type", "invalid_value"),
        ({"messages": HI, "temperature": 3}, 400, "temperature", "invalid_value"),
        ({"messages": HI, "temperature": "1"}, 400, "temperature", "invalid_type"),
        ({"messages": HI, "n": 17}, 400, "n", "invalid_value"),
        ({"messages": HI, "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"messages": HI, "max_tokens": 9_999_999}, 400, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages", "context_length_exceeded"),
        ({"messages": HI, "stop": ["a", ""]}, 400, "stop[1]", "invalid_value"),
        ({"messages": HI, "logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_value"),
        ({"messages": HI, "logit_bias": {"99999": 1}}, 400, "logit_bias", "invalid_value"),
        ({"messages": HI, "top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
        ({"messages": HI, "response_format": {"type": "xml"}}, 400, "response_format.type", "invalid_value"),
        ({"messages": HI, "nonsense": 1}, 400, "nonsense", "unknown_parameter"),
        ({"messages": HI, "stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
        ({"messages": HI, "stream_options": {"x": 1}}, 400, "stream_options.x", "unknown_parameter"),
        ({"messages": HI, "model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"messages": [HI[0], {"role": "system", "content": "x"}]}, 400, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", "invalid_value"),
    ],
)  # fmt: skip
def test_an_error_names_the_wrong_field(server: Running, body: dict, status: int, param: str, code: str) -> None:
    got, document = server.post("/v1/chat/completions", **body)
    error = document["error"]
    assert (got, error["param"], error["code"]) == (status, param, code), error
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


def test_a_full_context_is_said_with_both_numbers(server: Running, tiny_engine: gemma_py.Engine) -> None:
    _, document = server.post("/v1/completions", prompt=[5] * 4000, max_tokens=500)
    assert str(tiny_engine.context) in document["error"]["message"] and "4000" in document["error"]["message"]
    assert document["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": ""}]}),
        ("/v1/completions", {"prompt": ["x"] * 65}),
        ("/v1/completions", {"prompt": ["x"] * 64, "n": 2}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/tokenize", {"content": 5}),
        ("/v1/responses", {"input": "x", "metadata": {"a": "\ud800"}}),
    ],
)
def test_unsupported_fields_are_refused(server: Running, path: str, body: dict) -> None:
    status, document = server.post(path, **body)
    assert status == 400 and document["error"]["message"]


@pytest.mark.parametrize("prompt", [[], {}, None, [[]]])
def test_a_prompt_of_nothing(server: Running, prompt: object) -> None:
    status, document = server.post("/v1/completions", prompt=prompt)
    error = document["error"]
    assert (status, error["param"], error["code"]) == (400, "prompt", "invalid_value")
    assert "non-empty" in error["message"] or error["message"] == "expected at least one token, found none"


MANY = 1000  # more errors than a response should report


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [[-1] * MANY]}),
        (DetokenizeRequest, {"tokens": ["x"] * MANY}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "tool_calls": [{}] * MANY}]}),
        (ChatRequest, {"messages": HI, "modalities": [1] * MANY}),
        (ResponsesRequest, {"input": [{}] * MANY}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{}] * MANY}]}),
    ],
)
def test_few_errors_of_a_body_are_reported(schema: type[BaseModel], document: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(document)
    assert caught.value.error_count() < 20


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"[" * 100_000, b'{"messages": NaN}', b"\xff", b'"x"'])
def test_invalid_bodies_are_refused(server: Running, body: bytes) -> None:
    status, document, _ = server.request("POST", "/v1/chat/completions", body)
    assert status == 400 and document["error"]["code"] in ("invalid_json", "invalid_type")


def test_other_types_paths_and_methods(server: Running) -> None:
    status, document, _ = server.request("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"})
    assert (status, document["error"]["code"]) == (415, "unsupported_media_type")
    status, document, headers = server.request("GET", "/v1/completions")
    assert (status, headers["Allow"], document["error"]["code"]) == (405, "POST", "method_not_supported")
    assert document["error"]["message"] == "'/v1/completions' does not accept GET, only POST."


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/images/generations", "/openapi.json lists all."),
        ("/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("/v1/chat/completions/", "did you mean '/v1/chat/completions'?"),
        ("/v1/v1/completions", "did you mean '/v1/completions'?"),
        ("/" + "x" * 9000, "/openapi.json lists all."),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_path(server: Running, method: str, path: str, advice: str) -> None:
    status, document, _ = server.request(method, path)
    error = {"message": f"Unknown path: {path[:80]!r}; {advice}", "type": "invalid_request_error", "param": None}
    assert (status, document) == (404, {"error": {**error, "code": "unknown_url"}})
