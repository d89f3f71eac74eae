"""Requests, and the choice of an answer's tokens from logits.

A `Request` holds the prompt and the options. A `Generation` checks a request against a model, samples the tokens,
streams the text and decides when the answer ends. `Engine`, `Conversation` and `Scheduler` compute the logits and pass
them to a `Generation`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gemma_py.errors import InputError
from gemma_py.generate.answer import AnswerStream, Constraint, Part, stop_strings
from gemma_py.generate.draft_model import GuessedSequence
from gemma_py.generate.drafting import Draft, Lookup
from gemma_py.generate.evidence import Evidence, asked_for
from gemma_py.generate.options import Sampling, check_mode
from gemma_py.generate.sampling import Sampler, likeliest, log_probabilities
from gemma_py.generate.speculation import MOST_GUESSES, Pace, Speculation
from gemma_py.receipts.receipt import ModelIdentity, Receipt
from gemma_py.runtime.cache import check_context
from gemma_py.templates.notation import Marks
from gemma_py.templates.tools import Call
from gemma_py.tokenizer import Tokenizer

_MOST_TOP = 100
TopLogprobs = tuple[tuple[int, float], ...]  # pairs of token id and log probability, the likeliest token first


@dataclass(frozen=True)
class Token:
    """A generated token.

    text: the text that becomes complete with this token; the texts of all tokens, joined, are the answer.
    logprob: the log probability before penalties, temperature and filters; NaN if the request does not ask for it.
    finish_reason: for the last token, "stop" (an end token or a stop string) or "length" (max_tokens reached); otherwise
    None.
    reasoning: text of a thought, which is not part of the answer; None if the token belongs to no thought.
    calls: the tool calls that become complete with this token.
    receipt: how the answer was made; only on the last token, and only if the request asks for a receipt.
    """

    id: int
    text: str
    logprob: float
    finish_reason: str | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    receipt: Receipt | None = None


@dataclass(frozen=True)
class Request:
    """The prompt and the options of one request.

    ids: the token ids of the prompt.
    max_tokens: the most tokens to generate. 0 computes only the prompt, and only the scheduler accepts 0.
    fit: if the context has no room for max_tokens, generate fewer. Without this option, ContextError is raised.
    stop: strings that end the answer.
    ends: token ids that end the answer.
    trim: remove white space at the beginning of the answer.
    logprobs: compute the log probability of each token.
    top_logprobs: the number of likeliest tokens to report at each position.
    scored: report the prompt's log probabilities too. The prefix cache is then not used, because it has no logits.
    marks: the marks of thoughts and tool calls, which are then separated from the answer's text.
    speculate: "auto" lets a pass compute guessed tokens too where that saves time, "off" does not; None is the engine's
    default. The answer does not depend on this option.
    prediction: token ids that the answer may consist of in large part, for better guesses.
    receipt: collect what a receipt of the answer needs.
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
    marks: Marks | None = None
    speculate: str | None = None
    prediction: Sequence[int] = ()
    receipt: bool = False


