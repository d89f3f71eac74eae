"""Ids to text while they are made: never half a character, and nothing of a stop string."""

from collections.abc import Sequence

from gemma_py.errors import InputError
from gemma_py.tokenizer import Tokenizer


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One or several, none of them empty."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop should be one string or several, none of them empty, found {stop!r:.60}")
    return strings


class TextStream:
    """The text of ids that come one by one. Each piece costs its own ids, not those before it.

    Held back are byte tokens, which are text only as a run (one more can spoil it), and whatever a stop string may begin
    with. `stopped` is set once one is complete; its text and all after it are never given. `trim`: no white space in front.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), trim: bool = False) -> None:
        if stop and tokenizer is None:
            raise InputError("stop strings need text, and the checkpoint brings no tokenizer")
        self._tokenizer, self._stop, self._trim = tokenizer, tuple(stop), trim
        self._run: list[int] = []  # ids whose text a later one may change
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """What becomes certain with this token."""
        if self._tokenizer is None or token >= self._tokenizer.size:
            return ""  # some embeddings have more rows than the tokenizer has pieces; such ids mean no text
        self._run.append(token)
        settled = self._tokenizer.settled(self._run)
        if settled == 0:
            return ""
        text = self._tokenizer.decode(self._run[:settled])
        del self._run[:settled]
        return self._pass(text)

    def finish(self) -> str:
        """What is left when no token follows."""
        if self.stopped:
            return ""
        text = self._pass(self._tokenizer.decode(self._run) if self._tokenizer and self._run else "")
        self._run.clear()
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _pass(self, new: str) -> str:
        text = self._held + new
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text a stop string may begin with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
