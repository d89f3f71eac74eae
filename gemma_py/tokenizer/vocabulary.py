"""A vocabulary as data: pieces, merges, added tokens; and its cache on disk."""

import bisect
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gemma_py.errors import GemmaError, TokenizerError, UnsupportedError
from gemma_py.formats.files import drop_pages, map_file
from gemma_py.paths import atomic_write, cache_dir, private_dir

_HTML = (
    "a b blockquote bbox body caption code div em footer h1 h2 h3 h4 h5 h6 html i iframe img li s span strong sub sup "
    "table tbody td tfoot th thead tr u ul"
)
_PLAIN = re.compile(rf"[\s▁]+|</?({'|'.join(_HTML.split())})>")
_GEMMA_CONTROL = re.compile(
    r"<unused\d+>|<(start|end)_of_(turn|image)>|<(bos|eos|pad|unk|mask|image_soft_token)>|\[multimodal\]"
)
_LAYOUT = 4  # of the cache file; a new number leaves old files behind
SUFFIX = ".vocab"


def is_control(content: str, special: bool) -> bool:
    """Whether user text must never become this added token: all but runs of white space and HTML tags."""
    return special or _PLAIN.fullmatch(content) is None


def is_gemma_control(content: str) -> bool:
    """Control by its name. Some official GGUF files say "normal" of <start_of_turn>."""
    return _GEMMA_CONTROL.fullmatch(content) is not None


@dataclass(frozen=True)
class Vocabulary:
    """pieces: by id. merges: int32 [M, 2], ids of the halves, best first. added: (id, content, special), by id."""

    pieces: list[str]
    merges: np.ndarray
    added: list[tuple[int, str, bool]]


class Tables(NamedTuple):
    """A vocabulary of V pieces as arrays, which are mapped from the cache and searched there; no piece becomes an object.

    A merge stands under its left half, those of one left half by their right one.
    """

    text: np.ndarray  # uint8, the pieces in UTF-8, one after the other
    ends: np.ndarray  # int64 [V], where each ends in the text
    order: np.ndarray  # int64 [V], ids by the bytes of their pieces
    characters: np.ndarray  # int64, the pieces of one character, sorted
    character_ids: np.ndarray  # int64
    byte_ids: np.ndarray  # int64 [256], of <0x00> .. <0xFF>
    starts: np.ndarray  # int64 [V + 1], the first merge of each left half
    rights: np.ndarray  # int32 [M]
    ranks: np.ndarray  # int32 [M]
    made: np.ndarray  # int32 [M], what the pair becomes
    added: list[tuple[int, str, bool]]

    def piece(self, number: int) -> bytes:
        return self.text[self.ends[number - 1] if number else 0 : self.ends[number]].tobytes()

    def find(self, piece: bytes) -> int | None:
        """The id of a piece."""
        at = bisect.bisect_left(self.order, piece, key=lambda number: self.piece(int(number)))
        found = int(self.order[at]) if at < len(self.order) else None
        return found if found is not None and self.piece(found) == piece else None


