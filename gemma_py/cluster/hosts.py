"""Hosts: where the processes of shards run."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from gemma_py import machine
from gemma_py.catalog import resolve
from gemma_py.cluster.channel import Channel
from gemma_py.cluster.processes import PipeChannel
from gemma_py.errors import GemmaError, InputError
from gemma_py.weights.checkpoint import open_checkpoint
from gemma_py.weights.store import file_digests


@dataclass(frozen=True)
class Facts:
    """What a host says of itself.

    memory: the available bytes, or None if unknown. package: a sha256 of the sources of gemma_py.
    model: the sha256 of each of the model's files; empty if no model was asked for. error: why the model cannot be opened.
    """

    memory: int | None
    threads: int
    package: str
    model: tuple[str, ...] = ()
    error: str = ""


def facts(model: str | None = None) -> Facts:
    """Return the facts of this host. model: as `resolve` takes it."""
    digests: tuple[str, ...] = ()
    error = ""
    if model is not None:
        try:
            digests = file_digests(open_checkpoint(resolve(model)))
        except (GemmaError, OSError) as raised:
            error = str(raised)
    return Facts(machine.memory(), machine.threads(), package_digest(), digests, error)


@cache
def package_digest() -> str:
    sources, package = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(package.rglob("*.py")):
        sources.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return sources.hexdigest()


class Host(Protocol):
    """name: for messages; empty for this machine. memory: the available bytes, or None if unknown.
    threads: the default number of worker threads; None for that of this process.
    """

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> int | None: ...

    @property
    def threads(self) -> int | None: ...

    def start(self, deadline: float) -> Channel:
        """Start a process. deadline: seconds in which the process sends several heartbeats."""


class Hosts(Protocol):
    """patience: how many seconds to try again, if a process ends or none can be started."""

    patience: float

    def usable(self) -> Sequence[Host]:
        """Return the hosts on which a process can be started now, the best first."""

    def ask(self, model: str | None) -> dict[str, Facts | str]:
        """Return each host's facts by its name, or an error text. model: see `facts`"""


class ThisMachine:
    """The only host of shards without a cluster."""

    patience = 30.0
    name, memory, threads = "", None, None

    def start(self, deadline: float) -> Channel:
        return PipeChannel(deadline)

    def usable(self) -> Sequence[Host]:
        return [self]

    def ask(self, model: str | None) -> dict[str, Facts | str]:
        return {"this machine": facts(model)}


def place(hosts: Sequence[Host], sizes: Sequence[int], running: Sequence[str] = ()) -> list[Host]:
    """Choose a host for each process: of the hosts with enough memory, the first with the fewest processes.

    sizes: the bytes that each process needs. running: the name of the host of each process that runs already
    """
    names, left = list(running), {host.name: host.memory for host in hosts if host.memory is not None}
    chosen = []
    for size in sizes:
        fitting = [host for host in hosts if left.get(host.name, size) >= size]
        if not fitting:
            most = max(left, key=lambda name: left[name], default=None)
            found = "no host is left" if most is None else f"{most} has the most left, {left[most] >> 20:,} MiB"
            raise InputError(f"a process needs {size >> 20:,} MiB of memory; {found}")
        best = min(fitting, key=lambda host: names.count(host.name))
        names.append(best.name)
        if best.name in left:
            left[best.name] -= size
        chosen.append(best)
    return chosen
