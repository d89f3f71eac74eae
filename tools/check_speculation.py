"""Compare speculation with plain decoding in random cases: ids, texts, bits of log probabilities, finish reasons, KV
digests.

    python tools/check_speculation.py [MODEL ...] [--tokens 100000] [--seed 0] [--case CASE]

The model `tiny` stands for a tiny model of each family and two tiny models with a tokenizer. By default, the tool uses
`tiny` and the demo model. A case has at random

- an engine with 1 to 4 threads and a KV cache of float32, bfloat16 or q8_0;
- a source of guesses: none, copied text, a prediction, a grammar, a draft model, an assistant, or right, half right, random
  or wrong guesses;
- a number of guesses in a pass;
- requests with sampling, penalties, stop strings, end tokens, JSON schemas or tool calls, whose prompts often end near the end
  of a window or of the context. They are answered alone or in shared passes.

Every answer is compared with the answer alone, with one thread and without speculation. The first difference ends the
tool with an error that names the case. The last line is a JSON document.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import assisted
import tiny_checkpoints as tiny
import tiny_families
from answers import Outcome, outcome, told
from crowd import Client
from drafters import Eager, drafting
from gemma4_model import write_checkpoint
from repository import TINY
from tiny_models import VARIANTS

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.cli.common import markdown, positive
from gemma_py.errors import GemmaError
from gemma_py.generate.answer import Constraint
from gemma_py.generate.assistant import Assistant
from gemma_py.generate.core import Request
from gemma_py.generate.events import Finished
from gemma_py.generate.options import Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.generate.speculation import MOST_GUESSES, Pace
from gemma_py.runtime.kv_types import KV_TYPES
from gemma_py.server.openai.constraint import JsonConstraints
from gemma_py.templates.notation import CallConstraint, marks_of

FAMILIES = ("gemma1-multi-head", "gemma2", "gemma3", "gemma3-multi-query", "vaultgemma", "gemma3n-wrapped", "gemma4-e2b", "gemma4-dense",
            "gemma4-experts", "gemma4-unified")  # fmt: skip
DRAFTERS = ("none", "lookup", "prediction", "grammar", "oracle", "half", "random", "wrong")
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "dark green"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}
_CASES_AN_ENGINE = 15  # cases until another engine is loaded
_MOST_PROMPT = 700  # tokens, if the context is longer

Constraints = dict[str, Callable[[], Constraint]]


class Asked(NamedTuple):
    """A request, and a function that makes a new constraint for each answer, because a constraint has a state."""

    request: Request
    kind: str  # the kind of the constraint, or ""
    constraint: Callable[[], Constraint] | None

    def made(self, **changes: Any) -> Request:
        return replace(self.request, constraint=self.constraint() if self.constraint else None, **changes)


class Difference(Exception):
    """Speculation changed an answer."""


def constraints_of(engine: gemma_py.Engine) -> Constraints:
    """{kind: function that makes a constraint of this kind}, for the kinds that the model's vocabulary allows."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        return {}
    compiler, marks = JsonConstraints(tokenizer, engine.config.vocab_size, engine.end_ids), marks_of(tokenizer)
    made: Constraints = {"schema": lambda: compiler.compile(SCHEMA, "")}
    if marks is not None and marks.call is not None:
        made["tool call"] = lambda: CallConstraint(tokenizer, marks, "weather")
    return made


# --- drawing a case ---------------------------------------------------------------------------------------------------


_FILTERS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("top_k", (1, 5, 40)),
    ("top_p", (0.3, 0.9)),
    ("min_p", (0.05, 0.3)),
)


def drawn_sampling(rng: random.Random, vocab_size: int) -> Sampling:
    options: dict[str, Any] = {}
    if rng.random() < 0.75:
        options |= {"temperature": rng.choice([0.2, 0.8, 1.0, 1.5]), "seed": rng.randrange(1000)}
        for name, values in _FILTERS:
            if rng.random() < 0.4:
                options[name] = rng.choice(values)
    if rng.random() < 0.33:
        for name, values in (
            ("repetition_penalty", (1.1, 1.5)),
            ("presence_penalty", (0.5,)),
            ("frequency_penalty", (-0.5, 0.7)),
        ):
            if rng.random() < 0.6:
                options[name] = rng.choice(values)
    if rng.random() < 0.1:
        options["logit_bias"] = {rng.randrange(vocab_size): rng.choice([-5.0, 5.0])}
    return Sampling(**options)


