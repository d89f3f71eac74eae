"""The text of an answer, decoded token by token. Thoughts and tool calls are separated from the text."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gemma_py.errors import InputError
from gemma_py.templates.notation import Marks
from gemma_py.templates.tools import Call, read_call
from gemma_py.tokenizer import Tokenizer

_CHANNEL_NAME = "thought\n"  # the name of the channel of thoughts, with which a thought begins


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Raise InputError for an empty stop string."""
    strings = (
        () if stop is None else tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
    )
    if not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop should be a non-empty string or a list of them, found {stop!r:.60}")
    return strings


class TextStream:
    """Decodes token ids to text, one by one. The text ends before the first stop string.

    Some text is held back until later tokens are known: bytes of an incomplete character, and text that may be the
    beginning of a stop string.

    trim: remove white space at the beginning of the text.
    stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), trim: bool = False) -> None:
        if stop and tokenizer is None:
            raise InputError("stop strings need a tokenizer, but the checkpoint has none")
        self._tokenizer, self._stop, self._trim = tokenizer, tuple(stop), trim
        self._run: list[int] = []  # ids whose text is held back
        self._held_back = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that this token completes, often an empty string."""
        if self._tokenizer is None or token >= self._tokenizer.size:
            return ""  # an id of a padding row of the embedding matrix
        self._run.append(token)
        final = self._tokenizer.final_prefix(self._run)
        if final == 0:
            return ""
        text = self._tokenizer.decode(self._run[:final])
        del self._run[:final]
        return self._pass(text)

    def finish(self) -> str:
        if self.stopped:
            return ""
        text = self._pass(self._decoded())
        if not self.stopped:
            text, self._held_back = text + self._held_back, ""
        return text

    def cut(self) -> str:
        """Decode the held-back bytes of an incomplete character. Call this at a mark, because no more bytes can follow."""
        return self.write(self._decoded())

    def write(self, text: str) -> str:
        """Append text that does not come from `push`. Return the text that can be shown now.

        The end of the text is held back if it may be the beginning of a stop string.
        """
        return "" if self.stopped else self._pass(text)

    def _decoded(self) -> str:
        run, self._run = self._run, []
        return self._tokenizer.decode(run) if self._tokenizer and run else ""

    def _pass(self, new: str) -> str:
        text = self._held_back + new
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held_back = ""
            return text[: min(found)]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held_back = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text begin the stop string: 2 for the text "abST" and the stop "STOP"."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class Part(NamedTuple):
    """What one token adds to an answer: text, text of a thought, or tool calls.

    reasoning: text of a thought; None if the token belongs to no thought.
    """

    text: str = ""
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()


