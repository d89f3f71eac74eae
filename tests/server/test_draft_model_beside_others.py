import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crowd import Client, Crowd, drawn
from drafters import Eager
from gemma4_model import write_checkpoint
from repository import TINY
from serving import serving

import gemma_py
from gemma_py.errors import ContextError, GemmaWarning
from gemma_py.generate import scheduler as schedulers
from gemma_py.generate.core import Request
from gemma_py.generate.draft_model import DraftModel, ModelDrafter
from gemma_py.generate.scheduler import Scheduler
from gemma_py.runtime.fault_injection import FaultPlan


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    with gemma_py.load(TINY, threads=2, draft=TINY) as engine:
        assert engine.draft is not None
        engine.instruments.poison = engine.draft.runner.instruments.poison = True
        yield Crowd(engine, 20, seed=7)


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the size of passes, so that prompts take several of them."""
    monkeypatch.setattr(schedulers, "_PASS_SECONDS", 0.0)
    monkeypatch.setattr(schedulers, "_PASS_SECONDS_BESIDE", 0.0)


def same(crowd: Crowd) -> Scheduler:
    """Compare answers in shared passes with answers to the requests alone. Return the closed scheduler."""
    scheduler = Scheduler(crowd.engine, parallel=6, queue=40, prefix_bytes=600_000)
    try:
        assert crowd.same(scheduler)
    finally:
        scheduler.close()
    return scheduler


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("draft", ["itself", "always wrong"])
def test_shared_passes_match(crowd: Crowd, monkeypatch: pytest.MonkeyPatch, draft: str, threads: int) -> None:
    monkeypatch.setattr(crowd.engine, "pace", Eager(4, model_every=threads))
    crowd.engine.set_threads(threads)
    if draft == "always wrong":
        honest = ModelDrafter.guess
        monkeypatch.setattr(
            ModelDrafter, "guess", lambda self, count: [(token + 1) % 1536 for token in honest(self, count)]
        )
    stats = same(crowd).stats()
    assert stats.guessed_tokens > 0
    assert (stats.accepted_tokens > 0.5 * stats.guessed_tokens) == (draft == "itself")


def test_requests_outlive_a_draft_model_that_fails(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, honest, passes = crowd.engine, DraftModel.run, [0]
    assert engine.draft is not None
    monkeypatch.setattr(engine, "pace", Eager(4))
    before = engine.draft.failures

    def run(self: DraftModel, cache: Any, tokens: list[int]) -> np.ndarray:
        passes[0] += 1
        faulty = passes[0] % 9 == 0
        self.runner.instruments.fault_plan = FaultPlan(fault="raise", worker=0, layer=1) if faulty else None
        return honest(self, cache, tokens)

    monkeypatch.setattr(DraftModel, "run", run)
    with pytest.warns(GemmaWarning, match="the draft model failed"):
        stats = same(crowd).stats()
    engine.draft.runner.instruments.fault_plan = None
    assert engine.draft.failures > before + 2
    assert engine.draft.usable
    assert stats.failed_passes == 0
    assert stats.accepted_tokens > 0


@pytest.mark.usefixtures("small_passes")
def test_control_a_draft_model_that_computes_in_the_cache_of_the_request(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd.engine, "pace", Eager(4))
    honest = Scheduler._allocate

    def allocate(self: Scheduler, sequence: Any) -> int:
        hit = honest(self, sequence)
        sequence.generation.speculation._model._sequence.cache = sequence.cache
        return hit

    monkeypatch.setattr(Scheduler, "_allocate", allocate)
    scheduler = Scheduler(crowd.engine, prefix_bytes=0)
    try:
        prompt = drawn(random.Random(2), 30)
        client = Client(scheduler, Request(prompt, 40))
        client.end()
        plain = [token.id for token in crowd.engine.generate(prompt, 40, speculate="off")]
        assert [event.token.id for event in client.made] != plain
    finally:
        scheduler.close()


def test_the_cache_of_the_draft_model_counts_as_memory_of_a_request(crowd: Crowd) -> None:
    engine = crowd.engine
    need = engine.cache_bytes(130, schedulers.BLOCK_TOKENS)
    scheduler = Scheduler(engine, kv_bytes=need + 1, prefix_bytes=0)
    try:
        with pytest.raises(ContextError, match="of KV cache"):
            scheduler.submit(Request([1] * 100, 30), lambda event: None)
        assert scheduler.submit(Request([1] * 50, 10), lambda event: None) is not None
    finally:
        scheduler.close()


SCHEMA = {"type": "object", "properties": {"tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 4}},
          "required": ["tags"], "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "red red green tags colour red"}]


def test_responses_with_schemas_and_stop_strings_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    path = write_checkpoint(tmp_path / "gemma4")
    bodies: list[dict[str, Any]] = [
        {"response_format": FORMAT, "temperature": 0, "logprobs": True},
        {"response_format": FORMAT, "temperature": 1, "seed": 3},
        {"temperature": 0.8, "seed": 4, "stop": ["e"], "logprobs": True},
    ]
    with gemma_py.load(path, threads=2, draft=path) as engine, serving(engine) as running:
        monkeypatch.setattr(engine, "pace", Eager(5))
        for body in bodies:
            made = [
                running.post("/v1/chat/completions", messages=MESSAGES, max_tokens=50, speculate=mode, **body)
                for mode in ("off", "auto")
            ]
            assert [status for status, _ in made] == [200, 200]
            assert made[0][1]["choices"] == made[1][1]["choices"]
        assert running.scheduler.stats().accepted_tokens > 0
