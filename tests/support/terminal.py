import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from repository import TINY, child_environment

GREEDY = ("--temperature", "0")  # with random weights, a greedy answer never ends
# Makes every pass slow, so that a test can type during an answer.
SLOW = """
import time
from gemma_py.runtime.runner import Runner
honest = Runner.run
def run(self, cache, ids, *rest, **options):
    time.sleep(0.3 if len(ids) > 1 else 0.02)
    return honest(self, cache, ids, *rest, **options)
Runner.run = run
from gemma_py.cli.main import entry
entry()
"""
# Makes the terminal the child's controlling terminal, as a terminal emulator does for a shell.
LAUNCH = "import fcntl,os,sys,termios; fcntl.ioctl(0,termios.TIOCSCTTY,0); os.execvp(sys.argv[1], sys.argv[1:])"


ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Window:
    def __init__(self, home: Path, **environment: str) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(24, 80)
        environment = {
            **child_environment(XDG_STATE_HOME=str(home), TERM="xterm-256color", PS1="shell$ ", ENV=""),
            "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONUTF8": "1", **environment,
        }  # fmt: skip
        if "NO_COLOR" not in environment:
            environment["COLORTERM"] = "truecolor"
        self.shell = subprocess.Popen(
            [sys.executable, "-ISc", LAUNCH, "sh", "-i"],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True, cwd=home,
        )  # fmt: skip
        os.close(theirs)
        self.text = ""
        self._seen = 0
        self.expect("shell$ ")

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        data = text.encode()
        while data:
            self._read(0)
            if select.select([], [self.ours], [], 0.1)[1]:
                data = data[os.write(self.ours, data[:1000]) :]

    def paste(self, text: str) -> None:
        """Paste a text: between marks if the program has switched bracketed paste on, as terminals do."""
        asked = self.text.rfind("\x1b[?2004h") > self.text.rfind("\x1b[?2004l")
        self.type(f"\x1b[200~{text}\x1b[201~" if asked else text)

    def _read(self, wait: float) -> None:
        if select.select([self.ours], [], [], wait)[0]:
            with contextlib.suppress(OSError):  # the shell has ended
                self.text += os.read(self.ours, 1 << 16).decode(errors="replace")

    def expect(self, *wanted: str, seconds: float = 60) -> str:
        """Wait for these texts, in this order. Return the output since the previous call.

        Escape sequences are ignored, and a line may be broken at any space.
        """
        until = time.monotonic() + seconds
        came = ""
        while time.monotonic() < until:
            self._read(0.2)
            came = ESCAPES.sub("", self.text[self._seen :])
            at = 0
            for one in wanted:
                found = re.compile(re.escape(one).replace(r"\ ", r"\s+")).search(came, at)
                if found is None:
                    break
                at = found.end()
            else:
                self._seen = len(self.text)
                return came
        raise AssertionError(f"waited for the output {wanted}, but found {came[-2000:]!r}")

    def ask_at_length(self, text: str) -> None:
        self.type(text + "\r")
        self.expect(text, "\n")
        self.answers()

    def answers(self, more: int = 0) -> None:
        until, least = time.monotonic() + 60, len(self.text) + more
        while len(ESCAPES.sub("", self.text).rpartition("\n")[2]) < 30 or len(self.text) < least:
            assert time.monotonic() < until
            self._read(0.2)

    def chat(self, *options: str) -> None:
        script = " ".join(
            f"'{part}'" for part in (sys.executable, "-c", SLOW.strip(), "chat", str(TINY), *GREEDY, *options)
        )
        (Path(f"/proc/{self.shell.pid}/cwd").resolve() / "start").write_text(script)
        self.type(". ./start\n")
        self.expect("Ctrl-D ends the chat")

    def close(self) -> None:
        self.shell.kill()
        os.close(self.ours)
        self.shell.wait()
