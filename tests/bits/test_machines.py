"""Other instruction sets, each in its own process, give equal bits."""

import json
import os
import subprocess
import sys

import cross_audit
import machine_digests
import pytest
from repository import child_environment

NUMPY_WITHOUT = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"

# (numba's target, whether numpy may use newer instructions). The targets are AVX2 with FMA, AMD's Zen 3, and the oldest
# x86-64.
MACHINES = {"haswell": "haswell", "znver3": "znver3", "generic": "generic"}


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "AMD64"), reason="the targets named here are x86-64's")
@pytest.mark.parametrize("cpu", MACHINES)
def test_other_machine_code_gives_the_same_bits(cpu: str) -> None:
    from llvmlite.binding import get_host_cpu_features

    if cpu != "generic" and not get_host_cpu_features().get("avx2"):
        pytest.skip("this machine has no AVX2")
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


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "AMD64"), reason="the target named here is x86-64's")
def test_receipts_of_other_machine_code_are_audited() -> None:
    pytest.importorskip("llguidance")
    audits, wrong = cross_audit.cross_audit([cross_audit.HERE, "generic"], 12, say=lambda _: None)
    assert (audits, wrong) == (24, [])
