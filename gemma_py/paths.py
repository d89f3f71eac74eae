"""The directories of our own files (XDG), and private, atomic writes."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # the ending of a file that is being written
_YOUNG = 60.0  # seconds in which a partial file is never taken for abandoned


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/gemma_py, or ~/.cache/gemma_py. It is not created here. OSError if the user has no home directory."""
    return _ours("XDG_CACHE_HOME", "~/.cache")


def state_dir() -> Path:
    """$XDG_STATE_HOME/gemma_py, or ~/.local/state/gemma_py; as `cache_dir`."""
    return _ours("XDG_STATE_HOME", "~/.local/state")


def _ours(variable: str, otherwise: str) -> Path:
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():  # must be ignored, according to the XDG specification
        try:
            base = Path(otherwise).expanduser()
        except RuntimeError:
            raise FileNotFoundError(f"this user has no home directory; set {variable}") from None
    return base / "gemma_py"


def private_dir(path: Path) -> Path:
    """The directory, created if needed; OSError unless it belongs to this user and no other user may write there."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path}: other users may write here, so its content cannot be trusted")
    return path


def is_ours(path: Path) -> bool:
    """Whether a file or directory exists, is not a link, and belongs to this user."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return not path.is_symlink() and status.st_uid == os.getuid()


def is_abandoned(path: Path) -> bool:
    """Whether the process that wrote this partial file has ended: a running one has locked the file."""
    try:
        if time.time() - path.stat().st_ctime < _YOUNG:
            return False
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def private_file(path: Path) -> Path:
    """Create the file if needed, so that only this user can read and write it. OSError if that is not possible."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)
    return path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name when it is complete. OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(prefix=path.name + ".", suffix=PARTIAL, dir=path.parent)
    try:
        with contextlib.suppress(OSError):  # the file system has no locks
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
