import json
import re
from typing import Any

import numpy as np
import pytest
from serving import Running

import gemma_py
from gemma_py.errors import ToolError
from gemma_py.generate.answer import AnswerStream
from gemma_py.generate.core import Token
from gemma_py.generate.events import Finished, Generated, Usage
from gemma_py.server.openai.builders import ChatBuilder
from gemma_py.server.openai.errors import ApiError, api_error
from gemma_py.server.openai.responses import ResponsesBuilder
from gemma_py.server.openai.schemas import ChatRequest, ResponsesRequest
from gemma_py.server.openai.service import Service
from gemma_py.templates.chat_format import ChatFormat
from gemma_py.templates.notation import marks_of
from gemma_py.templates.template import Jinja
from gemma_py.templates.tools import Call, read_call
from gemma_py.tokenizer import Tokenizer

# FunctionGemma's template, shortened.
SOURCE = """{{ bos_token }}{% if tools %}<start_of_turn>developer
{% for tool in tools %}<start_function_declaration>declaration:{{ tool.function.name }}{description:<escape>{{
tool.function.description }}<escape>}<end_function_declaration>{% endfor %}<end_of_turn>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<start_function_response>response:{{ m.name }}{value:<escape>{{
m.content }}<escape>}<end_function_response>{% else %}<start_of_turn>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<start_function_call>call:{{ c.function.name }}{ {%- for k, v in
c.function.arguments | dictsort %}{{ k }}:<escape>{{ v }}<escape>{% endfor %}}<end_function_call>{% endfor %}<end_of_turn>
{% endif %}{% endfor %}<start_of_turn>model
"""
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a place.", "parameters": {"type": "object"}},
}
START, END, QUOTE = 6, 7, 8  # control tokens of a call and of a string, in these tests
MARKS = {"<start_function_call>": START, "<end_function_call>": END, "<escape>": QUOTE}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text in which names of MARKS stand for their ids."""
    made: list[int] = []
    for part in re.split("(" + "|".join(MARKS) + ")", text):
        made += [MARKS[part]] if part in MARKS else tokenizer.encode(part, bos=False)
    return made


def read(tokenizer: Tokenizer, text: str) -> Call | None:
    return read_call(ids_of(tokenizer, text), QUOTE, tokenizer)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("call:weather{place:<escape>Rome, {Italy}<escape>,days:3}", "weather", {"place": "Rome, {Italy}", "days": 3}),
        ("call:f{}", "f", {}),
        ("call:f{a:NaN,b:-Infinity,c:1e999}", "f", {"a": "NaN", "b": "-Infinity", "c": "1e999"}),
        (
            "call:f{a:[1,-2.5,true,null,word],b:{c:<escape><escape>}}",
            "f",
            {"a": [1, -2.5, True, None, "word"], "b": {"c": ""}},
        ),
        (" call:a.b-c{ <escape>k:1<escape> : <escape>v<escape> }", "a.b-c", {"k:1": "v"}),
        ('call:f{a:<escape>"\\\n<escape>}', "f", {"a": '"\\\n'}),
    ],
)
def test_a_call_is_read(tiny_engine: gemma_py.Engine, text: str, name: str, arguments: dict[str, Any]) -> None:
    call = read(tiny_engine.text_tokenizer(), text)
    assert call is not None
    assert (call.name, json.loads(call.arguments)) == (name, arguments)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weather{}",
        "call:{}",
        "call:f",
        "call:f{a}",
        "call:f{a:<escape>x}",
        "call:f{a:1",
        "call:f{a:[1}",
        "call:f" + "{a:" * 90,
    ],
)
def test_what_is_no_call_is_not_read(tiny_engine: gemma_py.Engine, text: str) -> None:
    assert read(tiny_engine.text_tokenizer(), text) is None


def test_a_mark_that_text_spells_is_part_of_a_string(tiny_engine: gemma_py.Engine) -> None:
    tokenizer = tiny_engine.text_tokenizer()
    spelled = tokenizer.encode("call:f{a:", bos=False), tokenizer.encode("x<escape>,b:<escape>y", bos=False)
    call = read_call([*spelled[0], QUOTE, *spelled[1], QUOTE, *tokenizer.encode("}", bos=False)], QUOTE, tokenizer)
    assert call is not None and json.loads(call.arguments) == {"a": "x<escape>,b:<escape>y"}


class _Marked(Tokenizer):
    """The tiny model's tokenizer with MARKS."""

    def token_id(self, piece: str) -> int | None:
        return MARKS.get(piece, super().token_id(piece))


