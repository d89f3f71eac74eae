"""A Ray cluster of one host, for tests."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

_MARK = "GEMMA_PY_TEST_CLUSTER"
_START = 120.0  # seconds


@dataclass(frozen=True)
class Cluster:
    """environment: of processes that join the cluster. mark: the value of an environment variable of Ray's processes."""

    address: str
    environment: dict[str, str]
    mark: str

    def command(self, *arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a gemma_py command."""
        return subprocess.run(
            [sys.executable, "-m", "gemma_py", *map(str, arguments)],
            env=self.environment | environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    def shards(self) -> list[int]:
        """Return the ids of the processes of shards."""
        return [number for number in self._processes() if _line(number).startswith(b"ray::_Member")]

    def _processes(self) -> list[int]:
        made = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # no process, or one that has just ended
                if folder.name.isdigit() and f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    made.append(int(folder.name))
        return made

    def end(self) -> None:
        for number in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def _line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def cluster(home: Path, token: bool) -> Iterator[Cluster]:
    """Start a cluster. home: an empty folder, for the token"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    files = tempfile.mkdtemp(prefix="ray-")  # a short path, because sockets have paths of at most 107 bytes
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    environment = {
        **os.environ, "HOME": str(home), "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": files,
        "RAY_AUTH_MODE": "token" if token else "disabled",
    }  # fmt: skip
    if token:
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text(uuid.uuid4().hex * 2)
    mark = uuid.uuid4().hex
    made = Cluster(f"127.0.0.1:{port}", {**environment}, mark)
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--include-dashboard=false",
        "--num-cpus=0", "--object-store-memory=80000000", "--disable-usage-stats",
    ]  # fmt: skip
    try:
        started = subprocess.run(
            command, env=environment | {_MARK: mark}, capture_output=True, text=True, timeout=_START
        )
        assert started.returncode == 0, started.stdout + started.stderr
        yield made
    finally:
        made.end()
        time.sleep(0.1)
        made.end()
        shutil.rmtree(files, ignore_errors=True)
