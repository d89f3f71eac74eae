import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_families
from answers import SAMPLINGS, Outcome, outcome, told
from assisted import STEPS, assistant_of, main_of, steps, written
from crowd import Client
from drafters import Eager
from equivalence import bits, prompt
from gguf_files import write_model
from golden_bits import GOLDEN
from repository import DATA, TINY

import gemma_py
from gemma_py.errors import GemmaWarning, InputError
from gemma_py.generate import assistant as assistants
from gemma_py.generate.assistant import Assistant, AssistantDrafter
from gemma_py.generate.core import Request
from gemma_py.generate.scheduler import Scheduler
from gemma_py.models.gemma4_assistant import joined
from gemma_py.reference import gemma4_assistant, logits_and_rows
from gemma_py.runtime import runner as runners
from gemma_py.runtime.batch import ORIGIN
from gemma_py.runtime.cache import Cache, HiddenStates
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.weights.checkpoint import open_checkpoint

NAMES = list(tiny_families.ASSISTANTS)
GOLDEN_NAMES = [name for name in NAMES if "wrapped" not in name]


def opened(checkpoints: dict[str, Path], name: str, folder: Path, **options: Any) -> gemma_py.Engine:
    """Load a main model with its assistant. Unwritten memory is NaN, so that a read of unwritten memory changes
    results.
    """
    engine = gemma_py.load(checkpoints[main_of(name)], draft=written(name, folder / "assistant"), **options)
    engine.instruments.poison = assistant_of(engine).runner.instruments.poison = True
    return engine


# --- the steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_steps_match_transformers(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """tools/make_assistant_goldens.py stored the results of transformers. The prompt is longer than the window."""
    with np.load(DATA / "tiny_assistants.npz") as stored:
        logits, hidden = stored[f"{name} logits"], stored[f"{name} hidden"]
    with opened(checkpoints, name, tmp_path, threads=2) as engine:
        session = engine.session()
        first = int(session.prefill(GOLDEN["ids"][main_of(name)]).argmax())
        made, states = steps(session, [first, *logits.argmax(1)[: STEPS - 1].tolist()])
    # transformers computes the logits of a few clusters. Every other logit is the smallest computed logit minus one.
    computed = logits > logits.min(1, keepdims=True) if "clusters" in name else np.ones(logits.shape, bool)
    assert 0.2 < computed.mean() < 0.3 or "clusters" not in name
    assert np.abs(made - logits)[computed].max() < 1e-4 * logits.std()
    assert np.abs(states - hidden).max() < 1e-4 * hidden.std()


def same_as_the_specification(engine: gemma_py.Engine, lengths: tuple[int, ...] = (1, 2, 8, 9, 30, 70)) -> bool:
    """Whether steps have the specification's bits, after prompts shorter and longer than a window."""
    assistant, ids = assistant_of(engine), prompt(engine.config, max(lengths))
    weights: Any = assistant.checkpoint.weights(engine.quant)
    embedding: Any = engine.reference_weights()["embed_tokens"]
    same = True
    for number, length in enumerate(lengths):
        engine.set_threads(1 + number % 4)
        session = engine.session()
        session.prefill(ids[:length], chunk=7)
        made, states = steps(session, ids[:3])
        _, cache = logits_and_rows(engine, ids[:length])
        wanted = session._cache.last_hidden()
        assert wanted is not None
        for token, logits, state in zip(ids[:3], made, states, strict=True):
            want, wanted = gemma4_assistant.step(
                weights, assistant.runner.config, embedding, cache, token, np.asarray(wanted)
            )
            same = same and bool((bits(logits) == bits(want)).all() and (bits(state) == bits(wanted)).all())
        same = same and session.ids == ids[:length] and session.kv_digest() == cache.digests()
    return same


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_match_the_specification(checkpoints: dict[str, Path], tmp_path: Path, name: str, kv: str) -> None:
    with opened(checkpoints, name, tmp_path, kv=kv) as engine:
        assert same_as_the_specification(engine)
        assistant_of(engine).runner.instruments.fault_plan = FaultPlan(seed=1)
        assert same_as_the_specification(engine, (33,))


