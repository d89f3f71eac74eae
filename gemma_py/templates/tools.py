"""Check the tools, tool calls and tool results of a request, and parse tool calls that the model generates.

notation.py describes how a model writes a tool call.
"""

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemma_py.errors import ToolError
from gemma_py.tokenizer import Tokenizer

# Stands for the quote mark in decoded text. Decoded text itself never contains half a surrogate pair.
_QUOTE = "\ud800"
_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_DEEPEST = 64


@dataclass(frozen=True)
class Call:
    """A tool call.

    id: the tool_call_id of the message with the call's result
    arguments: JSON text, as in OpenAI's format
    """

    id: str
    name: str
    arguments: str

    def document(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def read_call(ids: Sequence[int], quote: int, tokenizer: Tokenizer) -> Call | None:
    """Parse the tokens between the marks of a call. Return None for an invalid call.

    quote: the id of the mark around strings
    """
    strings: list[list[int]] = [[]]
    for token in ids:
        if token == quote:
            strings.append([])
        elif token < tokenizer.size:
            strings[-1].append(token)
    text = _QUOTE.join(map(tokenizer.decode, strings))
    named = _CALL.match(text)
    if named is None:
        return None
    reader = _Reader(text, named.end())
    try:
        arguments = reader.value(0)
    except ValueError:
        return None
    return Call(f"call_{uuid.uuid4().hex}", named[1], json.dumps(arguments, ensure_ascii=False))


class _Reader:
    """Parses argument values: quoted strings, {key:value,...}, [value,...], and bare words that end at , } or ]."""

    def __init__(self, text: str, at: int) -> None:
        self._text, self._at = text, at

    def value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("too deep")
        if self._has(_QUOTE):
            return self._until(_QUOTE)
        if self._has("{"):
            return self._mapping(depth)
        if self._has("["):
            return self._list(depth)
        return _bare(self._bare_word(",}]"))

    def _mapping(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not self._has("}"):
            key = self._until(_QUOTE) if self._has(_QUOTE) else self._bare_word(":")
            self._expect(":")
            made[key] = self.value(depth + 1)
            if not self._has(","):
                self._expect("}")
                break
        return made

    def _list(self, depth: int) -> list[Any]:
        made: list[Any] = []
        while not self._has("]"):
            made.append(self.value(depth + 1))
            if not self._has(","):
                self._expect("]")
                break
        return made

    def _has(self, mark: str) -> bool:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) * found
        return found

    def _expect(self, mark: str) -> None:
        if not self._has(mark):
            raise ValueError(mark)

    def _until(self, mark: str) -> str:
        end = self._text.index(mark, self._at)
        text, self._at = self._text[self._at : end], end + len(mark)
        return text

    def _bare_word(self, ends: str) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ends + _QUOTE:
            self._at += 1
        return self._text[start : self._at].strip()


def _bare(word: str) -> Any:
    """Convert a bare word to a number, true, false or null. Other words, such as NaN and 1e999, become strings."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if value is None or (isinstance(value, bool | int | float) and abs(value) < math.inf) else word


# --- the input of a template ------------------------------------------------------------------------------------------


def declarations(tools: Any) -> list[dict[str, Any]]:
    """Convert tools from OpenAI's format to the format of chat templates. Raise ToolError for an invalid tool."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ToolError(f"tools should be a list, found {tools!r:.60}.", "tools")
    made = []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ToolError("A tool should have a function with a name.", f"tools[{number}]")
        document = {"name": function["name"], "description": function.get("description") or ""}
        if function.get("parameters") is not None:
            document["parameters"] = function["parameters"]
        made.append({"type": "function", "function": document})
    return made


def calls_and_results(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tool fields of each message, converted from OpenAI's format to the format of chat templates.

    An assistant message has tool_calls. A tool message has tool_call_id and the name of the called function. Raise ToolError
    for an invalid field.
    """
    names: dict[Any, str] = {}
    made: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        field = f"messages[{number}]"
        entry: dict[str, Any] = {}
        calls = message.get("tool_calls") or []
        if calls:
            entry["tool_calls"] = [_call(call, f"{field}.tool_calls") for call in calls]
            names.update({call.get("id"): call["function"]["name"] for call in entry["tool_calls"]})
        if message["role"] == "tool":
            identifier = message.get("tool_call_id")
            name = names.get(identifier, message.get("name"))
            if not isinstance(name, str):
                raise ToolError(
                    "tool_call_id should be the id of a tool call in an earlier message.", f"{field}.tool_call_id"
                )
            entry = {"name": name} | ({} if identifier is None else {"tool_call_id": identifier})
        made.append(entry)
    return made


def _call(call: Any, field: str) -> dict[str, Any]:
    """Convert a call from OpenAI's format, where the arguments are JSON text, to an object for chat templates."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ToolError("A tool call should have a function with a name.", field)
    given = function.get("arguments", {})
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise ToolError("The arguments of a tool call should be a JSON object.", field)
    made = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return made | ({"id": call["id"]} if call.get("id") else {})
