"""Where our own files live (XDG), and how they are written: private, whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/gemma_py, or ~/.cache/gemma_py. Not created here. OSError where there is no home."""
    return _ours("XDG_CACHE_HOME", "~/.cache")


def state_dir() -> Path:
    """$XDG_STATE_HOME/gemma_py, or ~/.local/state/gemma_py; as `cache_dir`."""
    return _ours("XDG_STATE_HOME", "~/.local/state")


def _ours(variable: str, otherwise: str) -> Path:
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():  # the XDG specification: to be ignored
        try:
            base = Path(otherwise).expanduser()
        except RuntimeError:
            raise FileNotFoundError(f"this user has no home directory; set {variable}") from None
    return base / "gemma_py"


def private_file(path: Path) -> Path:
    """It exists, can be written, and nobody else reads it. OSError where that cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)
    return path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when it is complete. Raises OSError where it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(prefix=path.name + ".", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
