"""Requests, and the choice of an answer's tokens from logits.

A `Request` holds the prompt and the options. A `Generation` checks a request against a model, samples the tokens,
streams the text and decides when the answer ends. `Engine`, `Conversation` and `Scheduler` compute the logits and call
a `Generation`.
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

_MOST_TOP = 100  # the largest top_logprobs of a request
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log probability), likeliest token first


@dataclass(frozen=True)
class Token:
    """A generated token.

    text: the text that the token completes; the texts of all tokens, joined, are the answer.
    logprob: the log probability of the token before penalties, temperature and filters; NaN if the request asks for no
    log probabilities.
    finish_reason: None, except for the last token: "stop" (an end token or a stop string) or "length" (max_tokens
    reached).
    """

    id: int
    text: str
    logprob: float
    finish_reason: str | None = None


class Constraint(Protocol):
    """A grammar that restricts the tokens of one answer. A grammar has state, so requests cannot share one."""

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        """Return the logits [V] if every token is allowed, else a copy with -inf for the forbidden tokens."""

    def accept(self, token: int) -> None:
        """Advance the state of the grammar by the chosen token."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, so that generation has to stop."""


@dataclass(frozen=True)
class Request:
    """The prompt and the options of one request.

    ids: the token ids of the prompt.
    max_tokens: the most tokens to generate. 0 computes only the prompt, and only the scheduler accepts 0.
    fit: if the context has no room for max_tokens, generate as many tokens as fit instead of raising ContextError.
    stop: strings that end the answer.
    ends: token ids that end the answer.
    trim: remove white space at the beginning of the answer.
    logprobs: compute the log probability of each token.
    top_logprobs: the number of likeliest tokens to report at each position.
    scored: report log probabilities for the prompt's tokens too. The prefix cache is not used then, because
    cached tokens have no logits.
    """

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
    """A request in progress. The constructor raises InputError or ContextError if the request is invalid.

    prompt: the token ids of the prompt.
    generated: the token ids chosen so far.
    top: the likeliest tokens at the position of the last chosen token.
    max_tokens: the most tokens that the answer can have within the context.
    sampling: the sampling options of the request, with a random seed if the request has none.
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
        """Choose the next token.

        logits: [V], computed from the prompt and all tokens chosen so far
        """
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
            if self._stream.stopped:  # `finish` found a stop string
                reason = "stop"
        return Token(token, text, logprob, reason)

    def tokens(self, logits: np.ndarray, decode: Callable[[int], np.ndarray]) -> Iterator[Token]:
        """Yield the tokens of the answer. A token is decoded only when the caller asks for the next one.

        logits: [V], of the last token of the prompt
        """
        while True:
            token = self.next(logits)
            yield token
            if token.finish_reason is not None:
                return
            logits = decode(token.id)

    def score(self, logits: np.ndarray, token: int) -> tuple[float, TopLogprobs]:
        """Return the log probability of a token, and the `top_logprobs` likeliest tokens with their log probabilities.

        logits: [V]
        """
        count = self.request.top_logprobs
        ids = likeliest(logits, count)[1].tolist() if count else []
        logprob, *of_ids = log_probabilities(logits, [token, *ids])
        return logprob, tuple(zip(ids, of_ids, strict=True))


def check_ids(ids: Any, vocab_size: int) -> list[int]:
    """Return the ids as a list of int. Raise InputError if there are none or one is outside the vocabulary."""
    try:
        checked = [int(token) for token in ids]
        exact = all(not isinstance(token, bool) and token == n for token, n in zip(ids, checked, strict=True))
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        raise InputError("token ids should be whole numbers")
    if not checked:
        raise InputError("expected at least one token, found none")
    for position, token in enumerate(checked):
        if not 0 <= token < vocab_size:
            raise InputError(f"token id {token} at position {position} is outside the vocabulary of {vocab_size}")
    return checked


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# --- the text of an answer --------------------------------------------------------------------------------------------


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings as a tuple. Raise InputError if a stop string is empty."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop should be a non-empty string or a list of them, found {stop!r:.60}")
    return strings


class TextStream:
    """Decodes token ids to text, one by one. The text ends before the first stop string.

    Two kinds of text are held back: byte tokens until the next token of another kind, because one more byte can make
    the sequence invalid UTF-8; and text that may be the beginning of a stop string.

    trim: remove white space at the beginning of the text.
    stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), trim: bool = False) -> None:
        if stop and tokenizer is None:
            raise InputError("stop strings need a tokenizer, but the checkpoint has none")
        self._tokenizer, self._stop, self._trim = tokenizer, tuple(stop), trim
        self._run: list[int] = []  # ids held back, because a later byte token may change the text
        self._held_back = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that this token completes, often an empty string."""
        if self._tokenizer is None or token >= self._tokenizer.size:
            return ""  # an id that only pads the embedding matrix has no text
        self._run.append(token)
        final = self._tokenizer.final_prefix(self._run)
        if final == 0:
            return ""
        text = self._tokenizer.decode(self._run[:final])
        del self._run[:final]
        return self._pass(text)

    def finish(self) -> str:
        """Return the text that is still held back. Called after the last token."""
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
    """Return the length of the longest end of the text that is the beginning, but not the whole, of the stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
