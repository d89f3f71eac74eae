"""Download models of the Hugging Face hub, written `hf:owner/name[/file.gguf][@revision]`.

The library huggingface_hub (extra `hf`) downloads files, resumes interrupted downloads, keeps the cache, and reads
HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE. This module selects the files of a model and writes the error
messages.
"""

import glob
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from gemma_py.errors import GemmaWarning, InputError, ModelNotFoundError, install_command
from gemma_py.progress import ReportProgress, no_report

PREFIX = "hf:"
_REFERENCE = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:/([^@]+))?(?:@(.+))?")
_BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
# Files that sentence-transformers adds to an embedding model. _OF_MODULE matches the files in folders such as 1_Pooling.
_MODULES = ("modules.json", "config_sentence_transformers.json")
_OF_MODULE = re.compile(r"\d+_[A-Za-z]+/(config\.json|model\.safetensors)")
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_SECONDS = 10.0  # timeout for listing a repository's files


def fetched(reference: str, progress: ReportProgress = no_report) -> Path:
    """Download missing files, and return the path of the model's directory or GGUF file.

    Every call asks the hub for the current revision, because a branch may have changed. If the hub does not answer, or
    HF_HUB_OFFLINE is set, the copy in the cache is used.
    """
    repository, file, revision = _parts(reference)
    hub = _library(reference)
    try:
        info = hub.model_info(repository, revision=revision, timeout=_SECONDS, files_metadata=True)
    except Exception as error:  # different versions of the library raise different exceptions
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
    try:
        _library(reference)
        return _copy(reference) is not None
    except ModelNotFoundError:
        return False


def repository_of(path: Path) -> str | None:
    """Return owner/name if the path is a directory in the hub's cache, else None."""
    folder = path.parents[1].name if len(path.parents) > 1 and path.parent.name == "snapshots" else ""
    owner, separator, name = folder.removeprefix("models--").partition("--")
    return f"{owner}/{name}" if folder.startswith("models--") and separator else None


def _parts(reference: str) -> tuple[str, str | None, str | None]:
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise InputError(
            f"{reference}: should have the form hf:owner/name, hf:owner/name/file.gguf or hf:owner/name@revision"
        )
    return match[1], match[2], match[3]


def _library(reference: str) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ModuleNotFoundError as error:
        raise ModelNotFoundError(
            f"{reference}: downloading needs the package {error.name}: {install_command('hf')}"
        ) from None
    return huggingface_hub


def _copy(reference: str) -> Path | None:
    """Return the path of the model in the hub's cache, or None if a file is missing there."""
    repository, file, revision = _parts(reference)
    hub = _library(reference)
    try:
        # With allow_patterns=[], the library downloads nothing and returns the snapshot's directory.
        folder = Path(hub.snapshot_download(repository, revision=revision, allow_patterns=[], local_files_only=True))
    except hub.errors.LocalEntryNotFoundError:
        return None
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    try:
        return folder / _choose(reference, names, file)[0]
    except ModelNotFoundError:
        return None


def _choose(reference: str, names: Sequence[str], file: str | None) -> tuple[str, list[str]]:
    """Return the file to open ("." for the whole directory), and the files to download."""
    ggufs: dict[str, list[str]] = {}  # file name without shard number -> the names of all shards
    for name in names:
        # Files with "mmproj" in their names are image and audio encoders, not language models.
        if name.endswith(".gguf") and "mmproj" not in name.rpartition("/")[2]:
            ggufs.setdefault(_GGUF_PART.sub("", name), []).append(name)
    there = (
        f"the repository has {', '.join(parts[0] for parts in ggufs.values())}"
        if ggufs
        else "the repository has no GGUF file"
    )
    if file is not None:
        parts = ggufs.get(_GGUF_PART.sub("", file), [])
        if file not in parts:
            raise ModelNotFoundError(f"{reference}: this GGUF file does not exist; {there}")
        return file, parts
    weights = [_WHOLE] if _WHOLE in names else [_INDEX, *filter(_PART.fullmatch, names)] if _INDEX in names else []
    if weights and "config.json" in names:
        modules = [name for name in names if name in _MODULES or _OF_MODULE.fullmatch(name)]
        return ".", [*(name for name in _BESIDE_WEIGHTS if name in names), *modules, *weights]
    if not ggufs:
        raise ModelNotFoundError(
            f"{reference}: the repository has neither config.json with {_WHOLE} (or shards) nor a GGUF file"
        )
    if len(ggufs) > 1:
        raise ModelNotFoundError(f"{reference}: name the GGUF file, as in {reference.partition('@')[0]}/FILE; {there}")
    (parts,) = ggufs.values()
    return parts[0], parts


def _why(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the repository is gated: accept the terms on the model's page, then set HF_TOKEN or run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such repository on the hub, or a private repository that the token in HF_TOKEN may not read"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no such revision of this repository"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "files of the model are missing in the hub's cache, and HF_HUB_OFFLINE forbids downloads"
    lines = str(error).strip().splitlines()
    return f"the hub did not answer ({type(error).__name__}{': ' if lines else ''}{lines[0] if lines else ''})"
