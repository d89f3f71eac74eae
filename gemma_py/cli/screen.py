"""Input and output of a chat: the interface, and the implementation for pipes."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Protocol

from gemma_py.chat.conversation import AnswerStats
from gemma_py.cli.common import print_json
from gemma_py.errors import InputError
from gemma_py.formats.files import TEXT_LIMIT


class Stopped(Exception):
    """Raised when the user stops a computation with Ctrl-C."""


class Screen(Protocol):
    # True for a terminal, which shows errors to the user. Without a terminal, errors are raised.
    interactive: bool

    def read(self, draft: str) -> str | None:
        """Return the next message or command, or None at the end of input. draft: initial text, which the user can edit."""

    def write(self, text: str) -> None:
        """Show the next piece of an answer."""

    def think(self, text: str) -> None:
        """Show the next piece of a thought, separately from the answer."""

    def end_answer(self, stats: AnswerStats | None) -> None:
        """Finish showing an answer. stats: None if no answer was generated."""

    def note(self, text: str) -> None:
        """Show a text that is not part of an answer."""

    def error(self, text: str) -> None: ...

    def waiting(self, what: str) -> None:
        """Show a status line, such as "loading the model". An empty text removes the line."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def ask(self, question: str) -> str: ...

    def computing(self) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Surround a long computation. `with computing() as wanted:` gives a function that returns whether the user wants to
        stop.
        """


class PlainScreen:
    interactive = False

    def __init__(self, json: bool) -> None:
        self._json = json
        self._text = self._thought = ""

    def read(self, draft: str) -> str | None:
        line = sys.stdin.buffer.readline(TEXT_LIMIT + 1)
        if len(line) > TEXT_LIMIT:
            raise InputError(f"a line of standard input is larger than the limit of {TEXT_LIMIT} bytes")
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8: {error.reason} at byte {error.start} of a line") from None
        return text.rstrip("\r\n") if text else None

    def write(self, text: str) -> None:
        self._end_thought()
        self._text += text
        if not self._json:
            print(text, end="", flush=True)

    def think(self, text: str) -> None:
        self._thought += text
        if not self._json:
            print(text, end="", file=sys.stderr, flush=True)

    def _end_thought(self) -> None:
        if not self._json and self._thought and not self._text:
            print(file=sys.stderr, flush=True)

    def end_answer(self, stats: AnswerStats | None) -> None:
        if not self._text:
            self._end_thought()
        text, thought, self._text, self._thought = self._text, self._thought, "", ""
        if not self._json:
            print("" if text.endswith("\n") else "\n", end="", flush=True)
        elif stats is not None:
            print_json({"text": text, "reasoning_content": thought or None, **dataclasses.asdict(stats)})
            sys.stdout.flush()

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    error = note

    def waiting(self, what: str) -> None:
        pass

    def progress(self, what: str, done: int, total: int) -> None:
        if sys.stderr.isatty() and (done < total or what != "reading"):
            print(f"\r\x1b[K{what} {done:,} of {total:,} tokens", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty() and done == total:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def ask(self, question: str) -> str:
        raise InputError(f"cannot ask this question without a terminal: {question}")

    def computing(self) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        return contextlib.nullcontext(lambda: False)
