"""A vocabulary (pieces, merges and added tokens) as arrays, and its cache on disk."""

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
# The control tokens of Gemma 4 have names of three forms, such as <|turn>, <turn|> and <|think|>.
_GEMMA4_CONTROL = re.compile(r'<\|([a-z_]+|")>|<[a-z_]+\|>|<\|([a-z_]+|")\|>|<(bos|eos|pad|unk|mask)>')
_LAYOUT = 5  # the version of the cache files; files of other versions are ignored
OLD_SUFFIX = ".vocab"  # the suffix of cache files of older versions, which are no longer read


def is_control(content: str, special: bool) -> bool:
    """Return whether an added token is a control token. User text must never be encoded to a control token.

    All added tokens are control tokens, except runs of white space and HTML tags that are not marked special.
    """
    return special or _PLAIN.fullmatch(content) is None


def is_gemma_control(content: str) -> bool:
    """Return whether a token has the name of a Gemma control token.

    The name decides, not the type in the file, because some official GGUF files give <start_of_turn> the type "normal".
    """
    return _GEMMA_CONTROL.fullmatch(content) is not None


def is_gemma4_control(content: str) -> bool:
    """Return whether a token has the name of one of Gemma 4's control tokens.

    In Gemma 4, unlike earlier Gemma models, the <unused> tokens are ordinary pieces.
    """
    return _GEMMA4_CONTROL.fullmatch(content) is not None


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary in a model file.

    pieces: in the order of ids
    merges: int32 [M, 2], ids of the left and right halves, best merge first
    added: (id, content, special), in the order of ids
    split_newlines: whether a text is first split at runs of newlines
    """

    pieces: list[str]
    merges: np.ndarray
    added: list[tuple[int, str, bool]]
    split_newlines: bool = False


class Tables(NamedTuple):
    """A vocabulary of V pieces and M merges as arrays, which can be memory-mapped.

    Merges are sorted by left half, then by right half.
    """

    text: np.ndarray  # uint8: the UTF-8 bytes of all pieces, one after the other
    ends: np.ndarray  # int64 [V]: where each piece ends in `text`
    order: np.ndarray  # int64 [V]: ids, sorted by the bytes of their pieces
    characters: np.ndarray  # int64: the code points of all pieces that are one character, sorted
    character_ids: np.ndarray  # int64: the ids of `characters`
    byte_ids: np.ndarray  # int64 [256]: the ids of <0x00> .. <0xFF>
    starts: np.ndarray  # int64 [V + 1]: index of the first merge of each left half
    rights: np.ndarray  # int32 [M]: id of the right half
    ranks: np.ndarray  # int32 [M]: rank, 0 for the best merge
    made: np.ndarray  # int32 [M]: id of the merged piece
    added: list[tuple[int, str, bool]]

    def piece(self, number: int) -> bytes:
        return self.text[self.ends[number - 1] if number else 0 : self.ends[number]].tobytes()

    def find(self, piece: bytes) -> int | None:
        at = bisect.bisect_left(self.order, piece, key=lambda number: self.piece(int(number)))
        found = int(self.order[at]) if at < len(self.order) else None
        return found if found is not None and self.piece(found) == piece else None


def tables(vocabulary: Vocabulary, where: str) -> Tables:
    """Check a vocabulary, and convert it to searchable arrays."""
    pieces, added = vocabulary.pieces, vocabulary.added
    find = {piece: number for number, piece in enumerate(pieces)}.get
    _check_added(added, pieces, where)
    byte_ids = [find(f"<0x{value:02X}>", -1) for value in range(256)]
    if min(byte_ids) < 0:
        raise UnsupportedError(f"{where}: the vocabulary should have a piece for every byte, <0x00> to <0xFF>")
    encoded = [piece.encode("utf-8") for piece in pieces]
    characters = sorted((ord(piece), number) for number, piece in enumerate(pieces) if len(piece) == 1)
    left, right = vocabulary.merges[:, 0], vocabulary.merges[:, 1]
    made = np.array([find(pieces[a] + pieces[b], -1) for a, b in vocabulary.merges.tolist()], np.int32)
    if made.size and made.min() < 0:
        raise TokenizerError(f"{where}: merge {int(made.argmin())} produces a piece that is not in the vocabulary")
    # Omit merges that result in a control token. Otherwise ordinary text could be encoded to the control token.
    omitted = [number for number, content, special in added if is_control(content, special)]
    if vocabulary.split_newlines:
        # Omit merges of newlines with other characters. Encoding then gives the ids of a text that is split at newlines,
        # without splitting the text.
        omitted += [number for number, piece in enumerate(pieces) if "\n" in piece and piece.strip("\n")]
    order = np.lexsort((np.arange(len(made)), right, left))
    order = order[~np.isin(made[order], omitted)]
    pair = left[order].astype(np.int64) << 32 | right[order]
    # If the file lists a pair several times, keep only the last merge.
    last = np.append(pair[1:] != pair[:-1], [True] * min(1, len(pair)))
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
            raise TokenizerError(
                f"{where}: added token {content!r:.60} should have the id of an equal piece, or the next free id "
                f"{following}, found id {number}"
            )
        following += number >= len(pieces)
        if len(content) < 2 and is_control(content, special):
            raise TokenizerError(
                f"{where}: control token {content!r} is a single character, which ordinary text may contain"
            )


def cached(source: Path, salt: str, make: Callable[[], Tables]) -> Tables:
    """Return the cached tables of a file. On a cache miss, build the tables and write them to the cache.

    If the cache directory is not usable, the tables stay in memory. The cache key has the file's size and modification time,
    but no hash of the content, because hashing 33 MB would take as long as the cache saves.
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
        return made  # the directory is read-only or the disk is full; the next start builds the tables again
    return _read(path) or made  # read the tables from the file, because memory-mapped tables take less memory


def _write(file: BinaryIO, made: Tables) -> None:
    """Write tables to a cache file. Arrays with larger elements come first, so that every array is aligned."""
    text = json.dumps(made.added, ensure_ascii=False).encode("utf-8")
    arrays = {**made._asdict(), "added": np.frombuffer(text, np.uint8)}
    ordered = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    specs = {name: Spec(dtype_name(array.dtype), array.shape) for name, array in ordered.items()}
    write_arrays(file, specs, ordered.values(), {"format": "gemma_py vocabulary tables"})


def _read(path: Path) -> Tables | None:
    try:
        arrays, _ = read_arrays(path)
    except GemmaError:
        return None
    added = [tuple(token) for token in json.loads(arrays.pop("added").tobytes())]
    return Tables(**arrays, added=added)
