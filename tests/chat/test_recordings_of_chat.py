import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from pages import fences, recording
from repository import ROOT, child_environment


def test_the_chat_of_the_readme() -> None:
    """Speeds are not compared, because they differ from run to run."""
    lines = recording("README.md", "chat")
    said = [line.removeprefix("> ") for line in lines if line.startswith("> ")]
    answers = [line for before, line in itertools.pairwise(lines) if before.startswith("> ") and "/" not in before]
    verified = lines[-1]
    done = subprocess.run(
        [sys.executable, "-m", "gemma_py", "chat", "--threads", "2"],
        input="\n".join(said), env=child_environment(), capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert said[-1] == "/verify" and len(answers) == 2
    assert done.stdout.split("\n") == [*answers, ""]
    assert verified in done.stderr


def test_the_snippet_of_the_python_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = fences((ROOT / "docs" / "python.md").read_text(), "python")[0].replace("gemma-3-270m", "tiny-gemma3")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "docs/python.md", "exec"), {})
    assert (tmp_path / "talk.conversation").stat().st_size > 0
