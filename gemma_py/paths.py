"""The cache and state directories of gemma_py, and functions that write private files atomically."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gemma_py.errors import InputError

PARTIAL = ".partial"  # the suffix of a file that is still being written
# Seconds. A partial file younger than this may not be locked yet, so the file does not count as abandoned.
_YOUNG = 60.0


def cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/gemma_py or ~/.cache/gemma_py. Raises OSError if the user has no home directory."""
    return _ours("XDG_CACHE_HOME", "~/.cache")


def state_dir() -> Path:
    """Return $XDG_STATE_HOME/gemma_py or ~/.local/state/gemma_py. Raises OSError if the user has no home directory."""
    return _ours("XDG_STATE_HOME", "~/.local/state")


def _ours(variable: str, otherwise: str) -> Path:
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():  # the XDG specification says to ignore relative paths
        try:
            base = Path(otherwise).expanduser()
        except RuntimeError:
            raise FileNotFoundError(f"this user has no home directory; set {variable}") from None
    return base / "gemma_py"


def private_dir(path: Path) -> Path:
    """Create a directory if needed, and return its path. Raise PermissionError if other users may write to the directory."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path}: other users may write to this directory, so its content cannot be trusted")
    return path


def is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return not path.is_symlink() and status.st_uid == os.getuid()


def is_abandoned(path: Path) -> bool:
    """Return whether the writer of a partial file has ended. A running writer holds a lock on the file."""
    try:
        if time.time() - path.stat().st_ctime < _YOUNG:
            return False
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def private_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)
    return path


def check_writable(path: Path) -> None:
    """Raise InputError if no file can be written to the path. Commands call this before a long run."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{path}: no file can be written to this path, because {folder} is not a directory")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{path}: no file can be written to this path")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write to a temporary file, which replaces `path` at the end of the `with` statement.

    If an exception occurs, the temporary file is deleted and `path` does not change.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(prefix=path.name + ".", suffix=PARTIAL, dir=path.parent)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
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
