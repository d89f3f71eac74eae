import math
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import SAMPLINGS, Outcome, answers_to, outcome, requests, told
from drafters import KINDS, Eager, drafting
from equivalence import PARTS, WIDE, Expected, bits, opened, prompt
from gguf_files import write_model
from repository import TINY

import gemma_py
from gemma_py.chat.conversation import Conversation
from gemma_py.errors import ContextError, InputError, WorkerError
from gemma_py.generate.core import Generation, Request
from gemma_py.generate.options import Sampling
from gemma_py.generate.sampling import Sampler
from gemma_py.generate.speculation import Speculation
from gemma_py.runtime import cache as caches
from gemma_py.runtime.fault_injection import FaultPlan

# --- the runner -------------------------------------------------------------------------------------------------------


def verifies(engine: gemma_py.Engine, want: Expected, seed: int, keep: int = 0) -> bool:
    """Whether passes with right and wrong guesses give the specification's logits and KV rows."""
    rng, ids, V = random.Random(seed), want.ids, engine.config.vocab_size
    session = engine.session(keep)
    begin = rng.randint(1, 12)
    same = bool((bits(session.prefill(ids[:begin])) == bits(want.logits[begin - 1])).all())
    while session.position < len(ids):
        at = session.position
        count = min(rng.choice([1, 2, 4, 15]), engine.context - at - 1)
        right = min(rng.randint(0, count), len(ids) - at - 1)
        guesses = [*ids[at + 1 : at + 1 + right], *(rng.randrange(V) for _ in range(count - right))]
        logits = session.verify(ids[at], guesses)
        same = same and logits.shape == (1 + count, V)
        same = same and bool((bits(logits[: right + 1]) == bits(want.logits[at : at + right + 1])).all())
        if rng.random() < 0.2:
            session.reserve(rng.choice([1, 700]))
        taken = rng.choice([right, rng.randint(0, right)])
        for guess in guesses[:taken]:
            session.accept([guess])
        same = same and session.ids == ids[: at + 1 + taken]
    return same and session.kv_digest() == want.digest


CASES = [("gemma2", "float32"), ("gemma3", "float32"), ("gemma3", "bfloat16"), ("gemma3-multi-query", "q8_0"),
         ("gemma3n-wrapped", "float32"), ("gemma4-e2b", "bfloat16")]  # fmt: skip


@pytest.mark.parametrize(("name", "kv"), CASES)
def test_guesses_match_the_reference(checkpoints: dict[str, Path], name: str, kv: str) -> None:
    """Passes go on to the end of the context, and so beyond the ends of windows and rings."""
    with opened(checkpoints[name], 1, kv=kv) as engine:
        want = Expected(engine, prompt(engine.config, engine.context if name == "gemma3" else 60))
        for threads in (1, 2, 3, 4):
            engine.set_threads(threads)
            assert verifies(engine, want, seed=threads, keep=threads % 2 * 7)
        engine.instruments.fault_plan = FaultPlan(seed=1)
        assert verifies(engine, want, seed=9)


