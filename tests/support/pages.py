"""Code blocks and recorded output in README and docs."""

import re

from repository import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def fences(text: str, language: str) -> list[str]:
    found = [(match[1], match[3]) for match in _FENCE.finditer(text) if match[2] == language]
    return ["\n".join(line.removeprefix(indent) for line in block.split("\n")) for indent, block in found]


def recording(page: str, command: str) -> list[str]:
    for block in fences((ROOT / page).read_text(), ""):
        first, *rest = block.strip("\n").split("\n")
        if first.startswith(f"$ python -m gemma_py {command}"):
            return rest
    raise AssertionError(f"{page} has no recording of {command}")
