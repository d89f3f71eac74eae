"""The tokenizer that the engine shows: `tokenizers` underneath, control tokens only on request."""

import gc
import json
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from gemma_py.errors import InputError, TokenizerError
from gemma_py.tokenizer.vocabulary import Vocabulary, is_control


def _guarded(action: Callable[[], Any], where: str, error_type: type[Exception] = TokenizerError) -> Any:
    """Rust panics arrive as BaseException; here every failure becomes an error with a place."""
    try:
        return action()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise error_type(f"{where}: {type(error).__name__}: {error!s:.200}") from None


def _model(vocabulary: Vocabulary) -> Any:
    """The BPE model. Half a million tuples are made on the way: the collector would look through them time and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        pieces = vocabulary.pieces
        vocab = {piece: number for number, piece in enumerate(pieces)}
        left, right = (map(pieces.__getitem__, vocabulary.merges[:, side].tolist()) for side in (0, 1))
        return tokenizers.models.BPE(vocab, list(zip(left, right, strict=True)), **vocabulary.options)
    finally:
        if collecting:
            gc.enable()


class Tokenizer:
    """encode and decode. Two encoders share one model: one knows the control tokens, one takes them as text."""

    def __init__(
        self, vocabulary: Vocabulary, where: str, bos_id: int | None = None, bos_token: str | None = None
    ) -> None:
        self.where = where
        self.control_ids = frozenset(n for n, content, special in vocabulary.added if is_control(content, special))
        control = self.control_ids

        def build() -> tuple[Any, Any]:
            model = _model(vocabulary)
            both = []
            for with_control in (True, False):
                skeleton = {"version": "1.0", "added_tokens": [], "post_processor": None, **vocabulary.pipeline}
                skeleton["model"] = {"type": "BPE", "vocab": {}, "merges": []}
                made = tokenizers.Tokenizer.from_str(json.dumps(skeleton))
                made.model = model
                made.add_tokens(
                    [
                        tokenizers.AddedToken(content, normalized=False, special=False)
                        for number, content, _ in vocabulary.added
                        if with_control or number not in control
                    ]
                )
                both.append(made)
            return both[0], both[1]

        self._with_control, self._text_only = _guarded(build, where)
        for number, content, _ in vocabulary.added:
            for encoder in (self._with_control, *(() if number in control else (self._text_only,))):
                found = encoder.token_to_id(content)
                if found != number:
                    raise TokenizerError(f"{where}: added token {content!r:.60} should have id {number}, gets {found}")
            if number in control and len(content) < 2:
                raise TokenizerError(f"{where}: control token {content!r} is a character of ordinary text")
        self._bytes = frozenset(self._with_control.token_to_id(f"<0x{value:02X}>") for value in range(256))
        self.size: int = self._with_control.get_vocab_size()
        self.bos_id = bos_id if bos_id is not None else self.token_id(bos_token or "<bos>")

    def token_id(self, piece: str) -> int | None:
        """The id of a piece or added token; None where there is none."""
        found: int | None = self._with_control.token_to_id(piece)
        return found

    def piece(self, token_id: int) -> str | None:
        found: str | None = self._with_control.id_to_token(token_id)
        return found

    def encode(self, text: str, bos: bool = True, control: bool = False) -> list[int]:
        """Ids of the text. control=False: no part of it becomes a control token. bos: exactly one in front."""
        encoder = self._with_control if control else self._text_only
        encoding = _guarded(lambda: encoder.encode(text, add_special_tokens=False), "the text", InputError)
        ids: list[int] = encoding.ids
        if not control and not self.control_ids.isdisjoint(ids):
            raise TokenizerError(
                f"{self.where}: ordinary text became a control token; this tokenizer is not to be trusted"
            )
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included as they are written."""
        for token_id in ids:
            if not 0 <= token_id < self.size:
                raise InputError(f"token id {token_id} is outside the vocabulary of {self.size}")
        text: str = _guarded(lambda: self._with_control.decode(list(ids), skip_special_tokens=False), self.where)
        return text

    def settled(self, ids: Sequence[int]) -> int:
        """How many of the ids have text that no later id can change.

        A run of byte tokens is text only as a whole: one byte more can turn all of it into replacement characters.
        """
        count = len(ids)
        while count and ids[count - 1] in self._bytes:
            count -= 1
        return count
