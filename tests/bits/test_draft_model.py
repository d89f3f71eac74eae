import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
from answers import SAMPLINGS, Outcome, outcome, requests, told
from drafters import Eager, draft_model_right
from equivalence import prompt
from gemma4_model import write_checkpoint
from repository import TINY
from tiny_models import VARIANTS

import gemma_py
from gemma_py.chat.conversation import Conversation
from gemma_py.errors import GemmaWarning, InputError
from gemma_py.generate.core import Request
from gemma_py.generate.draft_model import DraftModel, ModelDrafter
from gemma_py.generate.options import Sampling
from gemma_py.generate.session import Session
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.weights.checkpoint import open_checkpoint

FAMILIES = ("gemma2", "gemma3", "gemma3n", "gemma4-e2b")
DRAFTS = ("itself", "another", "always wrong")


def wrong(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
    honest = ModelDrafter.guess
    monkeypatch.setattr(
        ModelDrafter, "guess", lambda self, count: [(token + 1) % vocabulary for token in honest(self, count)]
    )


def check_answers(engine: gemma_py.Engine, asked: list[tuple[Request, Outcome]], draft: str) -> None:
    guessed = accepted = 0
    for number, (request, want) in enumerate(asked):
        engine.set_threads(1 + number % 4)
        made, speculation = outcome(engine, request)
        assert made == want
        if draft == "itself" and made.tokens[-1][-1] == "length":
            assert speculation.guessed == speculation.accepted
        guessed, accepted = guessed + speculation.guessed, accepted + speculation.accepted
    # A right guess after the answer's end is not accepted.
    assert {"itself": accepted > 0, "always wrong": accepted == 0 < guessed}.get(draft, 0 < guessed > accepted)


@pytest.fixture(scope="module")
def engine() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=2, context=160, draft=TINY) as made:
        assert made.draft is not None
        made.instruments.poison = made.draft.runner.instruments.poison = True
        yield made


@pytest.fixture(scope="module")
def plain(engine: gemma_py.Engine) -> list[tuple[Request, Outcome]]:
    return [(request, outcome(engine, replace(request, speculate="off"))[0]) for request in requests(engine)]


@pytest.mark.parametrize("most", [1, 4, 15])
@pytest.mark.parametrize("draft", ["itself", "always wrong"])
def test_answers_match_those_without_a_draft_model(
    engine: gemma_py.Engine,
    plain: list[tuple[Request, Outcome]],
    monkeypatch: pytest.MonkeyPatch,
    draft: str,
    most: int,
) -> None:
    monkeypatch.setattr(engine, "pace", Eager(most))
    if draft == "always wrong":
        wrong(monkeypatch, engine.config.vocab_size)
    check_answers(engine, plain, draft)


