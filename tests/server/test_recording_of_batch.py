import json
from collections.abc import Callable
from pathlib import Path

from pages import fences
from repository import ROOT


def test_the_batch_of_the_server_page(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    (block,) = (text for text in fences((ROOT / "docs" / "server.md").read_text(), "") if "cat in.jsonl" in text)
    rows, _, last = (
        block.strip().removeprefix("$ cat in.jsonl\n").partition("$ python -m gemma_py batch in.jsonl out.jsonl\n")
    )
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(rows)
    code, _, err = run("batch", source, output)
    assert code == 0 and last in err.splitlines()
    answers = {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert answers["a"]["response"]["status_code"] == 200 and answers["b"]["response"]["status_code"] != 200
