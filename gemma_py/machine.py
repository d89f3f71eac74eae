"""The logical CPUs and the memory that this process may use.

The default number of worker threads is the number of physical cores in the process's affinity, but at most the CPU
quota of the cgroups. More workers than cores would be slower, because the two logical CPUs of a core share arithmetic
units. The quota is rounded down, because Linux suspends a process that has used up its quota.

`root` is the directory that contains proc/ and sys/. Only tests use another directory than "/".
"""

import contextlib
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path("/")


def threads(root: Path = ROOT) -> int:
    cores = len(physical_cores(affinity(), root))
    allowed = quota(root)
    return max(1, cores if allowed is None else min(cores, int(allowed)))


def affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(processors: Iterable[int], root: Path = ROOT) -> list[set[int]]:
    """Group logical CPUs by core, in ascending order. If /sys does not list cores, every logical CPU counts as a core."""
    cores: dict[str, set[int]] = {}
    for number in sorted(processors):
        cores.setdefault(_siblings(number, root) or str(number), set()).add(number)
    return list(cores.values())


def _siblings(number: int, root: Path) -> str | None:
    """Return the logical CPUs of one core, such as "0,4". number: one of these CPUs."""
    topology = root / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
    # Linux before 5.3 has only thread_siblings_list.
    return _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")


def stay_on(processors: set[int]) -> None:
    """Let the calling thread run only on these logical CPUs, if the system supports this and allows it."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # some sandboxes forbid the call; then the system chooses the CPUs
            os.sched_setaffinity(0, processors)


def quota(root: Path = ROOT) -> float | None:
    """Return the smallest CPU quota of this process's cgroups, such as 1.5 CPUs, or None without a quota."""
    limits = []
    for folder in _cgroups("cpu", root):
        quota_us, period_us = (*(_text(folder / "cpu.max") or "").split(), "", "")[:2]
        if not quota_us:
            quota_us, period_us = (_text(folder / f"cpu.cfs_{part}_us") or "" for part in ("quota", "period"))
        if quota_us.isdigit() and period_us.isdigit() and int(period_us) > 0:  # "max" or -1 means no quota
            limits.append(int(quota_us) / int(period_us))
    return min(limits, default=None)


def memory(root: Path = ROOT) -> int | None:
    """Return the available memory in bytes, but at most the cgroups' memory limit; None if unknown."""
    limits = []
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            limits.append(int(rest.split()[0]) << 10)
    for folder in _cgroups("memory", root):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes") or ""
        limits += [int(limit)] if limit.isdigit() else []
    return min(limits, default=None)


def thread_state(number: int, root: Path = ROOT) -> tuple[bool, float] | None:
    """Return (whether a thread is runnable, the thread's CPU seconds), or None if the thread has ended or /proc is missing.

    number: `threading.Thread.native_id`
    """
    # Split after the closing parenthesis of the thread's name, because the name may contain spaces.
    fields = (_text(root / f"proc/self/task/{number}/stat") or "").rpartition(")")[2].split()
    if not fields:
        return None
    return fields[0] == "R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the directories of this process's cgroup and of the parent cgroups, for cgroups version 1 and 2.

    Inside a container, /proc/self/cgroup may give a path that exists only on the host. The container's limits are then
    in the top directory, which is yielded last.
    """
    base = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        tops = [base / controllers, base / controller] if controllers else [base / "unified", base]
        top = next((top for top in tops if top.is_dir()), None)
        if top is None:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:count])


def name(root: Path = ROOT) -> str:
    """Return the processor's name. On ARM, /proc/cpuinfo has no name, so the result is LLVM's name, such as neoverse-v1."""
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    from llvmlite import binding  # imported here, because the import takes 50 ms

    name: str = binding.get_host_cpu_name()
    return platform.processor() or platform.machine() if name in ("", "generic") else name


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
