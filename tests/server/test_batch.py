import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import TINY, child_environment
from serving import Running, serving, wait_until

import gemma_py

Run = Callable[..., tuple[int, str, str]]


def request(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by custom_id. Fails if a row is incomplete or occurs twice."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


CHAT = [{"role": "user", "content": "hi"}]
ROWS = [
    request("a", prompt="The", max_tokens=9, temperature=0),
    request("b", "/v1/chat/completions", messages=CHAT, max_tokens=7, temperature=0, n=2),
    request("c", "/v1/responses", input="hi", max_output_tokens=5, temperature=0),
    request("none of that model", model="gpt-9", prompt="x"),
    request("too long", prompt="x", max_tokens=99_999),
    request("a stream", prompt="x", stream=True),
    request("nonsense", nonsense=1),
]  # fmt: skip


def test_each_row_gets_what_the_server_says(run: Run, tmp_path: Path, server: Running) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    code, text, _ = run("batch", source, out, TINY, "--json")
    counts = json.loads(text)
    assert code == 0 and (counts["rows"], counts["before"], counts["done"], counts["failed"]) == (7, 0, 7, 4)
    got = read(out)
    for row in ROWS:
        name = row["custom_id"]
        status, document = server.post(row["url"], **row["body"])
        response = got[name]["response"]
        if name == "a stream":
            status = 400
        assert response["status_code"] == status
        if status == 200:
            assert got[name]["error"] is None
            for part in ("choices", "usage") if name in "ab" else ("status", "usage"):
                assert response["body"][part] == document[part]
        else:
            assert got[name]["error"]["message"] == response["body"]["error"]["message"]
    assert got["too long"]["error"]["code"] == "context_length_exceeded"
    assert got["nonsense"]["error"]["param"] in ("nonsense", "prompt")

    before = out.read_bytes()
    code, text, _ = run("batch", source, out, TINY, "--json")
    assert (code, json.loads(text)["done"], json.loads(text)["before"]) == (0, 0, 7)
    assert out.read_bytes() == before


def test_rows_of_embeddings(run: Run, tmp_path: Path, embedding_folder: Path) -> None:
    url = "/v1/embeddings"
    rows = [
        request("a", url, input="one", task="query"),
        request("b", url, input=["one", "two three"], encoding_format="base64", dimensions=5),
        request("chat", "/v1/chat/completions", messages=CHAT),
        request("wide", url, input="one", dimensions=99),
        request("a stream", url, input="one", stream=True),
    ]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    code, text, _ = run("batch", source, out, embedding_folder, "--json")
    counts = json.loads(text)
    assert code == 0 and (counts["done"], counts["failed"], counts["completion_tokens"]) == (5, 3, 0)
    got = read(out)
    with gemma_py.load(embedding_folder) as engine, serving(engine) as server:
        for row in rows:
            response = got[row["custom_id"]]["response"]
            status, document = server.post(row["url"], **row["body"])
            assert response["status_code"] == status == (200 if row["custom_id"] in "ab" else 400)
            if status == 200:
                assert response["body"] == document | {"model": response["body"]["model"]}
    assert counts["prompt_tokens"] == sum(got[name]["response"]["body"]["usage"]["prompt_tokens"] for name in "ab")
    assert "use /v1/embeddings" in got["chat"]["error"]["message"]
    assert got["wide"]["error"]["param"] == "dimensions" and got["a stream"]["error"]["param"] == "stream"


def test_a_model_that_generates_refuses_rows_of_embeddings(run: Run, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [request("a", "/v1/embeddings", input="one")]), tmp_path / "out.jsonl"
    code, text, _ = run("batch", source, out, TINY, "--json")
    assert code == 0 and json.loads(text)["failed"] == 1
    assert "embeddings need an embedding model" in read(out)["a"]["error"]["message"]


def test_a_torn_last_line_is_computed_again_and_nothing_else(run: Run, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS[:3]), tmp_path / "out.jsonl"
    assert run("batch", source, out, TINY)[0] == 0
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1] + lines[2][:40])
    code, _, err = run("batch", source, out, TINY)
    assert code == 0 and "1 row written, 0 with an error; 2 were complete before" in err
    assert out.read_bytes().startswith(lines[0] + lines[1])
    assert set(read(out)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "contains no requests"),
        ("{\n", "line 1: the line is not valid JSON"),
        ("[]\n", "line 1: the line should be a JSON object"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n{"url": "/x"}\n', "line 2: custom_id"),
        ('{"custom_id": "a", "url": "/v1/models", "body": {}}\n', "line 1: method and url should be POST and one of"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": 1}\n', "line 1: body"),
        (
            '{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2,
            "line 2: custom_id 'a' is already used in line 1",
        ),
    ],
)
def test_a_file_that_is_malformed_is_refused_at_once(run: Run, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "in").write_text(content)
    code, _, err = run("batch", tmp_path / "in", tmp_path / "out", TINY)
    assert code == 1 and said in err and err.count("\n") == 1


