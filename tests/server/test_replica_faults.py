"""Kill and stop replicas at random, and batches whose replicas and whose own process are killed."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import replica_faults
from pools import WAIT
from repository import TINY, child_environment
from serving import NO_END, wait_until


def faults(seed: int) -> dict[str, Any]:
    return replica_faults.run(str(TINY), replicas=2, streams=8, tokens=600, every=60, deadline=2.0, seed=seed)


def test_faults_at_random_change_no_answer() -> None:
    report = faults(1)
    assert report["faults"] and report["wrong"] == [] and report["failed"] == {} and report["left"] == []


# --- batch ------------------------------------------------------------------------------------------------------------

ROWS = 200


def rows() -> list[dict[str, Any]]:
    """Every second row draws with a seed."""
    rng, made = random.Random(5), []
    for number in range(ROWS):
        body = {
            "prompt": [2, *(rng.randrange(10, 1500) for _ in range(rng.randint(5, 60)))], "max_tokens": rng.randint(20, 60),
            "temperature": number % 2, "seed": number, "logprobs": 1, "logit_bias": NO_END,
        }  # fmt: skip
        made.append({"custom_id": f"row {number}", "method": "POST", "url": "/v1/completions", "body": body})
    return made


def start(source: Path, output: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "gemma_py", "batch", str(source), str(output), str(TINY), "--json", *options]
    return subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def replicas_of(process: int) -> list[int]:
    made = []
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"cluster.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                made.append(int(child))
    return made


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def choices(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in found}) == len(found) == ROWS
    assert all(row["error"] is None for row in found)
    return {row["custom_id"]: row["response"]["body"]["choices"] for row in found}


def test_a_batch_whose_replicas_and_driver_are_killed(tmp_path: Path) -> None:
    if not Path("/proc/self/task").exists():
        pytest.skip("needs Linux's /proc")
    source, output, wanted = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "wanted.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    alone = start(source, wanted)
    assert alone.communicate(timeout=WAIT)[0] and alone.returncode == 0

    options = "--replicas", "3", "--parallel", "2"
    driver, started = start(source, output, *options), list[int]()
    for count in (20, 60):
        wait_until(lambda count=count: lines(output) >= count, WAIT)  # type: ignore[misc]
        started += replicas_of(driver.pid)
        os.kill(replicas_of(driver.pid)[0], signal.SIGKILL)
    wait_until(lambda: lines(output) >= 100, WAIT)
    started += replicas_of(driver.pid)
    driver.kill()
    driver.communicate()
    assert lines(output) < ROWS
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in started))

    driver = start(source, output, *options)
    before = lines(output)
    wait_until(lambda: lines(output) >= before + 20, WAIT)
    os.kill(replicas_of(driver.pid)[0], signal.SIGSTOP)
    told, error = driver.communicate(timeout=WAIT)
    assert driver.returncode == 0, error
    assert json.loads(told)["before"] == before
    assert choices(output) == choices(wanted)
