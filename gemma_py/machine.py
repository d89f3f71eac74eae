"""The resources that this process may use: processors, quotas, memory. root: the root of Linux's /proc and /sys, for tests.

    threads = physical cores within the affinity, at most the quota of the cgroup and of those around it, at least 1

Two hardware threads of a core share its arithmetic units, so more workers than cores are slower. A quota is rounded down: a
team that exhausts it early in each period is suspended for the rest of the period.
"""

import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path("/")


def threads(root: Path = ROOT) -> int:
    """The default number of worker threads."""
    cores = physical_cores(affinity(), root)
    allowed = quota(root)
    return max(1, cores if allowed is None else min(cores, int(allowed)))


def affinity() -> set[int]:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(processors: Iterable[int], root: Path = ROOT) -> int:
    """The number of cores that these processors belong to; each is a core if the system does not say which share one."""
    return len({_siblings(number, root) or str(number) for number in processors})


def _siblings(number: int, root: Path) -> str | None:
    """The processors of this one's core, as the kernel writes them; the second name is the older one."""
    topology = root / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
    return _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")


def quota(root: Path = ROOT) -> float | None:
    """The smallest CPU quota of our cgroups, in processors; None: no limit."""
    limits = []
    for folder in _cgroups("cpu", root):
        quota_us, period_us = (*(_text(folder / "cpu.max") or "").split(), "", "")[:2]
        if not quota_us:
            quota_us, period_us = (_text(folder / f"cpu.cfs_{part}_us") or "" for part in ("quota", "period"))
        if quota_us.isdigit() and period_us.isdigit() and int(period_us) > 0:  # else "max", or -1
            limits.append(int(quota_us) / int(period_us))
    return min(limits, default=None)


def memory(root: Path = ROOT) -> int | None:
    """The bytes that can still be allocated without swapping, at most the limit of our cgroups; None if unknown."""
    limits = []
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            limits.append(int(rest.split()[0]) << 10)
    for folder in _cgroups("memory", root):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes") or ""
        limits += [int(limit)] if limit.isdigit() else []
    return min(limits, default=None)


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of our cgroup and of its parents, in both versions of the file system, as far as they are visible.

    In a container the path may be the host's, which is not mounted here; the container's own limit is then at the top.
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
    """The name of the processor."""
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _text(path: Path) -> str | None:
    """The text of a file; None if it is missing or unreadable, because /sys and /proc differ between systems."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
