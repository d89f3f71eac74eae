"""Drafters, which guess the next tokens of an answer. A wrong guess costs time, but never changes the answer."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from gemma_py.kernels import suffix_automaton as kernels

_SEPARATOR = -1  # the id that separates the texts of an index; no token has this id
_FEWEST_TOKENS = 512  # the smallest capacity of an index


class Draft(NamedTuple):
    """Guesses of the next tokens.

    matched: how many tokens directly before the guesses equal the tokens directly before the copied text.
    predicted: whether the guesses are copied from the request's prediction.
    model: whether the guesses come from the draft model.
    """

    tokens: tuple[int, ...] = ()
    matched: int = 0
    predicted: bool = False
    model: bool = False


class Drafter(Protocol):
    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""

    def propose(self, k: int, ahead: Sequence[int] = ()) -> Draft:
        """Guess up to k tokens that follow the answer so far and the tokens `ahead`, which are not part of the answer yet."""


class DrafterOfModel(Protocol):
    """Guesses the tokens of one answer with a draft model. A guess takes as long as a pass of the draft model.

    room: the most tokens that can be guessed now.
    pending: the number of tokens that the draft model has to compute before it can guess.
    """

    @property
    def room(self) -> int: ...

    @property
    def pending(self) -> int: ...

    def extend(self, token: int) -> None:
        """Append a token to the answer."""

    def guess(self, count: int) -> list[int]:
        """Guess up to `count` tokens that follow the answer so far."""


class SuffixIndex:
    """A suffix automaton, which finds the longest suffix of a text that also occurs earlier in the text."""

    def __init__(self) -> None:
        self._counts = np.zeros(5, np.int64)
        self._counts[kernels.STATES_USED] = 1  # the state of the empty text
        self._counts[kernels.MATCHED] = -1
        self._states, self._edges = np.empty((0, 4), np.int32), np.empty((0, 4), np.int32)
        self._text, self._table = np.empty(0, np.int32), np.empty(0, np.int32)
        self._grow(_FEWEST_TOKENS)
        self._states[0] = 0, -1, -1, -1

    def _grow(self, tokens: int) -> None:
        for name, rows in (("_states", 2 * tokens + 2), ("_edges", 3 * tokens + 3), ("_text", tokens)):
            old = getattr(self, name)
            new = np.empty((rows, *old.shape[1:]), np.int32)
            new[: len(old)] = old
            setattr(self, name, new)
        self._table = np.full(1 << (4 * tokens + 4).bit_length(), -1, np.int32)
        kernels.rehash(self._edges, self._table, self._counts)

    def extend(self, tokens: Sequence[int]) -> None:
        needed = int(self._counts[kernels.TEXT_USED]) + len(tokens)
        if needed > len(self._text):
            self._grow(2 * needed)
        kernels.extend(
            self._states, self._edges, self._table, self._text, self._counts, np.array(tokens, np.int32)
        )  # fmt: skip

    def continuation(self, k: int, ahead: Sequence[int] = ()) -> tuple[list[int], int, int]:
        """Find the longest suffix that also occurs earlier. Return the k tokens after the earlier occurrence, the length of
        the suffix, and the position of the first returned token. Without a repeated suffix, return no tokens.

        ahead: tokens that count as the end of the text, but are not appended to the text.
        """
        made = np.empty(k, np.int32)
        matched, first = kernels.continuation(
            self._states, self._edges, self._table, self._text, self._counts, np.array(ahead, np.int32), made
        )  # fmt: skip
        return (made.tolist() if matched else []), int(matched), int(first)


class Lookup:
    """Finds the longest suffix of prompt and answer that occurs earlier, and guesses the tokens after the earlier place.

    With a prediction, the index holds: prompt, separator, prediction, separator, answer. At the beginning of the answer, the
    longest repeated suffix is the separator, so the first guesses are the beginning of the prediction.
    """

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int] = ()) -> None:
        self._index = SuffixIndex()
        begin = len(prompt) + 1
        self._prediction = range(begin, begin + len(prediction))
        between = [_SEPARATOR, *prediction, _SEPARATOR] if prediction else []
        self._pending = [*prompt, *between]  # tokens that are not in the index yet

    def extend(self, tokens: Sequence[int]) -> None:
        self._pending += tokens

    def propose(self, k: int, ahead: Sequence[int] = ()) -> Draft:
        if self._pending:
            self._index.extend(self._pending)
            self._pending = []
        tokens, matched, first = self._index.continuation(k, ahead)
        if _SEPARATOR in tokens:
            del tokens[tokens.index(_SEPARATOR) :]
        return Draft(tuple(tokens), matched, first in self._prediction)


def warm_up() -> None:
    Lookup([1, 2, 1]).propose(1)
