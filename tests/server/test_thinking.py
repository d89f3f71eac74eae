import json
from collections.abc import Iterator
from typing import Any, ClassVar

import gemma4_model
import numpy as np
import pytest
from gemma4_model import answer_ids, scripted
from serving import Running, serving

import gemma_py
from gemma_py.generate.answer import AfterThoughts
from gemma_py.server.openai.schemas import ChatRequest, ResponsesRequest
from gemma_py.server.openai.service import Service

THOUGHT = ("<|channel>", "thought\nLet me see.\n", "<channel|>")
CALL = ("<|tool_call>", "call:weather{place:", '<|"|>', "Rome", '<|"|>', "}", "<tool_call|>", "<|tool_response>")
FUNCTION = {"name": "weather", "description": "Of a place."}
TOOL = {"type": "function", "function": FUNCTION}
ASK = [{"role": "user", "content": "Rome?"}]
THINK = 98  # the id of <|think|>


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gemma_py.Engine]:
    folder = gemma4_model.write_checkpoint(tmp_path_factory.mktemp("gemma4") / "checkpoint")
    with gemma4_model.load(folder) as made:
        yield made


@pytest.fixture(scope="module")
def thinker(engine: gemma_py.Engine) -> Iterator[Running]:
    with serving(engine) as running:
        yield running


def script(engine: gemma_py.Engine, *parts: str) -> Any:
    return scripted(answer_ids(engine.text_tokenizer(), *parts))


def streamed(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    _, text, _ = server.request("POST", path, {**body, "stream": True})
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_a_chat_completion_has_its_thoughts_apart(engine: gemma_py.Engine, thinker: Running) -> None:
    asked = {"messages": ASK, "reasoning_effort": "high", "tools": [TOOL], "logprobs": True}
    with script(engine, *THOUGHT, "Look.", *CALL):
        status, whole = thinker.post("/v1/chat/completions", **asked)
    assert status == 200
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Let me see." and choice["message"]["content"] == "Look."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"place": "Rome"}'}
    thoughts = len(answer_ids(engine.text_tokenizer(), *THOUGHT))
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": thoughts}
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"] - thoughts - 1
    with script(engine, *THOUGHT, "Look.", *CALL):
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed(thinker, "/v1/chat/completions", **asked)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me see."
    assert "".join(delta.get("content", "") for delta in deltas) == "Look."
    kinds = [key for delta in deltas for key in ("reasoning_content", "content", "tool_calls") if delta.get(key)]
    assert [kind for at, kind in enumerate(kinds) if kinds[at - 1 : at] != [kind]] == [
        "reasoning_content", "content", "tool_calls"]  # fmt: skip


def test_a_response_has_an_item_for_its_thoughts(engine: gemma_py.Engine, thinker: Running) -> None:
    asked = {"input": "Rome?", "reasoning": {"effort": "low"}, "tools": [{"type": "function", **FUNCTION}]}
    with script(engine, *THOUGHT, "Look.", *CALL):
        events = streamed(thinker, "/v1/responses", **asked)
    whole = events[-1]["response"]
    thought, text, call = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}] and thought["summary"] == []
    assert text["content"][0]["text"] == "Look." and call["arguments"] == '{"place": "Rome"}'
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len(
        answer_ids(engine.text_tokenizer(), *THOUGHT)
    )
    of_thought = [event["type"] for event in events if event.get("output_index") == 0]
    deltas = of_thought.count("response.reasoning_text.delta")
    assert of_thought == [
        "response.output_item.added", "response.content_part.added", *["response.reasoning_text.delta"] * deltas,
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done"]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = next(at for at, event in enumerate(events) if event["type"] == "response.reasoning_text.done")
    first = next(at for at, event in enumerate(events) if event["type"] == "response.output_text.delta")
    assert done < first and events[done]["text"] == "Let me see."
    with script(engine, "Sunny.", "<turn|>"):
        turns = [{"role": "user", "content": "Rome?"}, *whole["output"],
                 {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]  # fmt: skip
        status, again = thinker.post("/v1/responses", **{**asked, "input": turns})
    assert status == 200 and again["output"][0]["content"][0]["text"] == "Sunny."


def test_a_response_that_only_thinks_has_an_empty_message(engine: gemma_py.Engine, thinker: Running) -> None:
    with script(engine, *THOUGHT, "<turn|>"):
        _, whole = thinker.post("/v1/responses", input="Rome?")
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["output"][1]["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("switch", "thinks"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, True),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
        ({"chat_template_kwargs": {}, "reasoning_effort": "high"}, True),
    ],
)
def test_the_switches_of_thoughts(thinker: Running, switch: dict[str, Any], thinks: bool) -> None:
    service = thinker.app.service
    ids = service.chat(ChatRequest.model_validate({"messages": ASK, **switch})).requests[0].ids
    assert (THINK in ids) is thinks
    if "reasoning_effort" in switch and "chat_template_kwargs" not in switch:
        effort = {"reasoning": {"effort": switch["reasoning_effort"]}}
        assert service.responses(ResponsesRequest.model_validate({"input": "Rome?", **effort})).requests[0].ids == ids


def test_switches_that_mean_nothing_are_refused(thinker: Running, server: Running) -> None:
    for asked, param in (
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"other": True}}, "chat_template_kwargs.other"),
    ):
        status, document = thinker.post("/v1/chat/completions", messages=ASK, **asked)
        assert (status, document["error"]["param"]) == (400, param)
    kwargs = {"enable_thinking": True}
    status, document = server.post("/v1/chat/completions", messages=ASK, chat_template_kwargs=kwargs)
    assert (status, document["error"]["param"]) == (400, "chat_template_kwargs")
    assert "\n" not in document["error"]["message"]
    status, _ = server.post("/v1/chat/completions", messages=ASK, max_tokens=1, reasoning_effort="high")
    assert status == 200  # models that cannot think ignore the effort