def test_copied_guesses_and_the_draft_model_take_turns(
    engine: gemma_py.Engine, plain: list[tuple[Request, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, every in ((3, 2), (15, 3)):
        monkeypatch.setattr(engine, "pace", Eager(most, every))
        for request, want in plain:
            assert outcome(engine, request)[0] == want


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_that_is_the_main_model_guesses_every_token(
    engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setattr(engine, "pace", Eager(5))
    request = Request(prompt(engine.config, 50), 61, Sampling(temperature=temperature, top_k=50, seed=9))
    _, speculation = outcome(engine, request)
    assert (speculation.passes, speculation.guessed, speculation.accepted) == (10, 50, 50)


@pytest.mark.parametrize(("share", "accepted"), [(0.0, range(1)), (0.7, range(10, 35)), (1.0, range(40, 60))])
def test_guesses_of_a_draft_model_are_right_with_a_given_probability(
    engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch, share: float, accepted: range
) -> None:
    """`tools/speculation.py --draft` measures speeds with such guesses. The answer has 60 tokens."""
    monkeypatch.setattr(engine, "pace", Eager(5))
    request = Request(prompt(engine.config, 50), 60, Sampling())
    want, _ = outcome(engine, replace(request, speculate="off"))
    answers = {tuple(request.ids): [token for token, *_ in want.tokens]}
    with draft_model_right(share, answers, engine.config.vocab_size):
        made, speculation = outcome(engine, request)
    assert made == want
    assert speculation.accepted in accepted and speculation.guessed > 40


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_match(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, draft: str
) -> None:
    """Answers go beyond windows and rings, up to the end of the context."""
    drafts = checkpoints[name]
    if draft == "another":
        drafts = tmp_path / "another"
        tiny.write(VARIANTS[name], drafts, seed=2)
    kv = "bfloat16" if name == "gemma3n" else "float32"
    with gemma_py.load(checkpoints[name], threads=2, kv=kv, draft=drafts) as engine:
        assert engine.draft is not None
        engine.instruments.poison = engine.draft.runner.instruments.poison = True
        ids, length = prompt(engine.config, 60), engine.context
        asked = [
            Request(ids, length - 60, SAMPLINGS["drawn with penalties"]),
            Request(ids, length - 60, replace(SAMPLINGS["top-k"], temperature=0.3)),
            Request(ids[:3], length - 3, Sampling()),
        ]
        plain = [(request, outcome(engine, replace(request, speculate="off"))[0]) for request in asked]
        monkeypatch.setattr(engine, "pace", Eager(4))
        if draft == "always wrong":
            wrong(monkeypatch, engine.config.vocab_size)
        check_answers(engine, plain, draft)


@pytest.mark.parametrize(
    "mutant", ["the cache of the main model", "a guess too many accepted", "one sampler position late"]
)
def test_control_mutants(
    engine: gemma_py.Engine, plain: list[tuple[Request, Outcome]], monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    """Each mutant must change an answer, or make a model that drafts for itself guess wrong."""
    monkeypatch.setattr(engine, "pace", Eager(4))
    honest_accept, honest_guess, latest = Session.accept, ModelDrafter.guess, list[int]()
    honest_session = Session.__init__

    def session(self: Session, *arguments: Any) -> None:
        honest_session(self, *arguments)
        assert self._draft is not None
        self._draft.cache = self._cache  # type: ignore[attr-defined]

    def guess(self: ModelDrafter, count: int) -> list[int]:
        if mutant == "one sampler position late":
            self._prompt_tokens -= self._prompt_tokens > 0
        latest[:] = honest_guess(self, count)
        return list(latest)

    def accept(self: Session, ids: list[int]) -> None:
        taken = self._cache._guesses[: 2 if len(self._cache._guesses) > 1 else 1]
        honest_accept(self, taken)

    monkeypatch.setattr(ModelDrafter, "guess", guess)
    if mutant == "the cache of the main model":
        monkeypatch.setattr(Session, "__init__", session)
    elif mutant == "a guess too many accepted":
        monkeypatch.setattr(Session, "accept", accept)
    with pytest.raises((AssertionError, InputError)):
        check_answers(engine, plain[1:2], "itself")


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["raise", "stall", "memory", "no numbers"])
def test_an_answer_continues_without_a_draft_model_that_fails(
    engine: gemma_py.Engine, plain: list[tuple[Request, Outcome]], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    draft, honest, passes = engine.draft, DraftModel.run, [0]
    assert draft is not None
    monkeypatch.setattr(engine, "pace", Eager(4))
    monkeypatch.setattr(engine.runner.team, "deadline", 0.5)
    before = draft.failures

    def run(self: DraftModel, cache: Any, tokens: list[int]) -> np.ndarray:
        passes[0] += 1
        if passes[0] < 7:
            return honest(self, cache, tokens)
        if fault == "memory":
            raise MemoryError("no memory")
        if fault == "no numbers":
            return np.full_like(honest(self, cache, tokens), np.nan)
        self.runner.instruments.fault_plan = FaultPlan(fault=fault, worker=0, layer=1)
        return honest(self, cache, tokens)

    monkeypatch.setattr(DraftModel, "run", run)
    request, want = plain[3]
    try:
        with pytest.warns(GemmaWarning, match="the draft model failed, and the answer continues"):
            made, speculation = outcome(engine, request)
    finally:
        draft.runner.instruments.fault_plan = None
    assert made == want
    assert speculation.accepted > 0
    assert (draft.failures - before, draft.usable, passes[0]) == (1, True, 7)
    monkeypatch.undo()
    # The next answer uses the draft model again.
    monkeypatch.setattr(engine, "pace", Eager(4))
    made, again = outcome(engine, request)
    assert made == want
    assert again.accepted > speculation.accepted


def test_a_draft_model_that_fails_twice_in_a_row_is_given_up(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: DraftModel, cache: Any, tokens: list[int]) -> np.ndarray:
        raise MemoryError("no memory")

    with gemma_py.load(checkpoints["gemma3"], threads=1, draft=checkpoints["gemma3"]) as engine:
        monkeypatch.setattr(engine, "pace", Eager(4))
        monkeypatch.setattr(DraftModel, "run", run)
        assert engine.draft is not None
        for failures in (1, 2, 2):
            with pytest.warns(GemmaWarning) if failures > engine.draft.failures else pytest.MonkeyPatch.context():
                outcome(engine, Request([1, 2, 3], 20))
            assert engine.draft.failures == failures
        assert not engine.draft.usable


def test_a_stopped_pass_of_the_draft_model_leaves_a_usable_session(
    engine: gemma_py.Engine, plain: list[tuple[Request, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a pass of the draft model ends the answer."""
    monkeypatch.setattr(engine, "pace", Eager(4))
    honest, passes = DraftModel.run, [0]

    def run(self: DraftModel, cache: Any, tokens: list[int]) -> np.ndarray:
        passes[0] += 1
        logits = honest(self, cache, tokens)
        if passes[0] == 6:
            raise KeyboardInterrupt
        return logits

    conversation = Conversation(engine, sampling=Sampling(), max_tokens=20)
    want = [told(token) for token in conversation.send("one two")]
    conversation.clear()
    monkeypatch.setattr(DraftModel, "run", run)
    with pytest.raises(KeyboardInterrupt):
        list(conversation.send("one two"))
    conversation.clear()
    assert [told(token) for token in conversation.send("one two")] == want


# --- what the draft model computes ------------------------------------------------------------------------------------


def rows_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each later pass of the draft model is appended to the returned list."""
    honest, rows = DraftModel.run, list[int]()

    def run(self: DraftModel, cache: Any, tokens: list[int]) -> np.ndarray:
        rows.append(len(tokens))
        return honest(self, cache, tokens)

    monkeypatch.setattr(DraftModel, "run", run)
    return rows


def test_later_turns_of_a_conversation_compute_only_new_tokens(
    engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "pace", Eager(4))
    rows = rows_of(monkeypatch)
    conversation = Conversation(engine, sampling=Sampling(), max_tokens=12)
    list(conversation.send("one two three one two three one two"))
    first, rows[:] = list(rows), []
    list(conversation.send("again"))
    assert rows[0] < first[0]
    assert conversation.stats is not None and conversation.stats.accepted_tokens > 0


def test_a_long_prompt_is_computed_in_parts(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Eager(4)
    monkeypatch.setattr(engine, "pace", pace)
    monkeypatch.setattr(Eager, "draft_row_seconds", 0.1 / 20)
    monkeypatch.setattr("gemma_py.generate.speculation._LIKELY_TOKENS", 10.0**9)
    rows = rows_of(monkeypatch)
    request = Request(prompt(engine.config, 70), 12)
    want = outcome(engine, replace(request, speculate="off"))[0]
    made, speculation = outcome(engine, request)
    assert made == want
    # The draft model computes the prompt in parts, while each pass adds a token to the answer.
    assert rows[:4] == [20, 20, 20, 14]
    assert speculation.passes > 3 and speculation.accepted > 0


def test_a_short_answer_to_a_long_prompt_does_without_the_draft_model(
    engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "pace", Eager(4))
    monkeypatch.setattr(Eager, "draft_row_seconds", 1.0)
    rows = rows_of(monkeypatch)
    outcome(engine, Request(prompt(engine.config, 100), 30))
    assert rows == []
    outcome(engine, Request(prompt(engine.config, 10), 30))
    assert rows != []


def test_a_draft_model_with_a_shorter_context_guesses_up_to_its_end(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gemma_py.load(checkpoints["gemma3"], threads=1) as engine:
        assert engine.context >= 100
        draft = open_checkpoint(checkpoints["gemma3"])
        engine.use_draft(replace(draft, config=replace(draft.config, max_position_embeddings=50)))
        monkeypatch.setattr(engine, "pace", Eager(4))
        request = Request(prompt(engine.config, 40), 60)
        want = outcome(engine, replace(request, speculate="off"))[0]
        rows = rows_of(monkeypatch)
        assert outcome(engine, request)[0] == want
        assert 46 <= sum(rows) <= 50


@pytest.mark.parametrize("size", [80, 96, 110])
def test_output_matrices_of_other_sizes(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Checkpoints may pad a vocabulary differently, so the output matrices of two models may differ in their rows."""
    with gemma_py.load(checkpoints["gemma3"], threads=1) as engine:
        assert engine.config.vocab_size == 96
        engine.draft = DraftModel(open_checkpoint(checkpoints["gemma3"]), engine.runner, None, lambda *_: None)
        monkeypatch.setattr(engine, "pace", Eager(4))
        monkeypatch.setattr(engine.draft, "_vocab_size", size)
        cache = engine.draft.new_cache()
        logits = engine.draft.run(cache, [1, 2, 3])
        honest = engine.session().prefill([1, 2, 3])
        assert len(logits) == size
        assert (logits[:80] == honest[:80]).all()
        assert (logits[96:] == -np.inf).all()


def test_tokens_beyond_the_vocabulary_of_the_draft_model_are_not_computed(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gemma_py.load(checkpoints["gemma3"], threads=1, draft=checkpoints["gemma3"]) as engine:
        assert isinstance(engine.draft, DraftModel)
        engine.draft.config = replace(engine.draft.config, vocab_size=90)
        monkeypatch.setattr(engine, "pace", Eager(4))
        rows = rows_of(monkeypatch)
        outcome(engine, Request([1, 95, 3], 20))
        assert rows == []
        outcome(engine, Request([1, 89, 3], 20))
        assert rows != []


def test_the_draft_model_has_no_threads_of_its_own(engine: gemma_py.Engine) -> None:
    assert engine.draft is not None
    for threads in (3, 2):
        engine.set_threads(threads)
        assert engine.draft.runner.team is engine.runner.team
        assert engine.draft.runner.team.workers == threads


# --- loading ----------------------------------------------------------------------------------------------------------


def test_models_that_cannot_draft_are_refused(
    checkpoints: dict[str, Path], embedding_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match="needs the vocabulary of the main model, which has 1536 tokens; found 96 tokens"
    ):
        gemma_py.load(TINY, draft=checkpoints["gemma3"])
    with pytest.raises(InputError, match="needs the vocabulary of the main model"):
        gemma_py.load(TINY, draft=write_checkpoint(tmp_path / "gemma4"))
    with pytest.raises(InputError, match="a draft model should generate text, but this model computes embeddings"):
        gemma_py.load(TINY, draft=embedding_folder)
    with pytest.raises(InputError, match="generates no text"):
        gemma_py.load(embedding_folder, draft=TINY)


def test_vocabularies_are_compared_piece_by_piece(engine: gemma_py.Engine, tmp_path: Path) -> None:
    tokenizer = engine.text_tokenizer()
    assert tokenizer.same_pieces(tokenizer)
    with gemma_py.load(write_checkpoint(tmp_path / "gemma4"), threads=1) as other:
        assert not tokenizer.same_pieces(other.text_tokenizer())


def test_the_command_line(run: Callable[..., tuple[int, str, str]], checkpoints: dict[str, Path]) -> None:
    words = ["generate", TINY, "--prompt", "one two one two", "--max-tokens", "30", "--json"]
    made = []
    for more in (["--speculate", "off"], ["--draft", TINY]):
        code, out, _ = run(*words, *more)
        made.append(json.loads(out))
        assert code == 0
        del made[-1]["timings"]
    assert made[0] == made[1]
    code, out, err = run(*words, "--draft", TINY, "--speculate", "off")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "--speculate off" in err
    code, _, err = run(*words, "--draft", checkpoints["gemma3"])
    assert code == 1
    assert err.count("\n") == 1
    assert "a draft model needs the vocabulary of the main model" in err