def drawn_prompt(rng: random.Random, engine: gemma_py.Engine, length: int) -> list[int]:
    """Draw token ids in which parts are often repeated."""
    vocabulary = rng.choice([5, engine.config.vocab_size])
    ids: list[int] = []
    while len(ids) < length:
        if ids and rng.random() < 0.5:
            first = rng.randrange(len(ids))
            ids += ids[first : first + rng.randint(1, 20)]
        else:
            ids += [rng.randrange(vocabulary) for _ in range(rng.randint(1, 15))]
    return ids[:length]


def drawn_length(rng: random.Random, engine: gemma_py.Engine, tokens: int) -> int:
    """Draw a prompt's length. Often the answer then crosses the end of a window, or ends with the context."""
    most = min(engine.context - tokens, _MOST_PROMPT)
    windows = {layer.sliding_window for layer in engine.config.layers if layer.sliding_window is not None}
    borders = [window * times + more for window in windows for times in (1, 2) for more in (0, MOST_GUESSES)]
    near = [border - rng.randint(0, tokens) for border in borders] + [engine.context - tokens, rng.randint(1, most)]
    return rng.choice([min(max(1, length), most) for length in near])


def drawn_request(rng: random.Random, engine: gemma_py.Engine, constraints: Constraints, grammar: bool) -> Asked:
    tokens = rng.choice([1, 9, 30, 60, 90])
    ids = drawn_prompt(rng, engine, drawn_length(rng, engine, tokens))
    fit = len(ids) + tokens == engine.context and rng.random() < 0.5
    request = Request(
        ids, tokens + 10 * fit, drawn_sampling(rng, engine.config.vocab_size), fit=fit,
        ends=frozenset(engine.end_ids), trim=rng.random() < 0.2, logprobs=rng.random() < 0.9,
        top_logprobs=rng.choice([0, 0, 3]),
    )  # fmt: skip
    if constraints and (grammar or rng.random() < 0.3):
        kind = rng.choice(sorted(constraints))
        return Asked(replace(request, max_tokens=tokens + 10 * fit), kind, constraints[kind])
    ending = rng.choice(["", "", "", "end token", "stop string"])
    if ending:
        plain = outcome(engine, replace(request, speculate="off"))[0].tokens
        text = "".join(piece for _, piece, _, _ in plain)
        if ending == "end token":
            request = replace(request, ends=frozenset([rng.choice(plain)[0]]))
        elif len(text) > 3:
            at = rng.randrange(len(text) - 1)
            request = replace(request, stop=(text[at : at + rng.randint(1, 4)],))
    return Asked(request, "", None)


def prediction_for(rng: random.Random, answer: Sequence[int], vocab_size: int) -> list[int]:
    made: list[int] = []
    for token in answer:
        change = rng.random()
        if change > 0.05:
            made.append(rng.randrange(vocab_size) if change < 0.1 else token)
        if change > 0.95:
            made.append(rng.randrange(vocab_size))
    return made or [answer[0]]


# --- comparing --------------------------------------------------------------------------------------------------------


