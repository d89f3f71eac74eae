"""Render streamed Markdown. A block appears as plain text, which is replaced by the rendering when the block is complete.

One write erases the plain text and prints the rendering, to avoid flicker. A block stays plain text if the number of rows to
erase is uncertain: the block is taller than the window, the window was resized, or terminals disagree about the width of a
character. A block also stays plain text if the rendering would lose a letter.
"""

import re
import unicodedata
from collections import Counter

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown

_FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
# HTML, images, reference links and indented code stay plain text, because rendering would drop part of their text.
_PARSER = (
    MarkdownIt("commonmark", {"html": False})
    .enable(["table", "strikethrough"])
    .disable(["image", "reference", "code", "html_block", "html_inline"])
)
_CONTROLS = {code: chr(0x2400 + code) for code in range(32)} | dict.fromkeys(range(127, 160), "�")
_CONTROLS |= {0x0A: "\n", 0x09: "    "}


def visible(text: str) -> str:
    """Replace control characters by visible symbols, so that a text cannot move the cursor or change the terminal's state."""
    return text.translate(_CONTROLS)


class StreamedMarkdown:
    def __init__(self, console: Console, rendered: bool) -> None:
        self._console, self._rendered = console, rendered
        self._block = ""
        self._open = ""
        self._undisturbed = True

    def disturb(self) -> None:
        """Keep the current block as plain text. Called when a resize or other output has moved the rows of the block."""
        self._undisturbed = False

    def write(self, text: str) -> None:
        for part in re.split(r"(?<=\n)", visible(text)):
            if not part:
                continue
            if self._block.endswith("\n\n") and not self._open and not part[0].isspace():
                self._finish("\n\n")
            self._block += part
            self._emit(part)
            if part.endswith("\n"):
                self._line_ended()

    def close(self) -> None:
        self._finish("\n")

    def _emit(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()

    def _line_ended(self) -> None:
        match = _FENCE.fullmatch(self._block.rpartition("\n")[0].rpartition("\n")[2])
        if match is None:
            return
        indent, fence, info = match.groups()
        if not self._open:
            self._open = fence
        elif fence.startswith(self._open) and not info.strip():
            self._open = ""
            if not indent:
                self._finish("\n")

    def _finish(self, end: str) -> None:
        block, self._block, self._open = self._block, "", ""
        sure, self._undisturbed = self._undisturbed, True
        if not block.strip():
            return
        drawn = self._draw(block) if self._rendered and sure else None
        if drawn is None:
            self._emit("" if block.endswith("\n") else "\n")
            return
        up = rows(block, self._console.width)
        to_its_start = f"\r\x1b[{up}A" if up else "\r"
        self._emit(f"{to_its_start}\x1b[J{drawn}{end}")

    def _draw(self, block: str) -> str | None:
        if rows(block, self._console.width) > self._console.height - 2 or any(map(contested, block)):
            return None
        markdown = Markdown(block, hyperlinks=False)
        markdown.parsed = _PARSER.parse(block)
        for token in markdown.parsed:
            for child in token.children or ():
                if child.type == "softbreak":  # keep the model's line breaks, which Markdown would turn into spaces
                    child.type = "hardbreak"
        with self._console.capture() as capture:
            self._console.print(markdown)
        drawn = re.sub(r" +\n", "\n", capture.get()).strip("\n")
        lost = letters(_FENCE.sub("", block)) - letters(_STYLE.sub("", drawn))
        return None if lost else drawn


def letters(text: str) -> Counter[str]:
    return Counter(filter(str.isalnum, text))


def contested(character: str) -> bool:
    """Return whether terminals disagree about the width of a character, such as a combining mark or a flag."""
    if character.isascii():
        return False
    pair = "\U0001f1e6" <= character <= "\U0001f1ff" or "\U0001f3fb" <= character <= "\U0001f3ff"
    return pair or unicodedata.category(character) in ("Cf", "Mn", "Me", "Mc", "Co", "Cn", "Zl", "Zp")


def rows(text: str, width: int) -> int:
    """Return how many rows the cursor moves down while a terminal of `width` columns prints the text."""
    row = column = 0
    for character in text:
        if character == "\n":
            row, column = row + 1, 0
            continue
        cells = cell_len(character)
        if column + cells > width:
            row, column = row + 1, 0
        column += cells
    return row
