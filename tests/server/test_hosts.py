"""Where shards are placed, what happens if a host cannot be used, and traces of hosts. The hosts are processes of this machine."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from repository import TINY

import gemma_py
from gemma_py.checks import verify
from gemma_py.checks.host_traces import TraceJob, differences
from gemma_py.checks.trace_file import trace_document
from gemma_py.cluster import divide
from gemma_py.cluster.channel import Channel
from gemma_py.cluster.hosts import Facts, facts, place
from gemma_py.cluster.processes import PipeChannel
from gemma_py.errors import ComputationError, InputError, ShardError

GIB = 1 << 30


@dataclass(frozen=True)
class FakeHost:
    """A host whose processes run on this machine. change: applied to each job that is sent to the host."""

    name: str
    memory: int | None = 64 * GIB
    threads: int | None = 1
    change: Callable[[Any], Any] = lambda job: job

    def start(self, deadline: float) -> Channel:
        channel, host = PipeChannel(deadline), self
        started.append((self.name, channel))
        send = channel.send

        def changed(message: Any) -> None:
            channel.send = send  # type: ignore[method-assign]  # only the first message is the job
            send(host.change(message))

        channel.send = changed  # type: ignore[method-assign]
        return channel


started: list[tuple[str, PipeChannel]] = []


class FakeHosts:
    patience = 1.0

    def __init__(self, *hosts: FakeHost) -> None:
        self.hosts, self.silent = list(hosts), set[str]()

    def usable(self) -> Sequence[FakeHost]:
        return [host for host in self.hosts if host.name not in self.silent]

    def ask(self, model: str | None) -> dict[str, Facts | str]:
        return {host.name: facts(model) for host in self.hosts}


@pytest.fixture(autouse=True)
def no_processes_yet() -> None:
    started.clear()


def ids_of(engine: gemma_py.Engine, fault: Callable[[int], None] = lambda tokens: None) -> list[int]:
    made = []
    for token in engine.generate([2, *range(100, 140)], 30, temperature=1.0, seed=3, speculate="off"):
        made.append(token.id)
        fault(len(made))
    return made


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    with gemma_py.load(TINY) as engine:
        return ids_of(engine)


def test_processes_are_spread_over_hosts_with_enough_memory() -> None:
    small, first, second = FakeHost("small", GIB), FakeHost("first"), FakeHost("second")
    hosts = [small, first, second]

    def names(sizes: list[int], running: Sequence[str] = ()) -> list[str]:
        return [host.name for host in place(hosts, sizes, running)]

    assert names([GIB // 2, 2 * GIB, 2 * GIB, GIB]) == ["small", "first", "second", "first"]
    assert names([GIB], ["small", "first"]) == ["second"]
    with pytest.raises(InputError, match="a process needs 66,560 MiB of memory; first has the most left, 65,536 MiB"):
        names([65 * GIB])
    with pytest.raises(InputError, match="a process needs 1,024 MiB of memory; no host is left"):
        place([], [GIB])


def test_a_stalled_process_is_replaced_on_a_host_that_answers(wanted: list[int]) -> None:
    hosts = FakeHosts(FakeHost("first"), FakeHost("second"))

    def stop(tokens: int) -> None:
        if tokens == 10:
            hosts.silent.add("first")
            os.kill(started[0][1].process.pid, signal.SIGSTOP)

    with gemma_py.load(TINY, shards=2, hosts=hosts, deadline=1.0) as engine:
        assert ids_of(engine, stop) == wanted
    assert [name for name, _ in started] == ["first", "second"]


def test_a_host_that_was_changed_meanwhile_gets_no_shard(wanted: list[int]) -> None:
    def other_package(job: Any) -> Any:
        return replace(job, identity=job.identity._replace(package="other")) if len(started) > 1 else job

    hosts = FakeHosts(FakeHost("first", change=other_package), FakeHost("second"))

    def kill(tokens: int) -> None:
        if tokens == 10:
            os.kill(started[0][1].process.pid, signal.SIGKILL)

    with gemma_py.load(TINY, shards=2, hosts=hosts) as engine:
        assert ids_of(engine, kill) == wanted
    assert [name for name, _ in started] == ["first", "first", "second"]


def test_an_answer_fails_if_no_host_is_left() -> None:
    hosts = FakeHosts(FakeHost("first"))

    def end(tokens: int) -> None:
        if tokens == 10:
            hosts.silent.add("first")
            os.kill(started[0][1].process.pid, signal.SIGKILL)

    with (
        gemma_py.load(TINY, shards=2, hosts=hosts) as engine,
        pytest.raises(ShardError, match=r"shard 1 of 2, layers 0 to \d, cannot be replaced: .*; no host is left"),
    ):
        ids_of(engine, end)


def test_a_host_with_another_model_is_named() -> None:
    hosts = FakeHosts(FakeHost("first", change=lambda job: replace(job, model="/no/such/model")))
    with pytest.raises(InputError, match=r"/no/such/model: no such file .* \(found on first\)"):
        gemma_py.load(TINY, shards=2, hosts=hosts)


def test_a_model_that_needs_more_memory_than_one_host_has_runs_on_two(
    wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gemma_py.load(TINY) as engine:
        needs = divide.layer_bytes(engine.config, engine.program, "float32", 4096)
    half = sum(needs) * 2 // 3
    monkeypatch.setattr("gemma_py.machine.memory", lambda: half)
    with gemma_py.load(TINY, shards=2, hosts=FakeHosts(FakeHost("first", half + divide._PROCESS))) as engine:
        assert ids_of(engine) == wanted
    monkeypatch.setattr("gemma_py.machine.memory", lambda: 64 * GIB)
    with pytest.raises(InputError, match=r"a process needs \d+ MiB of memory; first has the most left, 1 MiB"):
        gemma_py.load(TINY, shards=2, hosts=FakeHosts(FakeHost("first", 1 << 20)))
    monkeypatch.setattr("gemma_py.machine.memory", lambda: 1 << 10)
    with pytest.raises(
        InputError, match=r"this machine computes layers? .*, which need \d+ MiB of memory, and 0 MiB are"
    ):
        gemma_py.load(TINY, shards=2, hosts=FakeHosts(FakeHost("first", half)))
    with pytest.raises(InputError, match=r"each pass reads 0.00 GiB of weights, and 0.00 GiB of memory are available"):
        gemma_py.load(TINY)


# --- traces of hosts --------------------------------------------------------------------------------------------------


def flipped(folder: Path) -> Path:
    """Copy the tiny model, and flip one bit of one weight of layer 2."""
    for file in TINY.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    first, _ = json.loads(data[8:end])["model.layers.2.mlp.down_proj.weight"]["data_offsets"]
    data[end + first + 3000] ^= 1
    path.write_bytes(data)
    return folder


def test_a_bit_that_differs_on_one_host_is_named(tmp_path: Path) -> None:
    other = flipped(tmp_path)
    hosts = [FakeHost("first"), FakeHost("second", change=lambda job: replace(job, model=str(other)))]
    with gemma_py.load(TINY) as engine:
        ids = verify.prompt(40, engine.config.vocab_size)
        trace = trace_document(engine, ids)
    found = {host.name: found for host, found in differences(hosts, TraceJob(str(TINY), None, "float32", ids), trace)}
    assert found["first"] is None
    assert str(found["second"]) == "second and this machine differ, first in layer 2, down, positions 0 to 15"
    assert all(channel.process.poll() is not None for _, channel in started)


def test_a_host_that_cannot_trace_is_named(tmp_path: Path) -> None:
    with gemma_py.load(TINY) as engine:
        ids = verify.prompt(8, engine.config.vocab_size)
        trace = trace_document(engine, ids)
    with pytest.raises(ComputationError, match=r"first: .*nowhere: no such file or directory"):
        list(differences([FakeHost("first")], TraceJob(str(tmp_path / "nowhere"), None, "float32", ids), trace))


def test_shards_with_code_for_another_processor_give_equal_bits(
    wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts of a cluster need not have equal processors."""
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")  # for the processes that are started from now on
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    with gemma_py.load(TINY, shards=3) as engine:
        assert ids_of(engine) == wanted
