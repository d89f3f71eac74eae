"""Measure speculation: tokens a pass, accepted guesses, and the speed of `auto` as a multiple of the speed of `off`."""

import contextlib
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gemma_py.errors import ComputationError
from gemma_py.generate.core import Request
from gemma_py.generate.engine import Engine
from gemma_py.generate.options import Sampling
from gemma_py.generate.session import Decoder

_FUNCTION = '''def total_price(items, discount, tax_rate):
    """Return the price of all items, with discount and tax."""
    total = 0.0
    for item in items:
        if item.quantity < 0:
            raise ValueError("the quantity must not be negative")
        total += item.price * item.quantity
    if discount is not None:
        total -= total * discount
    total += total * tax_rate
    return round(total, 2)
'''
_ARTICLE = """The harbour bridge was opened in 1932, after eight years of work. "Nobody believed that it would stand," said the
engineer Ada Stone, who led the works from the first day. The arch was built from both sides at once, and the two halves met in
August 1930. The city paid for the bridge with tolls until 1988. "It is not a road, it is our front door," the mayor Tom Reed
said when the last toll was paid. Today 160,000 cars cross the bridge every day, and eight trains every hour."""
_PEOPLE = """Alice Brown, born 1984, lives in Leeds and works as a baker. Robert Hill, born 1990, lives in York and works as a
nurse. Clara Moss, born 1978, lives in Bath and works as a pilot. David Lane, born 2001, lives in Hull and works as a cook."""
# The recorded prompts, which a base model continues. `edit` changes a function's signature, and `rename` changes every second
# line of the function.
PROMPTS = {
    "edit": f"The function:\n\n{_FUNCTION}\nThe same function, in which the tax rate is 0.2 unless it is given:\n\n"
    + "def total_price(items, discount, tax_rate=0.2):",
    "rename": f"The function:\n\n{_FUNCTION}\nThe same function, in which items is called articles:\n\n"
    + _FUNCTION[:60].replace("items", "articles"),
    "quotes": f"{_ARTICLE}\n\nSummary, with the quotes of both people:\n\n",
    "json": f"{_PEOPLE}\n\nThe same facts in JSON:\n\n"
    '[\n  {"name": "Alice Brown", "born": 1984, "city": "Leeds", "job": "baker"},\n  {"name": "Robert Hill", "born":',
    "chat": "User: What should I see in a small town on a river in one day?\nAssistant:",
    "code": 'import csv\n\n\ndef read_table(path):\n    """Return the rows of a CSV file as dictionaries."""\n',
}
Tokens = list[tuple[int, str, bytes, str | None]]  # id, text, the bytes of the log probability, finish reason


class Answer(NamedTuple):
    """An answer. seconds: the time after the first token. passes, guessed, accepted: see `Speculation`."""

    tokens: Tokens
    seconds: float
    passes: int
    guessed: int
    accepted: int

    @property
    def rate(self) -> float:
        return (len(self.tokens) - 1) / self.seconds if self.seconds else 0.0


# Called with the request and its true answer; the measured answer is generated within the returned context.
Around = Callable[[Request, Tokens], AbstractContextManager[Any]]


def _unchanged(request: Request, known: Tokens) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Case:
    """A prompt and options that are measured. rounds: the number of answers, each with another seed."""

    prompt: str
    temperature: float
    tokens: int
    rounds: int

    def sampling(self, seed: int) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=64, top_p=0.95, seed=seed)


def answer(engine: Engine, request: Request) -> Answer:
    generation, session = engine.generation(request), engine.session()
    logits = session.prefill(generation.prompt)
    made, begin = [], 0.0
    for token in generation.tokens(logits, Decoder(session, generation).decode, session.kv_digest):
        begin = begin or time.perf_counter()
        made.append((token.id, token.text, struct.pack("<d", token.logprob), token.finish_reason))
    speculation = generation.speculation
    seconds = time.perf_counter() - begin
    return Answer(made, seconds, speculation.passes, speculation.guessed, speculation.accepted)


def measured(engine: Engine, case: Case, around: Around = _unchanged) -> dict[str, Any]:
    """Generate every answer with `off` and with `auto`, in an order that alternates. Return the figures.

    Ids, texts and finish reasons must be equal. The answers of the last round are generated once more with log probabilities,
    whose bits must be equal too. A difference raises ComputationError.
    """
    ids, ratios, compared, made = engine.encode(case.prompt), [], 0, list[Answer]()
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    for number in range(case.rounds):
        requests = {
            mode: Request(ids, case.tokens, case.sampling(number), logprobs=False, speculate=mode)
            for mode in ("off", "auto")
        }
        known = answer(engine, requests["off"]).tokens  # not timed
        of_mode = {}
        for mode in ("off", "auto") if number % 2 else ("auto", "off"):
            with around(requests[mode], known):
                of_mode[mode] = answer(engine, requests[mode])
            rates[mode].append(of_mode[mode].rate)
            _check(of_mode[mode].tokens, known)
        ratios.append(of_mode["off"].seconds / of_mode["auto"].seconds if of_mode["auto"].seconds else 1.0)
        made.append(of_mode["auto"])
        compared += len(known)
    _check(*(answer(engine, replace(request, logprobs=True)).tokens for request in requests.values()))
    return {
        "temperature": case.temperature, "tokens": compared,
        "tokens_a_pass": (compared - case.rounds) / max(1, sum(one.passes for one in made)),
        "guessed": sum(one.guessed for one in made), "accepted": sum(one.accepted for one in made),
        "off_tokens_per_second": statistics.median(rates["off"]),
        "auto_tokens_per_second": statistics.median(rates["auto"]),
        "speed": statistics.median(ratios), "least": min(ratios),
    }  # fmt: skip


def _check(made: Tokens, known: Tokens) -> None:
    if made != known:
        raise ComputationError("speculation changed an answer; please report this with the model and the prompt")


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table with the columns of HEADER."""
    share = f"{row['accepted'] / row['guessed']:.0%} of {row['guessed']:,}" if row["guessed"] else "no guesses"
    return [
        f"{row['temperature']:g}", f"{row['tokens']:,}", f"{row['tokens_a_pass']:.2f}", share,
        f"{row['off_tokens_per_second']:.1f}", f"{row['auto_tokens_per_second']:.1f}",
        f"{row['speed']:.2f}x", f"{row['least']:.2f}x",
    ]  # fmt: skip


HEADER = ("temperature", "tokens", "tokens a pass", "accepted", "off t/s", "auto t/s", "speed", "least")
