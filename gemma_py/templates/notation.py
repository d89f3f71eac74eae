"""Marks are the control tokens around thoughts, tool calls and strings in a model's answer.

    Gemma 4          <|channel>thought, newline, ...<channel|>  <|tool_call>call:NAME{place:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>
    FunctionGemma    <start_function_call>call:NAME{place:<escape>Rome<escape>,days:[1,2]}<end_function_call>

A model has the notation whose control tokens are in its vocabulary. Marks are recognised by token id, so ordinary text that
spells a mark stays text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemma_py.tokenizer import Tokenizer


@dataclass(frozen=True)
class Marks:
    """The token ids of the marks in an answer.

    channel: the ids at the beginning and the end of a thought; None to ignore thoughts
    call: the ids at the beginning and the end of a tool call; None to ignore tool calls
    quote: the id before and after a string
    """

    channel: tuple[int, int] | None
    call: tuple[int, int] | None
    quote: int

    def without_calls(self) -> "Marks":
        return replace(self, call=None)

    def thought_begins(self, prompt: Sequence[int]) -> int | None:
        """Return the index at which an unfinished thought at the end of the prompt begins, or None if there is none."""
        if self.channel is None:
            return None
        start, end = self.channel
        for at in range(len(prompt) - 1, -1, -1):
            if prompt[at] == end:
                return None
            if prompt[at] == start:
                return at + 1
        return None


_GEMMA4 = ("<|channel>", "<channel|>"), ("<|tool_call>", "<tool_call|>"), '<|"|>'
_FUNCTION_GEMMA = None, ("<start_function_call>", "<end_function_call>"), "<escape>"


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """Return the marks in the vocabulary, or None if the vocabulary has no marks."""

    def pair(names: tuple[str, str]) -> tuple[int, int] | None:
        start, end = (tokenizer.token_id(name) for name in names)
        return None if start is None or end is None or not {start, end} <= tokenizer.control_ids else (start, end)

    for channel, call, quote in (_GEMMA4, _FUNCTION_GEMMA):
        calls, strings = pair(call), tokenizer.token_id(quote)
        if calls is not None and strings is not None:
            return Marks(None if channel is None else pair(channel), calls, strings)
    return None


_GEMMA4_ENDS = ("<eos>", "<turn|>", "<|tool_response>")


def end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the token ids that end an answer of Gemma 4, or an empty set for other models.

    The ids are found by token name, because GGUF files of Gemma 4 list only some of these ids as end tokens.
    """
    marks = marks_of(tokenizer)
    if marks is None or marks.channel is None:
        return frozenset()
    return tokenizer.control_ids.intersection(map(tokenizer.token_id, _GEMMA4_ENDS))


class CallConstraint:
    """Forces an answer to begin with `call:` and the function's name. After that, every token is allowed.

    name: the function that must be called; None allows any function
    """

    finished = False

    def __init__(self, tokenizer: Tokenizer, marks: Marks, name: str | None) -> None:
        assert marks.call is not None
        self.description: dict[str, Any] = {"kind": "tool_call", "name": name, "thoughts": None}
        self._left = [marks.call[0], *tokenizer.encode("call:" if name is None else f"call:{name}{{", bos=False)]

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        if not self._left:
            return logits
        allowed = np.full_like(logits, -np.inf)
        allowed[self._left[0]] = logits[self._left[0]]
        return allowed

    def accept(self, token: int) -> None:
        del self._left[:1]

    def forced(self, most: int) -> list[int]:
        return self._left[:most]