@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
def test_guesses_match_the_reference_in_the_smallest_rings(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    """Rings have only as many rows as a pass needs. In production, rings are larger."""

    def make_room(self: caches.Cache, position: int, tokens: int, ahead: int = 0) -> None:
        for number, rows in enumerate(caches.rows_needed(self.config, position + tokens, tokens, self.keep)):
            if rows > self.layers[number].capacity:
                self._reallocate(number, rows)

    monkeypatch.setattr(caches.Cache, "_make_room", make_room)
    with opened(checkpoints["gemma3"], 2, kv=kv) as engine:
        want = Expected(engine, prompt(engine.config, 60))
        for seed in (1, 2, 3):
            assert verifies(engine, want, seed, keep=seed % 2 * 7)


@pytest.mark.parametrize(
    "mutant", ["one guess too many", "a ring one row short", "guesses committed before acceptance"]
)
def test_control_mutants_of_the_cache(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    honest_rows, honest_commit = caches.rows_needed, caches.Cache._commit

    def rows_needed(config: Any, tokens: int, chunk: int, keep: int = 0) -> list[int]:
        return honest_rows(config, tokens, chunk, keep - (chunk > 1))

    def commit(self: caches.Cache, tokens: list[int], guesses: list[int]) -> None:
        more = 1 if mutant == "one guess too many" else len(guesses)
        honest_commit(self, [*tokens, *guesses[:more]], guesses[more:])

    def reserve(self: caches.Cache, tokens: int, ahead: int = 0) -> None:
        for number, rows in enumerate(rows_needed(self.config, self.position + tokens, tokens, self.keep)):
            if rows != self.layers[number].capacity:
                self._reallocate(number, rows)

    with opened(checkpoints["gemma3"], 2) as engine:
        want = Expected(engine, prompt(engine.config, 60))
        assert verifies(engine, want, seed=1)
        if mutant == "a ring one row short":
            monkeypatch.setattr(caches.Cache, "reserve", reserve)
        else:
            monkeypatch.setattr(caches.Cache, "_commit", commit)
        try:
            assert not verifies(engine, want, seed=1)
        except InputError:
            assert mutant != "a ring one row short"


def test_the_limits_of_guesses(checkpoints: dict[str, Path]) -> None:
    with opened(checkpoints["gemma3"], 2) as engine:
        session = engine.session()
        session.prefill([1, 2, 3])
        with pytest.raises(ContextError):
            session.verify(4, [5] * (engine.context - 3))
        with pytest.raises(InputError, match="not a guess"):
            engine.runner.run(session._cache, [4, 5], True, guesses=2)
        session.verify(4, [5, 6])
        with pytest.raises(InputError, match="accept expects the first guesses"):
            session.accept([6])
        session.accept([5])
        with pytest.raises(InputError, match="accept expects the first guesses"):
            session.accept([6, 7])
        session.rewind(4)
        with pytest.raises(InputError, match="accept expects the first guesses"):
            session.accept([6])
        assert session.ids == [1, 2, 3, 4]


@pytest.mark.parametrize("fault", ["raise", "stall", "interrupt"])
def test_a_pass_that_fails_leaves_only_known_tokens(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with gemma_py.load(checkpoints["gemma3"], threads=2, deadline=0.5) as engine:
        engine.instruments.poison = True
        want = Expected(engine, prompt(engine.config, 40))
        session = engine.session()
        session.prefill(want.ids[:20])
        session.verify(want.ids[20], want.ids[21:30])
        session.accept(want.ids[21:24])
        if fault == "interrupt":
            honest = engine.runner.team.run

            def interrupted(*arguments: Any, **options: Any) -> None:
                honest(*arguments, **options)
                raise KeyboardInterrupt

            monkeypatch.setattr(engine.runner.team, "run", interrupted)
        else:
            engine.instruments.fault_plan = FaultPlan(fault=fault, worker=1, layer=1)
        with pytest.raises(KeyboardInterrupt if fault == "interrupt" else WorkerError):
            session.verify(want.ids[24], want.ids[25:30])
        monkeypatch.undo()
        engine.instruments.fault_plan = None
        assert session.ids == want.ids[:24]
        with pytest.raises(InputError):
            session.accept([want.ids[25]])
        if fault != "stall":
            session.prefill(want.ids[24:])
            assert session.kv_digest() == want.digest


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=2, context=160) as made:
        made.instruments.poison = True
        yield made


@pytest.fixture(scope="module")
def plain(engine: gemma_py.Engine) -> list[tuple[Request, Outcome]]:
    return [(request, outcome(engine, replace(request, speculate="off"))[0]) for request in requests(engine)]


@pytest.mark.parametrize("most", [1, 15])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_match_those_without_speculation(
    engine: gemma_py.Engine, plain: list[tuple[Request, Outcome]], monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    monkeypatch.setattr(engine, "pace", Eager(most))
    guessed = accepted = passes = 0
    for number, (request, want) in enumerate(plain):
        engine.set_threads(1 + number % 4)
        with drafting(kind, answers_to([(request, want)]), engine.config.vocab_size):
            made, speculation = outcome(engine, request)
        assert made == want
        guessed, accepted = guessed + speculation.guessed, accepted + speculation.accepted
        passes += speculation.passes
    tokens = sum(len(want.tokens) - 1 for _, want in plain)  # the prompt's pass gives the first token
    assert passes + accepted == tokens
    # The guess of an end token is never accepted, because no token follows.
    oracle, wrong = guessed - 2 <= accepted > 0, accepted == 0 < guessed
    assert {"oracle": oracle, "wrong": wrong}.get(kind, 0 < accepted < guessed)
    if kind == "oracle":
        assert passes < tokens / (1 + most) + 2 * len(plain)


def test_a_pass_starts_after_the_logits_of_the_last_pass_are_freed(
    engine: gemma_py.Engine, plain: list[tuple[Request, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of 16 rows take 16 MiB with a vocabulary of 262,144 tokens."""
    monkeypatch.setattr(engine, "pace", Eager())
    request, want = plain[0]
    honest, freed = gemma_py.Session.verify, 0
    last: list[weakref.ref[np.ndarray]] = []

    def verify(self: gemma_py.Session, token: int, guesses: Sequence[int]) -> np.ndarray:
        nonlocal freed
        if last:
            assert last.pop()() is None
            freed += 1
        logits = honest(self, token, guesses)
        owner = logits
        while owner.base is not None:
            owner = owner.base
        last.append(weakref.ref(owner))
        return logits

    monkeypatch.setattr(gemma_py.Session, "verify", verify)
    with drafting("half", answers_to([(request, want)]), engine.config.vocab_size):
        assert outcome(engine, request)[0] == want
    assert freed > 2


def test_predictions_match_and_are_counted(
    engine: gemma_py.Engine, plain: list[tuple[Request, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "pace", Eager())
    for request, want in plain[:8]:
        answer = [token for token, *_ in want.tokens]
        made, speculation = outcome(engine, replace(request, prediction=answer))
        assert made == want
        assert speculation.predicted >= 0.8 * len(answer)
        changed = [*answer[:10], *prompt(engine.config, 3, seed=8), *answer[13:]]
        assert outcome(engine, replace(request, prediction=changed))[0] == want


@pytest.mark.parametrize("mutant", ["a counter off by one", "penalties that saw a guess", "a guess taken unseen"])
def test_control_mutants_of_generation(
    engine: gemma_py.Engine, plain: list[tuple[Request, Outcome]], monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    monkeypatch.setattr(engine, "pace", Eager())
    latest: list[int] = []
    honest_guesses, honest_choose, honest_next = Speculation.guesses, Sampler.choose, Generation.next

    def guesses(self: Speculation, count: int) -> list[int]:
        latest[:] = honest_guesses(self, count)
        return list(latest)

    def choose(self: Sampler, logits: np.ndarray, made: Sequence[int]) -> int:
        if mutant == "a counter off by one":
            self._start += bool(latest)
            latest[:] = []
            return honest_choose(self, logits, made)
        if mutant == "a guess taken unseen" and latest:
            return latest.pop(0)
        return honest_choose(self, logits, [*made, *latest[:1]])

    monkeypatch.setattr(Speculation, "guesses", guesses)
    monkeypatch.setattr(Sampler, "choose", choose)
    names = {
        "a counter off by one": "drawn",
        "penalties that saw a guess": "penalties",
        "a guess taken unseen": "greedy",
    }
    request, want = plain[list(SAMPLINGS).index(names[mutant])]
    assert honest_next is Generation.next
    with (
        drafting("half", answers_to([(request, want)]), engine.config.vocab_size),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("drafters.Known.extend", lambda self, tokens: setattr(self, "_at", self._at + len(tokens)))
        assert outcome(engine, request)[0].tokens != want.tokens


def test_a_conversation_matches_and_can_be_stopped(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def talk() -> tuple[list[Any], list[int], list[str]]:
        conversation = Conversation(engine, sampling=Sampling(temperature=0.7, seed=3), max_tokens=25)
        said: list[Any] = [[told(token) for token in conversation.send("one two one two")]]
        stream = conversation.send("again")
        said.append([told(next(stream)) for _ in range(6)])
        stream.close()
        said.append([told(token) for token in conversation.retry()])
        return [said, conversation.messages], conversation.ids, conversation.kv_digest()

    monkeypatch.setattr(engine, "speculate", "off")
    want = talk()
    monkeypatch.setattr(engine, "speculate", "auto")
    monkeypatch.setattr(engine, "pace", Eager(5))
    assert talk() == want
    assert math.isfinite(want[0][0][0][0][2])


def test_an_unknown_mode_is_refused(engine: gemma_py.Engine) -> None:
    with pytest.raises(InputError, match="speculate should be one of auto, off"):
        engine.generate("a", speculate="always")
    with pytest.raises(InputError, match="speculate should be one of auto, off"):
        gemma_py.load(TINY, speculate="on")


def test_quantised_models_match(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", WIDE, seed=4, kinds=dict.fromkeys(PARTS, "Q8_0"))
    with opened(path, 3) as engine:
        assert verifies(engine, Expected(engine, prompt(engine.config, 100)), seed=2)
