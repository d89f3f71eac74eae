"""Other instruction sets, in processes of their own: the same bits from other machine code."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NUMPY_WITHOUT = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"

# (numba's target, whether numpy may dispatch): AVX2 with FMA, AMD's Zen 3, and the least that x86-64 has.
MACHINES = {"haswell": "haswell", "znver3": "znver3", "generic": "generic"}


def digests() -> dict[str, list[str]]:
    """Logits and KV rows by the parallel path, of a float and of a quantised model of each arithmetic."""
    import hashlib

    import tiny_checkpoints as tiny
    from gguf_files import write_model
    from test_equivalence import PARTS, WIDE, prompt

    import gemma_py

    made = {}
    with tempfile.TemporaryDirectory() as scratch:
        paths = {}
        for name in ("gemma1-multi-query", "gemma2", "gemma3-scaled-untied"):
            paths[name] = Path(scratch) / name
            tiny.write(tiny.VARIANTS[name], paths[name], seed=1)
        for kind in ("Q8_0", "Q2_K", "Q4_K", "Q6_K"):
            paths[kind] = write_model(Path(scratch) / f"{kind}.gguf", WIDE, seed=4, kinds=dict.fromkeys(PARTS, kind))
        for name, path in paths.items():
            with gemma_py.load(path, threads=2) as engine:
                session = engine.session()
                ids = prompt(engine.config, 50)
                logits = [session.prefill(ids[:33], all_logits=True), session.prefill(ids[33:], all_logits=True)]
                made[name] = [hashlib.sha256(part.tobytes()).hexdigest() for part in logits] + session.kv_digest()
    return made


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "AMD64"), reason="the targets named here are x86-64's")
@pytest.mark.parametrize("cpu", MACHINES)
def test_other_machine_code_gives_the_same_bits(cpu: str) -> None:
    from llvmlite.binding import get_host_cpu_features

    if cpu != "generic" and not get_host_cpu_features().get("avx2"):
        pytest.skip("this machine has no AVX2")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NPY_DISABLE_CPU_FEATURES": NUMPY_WITHOUT}
    # Without emptying the features, numba would keep the host's for any name.
    environment |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, "-W", "ignore", __file__]  # numpy warns of features that it does not know
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == digests()


if __name__ == "__main__":
    print(json.dumps(digests()))
