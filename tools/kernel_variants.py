"""Run the tests of the kernels with every variant of the kernels that this machine can execute.

    python tools/kernel_variants.py [--cpus haswell,generic]

Kernels differ between processors: in the width of vectors, and in the instructions that multiply codes. The environment
variable NUMBA_CPU_NAME makes numba compile for another processor. ARM64's variants run in an emulator (tools/arm64.py).
A table says for each variant how many tests passed, or which instructions this machine lacks. The exit code is 1 if a
test fails.
"""

import argparse
import platform
import re
import subprocess
import sys
from pathlib import Path

from llvmlite.binding import get_host_cpu_features

from gemma_py.cli.common import markdown

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from machines import NUMPY_WITHOUT, machines
from repository import child_environment

# Besides those of the test suite: {LLVM's name of a CPU: the feature that this machine needs to run its code}
MORE = {"x86_64": {"icelake-server": "avx512vnni", "znver3": "avx2"}}
TESTS = ("test_kernels", "test_kv_rows", "test_blocks", "test_experts", "test_gemma3n_kernels")


def outcome(cpu: str) -> tuple[str, bool]:
    """Run the tests with kernels for a processor. Returns pytest's summary, and whether all tests passed."""
    environment = child_environment(NPY_DISABLE_CPU_FEATURES=NUMPY_WITHOUT, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES="")
    files = [ROOT / "tests" / "bits" / f"{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-n", "0", *map(str, files)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = re.findall(r"(?:\d+ \w+(?:, )?)+ in ", done.stdout)
    return summary[-1].removesuffix(" in ") if summary else done.stdout[-200:], done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = machines(platform.machine()) | MORE.get(platform.machine(), {})
    parser.add_argument("--cpus", type=lambda text: text.split(","), default=list(known))
    rows, failed = [], False
    for cpu in parser.parse_args().cpus:
        feature = known.get(cpu, "")
        if feature and not get_host_cpu_features().get(feature):
            rows.append((cpu, f"not run: this machine has no {feature}"))
            continue
        summary, passed = outcome(cpu)
        rows.append((cpu, summary))
        failed |= not passed
    print(markdown(("kernels for", "tests"), rows, left=2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