class Generation:
    """A request in progress. The constructor raises InputError or ContextError if the request is invalid.

    prompt: the token ids of the prompt.
    generated: the token ids chosen so far.
    top: the likeliest tokens at the position of the last chosen token.
    max_tokens: the most tokens that the answer can have within the context.
    sampling: the request's sampling options, in which a missing seed is replaced by a random one.
    speculation: the guesses of the answer's next tokens.
    """

    def __init__(
        self,
        request: Request,
        vocab_size: int,
        context: int,
        tokenizer: Tokenizer | None,
        pace: Pace,
        least_tokens: int = 1,
    ) -> None:
        if not is_whole(request.max_tokens, least_tokens):
            raise InputError(f"max_tokens should be at least {least_tokens}, found {request.max_tokens!r:.40}")
        if not is_whole(request.top_logprobs, 0) or request.top_logprobs > min(_MOST_TOP, vocab_size):
            raise InputError(f"top_logprobs should be 0 to {_MOST_TOP}, found {request.top_logprobs!r:.40}")
        self.request = request
        self.prompt = check_ids(request.ids, vocab_size)
        self.generated: list[int] = []
        self.top: TopLogprobs = ()
        check_context(context, len(self.prompt), new=min(1, request.max_tokens) if request.fit else request.max_tokens)
        self.max_tokens = min(request.max_tokens, context - len(self.prompt))
        self._sampler = Sampler(request.sampling, vocab_size, self.prompt)
        self.sampling = self._sampler.sampling
        self._stream = AnswerStream(tokenizer, stop_strings(request.stop), request.trim, request.marks, self.prompt)
        check_mode(request.speculate)
        self._pace = pace
        prediction = check_ids(request.prediction, vocab_size) if request.prediction else []
        drafter = Lookup(self.prompt, prediction) if request.speculate == "auto" else None
        self.speculation = Speculation(drafter, pace, Draft(tuple(prediction[:1]), 1, True))
        self._evidence: Evidence | None = None

    def use_draft_model(self, sequence: GuessedSequence) -> None:
        """Let the draft model guess tokens of the answer. sequence: the draft model's state for this request's sequence."""
        self.speculation.use_model(sequence.drafter(self._pace, self.prompt, self._sampler))

    def guess_chances(self) -> list[float]:
        """Draft guesses of the next tokens. Element n of the result is the probability that guesses 0 to n all hold.

        A pass with n guesses chooses up to n + 1 tokens, so there are fewer guesses than tokens left to generate.
        """
        most, constraint = self.max_tokens - len(self.generated) - 1, self.request.constraint
        if constraint is None or self.request.speculate != "auto":
            return self.speculation.chances(most)
        return self.speculation.chances(most, constraint.forced(min(most, MOST_GUESSES)))

    def collect_evidence(self, model: ModelIdentity) -> None:
        """Prepare for `receipt`. Call this before the first token."""
        if self.max_tokens < 1:
            raise InputError("an answer without tokens has no receipt; max_tokens should be at least 1")
        self._evidence = Evidence(model)

    def receipt(self, kv: Sequence[str]) -> Receipt:
        """Return the receipt of the complete answer. The request must have asked for a receipt.

        kv: the digests of the KV cache after the last pass, which `Session.kv_digest` returns
        """
        if self._evidence is None:
            raise InputError("the request did not ask for a receipt")
        return self._evidence.receipt(self.prompt, asked_for(self.request, self.max_tokens, self.sampling), kv)

    def sample(self, logits: np.ndarray, guesses: Sequence[int] = ()) -> list[int]:
        """Return the next token, and if it equals the first guess, the token after it, and so on.

        The answer stays as it is, so several requests can sample in several threads.

        logits: [1 + guesses, V]
        """
        constraint, sampled = self.request.constraint, list[int]()
        for row, guess in zip(logits, (*guesses, None), strict=True):
            row = row if constraint is None else constraint.allowed(row)
            sampled.append(self._sampler.choose(row, [*self.generated, *sampled] if sampled else self.generated))
            # The grammar allows other tokens once it has accepted a token.
            if sampled[-1] != guess or constraint is not None:
                break
        return sampled

    def next(self, logits: np.ndarray, sampled: int | None = None) -> Token:
        """Choose the next token.

        logits: [V], computed from the prompt and all tokens chosen so far. sampled: the token that `sample` returned for these logits
        """
        if self._evidence is None:
            return self._next(logits, sampled)
        self._evidence.add_row(logits)
        token = self._next(logits, sampled)
        self._evidence.add_token(token)
        return token

    def _next(self, logits: np.ndarray, sampled: int | None) -> Token:
        constraint = self.request.constraint
        token = self.sample(logits[None])[0] if sampled is None else sampled
        logprob, self.top = math.nan, ()
        if self.request.logprobs or self.request.top_logprobs:
            logprob, self.top = self.score(logits, token)
        self.generated.append(token)
        self.speculation.extend(token)
        if token in self.request.ends:
            return _token(token, self._stream.finish(), logprob, "stop")
        if constraint is not None:
            constraint.accept(token)
        part = self._stream.push(token)
        reason = None
        if self._stream.stopped or (constraint is not None and constraint.finished):
            reason = "stop"
        elif len(self.generated) == self.max_tokens:
            reason = "length"
        if reason is not None:
            rest = self._stream.finish()
            reasoning = part.reasoning if rest.reasoning is None else (part.reasoning or "") + rest.reasoning
            part = Part(part.text + rest.text, reasoning, part.calls)
            if self._stream.stopped:
                reason = "stop"
        return _token(token, part, logprob, reason)

    def tokens(
        self, logits: np.ndarray, decode: Callable[[int], np.ndarray], kv_digest: Callable[[], list[str]]
    ) -> Iterator[Token]:
        """Yield the tokens of the answer. The next pass runs when the caller asks for the next token.

        logits: [V], of the last token of the prompt. kv_digest: `Session.kv_digest`, which is called only for a receipt.
        """
        while True:
            token = self.next(logits)
            if token.finish_reason is not None and self.request.receipt:
                token = replace(token, receipt=self.receipt(kv_digest()))
            yield token
            if token.finish_reason is not None:
                return
            del logits  # it keeps all rows of the last pass in memory
            logits = decode(token.id)

    def score(self, logits: np.ndarray, token: int) -> tuple[float, TopLogprobs]:
        """Return the log probability of a token, and the `top_logprobs` likeliest tokens with their log probabilities.

        logits: [V]
        """
        count = self.request.top_logprobs
        ids = likeliest(logits, count)[1].tolist() if count else []
        logprob, *of_ids = log_probabilities(logits, [token, *ids])
        return logprob, tuple(zip(ids, of_ids, strict=True))


def _token(token: int, part: Part, logprob: float, reason: str | None) -> Token:
    return Token(token, part.text, logprob, reason, part.reasoning, part.calls)


def check_ids(ids: Any, vocab_size: int) -> list[int]:
    """Raise InputError if the list is empty, or an id is no whole number or outside the vocabulary."""
    try:
        if isinstance(ids, bytes | bytearray):
            raise TypeError
        checked = [token if type(token) is int else _exact(token) for token in ids]
    except (TypeError, ValueError, OverflowError):
        raise InputError("token ids should be whole numbers") from None
    if not checked:
        raise InputError("expected at least one token, found none")
    if min(checked) < 0 or max(checked) >= vocab_size:
        position, token = next(pair for pair in enumerate(checked) if not 0 <= pair[1] < vocab_size)
        raise InputError(f"token id {token} at position {position} is outside the vocabulary of {vocab_size}")
    return checked


def _exact(token: Any) -> int:
    """Convert a whole number to int. Raise ValueError, or the error of `int`, for any other value."""
    number = int(token)
    if isinstance(token, bool | np.bool_) or token != number:
        raise ValueError
    return number


def is_whole(value: object, least: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def whole(name: str, value: Any, least: int | None = 0) -> int:
    """Return the value as an int. Raise InputError if the value is not a whole number, or is below `least`."""
    number = int(value) if isinstance(value, np.integer) else value
    if not is_whole(number, least):
        allowed = "" if least is None else f" from {least}"
        raise InputError(f"{name} should be a whole number{allowed}, found {value!r:.40}")
    return number
