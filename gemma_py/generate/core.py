"""The generation core: what a request asks for, and the tokens that its logits choose.

A `Request` is data. A `Generation` is one request checked against a model: it chooses each token, streams the text and knows
when the answer ends. It computes no logits: `Engine`, `Conversation` and `Scheduler` do, each at its own pace.
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
    """text: what becomes certain with this token; all texts joined are the answer. logprob: the model's own, before any
    penalty, temperature or filter; NaN where the request asks for none. finish_reason is None but on the last token: "stop"
    (an end token or a stop string) or "length".
    """

    id: int
    text: str
    logprob: float
    finish_reason: str | None = None


class Constraint(Protocol):
    """What a grammar allows. It has a state, so each request needs one of its own."""

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        """The logits [V] if every token may come next, else a copy with -inf for those that may not."""

    def accept(self, token: int) -> None:
        """Advance by the token that was chosen."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, and nothing may follow."""


@dataclass(frozen=True)
class Request:
    """ids: the prompt. max_tokens: 0 for the prompt alone, which only the scheduler computes. fit: generate fewer where the
    context has no room for max_tokens, but at least 1. stop: strings that end the answer; ends: tokens that do. trim: leave
    out white space in front of the answer. logprobs: whether its tokens have log probabilities. top_logprobs: how many of the
    likeliest tokens to report at each position. scored: report both for the prompt's tokens too, so all of them are computed,
    whatever the prefix cache holds."""

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
    """One request on its way. Whatever is invalid about the request is raised when this is made.

    prompt: its ids. made: the tokens chosen so far. top: the likeliest tokens at the last one's position. max_tokens: how many
    there can be. sampling: as asked for, with a seed.
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
        self.made: list[int] = []
        self.top: TopLogprobs = ()
        check_context(context, len(self.prompt), new=min(1, request.max_tokens) if request.fit else request.max_tokens)
        self.max_tokens = min(request.max_tokens, context - len(self.prompt))
        self._sampler = Sampler(request.sampling, vocab_size, self.prompt)
        self.sampling = self._sampler.sampling
        self._stream = TextStream(tokenizer, stop_strings(request.stop), request.trim)

    def next(self, logits: np.ndarray) -> Token:
        """The token that these logits choose.    logits: [V], after the prompt and all tokens so far"""
        constraint = self.request.constraint
        allowed = logits if constraint is None else constraint.allowed(logits)
        token = self._sampler.choose(allowed, self.made)
        logprob, self.top = math.nan, ()
        if self.request.logprobs or self.request.top_logprobs:
            logprob, self.top = self.score(logits, token)
        self.made.append(token)
        if token in self.request.ends:
            return Token(token, self._stream.finish(), logprob, "stop")
        if constraint is not None:
            constraint.accept(token)
        text = self._stream.push(token)
        reason = None
        if self._stream.stopped or (constraint is not None and constraint.finished):
            reason = "stop"
        elif len(self.made) == self.max_tokens:
            reason = "length"
        if reason is not None:
            text += self._stream.finish()
            if self._stream.stopped:  # a stop string may be complete only with what was held back
                reason = "stop"
        return Token(token, text, logprob, reason)

    def tokens(self, logits: np.ndarray, decode: Callable[[int], np.ndarray]) -> Iterator[Token]:
        """All tokens, from the logits of the prompt's last. A token is computed only when the one after it is asked for."""
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
    """The ids as plain integers, at least one, all within the vocabulary."""
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
    """One or several, none of them empty."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop should be one string or several, none of them empty, found {stop!r:.60}")
    return strings


class TextStream:
    """Decodes ids that come one by one: never half a character, and nothing of a stop string. A piece costs its own ids only.

    Byte tokens are held back, because they are text only as a run, which one more can make invalid; so is text with which a
    stop string may begin. `stopped` is set once one is complete; its text and all after it are never given. trim: leave out
    white space in front.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), trim: bool = False) -> None:
        if stop and tokenizer is None:
            raise InputError("stop strings need text, and the checkpoint has no tokenizer")
        self._tokenizer, self._stop, self._trim = tokenizer, tuple(stop), trim
        self._run: list[int] = []  # ids whose text a later one may change
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """What becomes certain with this token."""
        if self._tokenizer is None or token >= self._tokenizer.size:
            return ""  # some embeddings have more rows than the tokenizer has pieces; such ids mean no text
        self._run.append(token)
        settled = self._tokenizer.settled(self._run)
        if settled == 0:
            return ""
        text = self._tokenizer.decode(self._run[:settled])
        del self._run[:settled]
        return self._pass(text)

    def finish(self) -> str:
        """What is left when no token follows."""
        if self.stopped:
            return ""
        text = self._pass(self._tokenizer.decode(self._run) if self._tokenizer and self._run else "")
        self._run.clear()
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _pass(self, new: str) -> str:
        text = self._held + new
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text a stop string may begin with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
