import io
import random
import re
import unicodedata

import pytest

pytest.importorskip("rich", reason="the extra `chat` is not installed")
pytest.importorskip("prompt_toolkit", reason="the extra `chat` is not installed")

from rich.console import Console

from gemma_py.cli.markdown import StreamedMarkdown, letters, visible

TEXT = """# A title

Some *plain* text with **bold**, `code`, and a [link](https://example.org/there), long enough to be wrapped more than once.
Second line & <b>not</b> HTML.

- one
- two, with **more**
    - inner

1. first

2. second

```python
def f(x):

    return x
```
| a | b |
|---|---|
| 1 | 2 |

> quoted ![picture](there.png)

שלום עולם, 日本語 🙂 and [x]: not-a-reference
**never closed, 2 * 3 * 4 and snake_case_name
"""


class Rows:
    """A simulated terminal, which wraps lines, moves the cursor up and erases rows. Rows that scroll out of view are
    kept.
    """

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.row, self.column = width, [""], 0, 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|[^\x1b]", text):
            if part.endswith("A") and len(part) > 2:
                self.row -= int(part[2:-1])
            elif part == "\x1b[J":
                self.rows[self.row :] = [""]
            elif part == "\n":
                self._down()
            elif part == "\r":
                self.column = 0
            elif not part.startswith("\x1b"):
                self._show(part)

    def _show(self, character: str) -> None:
        cells = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if self.column + cells > self.width:
            self._down()
        assert self.column > 0 or not self.rows[self.row], "written over"
        self.rows[self.row] += character
        self.column += cells

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append("")


def shown(text: str, width: int, height: int = 50, piece: int = 7, seed: int = 0, rendered: bool = True) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=height, highlight=False)
    answer = StreamedMarkdown(console, rendered)
    rng = random.Random(seed)
    at = 0
    while at < len(text):
        size = rng.randint(1, piece)
        answer.write(text[at : at + size])
        at += size
    answer.close()
    terminal = Rows(width)
    terminal.feed(file.getvalue())
    return [row.rstrip() for row in terminal.rows]


@pytest.mark.parametrize("width", [20, 40, 80])
def test_pieces_change_nothing(width: int) -> None:
    whole = shown(TEXT, width, piece=10_000)
    for piece in (1, 3, 30):
        assert shown(TEXT, width, piece=piece) == whole
    lost = letters(TEXT.replace("```python", "")) - letters("".join(whole))
    assert not lost


def test_complete_markdown_is_rendered() -> None:
    page = "\n".join(shown(TEXT, 80))
    for raw in ("**bold**", "`code`", "```", "|---|"):
        assert raw not in page
    for kept in ("<b>not</b> HTML", "https://example.org/there", "there.png", "not-a-reference", "**never closed", "•"):
        assert kept in page
    assert "more than once.\nSecond line" in re.sub(r"\n(?!Second)", " ", page)


@pytest.mark.parametrize(
    "text",
    [
        "**a** family: 👨‍👩‍👧",
        "**flag** 🇩🇪",
        "**tall**  \n" * 60,
        "&copy; **entity**",
        "| **a** | b |\n|---|---|\n| " + "long" * 40 + " | x |\n",
    ],
)
def test_unclear_markdown_is_shown_unchanged(text: str) -> None:
    assert "".join(shown(text, 40)).replace(" ", "") == text.replace("\n", "").replace(" ", "")


def test_a_disturbed_block_is_not_erased() -> None:
    file = io.StringIO()
    answer = StreamedMarkdown(Console(file=file, force_terminal=True, width=80, height=24), True)
    answer.write("**one")
    answer.disturb()
    answer.write("**\n\n**two**\n")
    answer.close()
    assert file.getvalue().startswith("**one**\n\n**two")
    assert file.getvalue().count("\x1b[J") == 1


def test_without_rendering_the_text_is_unchanged() -> None:
    assert shown(TEXT, 1000, rendered=False) == [line.rstrip() for line in TEXT.split("\n")]


def test_no_text_reaches_the_terminal_as_a_command() -> None:
    hostile = "".join(map(chr, range(160))) + "\x1b]0;title\x07\x1b[2J"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", visible(hostile))