class AnswerStream:
    """Splits an answer into text, thoughts and tool calls. Special tokens mark where these begin and end.

    A mark without its partner, such as the end of a thought that has not begun, is left out. The tokens of an invalid or
    incomplete call become text. Stop strings are searched only in text.

    prompt: the ids of the prompt, which may end within a thought.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        trim: bool = False,
        marks: Marks | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._marks, self._text = tokenizer, marks, TextStream(tokenizer, stop, trim)
        self._thought: _Thought | None = None
        self._call: list[int] | None = None
        if marks is not None and tokenizer is not None:
            begins = marks.thought_begins(prompt)
            if begins is not None:
                self._thought = _Thought(tokenizer)
                for token in prompt[begins:]:
                    self._thought.push(token)

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    def push(self, token: int) -> Part:
        marks = self._marks
        if marks is None or self._tokenizer is None:
            return Part(self._text.push(token))
        if self._call is not None and marks.call is not None:
            return self._in_call(token, marks.call, self._tokenizer)
        if self._thought is not None:
            if token not in (marks.channel or ()) and (marks.call is None or token != marks.call[0]):
                return Part(reasoning=self._thought.push(token))
            if marks.channel is not None and token == marks.channel[0]:
                return Part(reasoning="")
            rest, self._thought = self._thought.finish(), None
            if marks.call is not None and token == marks.call[0]:
                self._call = [token]
            return Part(reasoning=rest)
        if marks.channel is not None and token in marks.channel:
            opens = token == marks.channel[0]
            self._thought = _Thought(self._tokenizer) if opens else None
            return Part(self._text.cut(), reasoning="" if opens else None)
        if marks.call is not None and token == marks.call[0]:
            self._call = [token]
            return Part(self._text.cut())
        return Part(self._text.push(token))

    def _in_call(self, token: int, marks: tuple[int, int], tokenizer: Tokenizer) -> Part:
        assert self._call is not None and self._marks is not None
        if token == marks[0]:  # a new call begins before the previous call has ended
            text, self._call = self._spelled(self._call, tokenizer), [token]
            return Part(text)
        self._call.append(token)
        if token != marks[1]:
            return Part()
        ids, self._call = self._call, None
        call = read_call(ids[1:-1], self._marks.quote, tokenizer)
        return Part(self._spelled(ids, tokenizer)) if call is None else Part(calls=(call,))

    def _spelled(self, ids: list[int], tokenizer: Tokenizer) -> str:
        return self._text.write(tokenizer.decode([token for token in ids if token < tokenizer.size]))

    def finish(self) -> Part:
        reasoning = None
        if self._thought is not None:
            reasoning, self._thought = self._thought.finish(), None
        text = ""
        if self._call is not None and self._tokenizer is not None:
            text, self._call = self._spelled(self._call, self._tokenizer), None
        return Part(text + self._text.finish(), reasoning)


class _Thought:
    """Removes the channel's name from a thought, and white space at the thought's beginning and end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        # Text held back while it may still be the channel's name; None once the name was found or ruled out.
        self._name: str | None = ""
        self._space = ""  # white space that is held back, because it may be the end of the thought
        self._begun = False

    def push(self, token: int) -> str:
        return self._pass(self._stream.push(token))

    def finish(self) -> str:
        text = self._pass(self._stream.finish())
        name, self._name = self._name, None
        return text + self._pass("" if name is None or name == _CHANNEL_NAME.strip() else name)

    def _pass(self, new: str) -> str:
        if self._name is not None:
            self._name += new
            if _CHANNEL_NAME.startswith(self._name) and self._name != _CHANNEL_NAME:
                return ""
            new, self._name = self._name.removeprefix(_CHANNEL_NAME), None
        text = self._space + new
        if not self._begun:
            text = text.lstrip()
        end = len(text.rstrip())
        self._begun, self._space = self._begun or end > 0, text[end:]
        return text[:end]


class Constraint(Protocol):
    """A grammar that restricts the tokens of one answer. Its state belongs to that answer alone."""

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        """Return the logits [V], with -inf for the forbidden tokens. The argument is not changed."""

    def accept(self, token: int) -> None:
        """Advance the grammar by the chosen token."""

    def forced(self, most: int) -> list[int]:
        """Return up to `most` next tokens for which the grammar leaves no choice. The grammar's state does not change."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, so that generation has to stop."""

    @property
    def description(self) -> dict[str, Any]:
        """A JSON object for receipts, from which an audit rebuilds the constraint."""


class AfterThoughts:
    """Applies a constraint to the answer, but not to a thought before the answer.

    thinking: whether the answer begins within a thought.
    """

    def __init__(self, inner: Constraint, channel: tuple[int, int], thinking: bool) -> None:
        self._inner, (self._start, self._end) = inner, channel
        # _thinking: the next token belongs to a thought. _begun: thought or answer has begun, so no new thought may begin.
        self._thinking, self._begun = thinking, thinking
        thoughts = {"channel": list(channel), "begun": thinking}
        self.description = {**inner.description, "thoughts": thoughts}

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        if self._thinking:
            return logits
        allowed = self._inner.allowed(logits)
        if not self._begun and allowed is not logits:
            allowed[self._start] = logits[self._start]
        return allowed

    def accept(self, token: int) -> None:
        if self._thinking:
            self._thinking = token != self._end
        elif not self._begun and token == self._start:
            self._thinking = self._begun = True
        else:
            self._begun = True
            self._inner.accept(token)

    def forced(self, most: int) -> list[int]:
        # Within a thought, every token is allowed. Before the answer begins, a token that begins a thought is allowed too.
        return self._inner.forced(most) if self._begun and not self._thinking else []

    @property
    def finished(self) -> bool:
        return not self._thinking and self._inner.finished
