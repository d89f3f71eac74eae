"""Tool calls in FunctionGemma's notation: declared functions, the model's calls and the results of calls.

    <start_function_call>call:NAME{place:<escape>London<escape>,days:[1,2]}<end_function_call>

The chat template writes declarations, calls and results into the prompt. This module parses the calls that the model
generates. A call begins at the token id of <start_function_call>, so plain text that spells <start_function_call> is
not a call.
"""

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_py.errors import ToolError
from gemma_py.tokenizer import Tokenizer

START, END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_DEEPEST = 64


@dataclass(frozen=True)
class Call:
    """A tool call. id: the identifier that the call's result refers to. arguments: JSON text, as in OpenAI's format."""

    id: str
    name: str
    arguments: str

    def document(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallConstraint:
    """Forces an answer to begin with a tool call. After the beginning, every token is allowed.

    name: the function that must be called; None allows any function.
    """

    finished = False

    def __init__(self, tokenizer: Tokenizer, name: str | None) -> None:
        start = tokenizer.token_id(START)
        assert start is not None
        self._left = [start, *tokenizer.encode("call:" if name is None else f"call:{name}{{", bos=False)]

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        if not self._left:
            return logits
        allowed = np.full_like(logits, -np.inf)
        allowed[self._left[0]] = logits[self._left[0]]
        return allowed

    def accept(self, token: int) -> None:
        del self._left[:1]


class CallReader:
    """Splits an answer into text and tool calls. An invalid call stays text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start, self._end = tokenizer.token_id(START), tokenizer.token_id(END)
        self._pieces: list[str] | None = None  # text since <start_function_call>; None outside a call
        self._ended = False
        self.calls: list[Call] = []

    def take(self, token: int, text: str) -> tuple[str, list[Call]]:
        """Return the text and the calls that this token completes.

        text: what `TextStream.push` returned for the token, which may begin with text held back before, and may lack an
        end that could be the beginning of a stop string
        """
        if self._pieces is None:
            if token != self._start:
                return text, []
            self._pieces, self._ended = [], False
        self._pieces.append(text)
        self._ended = self._ended or token == self._end
        whole = "".join(self._pieces) if self._ended else ""
        before, _, rest = whole.partition(START)
        inside, end, after = rest.partition(END)
        if not end:
            return "", []
        self._pieces = None
        call = read_call(inside)
        if call is None:
            before += START + inside + END
        else:
            self.calls.append(call)
        if token == self._start:
            self._pieces, self._ended, after = [after], False, ""
        return before + after, [] if call is None else [call]

    def finish(self) -> str:
        """Return the text of an incomplete call at the end of the answer."""
        pieces, self._pieces = self._pieces, None
        return "".join(pieces or [])


def read_call(text: str) -> Call | None:
    """Parse the text between <start_function_call> and <end_function_call>. Return None if the call is invalid."""
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
    """Parses argument values: <escape>text<escape>, {key:value,...}, [value,...], and bare words that end at , } or ]."""

    def __init__(self, text: str, at: int) -> None:
        self._text, self._at = text, at

    def value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("too deep")
        if self._has(ESCAPE):
            return self._until(ESCAPE)
        if self._has("{"):
            return self._mapping(depth)
        if self._has("["):
            return self._list(depth)
        return _bare(self._bare_word(",}]"))

    def _mapping(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not self._has("}"):
            key = self._until(ESCAPE) if self._has(ESCAPE) else self._bare_word(":")
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
        while self._at < len(self._text) and self._text[self._at] not in ends:
            self._at += 1
        return self._text[start : self._at].strip()


def _bare(word: str) -> Any:
    """Convert a bare word to a number, true, false or null. Return other words, such as NaN and 1e999, as strings."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if value is None or (isinstance(value, bool | int | float) and abs(value) < math.inf) else word


# --- the input of a template ------------------------------------------------------------------------------------------


def declarations(functions: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Convert functions in OpenAI's format ({name, description, parameters}) to the format of chat templates.

    Raise ToolError if a function contains a control token, because templates write functions next to their own control
    tokens.
    """
    made = []
    for number, function in enumerate(functions):
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        document = {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": parameters,
        }
        _refuse_control(document, tokenizer, f"tools[{number}]")
        made.append({"type": "function", "function": document})
    return made


def calls_and_results(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return, for each message in OpenAI's format, the fields that chat templates expect besides role and content.

    An assistant message gets tool_calls, and a tool message gets the name of the called function. Raise ToolError if a
    field is invalid.
    """
    names: dict[str | None, str] = {}
    made: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        field = f"messages[{number}]"
        entry: dict[str, Any] = {}
        calls = message.get("tool_calls") or []
        if calls:
            functions = [call["function"] for call in calls]
            told = [{"name": f["name"], "arguments": _object(f["arguments"], f"{field}.tool_calls")} for f in functions]
            names.update({call.get("id"): call["function"]["name"] for call in calls})
            entry = {"tool_calls": [{"type": "function", "function": call} for call in told]}
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id"), message.get("name"))
            if name is None:
                raise ToolError(
                    "tool_call_id should be the id of a tool call in an earlier message.", f"{field}.tool_call_id"
                )
            entry = {"name": name}
        _refuse_control(entry, tokenizer, field)
        made.append(entry)
    return made


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ToolError("The arguments of a tool call should be a JSON object.", field)
    return value


def _refuse_control(value: Any, tokenizer: Tokenizer, field: str) -> None:
    for text in _strings(value):
        ids = tokenizer.encode(text, bos=False, control=True)
        found = next((token for token in ids if token in tokenizer.control_ids), None)
        if found is not None:
            raise ToolError(f"{field} contains the control token {tokenizer.piece(found)}.", field)


def _strings(value: Any) -> list[str]:
    """Return all strings of a JSON value, including keys."""
    made, left = [], [value]
    while left:
        at = left.pop()
        if isinstance(at, str):
            made.append(at)
        elif isinstance(at, Mapping):
            left += [*at.keys(), *at.values()]
        elif isinstance(at, list):
            left += at
    return made
