"""The events that a scheduler sends to the listener of a request.

The order is PrefillProgress and Scored for the prompt, Generated for each token of the answer, then Finished or Failed. A
request for embeddings has one Embedded event, then Finished, or only Failed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gemma_py.errors import GemmaError
from gemma_py.generate.core import Token, TopLogprobs
from gemma_py.receipts.receipt import Receipt


@dataclass(frozen=True)
class Usage:
    """Token counts and times of a request.

    prompt, generated: the number of tokens of the prompt and of the answer.
    cached: the number of prompt tokens that were found in the prefix cache.
    queued_seconds: the time that the request waited until it began to run.
    first_token_seconds: the time from the request's arrival until the first token.
    seconds: the time since the request's arrival.
    predicted: the number of tokens of the answer that the request's prediction guessed.
    """

    prompt: int
    cached: int
    generated: int
    queued_seconds: float
    first_token_seconds: float
    seconds: float
    predicted: int = 0


@dataclass(frozen=True)
class PrefillProgress:
    """How much of a prompt is in the KV cache: `done` of `total` tokens, of which `cached` came from the prefix cache."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True)
class Generated:
    """A token of the answer, and the likeliest tokens at the same position."""

    token: Token
    top: TopLogprobs


@dataclass(frozen=True)
class Scored:
    """A token of the prompt.

    logprob: the log probability of the token, given the tokens before the token; None for the first token
    """

    id: int
    logprob: float | None
    top: TopLogprobs


@dataclass(frozen=True)
class Embedded:
    """The embeddings of the texts of a request, as `embed_all` returns them."""

    rows: np.ndarray


@dataclass(frozen=True)
class Finished:
    """The last event of a request that ended without an error. reason: "stop", "length" or "cancelled".

    receipt: a function that returns the answer's receipt, or None if the request does not ask for one. The function hashes
    the KV rows, which takes milliseconds to seconds, so the scheduler's thread should not call the function.
    """

    reason: str
    usage: Usage
    receipt: Callable[[], Receipt] | None = None


@dataclass(frozen=True)
class Failed:
    error: GemmaError


Event = PrefillProgress | Scored | Generated | Embedded | Finished | Failed
Listener = Callable[[Event], None]
