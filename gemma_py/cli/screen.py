"""Where a chat is shown. This one is for pipes: answers on stdout alone, everything else on stderr."""

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
    """Somebody does not want to wait for the rest."""


class Screen(Protocol):
    lasting: bool  # somebody is there: an error is shown, and the conversation goes on

    def read(self, draft: str) -> str | None:
        """The next message or command; None at the end of input."""

    def write(self, text: str) -> None:
        """More of an answer."""

    def end_answer(self, stats: AnswerStats | None) -> None:
        """stats: None if there was no answer."""

    def note(self, text: str) -> None:
        """What is not an answer."""

    def error(self, text: str) -> None: ...

    def waiting(self, what: str) -> None:
        """A line while something goes on that cannot say how far it is; empty: it is over."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def ask(self, question: str) -> str: ...

    def computing(self) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """While an answer is made or something is checked; gives whether somebody wants that to stop."""


class Plain:
    lasting = False

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
        pass  # in a script nobody waits

    def progress(self, what: str, done: int, total: int) -> None:
        if sys.stderr.isatty() and (done < total or what != "reading"):
            print(f"\r\x1b[K{what} {done:,} of {total:,} tokens", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty() and done == total:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def ask(self, question: str) -> str:
        raise InputError(f"there is nobody to ask: {question}")

    def computing(self) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        return contextlib.nullcontext(lambda: False)  # Ctrl-C ends the program
