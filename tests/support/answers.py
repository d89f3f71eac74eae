"""Random requests, and their answers in a form that can be compared."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from drafters import Answers
from equivalence import prompt

import gemma_py
from gemma_py.generate.core import Request, Token, TopLogprobs
from gemma_py.generate.options import Sampling
from gemma_py.generate.session import Decoder
from gemma_py.generate.speculation import Speculation


class Outcome(NamedTuple):
    tokens: list[tuple[int, str, int, str | None]]  # id, text, bits of the log probability, finish reason
    tops: list[TopLogprobs]
    ids: list[int]
    digest: list[str]


def told(token: Token) -> tuple[int, str, int, str | None]:
    return token.id, token.text, np.array(token.logprob).view(np.int64).item(), token.finish_reason


def outcome(engine: gemma_py.Engine, request: Request) -> tuple[Outcome, Speculation]:
    generation, session = engine.generation(request), engine.session()
    tokens, tops = [], []
    logits, decode = session.prefill(generation.prompt), Decoder(session, generation).decode
    for token in generation.tokens(logits, decode, session.kv_digest):
        tokens.append(told(token))
        tops.append(generation.top)
        # Rejected guesses are not in the session.
        assert session.ids == [*generation.prompt, *generation.generated[:-1]]
    return Outcome(tokens, tops, session.ids, session.kv_digest()), generation.speculation


SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.0, seed=4),
    "top-k": Sampling(temperature=0.8, top_k=5, seed=1),
    "top-p": Sampling(temperature=0.8, top_p=0.6, seed=2),
    "min-p": Sampling(temperature=1.5, min_p=0.2, seed=3),
    "penalties": Sampling(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5),
    "drawn with penalties": Sampling(temperature=1.0, frequency_penalty=1.0, logit_bias={7: 5.0}, seed=6),
}


def requests(engine: gemma_py.Engine) -> Iterator[Request]:
    """The answers end by length, at the end of the context, by a stop string or by an end token."""
    ids, ends = prompt(engine.config, 30), frozenset(engine.config.eos_token_ids)
    for number, sampling in enumerate(SAMPLINGS.values()):
        yield Request(ids[number:] * 2, 40, sampling, ends=ends, top_logprobs=number % 3)
    near = prompt(engine.config, engine.context - 20)
    yield Request(near, 20, Sampling(), ends=ends)
    yield Request(near, 50, Sampling(), ends=ends, fit=True, logprobs=False)
    first, _ = outcome(engine, Request(ids, 30, Sampling(), speculate="off"))
    yield Request(ids, 30, Sampling(), ends=frozenset([first.tokens[9][0]]))
    yield Request(ids, 30, Sampling(), stop=["".join(text for _, text, _, _ in first.tokens)[10:13]])
    yield Request(ids, 1, Sampling())


def answers_to(pairs: Sequence[tuple[Request, Outcome]]) -> Answers:
    return {tuple(request.ids): [token for token, *_ in want.tokens] for request, want in pairs}