class Checker:
    """Draws cases for one engine. Counts the compared tokens for each property of a case, such as "stop strings"."""

    def __init__(self, engine: gemma_py.Engine, counts: Counter[str]) -> None:
        self._engine, self._counts = engine, counts
        self._constraints = constraints_of(engine)

    def case(self, rng: random.Random) -> int:
        """Compare the answers of one case. Returns the number of compared tokens."""
        engine, clients = self._engine, rng.choice([1, 1, 1, rng.randint(2, 7)])
        engine.set_threads(1)
        drafter = rng.choice([kind for kind in DRAFTERS if kind != "grammar" or self._constraints])
        if engine.draft is not None:
            drafter = "assistant" if isinstance(engine.draft, Assistant) else "model"
        asked = [drawn_request(rng, engine, self._constraints, drafter == "grammar") for _ in range(clients)]
        asked = list({tuple(one.request.ids): one for one in asked}.values())
        engine.pace = Pace()
        wanted = [outcome(engine, one.made(speculate="off"))[0] for one in asked]
        if drafter == "prediction":
            asked = [
                one._replace(request=replace(one.request, prediction=self._prediction(rng, want)))
                for one, want in zip(asked, wanted, strict=True)
            ]
        engine.set_threads(rng.choice([1, 1, 2, 3, 4]))
        engine.pace = rng.choice([Pace(), Eager(1), Eager(3), Eager(), Eager(4, 2)])
        kind = {"prediction": "lookup", "grammar": "none", "model": "lookup", "assistant": "lookup"}.get(
            drafter, drafter
        )
        answers = {
            tuple(one.request.ids): [token for token, *_ in want.tokens]
            for one, want in zip(asked, wanted, strict=True)
        }
        with drafting(kind, answers, engine.config.vocab_size):
            compare = self._alone if len(asked) == 1 else self._in_shared_passes
            guessed, accepted = compare(rng, asked, wanted)
        tokens = sum(len(want.tokens) for want in wanted)
        self._counts.update(guessed=guessed, accepted=accepted, answers=len(asked))
        self._count(drafter, asked, wanted)
        return tokens

    def _prediction(self, rng: random.Random, want: Outcome) -> list[int]:
        return prediction_for(rng, [token for token, *_ in want.tokens], self._engine.config.vocab_size)

    def _count(self, drafter: str, asked: Sequence[Asked], wanted: Sequence[Outcome]) -> None:
        for one, want in zip(asked, wanted, strict=True):
            sampling, tokens = one.request.sampling, len(want.tokens)
            penalties = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
            having = {
                f"drafter {drafter}": True, "alone": len(asked) == 1, "shared passes": len(asked) > 1,
                "greedy": sampling.temperature == 0, "top-k": sampling.top_k, "top-p": sampling.top_p < 1,
                "min-p": sampling.min_p, "penalties": penalties, "stop string": one.request.stop, one.kind: one.kind,
                "end of the context": len(want.ids) >= self._engine.context - 1,
                f"{self._engine.threads} threads": True, f"KV {self._engine.kv_type}": True,
            }  # fmt: skip
            self._counts.update({name: tokens for name, has in having.items() if has})

    def _alone(self, rng: random.Random, asked: Sequence[Asked], wanted: Sequence[Outcome]) -> tuple[int, int]:
        made, speculation = outcome(self._engine, asked[0].made(speculate="auto"))
        if made != wanted[0]:
            raise Difference(_first_difference(made, wanted[0]))
        return speculation.guessed, speculation.accepted

    def _in_shared_passes(
        self, rng: random.Random, asked: Sequence[Asked], wanted: Sequence[Outcome]
    ) -> tuple[int, int]:
        """Answer the requests in shared passes. An eighth of the clients leave early; the tokens that these clients got
        are compared.
        """
        prefix_bytes = rng.choice([0, 600_000])
        scheduler = Scheduler(self._engine, parallel=rng.randint(1, 8), queue=64, prefix_bytes=prefix_bytes)
        try:
            clients = []
            for one in asked:
                clients.append(Client(scheduler, one.made(speculate="auto", receipt=True)))
                if rng.random() < 0.3 and not clients[0].over:
                    clients[0].next()
            for client, want in zip(clients, wanted, strict=True):
                leaves = rng.randint(1, 30) if rng.random() < 0.125 else len(want.tokens) + 1
                while not client.over:
                    client.next()
                    if len(client.made) == leaves:
                        client.ticket.cancel()
                self._compare(client, want)
            stats = scheduler.stats()
            return stats.guessed_tokens, stats.accepted_tokens
        finally:
            scheduler.close()

    @staticmethod
    def _compare(client: Client, want: Outcome) -> None:
        end, made = client.heard[-1], client.made
        tokens, tops = [told(event.token) for event in made], [event.top for event in made]
        if not isinstance(end, Finished):
            raise Difference(str(end))
        if tokens != want.tokens[: len(tokens)] or tops != want.tops[: len(tops)]:
            raise Difference(_first_difference(Outcome(tokens, tops, [], []), want))
        if end.reason != "cancelled":
            assert end.receipt is not None
            digests = [digest.hex() for digest in end.receipt().kv]
            if digests != [whole[: len(digest)] for whole, digest in zip(want.digest, digests, strict=True)]:
                raise Difference("the KV digests differ")
            if len(tokens) != len(want.tokens):
                raise Difference(f"{len(tokens)} tokens instead of {len(want.tokens)}")


