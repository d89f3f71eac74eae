"""The servers that load.py starts: gemma_py's and llama.cpp's."""

import argparse
import asyncio
import contextlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from load_clients import ask

from gemma_py.catalog import resolve


class Process:
    def __init__(self, command: list[str], port: int) -> None:
        self.port = port
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (a file, because a pipe that nobody reads fills up)
        self.child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._said, process_group=0)

    async def ready(self) -> "Process":
        for _ in range(3000):
            if self.child.poll() is not None:
                raise SystemExit(f"the server did not start: {' / '.join(self.complaints())[-2000:]}")
            with contextlib.suppress(OSError):
                if (await ask(self.port, "GET", "/v1/models")).status == 200:
                    return self
            await asyncio.sleep(0.1)
        raise SystemExit("the server did not start in five minutes")

    async def metric(self, name: str) -> float:
        metrics = (await ask(self.port, "GET", "/metrics")).text
        return float(next(line for line in metrics.splitlines() if line.startswith(f"{name} ")).split()[1])

    async def usage(self) -> tuple[float, int, int]:
        """Return (resident MB without the prefix cache, threads, open files)."""
        prefixes = await self.metric("gemma_py_prefix_bytes")
        base = Path(f"/proc/{self.child.pid}")
        status = dict(line.split(":", 1) for line in (base / "status").read_text().splitlines())
        return (
            int(status["VmRSS"].split()[0]) / 1024 - prefixes / 2**20,
            int(status["Threads"]),
            len(list((base / "fd").iterdir())),
        )

    def complaints(self) -> list[str]:
        self._said.seek(0)
        return self._said.read().decode().splitlines()

    def stop(self) -> int:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return self.child.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def ours(args: argparse.Namespace, *options: object) -> Process:
    port = free_port()
    threads = ["--threads", args.threads] if args.threads else []
    command = [sys.executable, "-m", "gemma_py", "serve", args.model, "--port", port, "--name", "m", *threads, *options]
    return Process([str(part) for part in command], port)


def peer(args: argparse.Namespace, *options: object) -> Process:
    """llama.cpp's server runs one request at a time. It has an option to interrupt a request for a newer one, which is
    off here.
    """
    port = free_port()
    threads = ["--n_threads", args.threads, "--n_threads_batch", args.threads] if args.threads else []
    command = [*shlex.split(args.peer), "--model", resolve(args.model), "--port", port, "--n_ctx", 4096,
               "--host", "127.0.0.1", "--verbose", "false", "--interrupt_requests", "false", "--model_alias", "m", *threads]  # fmt: skip
    return Process([str(part) for part in command], port)


@contextlib.asynccontextmanager
async def running(process: Process) -> AsyncIterator[Process]:
    try:
        yield await process.ready()
    finally:
        process.stop()