def tables(vocabulary: Vocabulary, where: str) -> Tables:
    """Searchable, checked, and without forgeries."""
    pieces, added = vocabulary.pieces, vocabulary.added
    find = {piece: number for number, piece in enumerate(pieces)}.get
    _check_added(added, pieces, where)
    byte_ids = [find(f"<0x{value:02X}>", -1) for value in range(256)]
    if min(byte_ids) < 0:
        raise UnsupportedError(f"{where}: a piece for every byte should be there, <0x00> to <0xFF>")
    encoded = [piece.encode("utf-8") for piece in pieces]
    characters = sorted((ord(piece), number) for number, piece in enumerate(pieces) if len(piece) == 1)
    left, right = vocabulary.merges[:, 0], vocabulary.merges[:, 1]
    made = np.array([find(pieces[a] + pieces[b], -1) for a, b in vocabulary.merges.tolist()], np.int32)
    if made.size and made.min() < 0:
        raise TokenizerError(f"{where}: merge {int(made.argmin())} makes a piece that the vocabulary does not have")
    # No merge may lead to a control token, whatever the file says: plain text would turn into it.
    forged = [number for number, content, special in added if is_control(content, special)]
    order = np.lexsort((np.arange(len(made)), right, left))
    order = order[~np.isin(made[order], forged)]
    pair = left[order].astype(np.int64) << 32 | right[order]
    last = np.append(pair[1:] != pair[:-1], [True] * min(1, len(pair)))  # of a pair that stands twice, the later counts
    order = order[last]
    return Tables(
        np.frombuffer(b"".join(encoded), np.uint8),
        np.cumsum([len(piece) for piece in encoded], dtype=np.int64),
        np.array(sorted(range(len(pieces)), key=encoded.__getitem__), np.int64),
        np.array([character for character, _ in characters], np.int64),
        np.array([number for _, number in characters], np.int64),
        np.array(byte_ids, np.int64),
        np.searchsorted(left[order], np.arange(len(pieces) + 1)).astype(np.int64),
        right[order].astype(np.int32),
        order.astype(np.int32),
        made[order],
        added,
    )


def _check_added(added: list[tuple[int, str, bool]], pieces: list[str], where: str) -> None:
    """Added tokens are pieces, or follow the last piece without gaps."""
    following = len(pieces)
    known = set(pieces)
    for number, content, special in added:
        place = number if number < len(pieces) else following
        right = (
            place == number
            and content
            and (pieces[number] == content if number < len(pieces) else content not in known)
        )
        if not right or number < 0:
            raise TokenizerError(f"{where}: added token {content!r:.60} should not have id {number}")
        following += number >= len(pieces)
        if len(content) < 2 and is_control(content, special):
            raise TokenizerError(f"{where}: control token {content!r} is a character of ordinary text")


def cached(source: Path, salt: str, build: Callable[[], Vocabulary]) -> Tables:
    """The vocabulary from the cache; built and stored at first use. The cache is optional: any trouble means build.

    The key holds the file's size and time of change, as reading 33 MB only to hash it would cost what the cache saves.
    """
    stat = source.stat()
    name = f"{source.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{salt}\0{_LAYOUT}"
    key = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    try:
        path = private_dir(cache_dir() / "tokenizers") / f"{key}{SUFFIX}"
    except OSError:
        return tables(build(), str(source))
    stored = _read(path)
    if stored is not None:
        return stored
    made = tables(build(), str(source))
    try:
        with atomic_write(path) as file:
            file.write(_dump(made))
    except OSError:
        return made  # a read-only home or a full disk: the next start builds it again
    return _read(path) or made  # mapped, and what it was made from can go


def _dump(made: Tables) -> bytes:
    """sha256 of the rest, the length of the JSON part, the JSON part, and the arrays, each at a multiple of 8 bytes."""
    arrays = made[:-1]
    named = zip(made._fields, arrays, strict=False)
    head = {"added": made.added, "arrays": [[name, array.dtype.str, len(array)] for name, array in named]}
    text = json.dumps(head, ensure_ascii=False).encode("utf-8")
    parts = [len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays)]
    body = b"".join(part.ljust(-(-len(part) // 8) * 8, b"\0") for part in parts)
    return hashlib.sha256(body).digest() + body


def _read(path: Path) -> Tables | None:
    try:
        data = map_file(path)
    except GemmaError:
        return None
    if hashlib.sha256(data[32:].data).digest() != data[:32].tobytes():
        return None  # damaged: it will be written anew
    drop_pages(data)
    length = int.from_bytes(data[32:40].tobytes(), "little")
    head = json.loads(data[40 : 40 + length].tobytes())
    arrays, at = {}, 40 + -(-length // 8) * 8
    for name, kind, count in head["arrays"]:
        size = np.dtype(kind).itemsize * count
        arrays[name] = data[at : at + size].view(kind)
        at += -(-size // 8) * 8
    return Tables(**arrays, added=[tuple(token) for token in head["added"]])