@pytest.mark.parametrize("mutant", ["a row of the next token", "a row less", "an earlier hidden state"])
def test_control_mutants_of_a_step(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    honest_batch = runners._batch

    def batch(inputs: Any, buffers: np.ndarray) -> Any:
        made = honest_batch(inputs, buffers)
        if inputs[0].cache.position and len(inputs[0].tokens) == 1:
            made.segments[:, :, ORIGIN] += 1 if mutant == "a row of the next token" else -1
        return made

    with opened(checkpoints, "gemma4-dense", tmp_path, deadline=1.0) as engine:
        assert same_as_the_specification(engine, (30,))
        if mutant == "an earlier hidden state":
            monkeypatch.setattr(assistants._HiddenState, "gather", lambda self, ids, rows: rows.fill(self.row[0]))
        else:
            monkeypatch.setattr(runners, "_batch", batch)
        try:
            assert not same_as_the_specification(engine, (30,))
        except gemma_py.errors.WorkerError:
            assert mutant == "a row of the next token"  # no layer stores this row, so the step waits until the deadline


def test_gguf_files_match(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for name in ("gemma4-e2b", "gemma4-dense"):
        path = write_model(tmp_path / f"{name}.gguf", tiny_families.ASSISTANTS[name], seed=2)
        with opened(checkpoints, name, tmp_path / name) as engine:
            session = engine.session()
            session.prefill(prompt(engine.config, 30))
            want = steps(session, [1, 2, 3])
        with gemma_py.load(checkpoints[name], draft=path) as engine:
            session = engine.session()
            session.prefill(prompt(engine.config, 30))
            for made, wanted in zip(steps(session, [1, 2, 3]), want, strict=True):
                assert (bits(made) == bits(wanted)).all()


def test_quantised_assistants_match_the_specification(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    variant = tiny_families.assistant(tiny_families.VARIANTS["gemma4-dense"], hidden_size=32, intermediate_size=64)
    path = write_model(tmp_path / "assistant.gguf", variant, seed=5, quant="Q8_0")
    with gemma_py.load(checkpoints["gemma4-dense"], draft=path) as engine:
        assert same_as_the_specification(engine, (40,))


def test_the_hidden_state_after_accepted_guesses_is_that_of_plain_decoding(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with opened(checkpoints, "gemma4-e2b", tmp_path) as engine:
        ids, plain, session = prompt(engine.config, 60), engine.session(), engine.session(16)
        plain.prefill(ids[:20])
        session.prefill(ids[:20])
        assert (session._cache.last_hidden() == plain._cache.last_hidden()).all()  # type: ignore[union-attr]
        for taken in (0, 1, 3, 4):
            at = session.position
            session.verify(ids[at], ids[at + 1 : at + 5])
            for guess in ids[at + 1 : at + 1 + taken]:
                session.accept([guess])
            for token in ids[at : at + 1 + taken]:
                plain.decode(token)
            assert (session._cache.last_hidden() == plain._cache.last_hidden()).all()  # type: ignore[union-attr]
        session.rewind(25)
        assert session._cache.last_hidden() is None
        assert engine.session()._cache.last_hidden() is None


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gemma4-e2b", "gemma4-dense", "gemma4-experts"])
def engine(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[gemma_py.Engine]:
    with opened(checkpoints, request.param, tmp_path_factory.mktemp("assistant"), threads=2) as made:
        yield made


def check_answers(engine: gemma_py.Engine, most: int) -> None:
    ids, length = prompt(engine.config, 40), engine.context
    asked = [Request(ids[n:], length - 40, sampling) for n, sampling in enumerate(SAMPLINGS.values())]
    asked += [Request(ids[:1], length - 1), Request(ids[:3], 30, ends=frozenset(range(20)))]
    for number, request in enumerate(asked):
        engine.set_threads(1 + number % 4)
        want: Outcome = outcome(engine, replace(request, speculate="off"))[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "pace", Eager(most))
            made, speculation = outcome(engine, request)
        assert made == want
        assert speculation.guessed > 0 or len(want.tokens) < 3


def mostly_right(monkeypatch: pytest.MonkeyPatch, answers: dict[int, list[int]]) -> None:
    """Replace two of three guesses by the right tokens. `answers` has the right answer for each length of prompt."""
    honest = AssistantDrafter.guess

    def guess(self: AssistantDrafter, count: int) -> list[int]:
        made, answer = honest(self, count), answers[self._prompt_tokens]
        true = answer[len(self._answer) :]
        return [t if (len(self._answer) + n) % 3 else own for n, (own, t) in enumerate(zip(made, true, strict=False))]

    monkeypatch.setattr(AssistantDrafter, "guess", guess)


@pytest.mark.parametrize("most", [1, 4, 15])
def test_answers_match_those_without_an_assistant(engine: gemma_py.Engine, most: int) -> None:
    check_answers(engine, most)


def test_answers_with_right_and_wrong_guesses_match(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, sampling in enumerate(SAMPLINGS.values()):
        request = Request(prompt(engine.config, 40 + number), 60, sampling)
        want, _ = outcome(engine, replace(request, speculate="off"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "pace", Eager(4))
            mostly_right(patch, {40 + number: [token for token, *_ in want.tokens]})
            made, speculation = outcome(engine, request)
        assert made == want
        assert 20 < speculation.accepted < speculation.guessed


def test_control_a_row_too_many_is_accepted(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Cache.accept

    def accept(self: Cache, tokens: Any) -> None:
        honest(self, self._guesses[: len(tokens) + 1])

    request = Request(prompt(engine.config, 40), 60)
    want, _ = outcome(engine, replace(request, speculate="off"))
    monkeypatch.setattr(engine, "pace", Eager(4))
    mostly_right(monkeypatch, {40: [token for token, *_ in want.tokens]})
    monkeypatch.setattr(Cache, "accept", accept)
    with pytest.raises((AssertionError, InputError)):
        assert outcome(engine, request)[0] == want


def test_shared_passes_match(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        Request(prompt(engine.config, 5 + 9 * number, number % 3), 30, sampling)
        for number, sampling in enumerate(SAMPLINGS.values())
    ]
    alone = [outcome(engine, replace(request, speculate="off"))[0] for request in asked]
    monkeypatch.setattr(engine, "pace", Eager(3))
    scheduler = Scheduler(engine, parallel=5, queue=40, prefix_bytes=300_000)
    try:
        clients = [Client(scheduler, request) for request in asked]
        for client, want in zip(clients, alone, strict=True):
            client.end()
            assert [told(event.token) for event in client.made] == want.tokens
        assert scheduler.stats().guessed_tokens > 0
    finally:
        scheduler.close()


@pytest.mark.parametrize("fault", ["raise", "stall", "memory"])
def test_an_answer_continues_without_an_assistant_that_fails(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    honest, count = Assistant.step, itertools.count()

    def step(self: Assistant, cache: Cache, token: int, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if next(count) == 5:
            if fault == "memory":
                raise MemoryError("no memory")
            self.runner.instruments.fault_plan = FaultPlan(fault=fault, worker=0, phase=0)
        return honest(self, cache, token, hidden)

    with opened(checkpoints, "gemma4-dense", tmp_path, threads=2, deadline=0.5) as engine:
        request = Request(prompt(engine.config, 30), 40)
        want, _ = outcome(engine, replace(request, speculate="off"))
        monkeypatch.setattr(engine, "pace", Eager(4))
        monkeypatch.setattr(Assistant, "step", step)
        with pytest.warns(GemmaWarning, match="the draft model failed, and the answer continues"):
            made, speculation = outcome(engine, request)
        assert made == want
        assert speculation.guessed > 0
        assert (assistant_of(engine).failures, assistant_of(engine).usable) == (1, True)


def test_without_a_hidden_state_the_assistant_guesses_nothing(
    engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "pace", Eager(4))
    monkeypatch.setattr(runners, "HiddenStates", lambda first, rows: HiddenStates(first + 1, rows[:0]))
    request = Request(prompt(engine.config, 20), 20)
    made, speculation = outcome(engine, request)
    assert made == outcome(engine, replace(request, speculate="off"))[0]
    assert speculation.guessed == 0


# --- loading ----------------------------------------------------------------------------------------------------------


def test_assistants_that_do_not_fit_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    assistant = written("gemma4-dense", tmp_path / "assistant")
    with pytest.raises(InputError, match="an assistant only guesses tokens for another model"):
        gemma_py.load(assistant)
    with pytest.raises(
        InputError, match=r"layer 2 of the assistant needs a layer of the main model with the same kind of window"
    ):
        gemma_py.load(checkpoints["gemma4-dense-untied-old-config"], draft=assistant)
    with pytest.raises(InputError, match="needs the vocabulary of the main model"):
        gemma_py.load(TINY, draft=assistant)
    with gemma_py.load(checkpoints["gemma4-dense"], threads=1) as engine:
        config = replace(open_checkpoint(assistant).config, backbone_hidden_size=31)
        with pytest.raises(InputError, match="needs a main model with hidden_size 31, found 32"):
            joined(config, engine.config, "here")


def test_the_commands_accept_an_assistant(checkpoints: dict[str, Path], tmp_path: Path, run: Any) -> None:
    assistant, ids = written("gemma4-dense", tmp_path / "assistant"), tmp_path / "ids.json"
    ids.write_text("[2, 5, 7, 5, 7]")
    made = []
    for more in (["--draft", assistant], ["--speculate", "off"]):
        code, out, _ = run(
            "generate",
            checkpoints["gemma4-dense"],
            "--ids",
            ids,
            "--max-tokens",
            20,
            "--json",
            *more,
        )
        assert code == 0
        made.append(out[: out.index('"timings"')])
    assert made[0] == made[1]
    code, out, _ = run("inspect", assistant)
    assert code == 0
    assert "assistant" in out
    code, _, err = run("generate", assistant, "--ids", ids, "--json")
    assert code == 1
    assert err.count("\n") == 1
