"""What every way of generating shares: choose a token, say its text, know when the answer ends."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gemma_py.generate.sampling import Sampler
from gemma_py.generate.score import log_probability
from gemma_py.generate.text_stream import TextStream


@dataclass(frozen=True)
class Token:
    """text: what becomes certain with this token; all texts joined are the answer. logprob: the model's own, before any
    penalty, temperature or filter; NaN where nobody asked for it. finish_reason is None but on the last: "stop" (an end
    token or a stop string) or "length".
    """

    id: int
    text: str
    logprob: float
    finish_reason: str | None = None


class Constraint(Protocol):
    """What a grammar allows."""

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        """The logits [V] if every token may come next, else a copy with -inf for those that may not."""

    def accept(self, token: int) -> None:
        """The token that was chosen."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, and nothing may follow."""


class Continuation:
    """The tokens after a prompt, as they are chosen."""

    def __init__(
        self,
        sampler: Sampler,
        stream: TextStream,
        ends: Collection[int],
        max_tokens: int,
        constraint: Constraint | None = None,
        logprobs: bool = True,
    ) -> None:
        self._sampler, self._stream, self._ends = sampler, stream, ends
        self._max_tokens, self._constraint, self._logprobs = max_tokens, constraint, logprobs
        self.made: list[int] = []

    def next(self, logits: np.ndarray) -> Token:
        """The token that these logits choose.    logits: [V], after all tokens so far"""
        allowed = logits if self._constraint is None else self._constraint.allowed(logits)
        token = self._sampler.choose(allowed, self.made)
        logprob = log_probability(logits, token) if self._logprobs else math.nan
        self.made.append(token)
        if token in self._ends:
            return Token(token, self._stream.finish(), logprob, "stop")
        if self._constraint is not None:
            self._constraint.accept(token)
        text = self._stream.push(token)
        reason = None
        if self._stream.stopped or (self._constraint is not None and self._constraint.finished):
            reason = "stop"
        elif len(self.made) == self._max_tokens:
            reason = "length"
        if reason is not None:
            text += self._stream.finish()
            if self._stream.stopped:  # a stop string may be complete only with what was held back
                reason = "stop"
        return Token(token, text, logprob, reason)


def generate(logits: np.ndarray, decode: Callable[[int], np.ndarray], continuation: Continuation) -> Iterator[Token]:
    """Tokens after the prompt, whose last logits are given. A token is computed only when the one after it is asked for."""
    while True:
        token = continuation.next(logits)
        yield token
        if token.finish_reason is not None:
            return
        logits = decode(token.id)
