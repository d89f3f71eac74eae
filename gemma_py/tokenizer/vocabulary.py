"""A vocabulary as data: pieces, merges, added tokens; and its cache on disk."""

import bisect
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from gemma_py.errors import GemmaError, TokenizerError, UnsupportedError
from gemma_py.formats.container import SUFFIX, Spec, dtype_name, read_arrays, write_arrays
from gemma_py.paths import atomic_write, cache_dir, private_dir

_HTML = (
    "a b blockquote bbox body caption code div em footer h1 h2 h3 h4 h5 h6 html i iframe img li s span strong sub sup "
    "table tbody td tfoot th thead tr u ul"
)
_PLAIN = re.compile(rf"[\s▁]+|</?({'|'.join(_HTML.split())})>")
_GEMMA_CONTROL = re.compile(
    r"<unused\d+>|<(start|end)_of_(turn|image)>|<(bos|eos|pad|unk|mask|image_soft_token)>|\[multimodal\]"
)
# The control tokens of Gemma 4: <|turn>, <turn|>, <|think|>, <|"|> and others of these three forms.
_GEMMA4_CONTROL = re.compile(r'<\|([a-z_]+|")>|<[a-z_]+\|>|<\|([a-z_]+|")\|>|<(bos|eos|pad|unk|mask)>')
_LAYOUT = 5  # the version of the cache file; files of other versions are not read
OLD_SUFFIX = ".vocab"  # files of a former format, which is not read any more


def is_control(content: str, special: bool) -> bool:
    """Whether user text must never become this added token: all but runs of white space and HTML tags."""
    return special or _PLAIN.fullmatch(content) is None


def is_gemma_control(content: str) -> bool:
    """Whether the token is a control token by its name. Some official GGUF files have <start_of_turn> as "normal"."""
    return _GEMMA_CONTROL.fullmatch(content) is not None


def is_gemma4_control(content: str) -> bool:
    """Whether the token is a control token of Gemma 4 by its name; its <unused> tokens are ordinary pieces."""
    return _GEMMA4_CONTROL.fullmatch(content) is not None


@dataclass(frozen=True)
class Vocabulary:
    """pieces: by id. merges: int32 [M, 2], ids of the halves, best first. added: (id, content, special), by id. split_newlines:
    a text is split at its runs of newlines before neighbours merge."""

    pieces: list[str]
    merges: np.ndarray
    added: list[tuple[int, str, bool]]
    split_newlines: bool = False


class Tables(NamedTuple):
    """A vocabulary of V pieces as arrays, which are mapped from the cache and searched without creating Python objects.

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
    made: np.ndarray  # int32 [M], the merged piece
    added: list[tuple[int, str, bool]]

    def piece(self, number: int) -> bytes:
        return self.text[self.ends[number - 1] if number else 0 : self.ends[number]].tobytes()

    def find(self, piece: bytes) -> int | None:
        """The id of a piece."""
        at = bisect.bisect_left(self.order, piece, key=lambda number: self.piece(int(number)))
        found = int(self.order[at]) if at < len(self.order) else None
        return found if found is not None and self.piece(found) == piece else None


def tables(vocabulary: Vocabulary, where: str) -> Tables:
    """The vocabulary as searchable arrays, checked, without merges that lead from plain text to a control token."""
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
    dropped = [number for number, content, special in added if is_control(content, special)]
    if vocabulary.split_newlines:
        # A split text never merges a newline with another character, so dropping such merges gives the ids of a split text.
        dropped += [number for number, piece in enumerate(pieces) if "\n" in piece and piece.strip("\n")]
    order = np.lexsort((np.arange(len(made)), right, left))
    order = order[~np.isin(made[order], dropped)]
    pair = left[order].astype(np.int64) << 32 | right[order]
    last = np.append(
        pair[1:] != pair[:-1], [True] * min(1, len(pair))
    )  # of a pair that is there twice, the later one counts
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


def cached(source: Path, salt: str, make: Callable[[], Tables]) -> Tables:
    """The tables from the cache; they are built and stored at first use. If the cache cannot be used, they are built in memory.

    The key holds the file's size and time of change, as reading 33 MB only to hash it would cost what the cache saves.
    """
    stat = source.stat()
    name = f"{source.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{salt}\0{_LAYOUT}"
    key = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    try:
        path = private_dir(cache_dir() / "tokenizers") / f"{key}{SUFFIX}"
    except OSError:
        return make()
    stored = _read(path)
    if stored is not None:
        return stored
    made = make()
    try:
        with atomic_write(path) as file:
            _write(file, made)
    except OSError:
        return made  # a read-only home directory or a full disk: the next start builds them again
    return _read(path) or made  # mapped, so that the memory of the built tables can be freed


def _write(file: BinaryIO, made: Tables) -> None:
    """Arrays of wide numbers first, so that each is aligned."""
    text = json.dumps(made.added, ensure_ascii=False).encode("utf-8")
    arrays = {**made._asdict(), "added": np.frombuffer(text, np.uint8)}
    ordered = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    specs = {name: Spec(dtype_name(array.dtype), array.shape) for name, array in ordered.items()}
    write_arrays(file, specs, ordered.values(), {"format": "gemma_py vocabulary tables"})


def _read(path: Path) -> Tables | None:
    """The tables in a file; None if it is missing, or damaged, and then it is written again."""
    try:
        arrays, _ = read_arrays(path)
    except GemmaError:
        return None
    added = [tuple(token) for token in json.loads(arrays.pop("added").tobytes())]
    return Tables(**arrays, added=added)
