"""What a scheduler tells the listener of a request, in order: progress and scores of the prompt, then tokens, then one end."""

from collections.abc import Callable
from dataclasses import dataclass

from gemma_py.errors import GemmaError
from gemma_py.generate.core import Token, TopLogprobs


@dataclass(frozen=True)
class Usage:
    """prompt, cached, generated: tokens; cached are those of the prompt that were found in the prefix cache. Seconds from the
    request's arrival: until it was admitted, until its first token, until now."""

    prompt: int
    cached: int
    generated: int
    queued_seconds: float
    first_token_seconds: float
    seconds: float


@dataclass(frozen=True)
class PrefillProgress:
    """The progress of the prompt, in tokens: computed so far, in all, and found in the prefix cache."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True)
class Generated:
    """A token of the answer."""

    token: Token
    top: TopLogprobs


@dataclass(frozen=True)
class Scored:
    """A token of the prompt. logprob: given the tokens before it; None for the first."""

    id: int
    logprob: float | None
    top: TopLogprobs


@dataclass(frozen=True)
class Finished:
    """The last event. reason: "stop", "length" or "cancelled"."""

    reason: str
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """The last event of a request that an error ended."""

    error: GemmaError


Event = PrefillProgress | Scored | Generated | Finished | Failed
Listener = Callable[[Event], None]
