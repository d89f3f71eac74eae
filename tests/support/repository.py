"""Paths in the repository, and the environment for Python processes that a test starts."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "models" / "tiny-gemma3"
DATA = ROOT / "tests" / "data"
# These are the folders of `pythonpath` in pyproject.toml, which pytest uses for its own process.
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "tools", "tests/support"))


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with some changes. A child process can import gemma_py, tools and tests/support."""
    return {**os.environ, "PYTHONPATH": PYTHONPATH, **changes}
