"""Models of the Hugging Face hub, `hf:owner/name[/file.gguf][@revision]`, in the cache that its own library keeps.

The library (extra `hf`) draws the progress of a download, resumes one whose connection broke, caches each complete file, and
honours HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE. This module decides which files make a model, and which error a
reference without a model gives.
"""

import glob
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from gemma_py.errors import GemmaWarning, InputError, ModelNotFoundError
from gemma_py.progress import ReportProgress, no_report

PREFIX = "hf:"
_REFERENCE = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:/([^@]+))?(?:@(.+))?")
_BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_SECONDS = 10.0  # how long to wait for the list of a repository's files


def fetched(reference: str, progress: ReportProgress = no_report) -> Path:
    """The directory or GGUF file, downloaded if it is not in the cache. The hub is asked each time, unless HF_HUB_OFFLINE
    forbids it, because a branch may have moved."""
    repository, file, revision = _parts(reference)
    hub = _library(reference)
    try:
        info = hub.model_info(repository, revision=revision, timeout=_SECONDS, files_metadata=True)
    except (
        Exception
    ) as error:  # the hub library's own errors and those of its HTTP library, which differ from version to version
        copy = _copy(reference)
        if copy is None:
            raise ModelNotFoundError(f"{reference}: {_why(error)}") from error
        if not isinstance(error, hub.errors.OfflineModeIsEnabled):
            warnings.warn(f"{reference}: {_why(error)}; the copy in the cache is used", GemmaWarning, stacklevel=2)
        return copy
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings}
    opened, files = _choose(reference, sorted(sizes), file)
    places = [hub.try_to_load_from_cache(repository, name, revision=info.sha) for name in files]
    if all(isinstance(place, str) for place in places):
        return Path(places[0]).parents[files[0].count("/")] / opened
    progress(f"downloading {repository}", 0, sum(sizes[name] for name in files), "bytes")
    try:
        folder = hub.snapshot_download(repository, revision=revision, allow_patterns=[glob.escape(n) for n in files])
    except Exception as error:
        raise ModelNotFoundError(f"{reference}: {_why(error)}") from error
    return Path(folder) / opened


def available_locally(reference: str) -> bool:
    """Whether the model is in the hub's cache, so that no network is needed."""
    try:
        _library(reference)
        return _copy(reference) is not None
    except ModelNotFoundError:
        return False


def repository_of(path: Path) -> str | None:
    """owner/name of a snapshot in the library's cache, whose own name is a hash."""
    folder = path.parents[1].name if len(path.parents) > 1 and path.parent.name == "snapshots" else ""
    owner, separator, name = folder.removeprefix("models--").partition("--")
    return f"{owner}/{name}" if folder.startswith("models--") and separator else None


def _parts(reference: str) -> tuple[str, str | None, str | None]:
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise InputError(
            f"{reference}: a model of the hub is written hf:owner/name, hf:owner/name/file.gguf or ...@revision"
        )
    return match[1], match[2], match[3]


def _library(reference: str) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ModuleNotFoundError as error:
        raise ModelNotFoundError(
            f"{reference}: downloading needs {error.name}: pip install 'gemma_py[hf]' (in a clone: pip install -e '.[hf]')"
        ) from None
    return huggingface_hub


def _copy(reference: str) -> Path | None:
    """The model in the hub's cache; None where it is missing or incomplete."""
    repository, file, revision = _parts(reference)
    hub = _library(reference)
    try:
        # No file is asked for: only where the snapshot is.
        folder = Path(hub.snapshot_download(repository, revision=revision, allow_patterns=[], local_files_only=True))
    except hub.errors.LocalEntryNotFoundError:
        return None
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    try:
        return folder / _choose(reference, names, file)[0]
    except ModelNotFoundError:
        return None


def _choose(reference: str, names: Sequence[str], file: str | None) -> tuple[str, list[str]]:
    """The file to open ("." stands for the directory), and all files that it needs."""
    ggufs: dict[str, list[str]] = {}  # parts of one model together
    for name in names:
        if name.endswith(".gguf") and not name.rpartition("/")[2].startswith("mmproj"):  # those are for images
            ggufs.setdefault(_GGUF_PART.sub("", name), []).append(name)
    there = f"there are {', '.join(parts[0] for parts in ggufs.values())}" if ggufs else "there is no GGUF file at all"
    if file is not None:
        parts = ggufs.get(_GGUF_PART.sub("", file), [])
        if file not in parts:
            raise ModelNotFoundError(f"{reference}: no such GGUF file in this repository; {there}")
        return file, parts
    weights = [_WHOLE] if _WHOLE in names else [_INDEX, *filter(_PART.fullmatch, names)] if _INDEX in names else []
    if weights and "config.json" in names:
        return ".", [*(name for name in _BESIDE_WEIGHTS if name in names), *weights]
    if not ggufs:
        raise ModelNotFoundError(
            f"{reference}: neither config.json beside {_WHOLE} (or its parts) nor a GGUF file in this repository"
        )
    if len(ggufs) > 1:
        raise ModelNotFoundError(f"{reference}: add which file, as in {reference.partition('@')[0]}/FILE; {there}")
    (parts,) = ggufs.values()
    return parts[0], parts


def _why(error: Exception) -> str:
    """The reason why there is no model, in one line."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "a gated repository: agree to its terms on its page, and let HF_TOKEN hold a token of yours (or `hf auth login`)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such repository on the hub, or a private one that no token here (HF_TOKEN) may read"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no such revision of this repository"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "not in the hub's cache, or not all of it, and HF_HUB_OFFLINE forbids to ask the hub"
    lines = str(error).strip().splitlines()
    return f"the hub did not answer ({type(error).__name__}{': ' if lines else ''}{lines[0] if lines else ''})"
