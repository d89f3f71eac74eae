"""tools/compare_peers.py, without any other runtime."""

import json
import subprocess
import sys
from pathlib import Path

import compare_peers
import peers
import pytest
from compare_peers import OURS, Figures, Peer, PeerError, Worker
from repository import TINY

NOWHERE = Peer("nowhere", ("json", "no_such_runtime"), "pip install nowhere")


def test_a_machine_that_slows_down_half_way_does_not_change_the_ratios() -> None:
    assert compare_peers.ratios([1.0, 10.0, 2.0], [2.0, 20.0, 5.0]) == (2.0, 2.0, 2.5)
    with pytest.raises(ValueError, match="shorter"):
        compare_peers.ratios([1.0, 2.0], [1.0])


def test_the_best_setting_is_that_of_the_smallest_median() -> None:
    assert compare_peers.best_setting({"steady": [3.0, 3.0, 3.0], "lucky once": [1.0, 4.0, 4.0]}) == "steady"


def test_errors_are_absolute() -> None:
    assert compare_peers.errors([1.0, 2.0], [1.5, 1.0]) == (0.75, 1.0)


def measured() -> dict[str, Figures]:
    ours = Figures({"prefill 10": {"": [1.0, 2.0]}}, {"": 5_000_000}, [1.0, 2.0])
    peer = Figures({"prefill 10": {"a": [9.0, 9.0], "b": [2.0, 6.0]}}, {"a": 7_000_000, "b": 6_000_000}, [1.0, 2.5])
    torch = Figures({"prefill 10": {"": [4.0, 4.0]}}, {"": 8_000_000}, [1.0, 2.0])
    return {OURS: ours, "peer": peer, "torch": torch, "broken": Figures(failed="ended with signal 11")}


def test_table() -> None:
    whole = {OURS: [2.0, 2.0], "peer": [1.0, 1.0]}
    lines = compare_peers.table(measured(), {"prefill 10": 10}, whole, {"absent": "pip install absent"}).splitlines()
    assert lines[0] == "|  | gemma_py | peer | torch | broken | absent |"
    assert lines[2] == (
        "| prefill 10 | 7.5 tok/s (5.0 to 10.0) | 3.3 tok/s: 2.50x (2.00 to 3.00); b | 2.5 tok/s: 3.00x (2.00 to 4.00) "
        "| failed | missing |"
    )
    assert lines[3] == "| process with 1 token | 2.00 s | 1.00 s: 0.50x (0.50 to 0.50) |  |  | missing |"
    assert lines[4] == "| peak memory | 5 MB | 6 MB | 8 MB |  | missing |"
    assert lines[5] == (
        "| NLL, mean (largest) error | 0.00000 (0.0000) | 0.25000 (0.5000) | reference | not measured | missing |"
    )
    assert len({line.count("|") for line in lines}) == 1


def test_a_peer_that_fails_on_the_way_gives_no_ratio() -> None:
    figures = measured()
    figures["torch"].seconds["prefill 10"][""].pop()
    figures["torch"].failed = "ended with exit code 1"
    assert compare_peers.cell(figures, "torch", "prefill 10", 10) == "2.5 tok/s, then failed"
    assert compare_peers.report(figures, {"prefill 10": 10}, {})["torch"]["ours/theirs"] == {}


def test_a_missing_peer_is_skipped_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_peers, "PEERS", (NOWHERE,))
    assert compare_peers.present(["nowhere"]) == ([], {"nowhere": "pip install nowhere"})
    message = capsys.readouterr().err
    assert "SKIPPED: nowhere, without no_such_runtime" in message
    assert "pip install nowhere" in message
    with pytest.raises(SystemExit, match="unknown peer elsewhere"):
        compare_peers.present(["elsewhere"])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no weights')", "exit code 1 while starting: no weights"),
        ("print('\"ready\"', flush=True); import os; input(); os.abort()", "signal 6 while prefill"),
    ],
)
def test_a_runtime_that_dies_is_named(tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises(PeerError, match=f"other ended with {message}"):
        Worker("other", [sys.executable, "-c", program], tmp_path / "log").call("prefill", [1])


def test_ours_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare_peers, "PEERS", (NOWHERE,))
    options = "--peers nowhere --rounds 1 --prefill 5,9 --after 4 --decode 2 --score 8 --threads 1 --neighbour 19"
    assert compare_peers.main([str(TINY), *options.split()]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["skipped"] == {"nowhere": "pip install nowhere"}
    ours = report["runtimes"][OURS]
    tests = ["prefill 5", "prefill 9", "decode 2 after 4"]
    assert list(ours["tok/s"]) == [*tests, *(f"{test}, neighbour of nice 19" for test in tests)]
    assert all(0 < least <= median <= most for median, least, most in (s[""] for s in ours["tok/s"].values()))
    assert ours["memory"][""] > 10_000_000
    assert "| missing |" in "\n".join(lines)


def test_a_neighbour_is_busy_during_the_test_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str]) -> "subprocess.Popen[bytes]":
        started.append(popen(command))
        return started[-1]

    def ask(worker: object) -> float:
        assert len(started) == 1 and started[0].poll() is None
        return 1.5

    popen = subprocess.Popen
    monkeypatch.setattr(compare_peers.subprocess, "Popen", start)
    assert compare_peers.beside_neighbour(ask, 7)(None) == 1.5  # type: ignore[arg-type]
    assert started[0].args[:3] == ["nice", "-n", "7"]  # type: ignore[index]
    assert started[0].poll() is not None


def test_llama_bench_of_ik_llama(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho \'[{{"samples_ns": [4000000000, 2500000000]}}]\'\n'
    )
    program.chmod(0o755)
    peer = compare_peers.ik_llama(program)
    runtime = peers.RUNTIMES[peer.name](Path("m.gguf"), tmp_path, 3, **peer.settings["repacked"])
    assert runtime.prefill([1, 2, 3]) == 2.5 and runtime.decode([1] * 4, 8) == 2.5
    common = "-m m.gguf -t 3 -fa 1 -rtr 1 -r 2 -p 0 -n 0 -o json"
    assert (tmp_path / "calls").read_text().splitlines() == [f"{common} -p 3", f"{common} -gp 4,8"]
