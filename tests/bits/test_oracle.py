"""Checkpoints from new seeds give the results of transformers. Skipped without the extra `oracle`."""

import subprocess
import sys

import pytest
from repository import ROOT

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_other_seeds_match_transformers(seed: int) -> None:
    pytest.importorskip("torch", reason="needs the extra oracle: torch")
    pytest.importorskip("transformers", reason="needs the extra oracle: transformers")
    command = [sys.executable, "tools/make_goldens.py", "--check", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
