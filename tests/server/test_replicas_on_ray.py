"""Replicas on the hosts of a Ray cluster. Skipped without Ray (extra ray)."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pools import Listening
from ray_cluster import Cluster, cluster
from repository import PYTHONPATH, TINY
from serving import NO_END, wait_until

import gemma_py
from gemma_py.generate.core import Request
from gemma_py.generate.events import Finished
from gemma_py.generate.options import Sampling
from gemma_py.generate.scheduler import Scheduler

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes by /proc"),
    pytest.mark.usefixtures("compiled_kernels"),
]
pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("ray"), token=True) as made:
        yield made


def test_a_batch_has_the_rows_of_one_process(joined: Cluster, tmp_path: Path) -> None:
    body = {"max_tokens": 20, "logprobs": 1, "logit_bias": NO_END, "temperature": 1}
    rows = [
        {"custom_id": str(number), "url": "/v1/completions", "body": {**body, "prompt": f"a {number}", "seed": number}}
        for number in range(20)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def choices(*options: str) -> dict[str, object]:
        output = tmp_path / f"out{len(options)}.jsonl"
        found = joined.command("batch", source, output, TINY, *options)
        assert found.returncode == 0 and found.stdout == "", found.stderr
        made = [json.loads(line) for line in output.read_text().splitlines()]
        return {row["custom_id"]: row["response"]["body"]["choices"] for row in made}

    wanted = choices()
    assert len(wanted) == 20
    assert choices("--address", joined.address, "--replicas", "2") == wanted
    assert choices("--address", joined.address, "--replicas", "all", "--no-pack") == wanted
    wait_until(lambda: joined.shards() == [])


_ANSWERS = """
import os, signal, sys
import gemma_py
from gemma_py.cluster import ray_hosts
from gemma_py.generate.core import Request
from gemma_py.generate.options import Sampling
from pools import Listening, pooled
from ray_cluster import Cluster
made = Cluster("", {}, sys.argv[2])
hosts = ray_hosts.connect(sys.argv[1])
with gemma_py.load(sys.argv[4]) as engine, pooled(engine, hosts=hosts, deadline=2.0) as pool:
    asked = [Request([2, *range(100, 140), n], 200, Sampling(temperature=1.0, seed=n)) for n in range(4)]
    listening = [Listening(pool, request) for request in asked]
    for each in listening:
        each.until_tokens(5)
    os.kill(made.shards()[0], getattr(signal, sys.argv[3]))
    for each in listening:
        each.end()
    print([each.ids for each in listening])
"""


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_answers_survive_a_lost_replica(joined: Cluster, kind: str) -> None:
    with gemma_py.load(TINY) as engine:
        scheduler = Scheduler(engine)
        try:
            asked = [Request([2, *range(100, 140), n], 200, Sampling(temperature=1.0, seed=n)) for n in range(4)]
            listening = [Listening(scheduler, request) for request in asked]
            assert all(isinstance(each.end(), Finished) for each in listening)
        finally:
            scheduler.close()
    done = subprocess.run(
        [sys.executable, "-c", _ANSWERS, joined.address, joined.mark, kind, TINY],
        env=joined.environment | {"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == f"{[each.ids for each in listening]}\n", done.stderr
    wait_until(lambda: joined.shards() == [])


def test_replicas_end_with_a_killed_front(joined: Cluster) -> None:
    command = [sys.executable, "-m", "gemma_py", "serve", str(TINY), "--port", "0", "--replicas", "2", "--json"]
    with subprocess.Popen(
        [*command, "--address", joined.address], stdout=subprocess.PIPE, env=joined.environment, text=True
    ) as front:
        assert front.stdout is not None and "url" in front.stdout.readline()
        assert len(joined.shards()) == 2
        os.kill(front.pid, signal.SIGKILL)
    wait_until(lambda: joined.shards() == [], 90)
