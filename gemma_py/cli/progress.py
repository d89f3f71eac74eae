"""Shows the progress of long commands on stderr."""

import sys
import time
from types import TracebackType


class ProgressBar:
    """Draws a bar with the time left where stderr is a terminal, else prints a line for each step. Nothing if not wanted."""

    def __init__(self, doing: str, wanted: bool) -> None:
        self._doing = doing
        self._bar = wanted and sys.stderr.isatty()
        self._lines = wanted and not self._bar
        self._began, self._last = time.monotonic(), ""

    def __call__(self, what: str, part: float) -> None:
        if self._bar:
            full = int(24 * part)
            bar = "█" * full + "░" * (24 - full)
            print(f"\r\x1b[K{bar} {part:4.0%} {self._left(part)}  {what}", end="", file=sys.stderr, flush=True)
        elif self._lines and what != self._last:
            print(f"{self._doing} {what}", file=sys.stderr, flush=True)
        self._last = what

    def _left(self, part: float) -> str:
        """The time left; an empty text while there is too little to estimate it from."""
        spent = time.monotonic() - self._began
        if part < 0.02 or spent < 1:
            return ""
        seconds = int(spent * (1 - part) / part)
        return f"{seconds // 60}:{seconds % 60:02} left"

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Clears the bar, so that what is printed next has a line to itself."""
        if self._bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
