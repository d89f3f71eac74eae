import re
import shlex
from collections.abc import Callable

from pages import fences, recording
from repository import ROOT

Run = Callable[..., tuple[int, str, str]]


def test_verify_gives_the_digest_of_the_readme(run: Run) -> None:
    """Runs one of the README's sixteen settings."""
    digests = set(re.findall(r"\b[0-9a-f]{8}\b", "\n".join(recording("README.md", "verify"))))
    code, out, _ = run("verify", "--threads", 2, "--chunks", 512, "--reference", 0)
    assert code == 0
    assert set(re.findall(r"\b[0-9a-f]{8}\b", out)) == digests and len(digests) == 1


def test_generate_gives_the_text_of_its_page(run: Run) -> None:
    (line,) = (
        line
        for block in fences((ROOT / "docs" / "cli.md").read_text(), "")
        for line in block.splitlines()
        if line.startswith("$ python -m gemma_py generate")
    )
    code, out, _ = run(*shlex.split(line)[4:])
    assert (code, out.splitlines()) == (0, recording("docs/cli.md", "generate"))


def test_snippets_that_compare_with_the_specification() -> None:
    for name, number in (("docs/python.md", 1), ("CONTRIBUTING.md", 0)):
        snippet = fences((ROOT / name).read_text(), "python")[number]
        assert "reference.logits" in snippet
        exec(compile(snippet, f"{name}, snippet {number}", "exec"), {})