def test_an_output_of_another_model_is_left_alone(run: Run, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS[:1]), tmp_path / "out.jsonl"
    assert run("batch", source, out, TINY)[0] == 0
    row = json.loads(out.read_text())
    row["response"]["body"]["model"] = "another"
    out.write_text(json.dumps(row) + "\n")
    write(source, ROWS[:2])
    before = out.read_bytes()
    code, _, said = run("batch", source, out, TINY)
    assert code == 1 and "rows of the model 'another'" in said and out.read_bytes() == before


def test_an_output_of_something_else_is_left_alone(run: Run, tmp_path: Path) -> None:
    source = write(tmp_path / "in", ROWS[:1])
    for content, said in (
        ('{"custom_id": "z", "response": null}\n', "the output has the custom_id 'z'"),
        ("my notes\n", "not valid JSON"),
        ("[1]\n{}\n", "object"),
    ):
        (tmp_path / "out").write_text(content)
        code, _, err = run("batch", source, tmp_path / "out", TINY)
        assert code == 1 and said in err and (tmp_path / "out").read_text() == content
    assert "cannot be read" in run("batch", tmp_path / "nothing", tmp_path / "out", TINY)[2]
    assert "cannot be written" in run("batch", source, tmp_path / "no" / "out", TINY)[2]


def start(source: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gemma_py", "batch", str(source), str(out), str(TINY)]
    environment = child_environment()
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_kill_at_any_moment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    rows = [request(f"{number}", prompt=f"{number}", max_tokens=12, seed=number) for number in range(150)]
    source, out = write(tmp_path / "in", rows), tmp_path / "out"
    rng = random.Random(3)
    kept = b""
    for _ in range(3):
        with start(source, out) as child:
            wait_until(lambda: (out.exists() and len(out.read_bytes()) > len(kept)) or child.poll() is not None)  # noqa: B023
            time.sleep(rng.random() * 0.2)
            child.kill()
        now = out.read_bytes()
        assert now.startswith(kept)
        kept = now[: now.rfind(b"\n") + 1]
    with start(source, out) as child:
        assert child.wait(120) == 0
    assert out.read_bytes().startswith(kept)
    assert set(read(out)) == {row["custom_id"] for row in rows}


def test_two_processes_do_not_write_one_output_and_ctrl_c_keeps_what_is_done(run: Run, tmp_path: Path) -> None:
    rows = [request(f"{number}", prompt=f"{number}", max_tokens=200) for number in range(500)]
    source, out = write(tmp_path / "in", rows), tmp_path / "out"
    with start(source, out) as child:
        wait_until(lambda: out.exists() and out.read_bytes() != b"")
        code, _, err = run("batch", source, out, TINY)
        assert code == 1 and "another process is writing to this file" in err
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 130 and "Traceback" not in errors
    assert 0 < len(read(out)) < 500


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_file_that_is_no_output_is_refused_and_not_changed(run: Run, tmp_path: Path, end: str) -> None:
    """Such as the file of requests itself, given twice, whose last line may have no end."""
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(ROWS[0]) + end)
    for other, text in (
        ("in.jsonl", source.read_text()),
        ("other.jsonl", source.read_text()),
        ("notes.txt", "a" + end),
    ):
        (tmp_path / other).write_text(text)
        code, _, err = run("batch", source, tmp_path / other, TINY)
        assert code == 1 and err.count("\n") == 1 and f"{other}, line 1: " in err
        assert (tmp_path / other).read_text() == text


@pytest.mark.parametrize("part", [b"", b"{", b'{"id": "batch_re', b'{"id": "batch_req_1", "custom', b"\0\0\0"])
def test_an_incomplete_last_row_is_computed_again(run: Run, tmp_path: Path, part: bytes) -> None:
    source, out = write(tmp_path / "in.jsonl", [ROWS[6]]), tmp_path / "out.jsonl"
    out.write_bytes(part)
    assert run("batch", source, out, TINY)[0] == 0
    assert list(read(out)) == ["nonsense"]
