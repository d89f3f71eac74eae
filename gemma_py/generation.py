"""The loop that every way of generating shares: choose a token, give it, compute the next logits."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from gemma_py.sampling import Sampler
from gemma_py.score import log_probability
from gemma_py.stream import TextStream


@dataclass(frozen=True)
class Token:
    """text: what becomes certain with this token; all texts joined are the answer. logprob: the model's own, before any
    penalty, temperature or filter. finish_reason is None but on the last: "stop" (an end token or a stop string) or
    "length".
    """

    id: int
    text: str
    logprob: float
    finish_reason: str | None = None


def generate(
    logits: np.ndarray,
    decode: Callable[[int], np.ndarray],
    sampler: Sampler,
    stream: TextStream,
    ends: Collection[int],
    max_tokens: int,
) -> Iterator[Token]:
    """Tokens after the prompt, whose last logits are given. A token is computed only when the one after it is asked for."""
    made: list[int] = []
    while True:
        token = sampler.choose(logits, made)
        logprob = log_probability(logits, token)
        made.append(token)
        if token in ends:
            yield Token(token, stream.finish(), logprob, "stop")
            return
        text = stream.push(token)
        if not stream.stopped and len(made) == max_tokens:
            text += stream.finish()
        reason = "stop" if stream.stopped else "length" if len(made) == max_tokens else None
        yield Token(token, text, logprob, reason)
        if reason is not None:
            return
        logits = decode(token)