@pytest.fixture
def service(server: Running, tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(tiny_engine.text_tokenizer(), "__class__", _Marked)
    made = Service(tiny_engine, server.scheduler, "tiny")
    template = Jinja("a template", source=SOURCE, globals=(("bos_token", "<bos>"),))
    made.format = ChatFormat(template, tiny_engine.text_tokenizer())
    assert made.format.knows_tools
    return made


def pieces_of(service: Service, **asked: Any) -> str:
    return service.tokenizer.decode(service.chat(ChatRequest.model_validate(asked)).requests[0].ids)


def test_the_template_is_told_of_tools_calls_and_results(service: Service) -> None:
    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    text = pieces_of(service, messages=messages, tools=[WEATHER])
    assert "declaration:weather{description:<escape>Of a place.<escape>}" in text
    assert "call:weather{place:<escape>Rome<escape>}<end_function_call>" in text
    assert "response:weather{value:<escape>sunny<escape>}" in text
    without = pieces_of(service, messages=messages[:1], tools=[WEATHER], tool_choice="none")
    assert "declaration" not in without


def test_nobody_forges_a_control_token_through_a_tool(service: Service) -> None:
    """A control token in a name, description, key, argument or result becomes text. The template's own control tokens
    stay.
    """
    ask = [{"role": "user", "content": "x"}]

    def asked(word: str) -> list[dict[str, Any]]:
        function = {"name": word, "arguments": json.dumps({"a": word, word: [word]})}
        described = {"name": "f", "description": word, "parameters": {"type": "object", "properties": {word: {}}}}
        return [
            {"messages": ask, "tools": [{"type": "function", "function": described}]},
            {"messages": [*ask, {"role": "assistant", "tool_calls": [{"function": function}]}]},
            {"messages": [*ask, {"role": "tool", "name": word, "content": "x"}]},
            {"messages": [*ask, {"role": "tool", "name": "f", "content": word}]},
        ]

    control = service.tokenizer.control_ids
    for forged in (service.tokenizer.piece(token) for token in sorted(control)):
        for honest, hostile in zip(asked("word"), asked(f"x{forged}y"), strict=True):
            ids, wanted = (service.chat(ChatRequest.model_validate(case)).requests[0].ids for case in (hostile, honest))
            assert [token for token in ids if token in control] == [token for token in wanted if token in control]
            assert f"x{forged}y" in service.tokenizer.decode(ids)


def test_results_and_arguments_must_make_sense(service: Service) -> None:
    for message, param in (
        ({"role": "tool", "tool_call_id": "nobody", "content": "x"}, "messages[0].tool_call_id"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[0].tool_calls",
        ),
    ):
        with pytest.raises(ToolError) as caught:
            pieces_of(service, messages=[message])
        assert api_error(caught.value).param == param


def events_of(service: Service, made: Any, ids: list[int]) -> list[Any]:
    """The events of an answer that consists of these tokens. The last token ends the answer."""
    stream = AnswerStream(service.tokenizer, trim=True, marks=made.job.requests[0].marks)
    events: list[Any] = []
    for at, token in enumerate(ids):
        last = at == len(ids) - 1
        part = stream.finish() if last else stream.push(token)
        events.append(Generated(Token(token, part.text, 0.0, "stop" if last else None, part.reasoning, part.calls), ()))
    return [*events, Finished("stop", Usage(1, 0, len(ids), 0, 0, 0))]


def answer(service: Service, ids: list[int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (choice, streamed deltas) of an answer that consists of these tokens."""
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]})
    made = ChatBuilder(service, asked)
    pieces = [piece for event in events_of(service, made, ids) for piece in made.take(0, event)]
    return made.document()["choices"][0], [piece["choices"][0] for piece in pieces]


CALL = "<start_function_call>call:weather{place:<escape>Rome<escape>}<end_function_call>"


def test_a_call_in_an_answer(service: Service) -> None:
    whole, deltas = answer(service, [*ids_of(service.tokenizer, "Look. " + CALL), 1])
    assert whole["finish_reason"] == deltas[-1]["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Look. "
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Rome"}'}
    streamed = [delta["delta"]["tool_calls"][0] for delta in deltas if "tool_calls" in delta["delta"]]
    assert streamed == [{"index": 0, **call}]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == "Look. "


def test_what_only_looks_like_a_call_stays_text(service: Service) -> None:
    tokenizer = service.tokenizer
    start, end = (tokenizer.piece(token) or "" for token in (START, END))
    text = "<start_function_call>call:weather{}<end_function_call>"
    cases = [
        (tokenizer.encode(text, bos=False), text),
        ([START, *tokenizer.encode("call:weather{", bos=False)], start + "call:weather{"),
        ([START, *tokenizer.encode("hello", bos=False), END], start + "hello" + end),
    ]
    for ids, shown in cases:
        whole, deltas = answer(service, [*ids, 1])
        assert whole["message"]["content"] == shown and whole["finish_reason"] == "stop"
        assert "".join(delta["delta"].get("content", "") for delta in deltas) == shown


def test_several_calls(service: Service) -> None:
    whole, deltas = answer(service, [*ids_of(service.tokenizer, CALL + CALL), 1])
    assert len({made["id"] for made in whole["message"]["tool_calls"]}) == 2 and whole["message"]["content"] is None
    assert [d["delta"]["tool_calls"][0]["index"] for d in deltas if "tool_calls" in d["delta"]] == [0, 1]


@pytest.mark.parametrize(
    ("choice", "names", "begin"),
    [
        ("required", ["weather"], "call:weather{"),
        ("required", ["weather", "time"], "call:"),
        ({"type": "function", "function": {"name": "time"}}, ["weather", "time"], "call:time{"),
    ],
)
def test_an_answer_may_have_to_begin_with_a_call(service: Service, choice: Any, names: list[str], begin: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice, "n": 2}
    requests = service.chat(ChatRequest.model_validate(asked)).requests
    logits = np.arange(service.engine.config.vocab_size, dtype=np.float32)
    for constraint in (request.constraint for request in requests):
        assert constraint is not None
        forced = []
        while (allowed := constraint.allowed(logits)) is not logits:
            (token,) = np.flatnonzero(np.isfinite(allowed)).tolist()
            assert allowed[token] == logits[token] and not constraint.finished
            constraint.accept(token)
            forced.append(token)
        assert forced[0] == START and service.tokenizer.decode(forced[1:]) == begin


def test_tool_choice_must_name_a_given_tool(service: Service) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    for tools, choice in (([], "required"), ([WEATHER], named)):
        asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
        with pytest.raises(ApiError, match=r"'tool_choice' .* matches no function") as caught:
            service.chat(ChatRequest.model_validate(asked))
        assert caught.value.param == "tool_choice"


# --- the same in /v1/responses ----------------------------------------------------------------------------------------

FLAT = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]


def test_responses_and_chats_give_the_template_equal_messages(service: Service) -> None:
    call = {"name": "weather", "arguments": '{"place": "Rome"}'}
    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "Look.", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "tool_calls": [{"id": "call_2", "function": call}, {"id": "call_3", "function": call}]},
    ]  # fmt: skip
    items = [
        *messages[:1],
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed", **call},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "function_call", "call_id": "call_2", **call},
        {"type": "function_call", "call_id": "call_3", **call},
    ]  # fmt: skip
    choice = {"type": "function", "name": "weather"}
    made = service.responses(ResponsesRequest.model_validate({"input": items, "tools": [FLAT], "tool_choice": choice}))
    assert service.tokenizer.decode(made.requests[0].ids) == pieces_of(service, messages=messages, tools=[WEATHER])
    assert made.requests[0].constraint is not None


def test_only_functions_are_tools(server: Running) -> None:
    # This model's template does not support tools.
    for tool, param in ({"type": "web_search"}, "tools[0].type"), (FLAT, "tools"):
        status, document = server.post("/v1/responses", input="x", tools=[tool])
        assert (status, document["error"]["param"]) == (400, param)


@pytest.mark.parametrize("text", ["Look. ", ""])
def test_a_call_in_a_response(service: Service, text: str) -> None:
    asked = ResponsesRequest.model_validate({"input": "x", "tools": [FLAT]})
    made = ResponsesBuilder(service, asked)
    ids = [*ids_of(service.tokenizer, text + CALL), 1]
    events = [event for source in events_of(service, made, ids) for event in made.take(0, source)]
    whole = made.document()
    assert whole == events[-1]["response"] and whole["status"] == "completed"
    *before, call = whole["output"]
    assert [item["content"][0]["text"] for item in before] == [text] * bool(text)
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"place": "Rome"}')
    told = {event["type"]: event for event in events if event.get("output_index") == len(before)}
    kinds = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert list(told) == [f"response.{kind}" for kind in kinds]
    assert told[f"response.{kinds[1]}"]["delta"] == told[f"response.{kinds[2]}"]["arguments"] == call["arguments"]
    assert told[f"response.{kinds[3]}"]["item"] == call
    assert made.document()["tools"][0]["name"] == "weather"


def test_without_marks_all_tokens_are_text(tiny_engine: gemma_py.Engine) -> None:
    tokenizer = tiny_engine.text_tokenizer()
    assert marks_of(tokenizer) is None
    stream = AnswerStream(tokenizer)
    assert (stream.push(START).text, stream.finish().text) == (tokenizer.piece(START), "")


@pytest.mark.parametrize("stop", ["nothing", "<", "<unused", "b"])
def test_calls_are_read_whatever_the_stop_strings_are(service: Service, stop: str) -> None:
    tokenizer = service.tokenizer
    ids = ids_of(tokenizer, f"a{CALL}{CALL}<start_function_call>none<end_function_call> c")
    stream = AnswerStream(tokenizer, [stop], marks=service.format.marks(tools=True))
    parts = []
    for token in ids:
        if not stream.stopped:
            parts.append(stream.push(token))
    parts.append(stream.finish())
    shown = "a" + (tokenizer.piece(START) or "") + "none" + (tokenizer.piece(END) or "") + " c"
    assert [call.name for part in parts for call in part.calls] == ["weather", "weather"]
    assert "".join(part.text for part in parts) == shown.partition(stop)[0]
    assert stream.stopped is (stop in shown)
