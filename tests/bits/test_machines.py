"""Other instruction sets, each in a child process, give equal bits."""

import json
import platform
import subprocess
import sys

import cross_audit
import machine_digests
import pytest
from llvmlite.binding import get_host_cpu_features
from repository import child_environment

NUMPY_WITHOUT = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"

# {architecture: {LLVM's name of a CPU: the feature that this machine needs to run its code}}. "generic" is the oldest
# x86-64 or ARMv8.
MACHINES = {
    "x86_64": {"haswell": "avx2", "znver3": "avx2", "generic": ""},
    "aarch64": {"neoverse-v1": "sve", "neoverse-n1": "lse", "cortex-a72": "", "generic": ""},
}


def machines(architecture: str) -> dict[str, str]:
    return MACHINES.get({"AMD64": "x86_64", "arm64": "aarch64"}.get(architecture, architecture), {})


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
