"""tools/count_path.py counts the files whose code runs for a token, with Python and with kernels."""

import json
import re
import subprocess
import sys

from repository import ROOT, child_environment

PASSED = {
    "generate/core.py",
    "generate/sampling.py",
    "runtime/runner.py",
    "kernels/matmul.py",
    "tokenizer/tokenizer.py",
}


def documented(mode: str) -> tuple[int, int]:
    """The counts in CONTRIBUTING.md: (files whose Python runs, further files with kernels only)."""
    row = re.search(rf"^\| {mode} \| (\d+) \| (\d+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert row is not None
    return int(row[1]), int(row[2])


def test_the_files_of_a_token() -> None:
    command = [sys.executable, "tools/count_path.py", "both", "tiny-gemma3", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=300, check=True
    )
    decode, stream = (json.loads(line) for line in done.stdout.splitlines())
    for found in (decode, stream):
        files = set(found["functions"])
        assert found["files"] == len(files) and files >= PASSED
        # Only other kernels call this function.
        assert "matmul_codes" in found["functions"]["kernels/matmul.py"]
        assert "Generation.next" in found["functions"]["generate/core.py"]
        # These files work only before the first token.
        assert not any(file.startswith(("weights/", "chat/", "cli/", "templates/")) for file in files)
        python, kernels = documented(found["mode"])
        assert found["python"] <= python and found["files"] - found["python"] <= kernels
    assert "generate/scheduler.py" in stream["functions"] and "server/events.py" in stream["functions"]
    assert not any(file.startswith("server/") or file == "generate/scheduler.py" for file in decode["functions"])
    assert "server/process.py" not in stream["functions"]  # only the server's timer calls this file