def test_the_model_list_says_what_the_model_can_do(thinker: Running, server: Running) -> None:
    for running, can in ((thinker, True), (server, False)):
        _, document, _ = running.request("GET", "/v1/models")
        assert (document["data"][0]["thinking"], document["data"][0]["tools"]) == (can, can)


class _OnlyFive:
    """Allows only token 5, three times."""

    description: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(logits)) == 5, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def forced(self, most: int) -> list[int]:
        return [5] * min(most, 3 - len(self.accepted))

    @property
    def finished(self) -> bool:
        return len(self.accepted) == 3


@pytest.mark.parametrize("within", [False, True])
def test_a_constraint_binds_the_answer_and_not_the_thought_before_it(within: bool) -> None:
    logits = np.arange(8, dtype=np.float32)
    inner = _OnlyFive()
    constraint = AfterThoughts(inner, (2, 3), within)

    def allowed() -> list[int]:
        made: list[int] = np.flatnonzero(np.isfinite(constraint.allowed(logits))).tolist()
        return made

    if not within:
        assert allowed() == [2, 5] and constraint.forced(9) == []
        constraint.accept(2)
    assert allowed() == list(range(8)) and constraint.forced(9) == [] and not constraint.finished
    for token in (7, 5, 3):
        constraint.accept(token)
    assert constraint.forced(2) == [5, 5]
    assert allowed() == [5] and inner.accepted == []  # after the first thought, the constraint applies
    for _ in range(3):
        constraint.accept(5)
    assert constraint.finished and inner.accepted == [5, 5, 5]


def test_an_answer_may_omit_its_thought() -> None:
    inner = _OnlyFive()
    constraint = AfterThoughts(inner, (2, 3), False)
    constraint.accept(5)
    assert np.flatnonzero(np.isfinite(constraint.allowed(np.arange(8, dtype=np.float32)))).tolist() == [5]
    assert inner.accepted == [5]


def test_only_requests_that_think_leave_a_thought_free(engine: gemma_py.Engine, thinker: Running) -> None:
    service: Service = thinker.app.service
    for effort, kind in (("none", "CallConstraint"), ("high", "AfterThoughts")):
        asked = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "reasoning_effort": effort}
        made = service.chat(ChatRequest.model_validate(asked)).requests[0].constraint
        assert type(made).__name__ == kind
