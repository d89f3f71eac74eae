import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding
import pytest
from repository import ROOT, child_environment

from gemma_py.kernels.decorator import inlined, kernel

# Calls a small kernel. Prints its result, and the numbers of kernels from the disk and of compiled kernels.
PROGRAM = """
import numpy as np
from gemma_py.kernels.scores import log_sum_exp as kernel
largest, log_sum = kernel(np.arange(8, dtype=np.float32), np.empty(8))
value = 3 - largest - log_sum
print(value.hex(), sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""
RESULT = -4.458339626  # ln of softmax(0 .. 7)[3]


def start(cache: Path) -> "subprocess.Popen[str]":
    environment = child_environment(XDG_CACHE_HOME=str(cache))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(child: "subprocess.Popen[str]") -> tuple[int, int]:
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    value, hits, misses = out.split()
    assert float.fromhex(value) == pytest.approx(RESULT, abs=1e-6)
    return int(hits), int(misses)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("compiled")
    assert finish(start(cache)) == (0, 1)
    return cache


@pytest.fixture
def cache(compiled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(compiled, tmp_path / "cache")


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.suffix in (".nbi", ".nbc"))


def test_a_second_process_compiles_nothing(cache: Path) -> None:
    assert finish(start(cache)) == (1, 0)
    assert len(files(cache)) == 2
    # The package's directories, which contain numba's directories.
    assert all(path.parent.parent.stat().st_mode & 0o077 == 0 for path in files(cache))


def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    for child in [start(tmp_path) for _ in range(4)]:
        finish(child)
    assert finish(start(tmp_path)) == (1, 0)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("left", [0, 30, 0.5])
def test_a_truncated_file_is_repaired(cache: Path, suffix: str, left: float) -> None:
    (damaged,) = [path for path in files(cache) if path.suffix == suffix]
    data = damaged.read_bytes()
    damaged.write_bytes(data[: int(len(data) * left) if isinstance(left, float) else left])
    assert finish(start(cache)) == (0, 1)
    assert finish(start(cache)) == (1, 0)


def test_a_directory_that_others_may_write_is_not_trusted(cache: Path) -> None:
    files(cache)[0].parent.parent.chmod(0o777)
    assert finish(start(cache)) == (0, 1)


def test_kernels_run_without_a_cache_that_can_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    assert finish(start(blocked)) == (0, 1)
    assert files(tmp_path) == []


# Loads a model as at a first start, and then generates all kinds of answers. These must compile and load no further
# kernel.
FIRST_TIME = """
import sys
import gemma_py, gemma_py.generate.engine
from gemma_py import Sampling
from gemma_py.kernels import bpe, sampling, scores

def compiled():
    found = [f for module in (sampling, scores, bpe) for f in vars(module).values() if hasattr(f, "overloads")]
    return {f.__name__: len(f.overloads) for f in found}

gemma_py.generate.engine.first_time = lambda kv: sys.argv[1] == "first"
with gemma_py.load("tiny-gemma3") as engine:
    before = compiled()
    conversation = gemma_py.Conversation(engine, max_tokens=3)
    for options in ({"top_k": 64, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.1, "repetition_penalty": 1.1}, {}):
        conversation.sampling = Sampling(temperature=1.0, seed=1, **options)
        list(conversation.send("hello \\U0001f642"))
    print(before == compiled(), len(before))
"""


def test_the_first_answer_waits_for_no_compiler() -> None:
    said = {}
    for when in ("first", "later"):
        command = [sys.executable, "-c", FIRST_TIME, when]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        said[when] = done.stdout.split()
    assert said["first"][0] == "True" and int(said["first"][1]) >= 10
    assert said["later"][0] == "False"  # a negative control: a later start loads kernels only when they are needed


def test_functions_of_one_name_get_symbols_of_their_own() -> None:
    def make(number: int) -> Any:
        @inlined
        def add(x: int) -> int:
            return x + number

        return add

    first, second = make(1), make(2)
    assert first.py_func.__qualname__ != second.py_func.__qualname__


def test_a_kernel_is_stored_without_its_llvm_code(cache: Path) -> None:
    """The LLVM code of a pass would take 15 MiB of memory at every start."""
    (stored,) = (path for path in files(cache) if path.suffix == ".nbc")
    _, kind, (machine_code, llvm_code) = next(
        part for part in pickle.loads(stored.read_bytes()) if isinstance(part, tuple) and len(part) == 3
    )
    functions = [
        function for function in llvmlite.binding.parse_bitcode(llvm_code).functions if not function.is_declaration
    ]
    assert kind == "object" and len(machine_code) > 1000 and functions
    assert all(len(list(block.instructions)) == 1 for function in functions for block in function.blocks)


def test_control_a_kernel_cannot_be_linked_into_another_one() -> None:
    @kernel
    def inner(x):
        return x + 1

    @kernel
    def outer(x):
        return inner(x)

    assert inner(1) == 2
    with pytest.raises(TypeError, match="inner can only be called by Python"):
        outer(1)
