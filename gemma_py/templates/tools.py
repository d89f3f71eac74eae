"""Tool calls in FunctionGemma's notation: which functions are declared, what the model called, what the results were.

    <start_function_call>call:NAME{place:<escape>London<escape>,days:[1,2]}<end_function_call>

The template writes declarations, calls and results into the prompt; the model's calls are read back here. Token ids mark where
a call begins and ends, so no other text of the model is taken for one.
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
    """A tool call. id: the result refers to it. arguments: JSON, as in OpenAI's format."""

    id: str
    name: str
    arguments: str

    def document(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallConstraint:
    """Forces an answer to begin with a call of this function, or of any function. The rest is the model's choice."""

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
    """Splits an answer's tokens into text and calls. Text that begins like a call but is not a valid one stays text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start, self._end = tokenizer.token_id(START), tokenizer.token_id(END)
        self._pieces: list[str] | None = None  # of the text since the mark of a call
        self._ended = False
        self.calls: list[Call] = []

    def take(self, token: int, text: str) -> tuple[str, list[Call]]:
        """The text and the calls that this token completes.

        The token's text may begin with what was held back before it, and may lack characters with which a stop string begins,
        even those of a mark.
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
        """The text of a call that is not complete."""
        pieces, self._pieces = self._pieces, None
        return "".join(pieces or [])


def read_call(text: str) -> Call | None:
    """Parse the text between the markers of a call; None if it is not a valid call."""
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
    """Values: <escape>text<escape>, {key:value,...}, [value,...], and bare words up to the next , } or ]."""

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
    """A number, true, false or null; else the word itself, also for NaN and 1e999, which are not JSON numbers."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if value is None or (isinstance(value, bool | int | float) and abs(value) < math.inf) else word


# --- the input of a template ------------------------------------------------------------------------------------------


def declarations(functions: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Functions in OpenAI's format ({name, description, parameters}) as templates expect them.

    A template puts their words among its own, where a control token would be one: such a function is a ToolError.
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
    """For each message in OpenAI's format, what a template expects in addition to role and content: the calls, or the name of the
    function whose result it is. ToolError if that is invalid."""
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
                raise ToolError("A result should name a call before it.", f"{field}.tool_call_id")
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
        raise ToolError("Arguments of a call should be a JSON object.", field)
    return value


def _refuse_control(value: Any, tokenizer: Tokenizer, field: str) -> None:
    for text in _strings(value):
        ids = tokenizer.encode(text, bos=False, control=True)
        found = next((token for token in ids if token in tokenizer.control_ids), None)
        if found is not None:
            raise ToolError(f"{field} contains the control token {tokenizer.piece(found)}.", field)


def _strings(value: Any) -> list[str]:
    """All strings of a document, including its keys."""
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