def _first_difference(made: Outcome, want: Outcome) -> str:
    for position, (a, b) in enumerate(zip(made.tokens, want.tokens, strict=False)):
        if a != b:
            return f"token {position}: {a}, without speculation {b}"
    return (
        f"{len(made.tokens)} tokens, without speculation {len(want.tokens)}; or likeliest tokens or KV digests differ"
    )


# --- engines ----------------------------------------------------------------------------------------------------------


@contextmanager
def models(names: Sequence[str]) -> Iterator[tuple[dict[str, Path | str], dict[str, Path]]]:
    """Yields {name: path}, and {name: path of its assistant}. The name `tiny` stands for several models."""
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Path | str] = {name: name for name in names if name != "tiny"}
        assistants = {}
        if "tiny" in names:
            made |= {"tiny-gemma3": TINY, "gemma4 with tools": write_checkpoint(Path(folder) / "tools")}
            for name in FAMILIES:
                made[name] = Path(folder) / name
                tiny.write(VARIANTS[name], Path(folder) / name, seed=1)
                if name in tiny_families.ASSISTANTS:
                    assistants[name] = assisted.written(name, Path(folder) / f"assistant of {name}")
        yield made, assistants


def engines(
    named: Mapping[str, Path | str], assistants: Mapping[str, Path], seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, options of `load`) in endless rounds. In each round, every model gets another KV type or draft model."""
    number = seed
    while True:
        for name, path in named.items():
            options: dict[str, Any] = {"kv": tuple(KV_TYPES)[number % len(KV_TYPES)]}
            draft = {2: path, 3: assistants.get(name)}.get(number % 4)
            yield name, options if draft is None else options | {"draft": draft}
        number += 1


def check(
    named: Mapping[str, Path | str],
    tokens: int,
    seed: int,
    only: str | None = None,
    assistants: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, Any]:
    """Compare at least this many tokens, or only one case. Returns the counts. Raises SystemExit at the first
    difference.
    """
    counts: Counter[str] = Counter()
    begun = shown = time.monotonic()
    for number, (name, options) in enumerate(engines(named, assistants, seed)):
        label = f"{name}:{options['kv']}:{'draft:' if 'draft' in options else ''}{number}"
        context = 160 if name in FAMILIES or "tiny" in name else 700
        if only is not None and not only.startswith(label + ":"):
            continue
        with gemma_py.load(named[name], threads=2, context=context, **options) as engine:
            engine.instruments.poison = True
            checker = Checker(engine, counts)
            for case in range(_CASES_AN_ENGINE):
                here = f"{label}:{case}"
                if only in (None, here):
                    try:
                        compared = checker.case(random.Random(f"{seed} {here}"))
                    except (Difference, AssertionError, GemmaError) as error:
                        raise SystemExit(
                            f"to repeat this case, use --seed {seed} --case {here!r}: {error!r}"
                        ) from error
                    counts.update({"tokens": compared, name: compared})
                if time.monotonic() - shown > 20:
                    shown = time.monotonic()
                    print(f"{counts['tokens']:,} tokens in {shown - begun:.0f} s", file=sys.stderr, flush=True)
        if only is not None or counts["tokens"] >= tokens:
            break
    return {"seed": seed, "seconds": round(time.monotonic() - begun), **dict(sorted(counts.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["tiny", DEFAULT_MODEL])
    parser.add_argument(
        "--tokens", type=positive, default=100_000, help="how many tokens to compare (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="check only the case that an error message has named")
    args = parser.parse_args()
    with models(args.models) as (named, assistants):
        report = check(named, args.tokens, args.seed, args.case, assistants)
    numbers = [(name, f"{value:,}") for name, value in report.items()]
    print(markdown(("", "tokens"), numbers))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
