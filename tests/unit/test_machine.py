import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding
from repository import TINY

import gemma_py
from gemma_py import machine

Run = Callable[..., tuple[int, str, str]]
GIB = 1 << 30


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def siblings(*cores: str, name: str = "thread_siblings_list") -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{n}/topology/{name}": core for n, core in enumerate(cores)}


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    plant(tmp_path, siblings("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"))
    assert machine.physical_cores(range(8), tmp_path) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert machine.physical_cores({0, 4}, tmp_path) == [{0, 4}]
    assert machine.physical_cores({0, 1, 4, 6}, tmp_path) == [{0, 4}, {1}, {6}]
    # Processors 9 and 10 have no list, so each counts as a core.
    assert machine.physical_cores({0, 9, 10}, tmp_path) == [{0}, {9}, {10}]
    neighbours = plant(tmp_path / "newer", siblings("0-1", "0-1", "2-3", "2-3", name="core_cpus_list"))
    assert len(machine.physical_cores(range(4), neighbours)) == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        # The smallest quota of the cgroup and its parents applies.
        (
            {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "300000 100000",
             "sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/cpu.max": "400000 100000"}, 3.0),
        (
            {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "max 100000",
             "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5),
        # A container's cgroup path is the host's path, and the container's own quota is in the top directory.
        ({"proc/self/cgroup": "0::/../../docker/abc", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        # cgroups version 1, whose directory has one of two names, and versions 1 and 2 together.
        (
            {"proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/", "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "150000",
             "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "50000"}, 3.0),
        (
            {"proc/self/cgroup": "4:cpu,cpuacct:/box\n0::/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
             "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000", "sys/fs/cgroup/unified/cgroup.procs": ""}, 1.0),
        (
            {"proc/self/cgroup": "4:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
             "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        ({"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "also nonsense"}, None),
    ],
)  # fmt: skip
def test_quota(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert machine.quota(plant(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [("max", 4), ("1000000", 4), ("350000", 3), ("199999", 1), ("10000", 1)]
)
def test_threads_are_cores_within_the_quota_rounded_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: set(range(8)))
    cores = siblings(*("0-1", "2-3", "4-5", "6-7") * 2)
    plant(tmp_path, {**cores, "proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    assert machine.threads(tmp_path) == expected


def test_memory_is_what_is_left_within_the_cgroups(tmp_path: Path) -> None:
    assert machine.memory(tmp_path) is None
    plant(tmp_path, {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {8 * GIB >> 10} kB"})
    assert machine.memory(tmp_path) == 8 * GIB
    plant(tmp_path, {"proc/self/cgroup": "0::/x", "sys/fs/cgroup/x/memory.max": str(2 * GIB)})
    assert machine.memory(tmp_path) == 2 * GIB
    plant(tmp_path, {"sys/fs/cgroup/x/memory.max": "max"})
    assert machine.memory(tmp_path) == 8 * GIB


@pytest.mark.parametrize(("letter", "ready"), [("R", True), ("S", False), ("D", False)])
def test_state_of_a_thread(tmp_path: Path, letter: str, ready: bool) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    plant(tmp_path, {"proc/self/task/7/stat": f"7 (a) (b) c) {letter} 1 2 3 4 5 6 7 8 9 10 {3 * ticks} {ticks} 13"})
    assert machine.thread_state(7, tmp_path) == (ready, 4.0)
    assert machine.thread_state(8, tmp_path) is None


@pytest.mark.parametrize(
    ("cpuinfo", "llvm_name", "expected"),
    [
        ("processor: 0\nmodel name\t: AMD EPYC 7B13\n", "znver3", "AMD EPYC 7B13"),
        ("processor: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "neoverse-v1", "neoverse-v1"),
        ("processor: 0\nCPU implementer\t: 0x99\n", "generic", platform.processor() or platform.machine()),
    ],
)
def test_name_of_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, llvm_name: str, expected: str
) -> None:
    plant(tmp_path, {"proc/cpuinfo": cpuinfo})
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: llvm_name)
    assert machine.name(tmp_path) == expected


def test_this_machine() -> None:
    assert 1 <= machine.threads() <= len(machine.affinity()) <= (os.cpu_count() or 1)
    assert machine.name()
    with gemma_py.load(TINY) as engine:
        assert engine.threads == machine.threads()


def test_a_flag_beats_the_environment_which_beats_the_default(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int | None] = []
    real = gemma_py.load

    def load(model: str, threads: int | None = None, **others: Any) -> gemma_py.Engine:
        used.append(threads)
        return real(model, threads, **others)

    monkeypatch.setattr(gemma_py, "load", load)
    arguments = ["score", TINY, "--text", "some text", "--json"]
    monkeypatch.delenv("GEMMA_PY_THREADS", raising=False)
    assert run(*arguments)[0] == 0
    monkeypatch.setenv("GEMMA_PY_THREADS", "1")
    assert run(*arguments)[0] == 0
    assert run(*arguments, "--threads", 2)[0] == 0
    assert used == [None, 1, 2]
    monkeypatch.setenv("GEMMA_PY_THREADS", "many")
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "GEMMA_PY_THREADS" in err
    assert "'many'" in err


def test_more_threads_than_cores_are_warned_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "threads", lambda: 1)
    arguments = ["score", TINY, "--text", "some text", "--json"]
    assert run(*arguments, "--threads", 1)[2] == ""
    code, out, err = run(*arguments, "--threads", 2)
    assert code == 0
    assert out
    assert err.count("\n") == 1
    assert "2 threads" in err
