"""The generation core: requests, and the choice of tokens from logits.

A `Request` is data. A `Generation` is one request checked against a model: it samples each token, streams the text and decides
when the answer ends. It computes no logits; `Engine`, `Conversation` and `Scheduler` do, and call it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gemma_py.errors import InputError
from gemma_py.generate.options import Sampling
from gemma_py.generate.sampling import Sampler, likeliest, log_probabilities
from gemma_py.runtime.cache import check_context
from gemma_py.tokenizer import Tokenizer

_MOST_TOP = 100  # alternatives of a token
TopLogprobs = tuple[tuple[int, float], ...]  # the likeliest tokens at a position with their log probabilities, in order


@dataclass(frozen=True)
class Token:
    """text: the text that this token completes; all texts joined are the answer. logprob: the model's own, before any
    penalty, temperature or filter; NaN where the request asks for none. finish_reason is None but on the last token: "stop"
    (an end token or a stop string) or "length".
    """

    id: int
    text: str
    logprob: float
    finish_reason: str | None = None


class Constraint(Protocol):
    """A grammar that restricts the tokens of an answer. It has a state, so each request needs its own."""

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        """The logits [V] themselves if every token is allowed, else a copy with -inf for the tokens that are not."""

    def accept(self, token: int) -> None:
        """Advance the state by the token that was chosen."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, so that no token may follow."""


@dataclass(frozen=True)
class Request:
    """ids: the prompt. max_tokens: 0 computes the prompt only, which only the scheduler supports. fit: generate fewer tokens where
    the context has no room for max_tokens, but at least 1. stop: strings that end the answer. ends: token ids that end it. trim:
    remove white space at the beginning of the answer. logprobs: whether tokens have log probabilities. top_logprobs: how many of
    the likeliest tokens to report at each position. scored: report both for the tokens of the prompt too; all of them are then
    computed, even if the prefix cache has them."""

    ids: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    fit: bool = False
    stop: Sequence[str] = ()
    ends: frozenset[int] = frozenset()
    trim: bool = False
    logprobs: bool = True
    top_logprobs: int = 0
    constraint: Constraint | None = None
    scored: bool = False


class Generation:
    """One request in progress. The constructor raises InputError or ContextError if the request is invalid.

    prompt: its ids. generated: the tokens chosen so far. top: the likeliest tokens at the position of the last one. max_tokens:
    the most tokens that the answer can have. sampling: the request's sampling, with a seed.
    """

    def __init__(
        self, request: Request, vocab_size: int, context: int, tokenizer: Tokenizer | None, least_tokens: int = 1
    ) -> None:
        if not _is_whole(request.max_tokens, least_tokens):
            raise InputError(f"max_tokens should be at least {least_tokens}, found {request.max_tokens!r:.40}")
        if not _is_whole(request.top_logprobs, 0) or request.top_logprobs > min(_MOST_TOP, vocab_size):
            raise InputError(f"top_logprobs should be 0 to {_MOST_TOP}, found {request.top_logprobs!r:.40}")
        self.request = request
        self.prompt = check_ids(request.ids, vocab_size)
        self.generated: list[int] = []
        self.top: TopLogprobs = ()
        check_context(context, len(self.prompt), new=min(1, request.max_tokens) if request.fit else request.max_tokens)
        self.max_tokens = min(request.max_tokens, context - len(self.prompt))
        self._sampler = Sampler(request.sampling, vocab_size, self.prompt)
        self.sampling = self._sampler.sampling
        self._stream = TextStream(tokenizer, stop_strings(request.stop), request.trim)

    def next(self, logits: np.ndarray) -> Token:
        """Choose the next token from these logits.    logits: [V], after the prompt and all tokens so far"""
        constraint = self.request.constraint
        allowed = logits if constraint is None else constraint.allowed(logits)
        token = self._sampler.choose(allowed, self.generated)
        logprob, self.top = math.nan, ()
        if self.request.logprobs or self.request.top_logprobs:
            logprob, self.top = self.score(logits, token)
        self.generated.append(token)
        if token in self.request.ends:
            return Token(token, self._stream.finish(), logprob, "stop")
        if constraint is not None:
            constraint.accept(token)
        text = self._stream.push(token)
        reason = None
        if self._stream.stopped or (constraint is not None and constraint.finished):
            reason = "stop"
        elif len(self.generated) == self.max_tokens:
            reason = "length"
        if reason is not None:
            text += self._stream.finish()
            if self._stream.stopped:  # the text that was held back may complete a stop string
                reason = "stop"
        return Token(token, text, logprob, reason)

    def tokens(self, logits: np.ndarray, decode: Callable[[int], np.ndarray]) -> Iterator[Token]:
        """Yield the answer's tokens. logits: of the prompt's last token. A token is decoded only when the next one is asked for."""
        while True:
            token = self.next(logits)
            yield token
            if token.finish_reason is not None:
                return
            logits = decode(token.id)

    def score(self, logits: np.ndarray, token: int) -> tuple[float, TopLogprobs]:
        """The token's log probability, and the likeliest tokens with theirs, as many as requested.    logits: [V]"""
        count = self.request.top_logprobs
        ids = likeliest(logits, count)[1].tolist() if count else []
        logprob, *of_ids = log_probabilities(logits, [token, *ids])
        return logprob, tuple(zip(ids, of_ids, strict=True))


def check_ids(ids: Any, vocab_size: int) -> list[int]:
    """The ids as plain integers; InputError unless there is at least one and all are in the vocabulary."""
    try:
        checked = [int(token) for token in ids]
        exact = all(not isinstance(token, bool) and token == n for token, n in zip(ids, checked, strict=True))
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        raise InputError("token ids should be whole numbers")
    if not checked:
        raise InputError("no tokens given")
    for position, token in enumerate(checked):
        if not 0 <= token < vocab_size:
            raise InputError(f"token id {token} at position {position} is outside the vocabulary of {vocab_size}")
    return checked


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# --- the text of an answer --------------------------------------------------------------------------------------------


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings as a tuple; InputError if one of them is empty."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop should be one string or several, none of them empty, found {stop!r:.60}")
    return strings


class TextStream:
    """Decodes ids one by one, without incomplete characters and without stop strings. Each id is decoded once.

    Byte tokens are held back until their run ends, because one more byte can make all of it invalid; so is text with which a
    stop string may begin. `stopped` is set when a stop string is complete; neither it nor the text after it is returned. trim:
    remove white space at the beginning.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), trim: bool = False) -> None:
        if stop and tokenizer is None:
            raise InputError("stop strings need text, and the checkpoint has no tokenizer")
        self._tokenizer, self._stop, self._trim = tokenizer, tuple(stop), trim
        self._run: list[int] = []  # ids whose text a later one may change
        self._held_back = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token completes."""
        if self._tokenizer is None or token >= self._tokenizer.size:
            return ""  # the embedding may have more rows than the tokenizer has pieces; such ids have no text
        self._run.append(token)
        final = self._tokenizer.final_prefix(self._run)
        if final == 0:
            return ""
        text = self._tokenizer.decode(self._run[:final])
        del self._run[:final]
        return self._pass(text)

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        if self.stopped:
            return ""
        text = self._pass(self._tokenizer.decode(self._run) if self._tokenizer and self._run else "")
        self._run.clear()
        if not self.stopped:
            text, self._held_back = text + self._held_back, ""
        return text

    def _pass(self, new: str) -> str:
        text = self._held_back + new
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held_back = ""
            return text[: min(found)]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held_back = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text with which the stop string begins."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
