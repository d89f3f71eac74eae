import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import receipt_tampering as tampering
from repository import TINY

import gemma_py
from gemma_py.errors import ComputationError
from gemma_py.receipts.receipt import Receipt

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def engine() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def receipt(engine: gemma_py.Engine) -> Receipt:
    return tampering.usual_receipt(engine)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_checks_files_and_says_what_it_found(run: Run, tmp_path: Path, receipt: Receipt) -> None:
    good = tmp_path / "good.json"
    assert (
        run("generate", TINY, "--prompt", tampering.PROMPT, "--max-tokens", 6, "--seed", 4, "--receipt", good)[0] == 0
    )
    bad = tampering.write(tmp_path / "bad.json", tampering.TAMPERINGS["a row of logits"][0](None, receipt).to_bytes())  # type: ignore[arg-type]
    naive = tampering.write(tmp_path / "naive.json", good.read_bytes().replace(b'"trim":false', b'"trim":true'))
    other = dataclasses.replace(receipt, model=dataclasses.replace(receipt.model, files=("0" * 64,)))
    foreign = tampering.write(tmp_path / "foreign.json", other.to_bytes())
    newer = tampering.write(tmp_path / "newer.json", dataclasses.replace(receipt, rules=9).to_bytes())
    for files, code in (
        ([good], 0), ([good, bad], 1), ([naive], 1), ([foreign], 2), ([newer, good], 3), ([newer, foreign], 2),
        ([foreign, newer, bad], 1), ([tmp_path / "none.json"], 2), ([newer, tmp_path / "none.json", good], 2),
        ([tmp_path / "none.json", bad], 1),
    ):  # fmt: skip
        assert run("audit", *files, TINY)[0] == code, files
    _, out, _ = run("audit", good, bad, naive, TINY)
    lines = out.splitlines()
    assert lines[0].startswith(f"{good}: equal: 6 tokens after a prompt of ")
    assert lines[1].startswith(
        f"{bad}: differs: logits at token 5 (position {len(receipt.prompt) + 5}): the logits differ"
    )
    assert lines[2].startswith(f"{naive}: differs: structure: predicate.root is ")
    for data, why in ((b"# A page", "not valid JSON: "), (b"{}", "the file is neither a receipt nor a response")):
        page = tampering.write(tmp_path / "page.md", data)
        code, out, err = run("audit", page, TINY)
        assert code == 1 and out.startswith(f"{page}: holds no receipt: {why}") and not err
    assert not run("audit", *[good] * 9, TINY)[2], "a short audit must not print progress into a pipe"
    _, out, _ = run("audit", good, bad, TINY, "--json")
    rows = json.loads(out)["receipts"]
    assert [(row["verdict"], row["stage"], row["token"], row["signature"]) for row in rows] == [
        ("equal", None, None, "none"), ("diverged", "logits", 5, "none"),
    ]  # fmt: skip


def test_every_file_has_its_verdict(
    run: Run, tmp_path: Path, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compile kernels for bfloat16 now, because an audit that compiles says so on stderr.
    gemma_py.load(TINY, kv="bfloat16").close()
    good = tampering.write(tmp_path / "good.json", receipt.to_bytes())
    bad = tampering.write(tmp_path / "bad.json", b"{}")
    none, folder = tmp_path / "none.json", tmp_path / "folder"
    folder.mkdir()
    forged = dataclasses.replace(receipt, model=dataclasses.replace(receipt.model, kv="bfloat16"))
    other = tampering.write(tmp_path / "other.json", forged.to_bytes())
    files = (none, good, folder, bad, other, good)

    def rows(model: Any) -> tuple[int, list[tuple[Any, ...]]]:
        code, out, err = run("audit", *files, model, "--json")
        assert not err
        found = json.loads(out)["receipts"]
        assert [row["name"] for row in found] == list(map(str, files))
        assert all(row["message"] and "\n" not in row["message"] for row in found)
        return code, [(row["verdict"], row["stage"]) for row in found]

    unread, structure = ("unreadable", None), ("diverged", "structure")
    assert rows(TINY) == (
        1, [unread, ("equal", None), unread, structure, ("diverged", "model"), ("equal", None)],
    )  # fmt: skip
    no_model = ("unreadable", "model")
    assert rows(tmp_path / "none.gguf") == (1, [unread, no_model, unread, structure, no_model, no_model])
    code, out, _ = run("audit", good, tmp_path / "none.gguf")
    assert code == 2 and out.count("\n") == 1 and out.startswith(f"{good}: cannot be read: model: ")
    honest = gemma_py.load
    for error in (ComputationError("worker 1 stalled"), MemoryError()):

        def failing(*args: Any, error: Exception = error, **options: Any) -> gemma_py.Engine:
            if options["kv"] == "bfloat16":
                raise error
            return honest(*args, **options)

        monkeypatch.setattr(gemma_py, "load", failing)
        assert rows(TINY)[1][-2:] == [("unknown", "model"), ("equal", None)]
        assert run("audit", good, other, TINY)[0] == 3


@pytest.mark.parametrize("data", [
    b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"a":1,"a":1}', b"[" * 100_000, b'{"_type":' + b"9" * 100_000 + b"}",
    b"{}\n{}\n", b'{"payloadType":1}', b'{"receipts":[[[]]]}', b'{"receipts":[1]}', b" " * 1000,
])  # fmt: skip
def test_hostile_files_are_named_in_one_line(run: Run, tmp_path: Path, data: bytes) -> None:
    code, out, err = run("audit", tampering.write(tmp_path / "hostile.json", data), TINY)
    text = out + err
    assert code == 1 and text.count("\n") == len(text.splitlines()) <= 2 and "hostile.json" in text and len(text) < 700


def test_a_file_of_100_mb_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    code, out, err = run("audit", path, TINY)
    assert code == 2 and not err and out.count("\n") == 1 and f"{path}: cannot be read: the file is larger than" in out
