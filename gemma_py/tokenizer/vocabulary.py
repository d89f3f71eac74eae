"""A vocabulary as data: pieces, merges, added tokens; and its cache on disk."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py.errors import GemmaError
from gemma_py.formats.files import read_bytes
from gemma_py.paths import atomic_write, cache_dir

_HTML = (
    "a b blockquote bbox body caption code div em footer h1 h2 h3 h4 h5 h6 html i iframe img li s span strong sub sup "
    "table tbody td tfoot th thead tr u ul"
)
_PLAIN = re.compile(rf"[\s▁]+|</?({'|'.join(_HTML.split())})>")
_GEMMA_CONTROL = re.compile(
    r"<unused\d+>|<(start|end)_of_(turn|image)>|<(bos|eos|pad|unk|mask|image_soft_token)>|\[multimodal\]"
)
_LAYOUT = 2  # of the cache file; a new number leaves old files behind
SUFFIX = ".vocab"
_LARGEST_CACHE = 256 << 20


def is_control(content: str, special: bool) -> bool:
    """Whether user text must never become this added token: all but runs of white space and HTML tags."""
    return special or _PLAIN.fullmatch(content) is None


def is_gemma_control(content: str) -> bool:
    """Control by its name. Some official GGUF files say "normal" of <start_of_turn>."""
    return _GEMMA_CONTROL.fullmatch(content) is not None


@dataclass(frozen=True)
class Vocabulary:
    """pieces: by id. merges: int32 [M, 2], ids of the halves, best first. added: (id, content, special), by id.

    options are those of the BPE model, pipeline the normalizer, pre_tokenizer and decoder, as tokenizer.json has them.
    """

    pieces: list[str]
    merges: np.ndarray
    added: list[tuple[int, str, bool]]
    options: dict[str, Any]
    pipeline: dict[str, Any]


def without_forgeries(vocabulary: Vocabulary) -> Vocabulary:
    """No merge may lead to a control token, whatever the file says: plain text would turn into it."""
    pieces = vocabulary.pieces
    forged = {content for _, content, special in vocabulary.added if is_control(content, special)}
    kept = [pieces[left] + pieces[right] not in forged for left, right in vocabulary.merges.tolist()]
    return replace(vocabulary, merges=vocabulary.merges[np.array(kept, bool)])


def cached(source: Path, salt: str, build: Callable[[], Vocabulary]) -> Vocabulary:
    """The vocabulary from the cache; built and stored at first use. The cache is optional: any trouble means build.

    The key holds the file's size and time of change, as reading 33 MB only to hash it would cost what the cache saves.
    """
    stat = source.stat()
    name = f"{source.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{salt}\0{_LAYOUT}"
    key = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    try:
        path = cache_dir() / "tokenizers" / f"{key}{SUFFIX}"
    except OSError:
        return without_forgeries(build())
    stored = _read(path)
    if stored is not None:
        return stored
    vocabulary = without_forgeries(build())
    try:
        with atomic_write(path) as file:
            file.write(_dump(vocabulary))
    except OSError:
        pass  # a read-only home or a full disk: the next start builds it again
    return vocabulary


def _dump(vocabulary: Vocabulary) -> bytes:
    """sha256 of the rest, then the length of the JSON part, the JSON part, and the merges."""
    table = [vocabulary.pieces, vocabulary.added, vocabulary.options, vocabulary.pipeline]
    text = json.dumps(table, ensure_ascii=False).encode("utf-8")
    body = len(text).to_bytes(8, "little") + text + np.ascontiguousarray(vocabulary.merges, "<i4").tobytes()
    return hashlib.sha256(body).digest() + body


def _read(path: Path) -> Vocabulary | None:
    try:
        data = read_bytes(path, _LARGEST_CACHE)
    except GemmaError:
        return None
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        return None  # damaged: it will be written anew
    try:
        length = int.from_bytes(data[32:40], "little")
        pieces, added, options, pipeline = json.loads(data[40 : 40 + length])
        merges = np.frombuffer(data, "<i4", offset=40 + length).reshape(-1, 2)
    except (ValueError, TypeError):
        return None
    return Vocabulary(pieces, merges, [tuple(token) for token in added], options, pipeline)
