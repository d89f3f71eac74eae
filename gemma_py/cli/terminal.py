"""A chat in a terminal, with input by prompt_toolkit and output by rich."""

import contextlib
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from prompt_toolkit import PromptSession, prompt
from prompt_toolkit.completion import Completer, NestedCompleter, PathCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from gemma_py.chat.conversation import AnswerStats
from gemma_py.cli.chat_commands import FILE
from gemma_py.cli.markdown import StreamedMarkdown, rows, visible
from gemma_py.paths import private_file, state_dir

_PASTES_MARKED, _PASTES_PLAIN = "\x1b[?2004h", "\x1b[?2004l"


class Terminal:
    interactive = True

    def __init__(self, commands: Mapping[str, tuple[str, ...]], markdown: bool) -> None:
        self._console = Console(highlight=False)
        self._moves = not self._console.is_dumb_terminal
        self._markdown = markdown and self._moves
        self._answer: StreamedMarkdown | None = None
        self._thinks = False
        self._waits = False
        self._session: PromptSession[str] | None = None
        if self._moves:
            self._session = PromptSession(
                multiline=True,
                key_bindings=_keys(),
                prompt_continuation="  ",
                history=self._history(),
                completer=_completer(commands),
                complete_while_typing=False,
                enable_suspend=True,
                erase_when_done=True,
            )

    def _history(self) -> History:
        try:
            return FileHistory(private_file(state_dir() / "history"))
        except OSError as error:
            self.note(f"the history of your messages is not saved: {error}")
            return InMemoryHistory()

    def read(self, draft: str) -> str | None:
        try:
            if self._session is not None:
                text = self._session.prompt("> ", default=draft)
                self._show_message(text)
                return text
            if draft:
                self.note(draft)
            return input("> ")
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None

    def _show_message(self, text: str) -> None:
        shown, room = visible(text).replace("\n", "\n  "), max(3, self._console.height // 2)
        while rows(f"> {shown}", self._console.width) >= room:
            shown = f"{shown[: len(shown) * 3 // 4].rstrip()} …"
        cut = f" ({len(text):,} characters)" if shown.endswith("…") and not text.endswith("…") else ""
        self._console.file.write(f"> {shown}{cut}\n")
        self._console.file.flush()

    def ask(self, question: str) -> str:
        try:
            return (prompt if self._moves else input)(f"{question}: ").strip().lower()
        except (KeyboardInterrupt, EOFError):
            return ""

    def write(self, text: str) -> None:
        self._end_thought()
        if self._answer is None:
            self._answer = StreamedMarkdown(self._console, self._markdown)
        self._answer.write(text)

    def think(self, text: str) -> None:
        self.waiting("")
        self._thinks = True
        self._console.print(Text(visible(text)), style="dim", end="", soft_wrap=True)
        self._console.file.flush()

    def _end_thought(self) -> None:
        if self._thinks:
            self._console.file.write("\n\n")
        self._thinks = False

    def end_answer(self, stats: AnswerStats | None) -> None:
        self.waiting("")
        self._end_thought()
        if self._answer is not None:
            self._answer.close()
        self._answer = None

    def note(self, text: str) -> None:
        self._console.print(Text(visible(text)), style="dim")

    def error(self, text: str) -> None:
        self._console.print(Text(visible(text)), style="red")

    def waiting(self, what: str) -> None:
        if self._moves and (what or self._waits):
            line = Text(visible(what))
            line.truncate(max(1, self._console.width - 1), overflow="ellipsis")
            # The final \r moves the cursor to the start of the line, so that the next output overwrites the status line.
            self._console.file.write(f"\r\x1b[K{line.plain}\r")
            self._console.file.flush()
            self._waits = bool(what)

    def progress(self, what: str, done: int, total: int) -> None:
        self.waiting("" if done == total else f"{what} {done:,} of {total:,} tokens (Ctrl-C stops)")

    @contextlib.contextmanager
    def computing(self) -> Iterator[Callable[[], bool]]:
        """Handle Ctrl-C during a computation. The first Ctrl-C stops the computation after the current token or chunk. A
        second Ctrl-C stops the computation at once.
        """
        asked: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            asked.append(number)
            if len(asked) > 1:
                raise KeyboardInterrupt

        def disturbed(number: int, frame: FrameType | None) -> None:
            if self._answer is not None:
                self._answer.disturb()

        def leave(number: int, frame: FrameType | None) -> None:
            self._give_back(keys)  # while this process is suspended, the shell uses the terminal
            signal.signal(number, signal.SIG_DFL)
            # Suspend this process. The kernel ignores the signal if no shell could resume the process.
            os.kill(os.getpid(), number)
            signal.signal(number, leave)
            self._silence()

        def back(number: int, frame: FrameType | None) -> None:
            disturbed(number, frame)
            if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
                self._silence()

        handlers = {signal.SIGINT: stop, signal.SIGWINCH: disturbed, signal.SIGTSTP: leave, signal.SIGCONT: back}
        keys = termios.tcgetattr(sys.stdin)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            self._silence()
            yield lambda: bool(asked)
        finally:
            self._give_back(keys)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _silence(self) -> None:
        """Turn echo off, so that keys typed during an answer do not appear in the answer. The next prompt reads these keys.

        For prompt_toolkit, canonical mode is turned off too. Canonical mode would cut lines at 4,096 characters, and would
        send each line of a pasted text as a separate message. NOFLSH keeps the typed keys when Ctrl-C is pressed.
        """
        now = termios.tcgetattr(sys.stdin)
        now[3] = now[3] & ~termios.ECHO | termios.NOFLSH
        if self._moves:
            now[0] &= ~termios.ICRNL
            now[3] &= ~termios.ICANON
            self._console.file.write(_PASTES_MARKED)
            self._console.file.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, now)

    def _give_back(self, keys: list[Any]) -> None:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, keys)
        if self._moves:
            self._console.file.write(_PASTES_PLAIN)
            self._console.file.flush()


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer(commands: Mapping[str, tuple[str, ...]]) -> Completer:
    following: dict[str, Completer | dict[str, None] | None] = {
        name: PathCompleter(expanduser=True) if words == (FILE,) else dict.fromkeys(words) or None
        for name, words in commands.items()
    }
    return NestedCompleter.from_nested_dict(following)
