import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "models" / "tiny-gemma3"
DATA = ROOT / "tests" / "data"
# `pythonpath` in pyproject.toml lists these folders for pytest's own process.
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "tools", "tests/support"))


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes. The child process can import gemma_py, tools and tests/support."""
    return {**os.environ, "PYTHONPATH": PYTHONPATH, **changes}
