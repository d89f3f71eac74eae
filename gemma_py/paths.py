"""Where our own files live (XDG), and how they are written: private, whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/gemma_py, or ~/.cache/gemma_py. Not created here. OSError where there is no home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification: to be ignored
        try:
            base = Path("~/.cache").expanduser()
        except RuntimeError:
            raise FileNotFoundError("this user has no home directory; set XDG_CACHE_HOME") from None
    return base / "gemma_py"


def private_dir(path: Path) -> Path:
    """The directory, made if need be; OSError unless it is this user's and nobody else may write there."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path}: others may write here, so nothing in it can be trusted")
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
