"""Machine code for ARM64, compiled on any machine: memory ordering, no fused multiply-add unless asked for, instructions for
integer dot products.

tools/arm64.py compares the results of this code in an emulator. The emulator cannot show a missing memory ordering,
because it runs on x86-64, which orders loads and stores more strictly.
"""

import json
import re
import subprocess
import sys

import estimate_arm64
import pytest
from repository import ROOT, child_environment

LANES, ROWS, VECTORS = 16, 4, 1  # of a tile of attention on ARM64
# A program, not an import, because it replaces LLVM's target for its whole process.
PROGRAM = ROOT / "tests" / "support" / "arm64_assembly.py"
# `generic` is the oldest ARMv8, which loops for an atomic operation. Neoverse N1 and V1 have an instruction for each.
CPUS = ("generic", "neoverse-n1", "neoverse-v1")
ONE_INSTRUCTION = {"load": {"ldapr"}, "store": {"stlr"}, "add": {"ldaddal"}, "exchange": {"casal"}}
EXPECTED = {
    "generic": {"load": {"ldar"}, "store": {"stlr"}, "add": {"ldaxr", "stlxr"}, "exchange": {"ldaxr", "stlxr"}},
    "neoverse-n1": ONE_INSTRUCTION,
    "neoverse-v1": ONE_INSTRUCTION,
}
# Vector instructions that multiply integers. sudot is usdot with its operands exchanged.
INTEGER_PRODUCT = re.compile(r"[su]ml[as]l2?|[su]mull2?|ml[as]|[su]{1,2}dot|us?mmla|smmla")
PRODUCTS = {
    "generic": {"smull", "smull2", "smlal", "smlal2"},
    "neoverse-n1": {"sdot", "udot"},
    "neoverse-v1": {"sdot", "sudot", "smmla", "usmmla"},
}
ATOMIC = re.compile(r"(ld|st)(a|l|x)\w*r|ldadd\w*|cas\w*|dmb|swp\w*")
FUSED = re.compile(r"fn?m(add|sub)|fml[as]")


@pytest.fixture(scope="module", params=CPUS)
def assembly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    cache = str(tmp_path_factory.mktemp("cache"))
    environment = child_environment(NUMBA_CPU_NAME=request.param, NUMBA_CPU_FEATURES="", XDG_CACHE_HOME=cache)
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled(assembly: tuple[str, dict[str, str]]) -> "Compiled":
    cpu, texts = assembly
    return cpu, {name: set(re.findall(r"^\s+([a-z][a-z0-9]*)\b", text, re.M)) for name, text in texts.items()}


Compiled = tuple[str, dict[str, set[str]]]


@pytest.mark.parametrize("kernel", ["load", "store", "add", "exchange"])
def test_atomics_have_acquire_and_release(compiled: Compiled, kernel: str) -> None:
    cpu, instructions = compiled
    assert {name for name in instructions[kernel] if ATOMIC.fullmatch(name)} == EXPECTED[cpu][kernel]


def test_a_spin_loop_takes_time(compiled: Compiled) -> None:
    assert "isb" in compiled[1]["spin"] and "yield" not in compiled[1]["spin"]


def test_a_product_and_a_sum_are_rounded_separately(compiled: Compiled) -> None:
    for kernel in ("product_and_sum", "products_and_sums"):
        assert {"fmul", "fadd"} <= compiled[1][kernel]
        assert not any(FUSED.fullmatch(name) for name in compiled[1][kernel])
    assert any(FUSED.fullmatch(name) for name in compiled[1]["fused"])


def test_products_of_codes_are_widened_by_the_multiplication(compiled: Compiled) -> None:
    assert {"smlal", "smlal2"} <= compiled[1]["dot"]
    assert not compiled[1]["dot"] & {"mul", "mla"}


def test_quantised_weights_are_multiplied_by_the_fastest_instructions(compiled: Compiled) -> None:
    cpu, instructions = compiled
    assert {name for name in instructions["products"] if INTEGER_PRODUCT.fullmatch(name)} == PRODUCTS[cpu]


@pytest.mark.parametrize("kernel", ["scores", "values"])
def test_the_sums_of_attention_stay_in_registers(assembly: tuple[str, dict[str, str]], kernel: str) -> None:
    _, texts = assembly
    blocks = estimate_arm64.blocks_of(texts[kernel].splitlines(), estimate_arm64.FLOAT_MULTIPLY_ADDS)
    instructions, count = estimate_arm64.innermost(blocks)
    assert count == ROWS * VECTORS * LANES
    assert not [instruction for instruction in instructions if re.search(r"\bq\d+.*\[sp\b", instruction)]
