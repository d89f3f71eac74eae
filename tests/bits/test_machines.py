"""Other instruction sets, each in a child process, give equal bits."""

import json
import platform
import subprocess
import sys

import cross_audit
import machine_digests
import pytest
from llvmlite.binding import get_host_cpu_features
from machines import NUMPY_WITHOUT, machines
from repository import child_environment


@pytest.mark.parametrize("architecture", ["x86_64", "AMD64", "aarch64", "arm64"])
def test_every_architecture_has_a_processor_whose_code_each_of_its_machines_runs(architecture: str) -> None:
    assert "" in machines(architecture).values()


@pytest.mark.parametrize("cpu", machines(platform.machine()))
def test_other_machine_code_gives_the_same_bits(cpu: str) -> None:
    feature = machines(platform.machine())[cpu]
    if feature and not get_host_cpu_features().get(feature):
        pytest.skip(f"this machine has no {feature}")
    environment = child_environment(NPY_DISABLE_CPU_FEATURES=NUMPY_WITHOUT)
    # The list of features is empty, because numba otherwise adds this machine's features.
    environment |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    command = [
        sys.executable,
        "-W",
        "ignore",
        machine_digests.__file__,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == machine_digests.digests()


@pytest.mark.skipif("generic" not in machines(platform.machine()), reason="the tool knows no target of this machine")
def test_receipts_of_other_machine_code_are_audited() -> None:
    pytest.importorskip("llguidance")
    audits, wrong = cross_audit.cross_audit([cross_audit.HERE, "generic"], 12, say=lambda _: None)
    assert (audits, wrong) == (24, [])
