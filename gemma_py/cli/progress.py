"""Show the progress of long commands on stderr."""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from gemma_py.cli.common import notify
from gemma_py.errors import GemmaWarning


class ProgressBar:
    """Draws a progress bar on a terminal, or prints a line for each step if stderr is not a terminal.

    wanted: False to show nothing
    pause: the minimum time in seconds before each line, for commands with many short steps
    """

    def __init__(self, doing: str, wanted: bool, pause: float = 0.0) -> None:
        self._doing = doing
        self._bar = wanted and sys.stderr.isatty()
        self._lines = wanted and not self._bar
        self._began, self._last = time.monotonic(), ""
        self._pause, self._next_line = pause, self._began + pause

    def __call__(self, what: str, part: float) -> None:
        if self._bar:
            full = int(24 * part)
            bar = "█" * full + "░" * (24 - full)
            print(f"\r\x1b[K{bar} {part:4.0%} {self._left(part)}  {what}", end="", file=sys.stderr, flush=True)
        elif self._lines and what != self._last and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._pause
            print(f"{self._doing} {what}", file=sys.stderr, flush=True)
        self._last = what

    def _left(self, part: float) -> str:
        spent = time.monotonic() - self._began
        if part < 0.02 or spent < 1:
            return ""
        seconds = int(spent * (1 - part) / part)
        return f"{seconds // 60}:{seconds % 60:02} left"

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


_FIRST_LINE_AFTER, _NEXT_LINE_AFTER = 2.0, 3.0  # seconds


class LoadProgress:
    """A progress callback for `gemma_py.load` and `resolve` that prints to stderr."""

    def __init__(self) -> None:
        self._next_line: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int, unit: str) -> None:
        first = what not in self._next_line
        if first:
            self._next_line[what] = time.monotonic() + _FIRST_LINE_AFTER
        if unit == "kernels":
            self._count(what, done, total, first)
        elif what.startswith("downloading"):  # huggingface_hub draws its own progress bar
            _line(f"{what}, {total / (1 << 20):,.0f} MiB, once")
        elif what.startswith("writing"):
            _line(f"{what}, {total / (1 << 30):.1f} GiB of disk space, once; --no-pack keeps them in memory instead")
        elif what.startswith("assembling"):
            self._bar(what, done, total, first)
        elif not first and time.monotonic() >= self._next_line[what]:
            self._next_line[what] = time.monotonic() + _NEXT_LINE_AFTER
            _line(f"{what}: {done >> 20} of {total >> 20} MiB")

    def _count(self, what: str, done: int, total: int, first: bool) -> None:
        if first:
            _line(f"{what}, once on this machine for each value of --kv: about a minute")
        elif sys.stderr.isatty():
            _write("\r\x1b[K" + (f"{what}: {done} of {total}" if done < total else ""))

    def _bar(self, what: str, done: int, total: int, first: bool) -> None:
        if sys.stderr.isatty():
            full = 30 * done // total
            end = "\n" if done >= total else ""
            _write(f"\r{what} [{'#' * full}{'.' * (30 - full)}] {done >> 20} of {total >> 20} MiB{end}")
        elif first:
            _line(f"{what}, {total >> 20} MiB, once")


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print gemma_py's warnings to stderr, each on one line and only once."""
    with warnings.catch_warnings():
        default = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int,
            file: TextIO | None = None, line: str | None = None,
        ) -> None:  # fmt: skip
            if issubclass(category, GemmaWarning):
                notify(str(message))
            else:
                default(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        warnings.simplefilter("default", GemmaWarning)
        yield


def _line(text: str) -> None:
    _write(f"{text}\n")


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
