"""Calls of functions, in FunctionGemma's notation: who may be called, what was called, and what came of it.

    <start_function_call>call:NAME{place:<escape>London<escape>,days:[1,2]}<end_function_call>

The template writes declarations, calls and responses; a model's calls are read back here. Where one begins and ends is told by
token ids, so nothing that a model merely writes looks like a call.
"""

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_py.server.openai.errors import ApiError
from gemma_py.server.openai.schemas import Function, Message
from gemma_py.tokenizer import Tokenizer

START, END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_DEEPEST = 64


@dataclass(frozen=True)
class Call:
    """id: by which its result will be told. arguments: JSON, as OpenAI has it."""

    id: str
    name: str
    arguments: str

    def document(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallConstraint:
    """An answer begins with a call: of this function, or of any. What follows is the model's."""

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
    """Parts an answer's tokens into text and calls. What begins like a call and is none stays text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start, self._end = tokenizer.token_id(START), tokenizer.token_id(END)
        self._pieces: list[str] | None = None  # of the text since the mark of a call
        self._ended = False
        self.calls: list[Call] = []

    def take(self, token: int, text: str) -> tuple[str, list[Call]]:
        """The text and the calls that are complete with this token.

        Its text may begin with what was held back before it, and lack what a stop string may begin with: of marks too.
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
        """Of a call that never ended."""
        pieces, self._pieces = self._pieces, None
        return "".join(pieces or [])


def read_call(text: str) -> Call | None:
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
            self._insist(":")
            made[key] = self.value(depth + 1)
            if not self._has(","):
                self._insist("}")
                break
        return made

    def _list(self, depth: int) -> list[Any]:
        made: list[Any] = []
        while not self._has("]"):
            made.append(self.value(depth + 1))
            if not self._has(","):
                self._insist("]")
                break
        return made

    def _has(self, mark: str) -> bool:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) * found
        return found

    def _insist(self, mark: str) -> None:
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
    """A number, true, false or null; else the word itself, which NaN and 1e999 are: JSON has no number for them."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if value is None or (isinstance(value, bool | int | float) and abs(value) < math.inf) else word


# --- what a template is given -----------------------------------------------------------------------------------------


def declared(functions: Sequence[Function], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For the template. Their words stand among its own, so they must not hold a control token."""
    made = []
    for number, function in enumerate(functions):
        parameters = function.parameters or {"type": "object", "properties": {}}
        document = {"name": function.name, "description": function.description or "", "parameters": parameters}
        _refuse_control(document, tokenizer, f"tools[{number}]")
        made.append({"type": "function", "function": document})
    return made


def calls_and_results(messages: Sequence[Message], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What the template is told of each message beside its text: calls, or the function whose result it is."""
    names: dict[str | None, str] = {}
    made: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        param = f"messages[{number}]"
        entry: dict[str, Any] = {}
        if message.tool_calls:
            functions = [call.function for call in message.tool_calls]
            calls = [{"name": f.name, "arguments": _object(f.arguments, f"{param}.tool_calls")} for f in functions]
            names.update({call.id: call.function.name for call in message.tool_calls})
            entry = {"tool_calls": [{"type": "function", "function": call} for call in calls]}
        if message.role == "tool":
            name = names.get(message.tool_call_id, message.name)
            if name is None:
                raise ApiError(400, "A result should name a call before it.", f"{param}.tool_call_id", "invalid_value")
            entry = {"name": name}
        _refuse_control(entry, tokenizer, param)
        made.append(entry)
    return made


def _object(text: str, param: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "Arguments of a call should be a JSON object.", param, "invalid_value")
    return value


def _refuse_control(value: Any, tokenizer: Tokenizer, param: str) -> None:
    for text in _strings(value):
        found = next(
            (token for token in tokenizer.encode(text, bos=False, control=True) if token in tokenizer.control_ids), None
        )
        if found is not None:
            raise ApiError(400, f"{param} holds the control token {tokenizer.piece(found)}.", param, "invalid_value")


def _strings(value: Any) -> list[str]:
    """All of a document, keys too."""
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
