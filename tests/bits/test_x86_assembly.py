"""Products of codes compile to the instructions that are meant for each x86-64 processor. Nothing is executed here."""

import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from repository import child_environment

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="numba compiles for this machine")

PROGRAM = """
import numba
import numpy as np
from gemma_py.kernels.decorator import kernel
from gemma_py.kernels.matmul import CodedRows, matmul_codes
from gemma_py.kernels.panels import CodePanels, UnpackBuffer

@kernel
def product(x, w, y, rows, unpacked):
    matmul_codes(x, w, y, 0, rows, 0, 4, 0, unpacked)

floats, codes = np.empty(0, np.float32), np.empty(0, np.int16)
arena = np.empty(0, np.int8)
arguments = (CodedRows(codes, arena, floats, floats, floats, floats), CodePanels(arena, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1), floats,
             1, UnpackBuffer(codes, floats, floats))
product.compile(tuple(map(numba.typeof, arguments)))
print(product.inspect_asm(product.signatures[0]))
"""


@pytest.mark.parametrize(
    ("cpu", "meant"),
    [
        ("generic", {"vpmaddwd": 0, "vpdpwssd": 0, "vpdpbusd": 0}),
        ("haswell", {"vpmaddwd": 1, "vpdpwssd": 0, "vpdpbusd": 0}),
        ("alderlake", {"vpmaddwd": 0, "vpdpwssd": 1, "vpdpbusd": 0}),  # AVX-VNNI
        ("skylake-avx512", {"vpmaddwd": 1, "vpdpwssd": 0, "vpdpbusd": 0}),
        ("icelake-server", {"vpmaddwd": 0, "vpdpwssd": 1, "vpdpbusd": 1}),  # AVX-512 VNNI
    ],
)
def test_products_of_codes_use_the_instructions_that_are_meant(tmp_path: Path, cpu: str, meant: dict[str, int]) -> None:
    (tmp_path / "product.py").write_text(PROGRAM)
    environment = child_environment(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES="")
    command = [sys.executable, "-W", "ignore", str(tmp_path / "product.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = Counter(re.findall(r"\bv?p(?:maddwd|dpwssd|dpbusd)\b", done.stdout))
    assert {name: min(1, found[name]) for name in meant} == meant
