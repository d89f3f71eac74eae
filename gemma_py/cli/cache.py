"""List or remove the files that gemma_py caches on disk to start faster.

The cache contains the demo model, weights packed for the kernels, tokenizers and compiled kernels. gemma_py creates removed
entries again when they are needed. A stale entry has the format of another version of gemma_py, or is incomplete because the
process that wrote the entry was interrupted.

With --json: {"path", "kept": [{"name", "kind", "bytes", "last_use", "stale", "source", "path"}], "bytes"}; with --remove, "removed"
instead of "kept".
"""

import argparse
import dataclasses
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from gemma_py.cli.common import print_json, size
from gemma_py.errors import InputError
from gemma_py.formats.container import SUFFIX
from gemma_py.kernels import decorator
from gemma_py.paths import PARTIAL, cache_dir, is_abandoned, is_ours
from gemma_py.tokenizer import vocabulary
from gemma_py.weights import store
from gemma_py.weights.pack import LAYOUT

# The file names of each kind of entry. Files with other names are neither listed nor removed.
_KINDS = {
    "models": re.compile(r"[\w.-]+\.gguf"),
    "weights": re.compile(rf"[0-9a-f]{{40}}-(\d+)({re.escape(SUFFIX)}|{re.escape(store.OLD_SUFFIX)})"),
    "tokenizers": re.compile(rf"[0-9a-f]{{64}}({re.escape(SUFFIX)}|{re.escape(vocabulary.OLD_SUFFIX)})"),
    "kernels": re.compile(r"[0-9a-f]{24}"),
}


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """One entry of the cache.

    name: KIND/FILENAME
    source: the file that the entry was made from, or None if that file is unknown
    """

    name: str
    kind: str
    bytes: int
    last_use: float
    stale: bool
    source: str | None
    path: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--remove",
        metavar="NAME",
        help="remove entries; NAME is a listed name, a kind such as weights, the file that entries were made from, `stale` or `all`",
    )


def all_entries() -> list[CacheEntry]:
    root = cache_dir()
    return [entry for kind in _KINDS if is_ours(root / kind) for entry in _of_kind(root / kind, kind)]


def _of_kind(folder: Path, kind: str) -> Iterator[CacheEntry]:
    for path in sorted(folder.iterdir()):
        whole = path.name.removesuffix(PARTIAL)
        unfinished = path.name != whole
        match = _KINDS[kind].fullmatch(whole.rpartition(".")[0] if unfinished else whole)
        if match is None or not is_ours(path) or (unfinished and not is_abandoned(path)):
            continue
        files = [path, *path.rglob("*")] if path.is_dir() else [path]
        states = [state for state in (file.lstat() for file in files) if stat.S_ISREG(state.st_mode)]
        stale, source = unfinished, None
        if kind == "weights" and not unfinished:
            stale, source = int(match[1]) != LAYOUT or match[2] != SUFFIX, store.source_of(path)
        if kind == "tokenizers" and not unfinished:
            stale = match[1] != SUFFIX
        if kind == "kernels":
            stale = path != decorator.CACHE
        yield CacheEntry(
            f"{kind}/{path.name}", kind, sum(state.st_size for state in states),
            max((max(state.st_atime, state.st_mtime) for state in states), default=path.lstat().st_mtime),
            stale, source, path,
        )  # fmt: skip


def _chosen(entries: list[CacheEntry], name: str) -> list[CacheEntry]:
    if name == "all":
        return entries
    if name == "stale":
        return [entry for entry in entries if entry.stale]
    source = str(Path(name).absolute())
    chosen = [entry for entry in entries if name in (entry.name, entry.kind, entry.path.name) or entry.source == source]
    if not chosen and name not in _KINDS:
        raise InputError(f"{name!r:.80}: no such entry in the cache; `gemma_py cache` lists all entries")
    return chosen


def _remove(entries: list[CacheEntry]) -> None:
    for entry in entries:
        if entry.path.is_dir():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink(missing_ok=True)
    store.drop_records()


def run(args: argparse.Namespace) -> None:
    entries = all_entries()
    if args.remove is not None:
        entries = _chosen(entries, args.remove)
        _remove(entries)
    total = sum(entry.bytes for entry in entries)
    if args.json:
        shown = [dataclasses.asdict(entry) | {"path": str(entry.path)} for entry in entries]
        key = "kept" if args.remove is None else "removed"
        print_json({"path": str(cache_dir()), key: shown, "bytes": total})
        return
    if args.remove is not None:
        print(f"entries removed: {len(entries)}, {size(total)}")
        return
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_use))
        about = "stale" if entry.stale else "" if entry.source is None else f"from {entry.source}"
        print(f"{size(entry.bytes):>10}  {used}  {entry.name:68} {about}".rstrip())
    print(f"{size(total):>10}  in {cache_dir()}")
