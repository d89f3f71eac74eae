"""A Ray cluster of several hosts on this machine: a network namespace for each host, joined by a bridge.

Linux only. Needs root, Debian's iproute2 and util-linux, and the extra ray.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

BRIDGE, PORT = "gemmabr", 6379
# The process that made the network. Commands that change the network run in its namespace, even if a process of a host runs them.
_MAKER = "GEMMA_PY_NETWORK_MAKER"
_ROOT = ["nsenter", f"--net=/proc/{os.environ.get(_MAKER, os.getpid())}/ns/net"]


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def namespace(host: int) -> str:
    return f"gemma{host}"


def ip(*arguments: str) -> None:
    subprocess.run([*_ROOT, "ip", *arguments], check=True)


def inside(host: int) -> list[str]:
    """Return the beginning of a command that runs on a host."""
    # Not `ip netns exec`, which would also mount another /sys, without the limits of cgroups.
    return ["nsenter", f"--net=/run/netns/{namespace(host)}"]


def cut(host: int) -> None:
    """Cut a host off from the others."""
    ip("link", "set", f"gemmav{host}", "down")


def join(host: int) -> None:
    ip("link", "set", f"gemmav{host}", "up")


def processes(host: int, name: str) -> list[int]:
    """Return the ids of a host's processes whose command line begins with a name, such as ray::_Member."""
    ids = subprocess.run([*_ROOT, "ip", "netns", "pids", namespace(host)], check=True, capture_output=True, text=True)
    made = []
    for process in map(int, ids.stdout.split()):
        try:
            line = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:  # the process has just ended
            continue
        if Path(line.partition(b"\0")[0].decode(errors="replace")).name.startswith(name) or line.startswith(
            name.encode()
        ):
            made.append(process)
    return made


class Network:
    """The hosts, each with a node of one Ray cluster. The head is on host 0.

    rate: the bandwidth of each host, as tc writes it, such as 1gbit. environment: of Ray's processes.
    """

    def __init__(self, hosts: int, rate: str | None = None, token: bool = True) -> None:
        self.hosts, self.rate = hosts, rate
        self.home = Path(tempfile.mkdtemp(prefix="gemma_py-ray-"))
        # HOME is this folder, so that Ray finds the token in .ray/auth_token.
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        self.environment = {
            **os.environ, _MAKER: str(os.getpid()), "HOME": str(self.home), "XDG_CACHE_HOME": cache,
            "RAY_AUTH_MODE": "token" if token else "disabled", "RAY_TMPDIR": str(self.home),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }  # fmt: skip
        if token:
            (self.home / ".ray").mkdir()
            (self.home / ".ray" / "auth_token").write_text(os.urandom(32).hex())

    def __enter__(self) -> "Network":
        self._remove()
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for host in range(self.hosts):
            name, end = namespace(host), f"gemmav{host}"
            ip("netns", "add", name)
            ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", end, "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
            if self.rate is not None:
                shape = ["root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms"]
                for device, where in ((end, _ROOT), ("eth0", inside(host))):
                    subprocess.run([*where, "tc", "qdisc", "add", "dev", device, *shape], check=True)
        for host in range(self.hosts):
            self.start(host)
        return self

    def start(self, host: int) -> None:
        """Start Ray on a host."""
        head = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if host == 0
            else [f"--address={address(0)}:{PORT}"]
        )
        ray = str(Path(sys.executable).with_name("ray"))
        command = [
            ray, "start", *head, f"--node-ip-address={address(host)}", "--num-cpus=0", "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]  # fmt: skip
        self.run(host, command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def run(self, host: int, command: Sequence[str], **options: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*inside(host), *command], env=self.environment, text=True, **options)  # type: ignore[call-overload]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        shutil.rmtree(self.home, ignore_errors=True)

    def _remove(self) -> None:
        for host in range(self.hosts):
            while ids := self._processes(host):
                subprocess.run(["kill", "-9", *ids], check=False, stderr=subprocess.DEVNULL)  # some may have just ended
                time.sleep(0.1)
            subprocess.run([*_ROOT, "ip", "link", "del", f"gemmav{host}"], check=False, stderr=subprocess.DEVNULL)
            subprocess.run([*_ROOT, "ip", "netns", "del", namespace(host)], check=False, stderr=subprocess.DEVNULL)
        subprocess.run([*_ROOT, "ip", "link", "del", BRIDGE], check=False, stderr=subprocess.DEVNULL)

    def _processes(self, host: int) -> list[str]:
        command = [*_ROOT, "ip", "netns", "pids", namespace(host)]
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
