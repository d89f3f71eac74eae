"""Shards on the hosts of a Ray cluster. Skipped without Ray (extra ray)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_cluster import Cluster, cluster
from repository import ROOT, TINY

import gemma_py

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes by /proc"),
    pytest.mark.usefixtures("compiled_kernels"),
]
pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")

GENERATE = ("generate", TINY, "--prompt", "a b c", "--max-tokens", 24, "--threads", 2)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("ray"), token=True) as made:
        yield made


def test_commands_print_the_output_of_one_process_and_nothing_of_ray(joined: Cluster) -> None:
    wanted = joined.command(*GENERATE)
    for shards in (2, 4):
        found = joined.command(*GENERATE, "--shards", shards, "--address", joined.address)
        assert found.returncode == 0, found.stderr
        assert found.stdout == wanted.stdout
    assert joined.shards() == []


_ANSWER = """
import os, signal, sys
import gemma_py
from gemma_py.cluster import ray_hosts
from ray_cluster import Cluster
made = Cluster("", {}, sys.argv[3])
with gemma_py.load(sys.argv[1], threads=2, shards=3, deadline=1.0, hosts=ray_hosts.connect(sys.argv[2])) as engine:
    ids = []
    for token in engine.generate([2, *range(100, 160)], 60, temperature=1.0, seed=4, speculate="off"):
        ids.append(token.id)
        if len(ids) % 20 == 10:
            os.kill(made.shards()[0], getattr(signal, sys.argv[4]))
    print(ids)
"""


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_an_answer_continues_after_a_shard_ends_or_stalls(joined: Cluster, kind: str) -> None:
    with gemma_py.load(TINY, threads=2) as engine:
        prompt = [2, *range(100, 160)]
        wanted = [token.id for token in engine.generate(prompt, 60, temperature=1.0, seed=4, speculate="off")]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    done = subprocess.run(
        [sys.executable, "-c", _ANSWER, TINY, joined.address, joined.mark, kind],
        env=joined.environment | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == f"{wanted}\n", done.stderr


def test_shards_end_with_a_killed_process(joined: Cluster) -> None:
    code = (
        f"import time, gemma_py\nfrom gemma_py.cluster import ray_hosts\n"
        f"engine = gemma_py.load({str(TINY)!r}, shards=2, hosts=ray_hosts.connect({joined.address!r}))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=joined.environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert len(joined.shards()) == 1
        process.send_signal(signal.SIGKILL)
    for _ in range(600):
        if not joined.shards():
            return
        time.sleep(0.1)
    pytest.fail("the shard's process is still running")


def test_nodes_lists_hosts(joined: Cluster) -> None:
    found = joined.command("nodes", TINY, "--address", joined.address, "--json")
    assert found.returncode == 0, found.stderr
    (host,) = json.loads(found.stdout)["hosts"]
    assert host["same_code"] and host["same_model"] and host["memory"] > 0 and not host["error"]
    found = joined.command("nodes", "--address", joined.address)
    assert found.returncode == 0 and "same" in found.stdout


def test_nodes_says_which_host_lacks_the_model(joined: Cluster, tmp_path: Path) -> None:
    """The path means another folder on the host, because ~ is another folder."""
    (tmp_path / "tiny").symlink_to(TINY)
    found = joined.command(
        "nodes", "~/tiny", "--address", joined.address, HOME=str(tmp_path),
        RAY_AUTH_TOKEN_PATH=f"{joined.environment['HOME']}/.ray/auth_token",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr  # an existing path is sent as an absolute path
    found = joined.command("nodes", "gemma-3-27b", "--address", joined.address)
    assert found.returncode == 1 and found.stderr.count("\n") == 1


def test_verify_compares_the_hosts(joined: Cluster) -> None:
    command = ("verify", TINY, "--threads", "1,2", "--chunks", "7", "--tokens", 40, "--address", joined.address)
    found = joined.command(*command)
    assert found.returncode == 0, found.stderr
    assert "Every phase has the same bits on " in found.stdout
    found = joined.command(*command, "--json")
    assert json.loads(found.stdout)["hosts"][0]["equal"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("nowhere", "the address of a Ray cluster should be HOST:PORT, found 'nowhere'"),
        ("no-such-host.invalid:6379", "no Ray cluster answers at no-such-host.invalid:6379"),
    ],
)
def test_a_wrong_address_is_refused_in_one_line(joined: Cluster, address: str, said: str) -> None:
    found = joined.command(*GENERATE, "--shards", 2, "--address", address)
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1 and said in found.stderr


def test_a_wrong_token_is_refused_in_one_line(joined: Cluster) -> None:
    found = joined.command("nodes", "--address", joined.address, RAY_AUTH_TOKEN="0" * 64)
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1 and "refuses the token" in found.stderr


def test_a_cluster_without_a_token_needs_open(tmp_path: Path) -> None:
    with cluster(tmp_path, token=False) as made:
        found = made.command("nodes", "--address", made.address)
        assert found.returncode == 1
        assert found.stderr.count("\n") == 1 and "asks for no token" in found.stderr and "--open" in found.stderr
        assert made.command("nodes", "--address", made.address, "--open").returncode == 0
