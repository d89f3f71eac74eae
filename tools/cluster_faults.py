"""Kill, stop and cut off the hosts of shards at random while streams run. All answers must equal those of one process.

    python tools/cluster_faults.py [MODEL] [--hosts 3] [--shards 2] [--streams 8] [--tokens 10000] [--every 200]
        [--deadline 2.0] [--seed 0] [--kinds kill,stop,cut]

The hosts are network namespaces of this machine with a Ray cluster (see ray_network.py). A fault comes after EVERY tokens
on average: `kill` kills the process of a shard, `stop` stops it, and `cut` cuts a host off from the others for 12 s. The
JSON document on the last line has the faults, the numbers of the answers that differ, the answers that fail with their
errors, and the longest time in which no stream got a token. The exit code is 1 if an answer differs or fails.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import ray_network
from shard_faults import answers, requests_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from repository import TINY

import gemma_py
from gemma_py.cli.common import positive

_CUT = 12.0  # seconds


class Faults:
    def __init__(self, hosts: int, every: int, seed: int, kinds: list[str]) -> None:
        self.counts = Counter[str]()
        self._hosts, self._every, self._kinds, self._rng = hosts, every, kinds, random.Random(seed)
        self._cut: set[int] = set()

    def after_token(self) -> None:
        if self._rng.random() < 1 / self._every:
            kind = self._rng.choice(self._kinds)
            # Host 0 is never cut off, because the streams run there. It has shards while no other host answers.
            hosts = range(1 if kind == "cut" else 0, self._hosts)
            used = [host for host in hosts if ray_network.processes(host, "ray::_Member")]
            if not used or (kind == "cut" and self._cut):
                return
            host = self._rng.choice(used)
            self.counts[kind] += 1
            if kind == "cut":
                self._cut.add(host)
                ray_network.cut(host)
                healing = threading.Timer(_CUT, self._heal, [host])
                healing.daemon = True
                healing.start()
            else:
                with contextlib.suppress(ProcessLookupError):  # the process has just ended
                    process = self._rng.choice(ray_network.processes(host, "ray::_Member"))
                    os.kill(process, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    def _heal(self, host: int) -> None:
        ray_network.join(host)
        self._cut.discard(host)

    def end(self) -> None:
        for host in range(self._hosts):
            ray_network.join(host)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from gemma_py.cluster import ray_hosts

    with gemma_py.load(args.model) as engine:
        requests = requests_of(engine, -(-args.tokens // 100), args.seed)
        wanted, undisturbed = answers(engine, requests, args.streams, lambda: None)
    hosts = ray_hosts.connect(f"{ray_network.address(0)}:{ray_network.PORT}")
    with gemma_py.load(args.model, shards=args.shards, hosts=hosts, deadline=args.deadline) as engine:
        faults = Faults(args.hosts, args.every, args.seed, args.kinds.split(","))
        made, longest = answers(engine, requests, args.streams, faults.after_token)
        faults.end()
    failed = {number: got for number, got in enumerate(made) if isinstance(got, str)}
    wrong = [number for number, got in enumerate(made) if number not in failed and got != wanted[number]]
    return {
        "tokens": sum(map(len, wanted)), "faults": faults.counts, "wrong": wrong, "failed": failed,
        "longest_seconds": round(longest, 2), "longest_seconds_without_shards": round(undisturbed, 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY))
    parser.add_argument("--hosts", type=positive, default=3)
    parser.add_argument("--shards", type=positive, default=2)
    parser.add_argument("--streams", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=10000)
    parser.add_argument("--every", type=positive, default=200, help="tokens between two faults on average")
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds after which a silent shard is replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="kill,stop,cut")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside:
        with ray_network.Network(args.hosts) as network:
            return network.run(0, [sys.executable, __file__, *sys.argv[1:], "--inside"]).returncode
    report = run(args)
    print(json.dumps(report))
    return 1 if report["wrong"] or report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
