"""The demo model: assembled once, from parts in a Python package, into the user's cache."""

import hashlib
import importlib
from pathlib import Path

from gemma_py.errors import FormatError, ModelNotFoundError
from gemma_py.paths import atomic_write, cache_dir
from gemma_py.progress import ReportProgress, no_report

_BLOCK = 1 << 20


def assembled(package: str, name: str, sha256: str, size: int, progress: ReportProgress = no_report) -> Path:
    """The model's file in the cache. If it is missing, it is assembled from the package's parts, and its digest is checked."""
    try:
        target = cache_dir() / "models" / name
    except OSError as error:
        raise FormatError(f"{name}: {error}") from error
    # The file got its name after its digest was checked, so its size is enough here (hashing takes as long as loading).
    if target.is_file() and target.stat().st_size == size:
        return target
    try:
        parts = importlib.import_module(package.replace("-", "_")).chunk_paths()
    except ImportError:
        raise ModelNotFoundError(
            f"{name}: its parts are not installed; `pip install {package}` brings them (extra: demo)"
        ) from None
    digest, done, what = hashlib.sha256(), 0, f"assembling {name}"
    progress(what, 0, size, "bytes")
    try:
        with atomic_write(target) as file:
            for part in parts:
                with Path(part).open("rb") as source:
                    while block := source.read(_BLOCK):
                        digest.update(block)
                        file.write(block)
                        done += len(block)
                        progress(what, done, size, "bytes")
            if digest.hexdigest() != sha256:
                raise FormatError(
                    f"{name}: sha256 {sha256} expected of the assembled parts, found {digest.hexdigest()}"
                )
    except OSError as error:
        raise FormatError(f"{target}: cannot be written or its parts cannot be read: {error}") from error
    return target
