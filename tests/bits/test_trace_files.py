import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tiny
from repository import TINY
from tampering import changed_gain, repacked, tamper

import gemma_py
from gemma_py.checks import trace_file, verify

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--threads", "1,2", "--chunks", "32", "--tokens", "96", "--reference", "0")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with gemma_py.load(TINY, threads=2) as engine:
        document = trace_file.trace_document(engine, verify.prompt(96, engine.config.vocab_size))
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    trace_file.write_trace(path, document)
    assert trace_file.read_trace(path) == document
    assert path.stat().st_size < 20_000
    return document


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_a_trace_is_read_as_it_was_written(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    path.parent.mkdir()
    code, out, _ = run("verify", TINY, *SMALL, "--trace", path)
    assert (code, out.splitlines()[-1]) == (0, f"The trace is in {path}.")
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]
    code, out, _ = run("verify", TINY, "--threads", 3, "--chunks", "5", "--tokens", 96, "--against", path)
    assert (code, out.splitlines()[-1]) == (0, f"Every phase has the bits of {path}.")
    code, out, _ = run("verify", TINY, "--threads", 1, "--chunks", 50, "--reference", 0, "--json", "--against", path)
    # Compares as many tokens as the trace has.
    assert (json.loads(out)["tokens"], json.loads(out)["against"]) == (96, {"equal": True, "difference": None})


def test_a_tampered_trace_is_located(run: Run, tmp_path: Path, traced: dict[str, Any]) -> None:
    document = json.loads(json.dumps(traced))
    attention, qkv = (document["phases"].index(name) for name in ("attention", "query, key and value"))
    row = document["hashes"][3][attention]
    document["hashes"][3][attention] = row[:32] + ("0" if row[32] != "0" else "1") + row[33:]
    document["hashes"][4][qkv] = row
    path = write(tmp_path / "t.json", document)
    code, out, err = run("verify", TINY, *SMALL, "--against", path)
    message = f"this machine and {path} differ, first in layer 3, attention, positions 32 to 47"
    assert (code, err.splitlines()[-1]) == (1, f"gemma_py: {message}")
    assert "same bits" in out
    code, out, _ = run("verify", TINY, *SMALL, "--against", path, "--json")
    assert (code, json.loads(out)["against"]["difference"]["message"]) == (1, message)


def test_a_machine_with_other_arithmetic_is_located_by_its_trace(
    monkeypatch: pytest.MonkeyPatch, traced: dict[str, Any]
) -> None:
    """The runs on this machine agree with each other, but differ from the trace."""
    tamper(monkeypatch, before=repacked(changed_gain(1, "middle", 1)))
    with gemma_py.load(TINY, threads=2) as engine:
        made = trace_file.trace_document(engine, traced["tokens"])
    difference = trace_file.compare(traced, made, "a and b")
    assert str(difference) == "a and b differ, first in layer 1, middle, positions 0 to 15"


def test_digests_beyond_the_phases_are_compared(traced: dict[str, Any]) -> None:
    assert trace_file.compare(traced, traced, "") is None
    kv = trace_file.compare({**traced, "kv": [*traced["kv"][:-1], "0"]}, traced, "a and b")
    assert str(kv) == "a and b differ, first in layer 6, rows kept in the cache"
    assert str(trace_file.compare({**traced, "logits": "0"}, traced, "a and b")) == "a and b differ, first in logits"
    hashes = [["" for _ in layer] for layer in traced["hashes"]]
    missing = trace_file.compare({**traced, "hashes": hashes}, traced, "a and b")
    assert str(missing) == "a and b differ, first in layer 0, embedding, positions 0 to 95"


def test_the_identity_sees_config_and_weights(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def of(path: Path) -> dict[str, str]:
        with gemma_py.load(path, threads=1) as engine:
            return trace_file.identity(engine)

    again, other = tmp_path / "again", tmp_path / "other"
    tiny.write(tiny.VARIANTS["gemma3"], again, seed=1)
    tiny.write(tiny.VARIANTS["gemma3"], other, seed=2)
    assert of(again) == of(checkpoints["gemma3"])
    assert of(other)["config"] == of(again)["config"]
    assert of(other)["weights"] != of(again)["weights"]


def bad_traces(document: dict[str, Any]) -> dict[str, Any]:
    short = [layer[:-1] for layer in document["hashes"]]
    return {
        "no trace": {},
        "a list": [document],
        "another version": {**document, "format": "gemma_py trace 0"},
        "another model": {**document, "model": {**document["model"], "weights": "0"}},
        "other tokens": {**document, "tokens": [*document["tokens"][:-1], 0]},
        "no tokens": {**document, "tokens": []},
        "tokens of text": {**document, "tokens": "abc"},
        "no hashes": {**document, "hashes": None},
        "short layers": {**document, "hashes": short},
        "few layers": {**document, "hashes": document["hashes"][1:]},
        "other phases": {**document, "phases": []},
        "no digests": {**document, "kv": []},
        "digests of numbers": {**document, "kv": [1] * 7},
    }


BAD_TRACES = ("no trace", "a list", "another version", "another model", "other tokens", "no tokens", "tokens of text",
              "no hashes", "short layers", "few layers", "other phases", "no digests", "digests of numbers")  # fmt: skip


@pytest.mark.parametrize("case", BAD_TRACES)
def test_bad_traces_are_refused_before_the_work_begins(
    run: Run, tmp_path: Path, traced: dict[str, Any], case: str
) -> None:
    assert set(bad_traces(traced)) == set(BAD_TRACES)
    path = write(tmp_path / "t.json", bad_traces(traced)[case])
    code, out, err = run("verify", TINY, *SMALL, "--against", path)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert str(path) in err


@pytest.mark.parametrize("case", ["nothing there", "not JSON", "other length", "too long", "threads", "a directory"])
def test_bad_input(run: Run, tmp_path: Path, traced: dict[str, Any], case: str) -> None:
    (tmp_path / "text").write_text("text")
    good = write(tmp_path / "t.json", traced)
    options: dict[str, list[object]] = {
        "nothing there": ["--against", tmp_path / "nothing"],
        "not JSON": ["--against", tmp_path / "text"],
        "other length": ["--tokens", 95, "--against", good],
        "too long": ["--tokens", 1 << 40],
        "threads": ["--threads", "1,5000"],
        "a directory": ["--trace", tmp_path],
    }
    code, out, err = run("verify", TINY, *options[case])
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert err.startswith("gemma_py: ")
    if case == "other length":
        assert "the trace has 96 tokens, but --tokens is 95; leave --tokens out" in err
