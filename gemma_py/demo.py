"""Join the parts of the demo model. A Python package contains the model's file in several parts."""

import hashlib
import importlib
from pathlib import Path

from gemma_py.errors import FormatError, ModelNotFoundError
from gemma_py.paths import atomic_write, cache_dir
from gemma_py.progress import ReportProgress, no_report

_BLOCK = 1 << 20


def assembled(package: str, name: str, sha256: str, size: int, progress: ReportProgress = no_report) -> Path:
    """Return the path of the model's file in the cache directory. Create the file from the parts if it is missing."""
    try:
        target = cache_dir() / "models" / name
    except OSError as error:
        raise FormatError(f"{name}: {error}") from error
    # Only a file with the right sha256 is renamed to `target`, so later calls check only the size.
    if target.is_file() and target.stat().st_size == size:
        return target
    try:
        parts = importlib.import_module(package.replace("-", "_")).chunk_paths()
    except ImportError:
        raise ModelNotFoundError(
            f"{name}: the package with this model is not installed; run pip install {package}"
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
                raise FormatError(f"{name}: the joined parts should have sha256 {sha256}, found {digest.hexdigest()}")
    except OSError as error:
        raise FormatError(
            f"{target}: the file cannot be written, or a part in {package} cannot be read: {error}"
        ) from error
    return target
