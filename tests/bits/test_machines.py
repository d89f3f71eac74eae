"""Other instruction sets, each in its own process, give equal bits."""

import json
import platform
import subprocess
import sys

import machine_digests
import pytest
from llvmlite.binding import get_host_cpu_features
from repository import child_environment

NUMPY_WITHOUT = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"

# For each architecture, LLVM's names of processors, and of the feature that this machine must have to run their code. "generic"
# is the oldest x86-64 or ARMv8.
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
    # An empty list of features is necessary, because numba would otherwise use this machine's features with any target.
    environment |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    command = [
        sys.executable,
        "-W",
        "ignore",
        machine_digests.__file__,
    ]  # numpy warns about features that it does not know
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == machine_digests.digests()
