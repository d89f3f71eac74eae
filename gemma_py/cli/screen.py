"""What a chat needs of the place where it is shown, and a screen for pipes: answers on stdout, everything else on stderr."""

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
    """The user stopped a computation."""


class Screen(Protocol):
    interactive: bool  # a person is there: errors are shown, and the conversation continues

    def read(self, draft: str) -> str | None:
        """The next message or command; None at the end of input."""

    def write(self, text: str) -> None:
        """Shows the next text of an answer."""

    def end_answer(self, stats: AnswerStats | None) -> None:
        """Ends the text of an answer. stats: None if there was no answer."""

    def note(self, text: str) -> None:
        """Shows a text that is not part of an answer."""

    def error(self, text: str) -> None: ...

    def waiting(self, what: str) -> None:
        """Shows what is being done while there is no progress to report; an empty text removes the line."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def ask(self, question: str) -> str: ...

    def computing(self) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """A context for a long computation, whose value tells whether the user wants to stop it."""


class PlainScreen:
    interactive = False

    def __init__(self, json: bool) -> None:
        self._json = json
        self._text = ""

    def read(self, draft: str) -> str | None:
        line = sys.stdin.buffer.readline(TEXT_LIMIT + 1)
        if len(line) > TEXT_LIMIT:
            raise InputError(f"a line of standard input is larger than the {TEXT_LIMIT} bytes allowed")
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8: {error.reason} at byte {error.start} of a line") from None
        return text.rstrip("\r\n") if text else None

    def write(self, text: str) -> None:
        self._text += text
        if not self._json:
            print(text, end="", flush=True)

    def end_answer(self, stats: AnswerStats | None) -> None:
        text, self._text = self._text, ""
        if not self._json:
            print("" if text.endswith("\n") else "\n", end="", flush=True)
        elif stats is not None:
            print_json({"text": text, **dataclasses.asdict(stats)})
            sys.stdout.flush()

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    error = note

    def waiting(self, what: str) -> None:
        pass  # a script does not wait at the screen

    def progress(self, what: str, done: int, total: int) -> None:
        if sys.stderr.isatty() and (done < total or what != "reading"):
            print(f"\r\x1b[K{what} {done:,} of {total:,} tokens", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty() and done == total:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def ask(self, question: str) -> str:
        raise InputError(f"there is no terminal to ask at: {question}")

    def computing(self) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        return contextlib.nullcontext(lambda: False)  # Ctrl-C ends the program
