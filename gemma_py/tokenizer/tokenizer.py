"""Gemma's byte pair encoding. Control tokens in a text are recognised only on request.

A text is first split at added tokens, where the longest match wins. The text between added tokens is normalised (" " becomes
"▁") and split into characters. A character that is not in the vocabulary is split into bytes. Then neighbouring pieces are
merged (see kernels/bpe.py).
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from gemma_py.errors import InputError
from gemma_py.kernels.bpe import merge
from gemma_py.tokenizer.vocabulary import Tables, is_control

_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


class _Added:
    def __init__(self, tokens: dict[str, int]) -> None:
        self._ids = tokens
        # first character of added tokens -> lengths of these tokens, longest first
        self._lengths: dict[str, list[int]] = {}
        for content in sorted(tokens, key=len, reverse=True):
            lengths = self._lengths.setdefault(content[0], [])
            if not lengths or lengths[-1] != len(content):
                lengths.append(len(content))
        self._first = re.compile("[" + "".join(map(re.escape, self._lengths)) + "]" if tokens else "(?!)")

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield (text before an added token, id of the token) for each added token, then (the remaining text, None)."""
        done = at = 0
        while found := self._first.search(text, at):
            at = found.start()
            for length in self._lengths[text[at]]:
                token = self._ids.get(text[at : at + length])
                if token is not None:
                    yield text[done:at], token
                    done = at = at + length
                    break
            else:
                at += 1
        yield text[done:], None


class Tokenizer:
    def __init__(self, tables: Tables, bos_id: int | None = None, bos_token: str | None = None) -> None:
        self._tables = tables
        added = {content: number for number, content, _ in tables.added}
        self.control_ids = frozenset(n for n, content, special in tables.added if is_control(content, special))
        self._beyond = {number: content for content, number in added.items() if number >= len(tables.ends)}
        self._all = _Added(added)
        self._control = _Added({content: number for content, number in added.items() if number in self.control_ids})
        self._plain = _Added({content: number for content, number in added.items() if number not in self.control_ids})
        self._bytes = frozenset(tables.byte_ids.tolist())
        self.size = len(tables.ends) + len(self._beyond)
        self.bos_id = bos_id if bos_id is not None else self.token_id(bos_token or "<bos>")

    def same_pieces(self, other: "Tokenizer") -> bool:
        """Return whether the tokenizers agree on the piece of every id below the smaller vocabulary size."""
        count = min(self.size, other.size)
        mapped = min(count, len(self._tables.ends), len(other._tables.ends))
        ends = self._tables.ends[:mapped]
        if not np.array_equal(ends, other._tables.ends[:mapped]):
            return False
        size = int(ends[-1])
        if not np.array_equal(self._tables.text[:size], other._tables.text[:size]):
            return False
        return all(self._piece(number) == other._piece(number) for number in range(mapped, count))

    def token_id(self, piece: str) -> int | None:
        beyond = next((number for number, content in self._beyond.items() if content == piece), None)
        return self._tables.find(piece.encode("utf-8", "surrogatepass")) if beyond is None else beyond

    def piece(self, token_id: int) -> str | None:
        return self._piece(token_id).decode("utf-8") if 0 <= token_id < self.size else None

    def _piece(self, token_id: int) -> bytes:
        beyond = self._beyond.get(token_id)
        return self._tables.piece(token_id) if beyond is None else beyond.encode("utf-8")

    def encode(self, text: str, bos: bool = True, control: bool = False) -> list[int]:
        """Return the ids of a text.

        bos: whether the ids begin with exactly one bos token
        control: whether control tokens in the text are recognised; otherwise a control token is encoded as ordinary text
        """
        ids: list[int] = []
        for part, token in (self._all if control else self._plain).split(text):
            ids += self._merged(part)
            if token is not None:
                ids.append(token)
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def control_parts(self, text: str) -> list[tuple[str, int | None]]:
        """Return (text before a control token, id of the token) for each control token, then (the remaining text, None)."""
        return list(self._control.split(text))

    def _merged(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            codes = np.frombuffer(text.replace(" ", "▁").encode("utf-32-le"), "<u4").astype(np.int64)
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has half a surrogate pair, which is not a character, at index {error.start}"
            ) from None
        tables = self._tables
        at = np.minimum(np.searchsorted(tables.characters, codes), len(tables.characters) - 1)
        ids = np.where(tables.characters[at] == codes, tables.character_ids[at], -1)
        unknown = np.flatnonzero(ids < 0)
        if len(unknown):
            as_bytes = [chr(code).encode("utf-8") for code in codes[unknown].tolist()]
            counts = np.ones(len(ids), np.int64)
            counts[unknown] = [len(code) for code in as_bytes]
            places = np.repeat(ids, counts)
            places[places < 0] = tables.byte_ids[np.frombuffer(b"".join(as_bytes), np.uint8)]
            ids = places
        n = len(ids)
        scratch = np.empty(n, np.int64), np.empty(n, np.int64), np.empty((3 * n, 2), np.int64)
        count = merge(ids, tables.starts, tables.rights, tables.ranks, tables.made, *scratch)
        made: list[int] = ids[:count].tolist()
        return made

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including control tokens. Invalid UTF-8 bytes become replacement characters."""
        text: list[str] = []
        run = bytearray()

        def flush() -> None:
            try:
                text.append(run.decode("utf-8"))
            except UnicodeDecodeError:
                text.append("\ufffd" * len(run))
            run.clear()

        for token_id in ids:
            if not 0 <= token_id < self.size:
                raise InputError(f"token id {token_id} is outside the vocabulary of {self.size}")
            piece = self._piece(token_id)
            byte = _BYTE.fullmatch(piece)
            if byte:
                run.append(int(byte[1], 16))
                continue
            flush()
            text.append(piece.decode("utf-8").replace("▁", " "))
        flush()
        return "".join(text)

    def final_prefix(self, ids: Sequence[int]) -> int:
        """Return the length of the longest prefix of `ids` whose text no later id can change.

        Neighbouring byte tokens are decoded together, so one more byte token can turn the whole run into replacement
        characters. The prefix therefore excludes a run of byte tokens at the end.
        """
        count = len(ids)
        while count and ids[count - 1] in self._bytes:
            count -= 1
        return count
