"""Where things are in the repository, and the environment in which a test starts another Python process."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "models" / "tiny-gemma3"
DATA = ROOT / "tests" / "data"
# The same folders as `pythonpath` in pyproject.toml, which is for the process that runs pytest.
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "tools", "tests/support"))


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment variables with these changes; the child imports gemma_py, tools and tests/support."""
    return {**os.environ, "PYTHONPATH": PYTHONPATH, **changes}
