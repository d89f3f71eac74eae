import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from repository import ROOT, TINY


def process(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gemma_py", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload]


def test_as_a_program() -> None:
    with process("generate", TINY, "--prompt", "some text", "--max-tokens", 3) as child:
        out, err = child.communicate(timeout=120)
    assert (child.returncode, err) == (0, b"")
    assert out.endswith(b"\n")


def test_standard_input() -> None:
    with process("score", TINY, "--file", "-", "--json", stdin=subprocess.PIPE) as child:
        out, err = child.communicate("some tëxt".encode(), timeout=120)
    assert (child.returncode, err) == (0, b"")
    assert len(json.loads(out)["nll"]) >= 2
    with process("score", TINY, "--file", "-", stdin=subprocess.PIPE) as child:
        out, err = child.communicate(b"\xff", timeout=120)
    assert (child.returncode, out) == (1, b"")
    assert len(err.splitlines()) == 1


def test_a_reader_that_leaves() -> None:
    with process("score", TINY, "--text", "word " * 400) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        err = child.stderr.read()
        assert child.wait(timeout=120) == 1
    assert err == b""


def test_an_interrupt() -> None:
    with process("score", TINY, "--text", "word " * 1500) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=120) == 130
        assert child.stderr.read() == b""


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": "/proc/nowhere", "HOME": "/proc/nowhere"}
    with process("generate", TINY, "--prompt", "a", "--max-tokens", 2, "--json", env=environment) as child:
        out, err = child.communicate(timeout=300)
    assert (child.returncode, err.splitlines()[1:]) == (0, [])
    assert err.startswith(b"compiling kernels")
    assert len(json.loads(out)["ids"]) == 2


def test_streams_that_are_closed_or_endless() -> None:
    for command, code in (
        ("models >&-", 0),
        (f"score {TINY} --file - <&-", 1),
        (f"score {TINY} --file - </dev/zero", 1),
    ):
        line = f"exec {sys.executable} -m gemma_py {command}"
        done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr
        assert len(done.stderr.splitlines()) <= 1


def test_a_full_disk() -> None:
    for extra in ([], ["--json"]):
        with Path("/dev/full").open("wb") as full:
            command = [sys.executable, "-m", "gemma_py", "score", str(TINY), "--text", "some text", *extra]
            done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
