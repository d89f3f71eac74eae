"""Where our own files live (XDG), and how they are written: private, whole or not at all."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # the ending of a file that is being written
_YOUNG = 60.0  # seconds


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


def is_ours(path: Path) -> bool:
    """Whether a file or directory is there, is no link, and belongs to this user."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return not path.is_symlink() and status.st_uid == os.getuid()


def abandoned(path: Path) -> bool:
    """Whether nobody writes this partial file any more: whoever does holds its lock from soon after its birth."""
    try:
        if time.time() - path.stat().st_ctime < _YOUNG:
            return False
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when it is complete. Raises OSError where it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(prefix=path.name + ".", suffix=PARTIAL, dir=path.parent)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
