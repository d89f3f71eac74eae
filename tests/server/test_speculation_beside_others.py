import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from crowd import Client, Crowd, drawn
from drafters import KINDS, Answers, Eager, drafting
from gemma4_model import write_checkpoint
from repository import TINY
from serving import Running, serving

import gemma_py
from gemma_py.errors import ComputationError
from gemma_py.generate import scheduler as schedulers
from gemma_py.generate.core import Generation, Request
from gemma_py.generate.events import Finished
from gemma_py.generate.scheduler import Scheduler
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS, PrefixCache
from gemma_py.runtime.runner import Runner, SequenceInput


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    with gemma_py.load(TINY, threads=2) as engine:
        engine.instruments.poison = True
        yield Crowd(engine, 20, seed=7)


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the size of passes, so that prompts take several of them."""
    monkeypatch.setattr(schedulers, "_PASS_SECONDS", 0.0)
    monkeypatch.setattr(schedulers, "_PASS_SECONDS_BESIDE", 0.0)


def answers_in(crowd: Crowd) -> Answers:
    pairs = zip(crowd.requests, crowd.alone, strict=True)
    return {tuple(request.ids): [token.id for token in alone] for request, alone in pairs}


def same_with_guesses(crowd: Crowd, kind: str, seed: int = 0) -> Scheduler:
    """Compare all requests with their answers alone, while drafters of this kind guess. Return the closed scheduler."""
    crowd.engine.instruments.fault_plan = FaultPlan(seed=seed)
    with drafting(kind, answers_in(crowd), crowd.engine.config.vocab_size):
        scheduler = Scheduler(crowd.engine, parallel=6, queue=40, prefix_bytes=600_000)
        try:
            assert crowd.same(scheduler)
        finally:
            scheduler.close()
            crowd.engine.instruments.fault_plan = None
    return scheduler


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("kind", KINDS)
def test_shared_passes_with_guesses_match(crowd: Crowd, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(crowd.engine, "pace", Eager(4))
    crowd.engine.set_threads(3 if kind == "half" else 1)
    stats = same_with_guesses(crowd, kind, seed=1 if kind == "half" else 0).stats()
    assert stats.guessed_tokens > 0
    assert stats.accepted_tokens <= stats.guessed_tokens
    assert (stats.accepted_tokens > 0) == (kind != "wrong")
    made = sum(len(alone) for alone in crowd.alone)
    assert stats.computed_tokens + stats.cached_tokens <= made + sum(len(request.ids) for request in crowd.requests)


def test_failed_passes_with_guesses_are_repeated(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd.engine, "pace", Eager(4))
    honest, passes = Runner.run_together, [0]

    def failing(self: Runner, inputs: list[SequenceInput]) -> list[np.ndarray]:
        passes[0] += 1
        self.instruments.fault_plan = FaultPlan(fault="raise", worker=0, layer=1) if passes[0] % 4 == 0 else None
        return honest(self, inputs)

    monkeypatch.setattr(Runner, "run_together", failing)
    stats = same_with_guesses(crowd, "half").stats()
    assert stats.failed_passes > 3
    assert stats.accepted_tokens > 0


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("mutant", ["a guess too many", "the logits of the next row"])
def test_control_mutants_of_the_scheduler(crowd: Crowd, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    """Mutants: a guess is accepted without comparison, or a token is chosen from another row's logits."""
    monkeypatch.setattr(crowd.engine, "pace", Eager(4))
    honest = Scheduler._choose

    def choose(
        self: Scheduler, sequence: Any, part: SequenceInput, logits: np.ndarray, sampled: list[int]
    ) -> Finished | None:
        if part.guesses and mutant == "a guess too many":
            sequence.ids += part.tokens[-1:]
            self.engine.accept(part.cache, part.tokens[-part.guesses :])
            part, sampled = part._replace(guesses=0), []
        if mutant == "the logits of the next row":
            logits, sampled = np.roll(logits, 1, axis=0), []
        return honest(self, sequence, part, logits, sampled)

    monkeypatch.setattr(Scheduler, "_choose", choose)
    with pytest.raises((AssertionError, ComputationError)):
        same_with_guesses(crowd, "lookup")


def cached_of_a_second_request(engine: gemma_py.Engine) -> tuple[int, int]:
    """Compute an answer with guesses, and then a prompt that begins with the answer's tokens.

    Return how many tokens of the prompt the prefix cache had, and how many it should have.
    """
    ids = drawn(random.Random(5), 20)
    plain = list(engine.generate(ids, 60, speculate="off"))
    known = [*ids, *(token.id for token in plain)]
    with drafting("half", {tuple(ids): known[20:], tuple(known): []}, engine.config.vocab_size):
        scheduler = Scheduler(engine, prefix_bytes=600_000)
        try:
            Client(scheduler, Request(ids, 60)).end()
            end = Client(scheduler, Request(known, 1)).end()
        finally:
            scheduler.close()
    assert isinstance(end, Finished)
    return end.usage.cached, (len(known) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_accepted_guesses_reach_the_prefix_cache(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd.engine, "pace", Eager())
    cached, tokens = cached_of_a_second_request(crowd.engine)
    assert cached == tokens
    honest_take, honest_insert = Scheduler._take, PrefixCache.insert

    def take(self: Scheduler, sequence: Any, part: SequenceInput, *others: Any) -> Any:
        honest_insert(self._prefixes, part.cache, sequence.position - len(part.tokens) + part.guesses)
        return honest_take(self, sequence, part, *others)

    # A mutant: the prefix cache stores the rows of a pass before guesses are accepted.
    monkeypatch.setattr(Scheduler, "_take", take)
    monkeypatch.setattr(PrefixCache, "insert", lambda self, cache, since: None)
    cached, tokens = cached_of_a_second_request(crowd.engine)
    assert cached < tokens


def test_a_client_that_cancels_gets_no_more_tokens(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd.engine, "pace", Eager())
    ids = drawn(random.Random(5), 20)
    plain = [token.id for token in crowd.engine.generate(ids, 40, speculate="off")]
    with drafting("oracle", {tuple(ids): plain}, crowd.engine.config.vocab_size):
        scheduler = Scheduler(crowd.engine)
        heard: list[Any] = []

        def listener(event: Any) -> None:
            heard.append(event)
            if len(heard) == 6:
                ticket.cancel()

        ticket = scheduler.submit(Request(ids, 40), listener)
        scheduler.drain(30)
        scheduler.close()
    assert [event.token.id for event in heard[1:-1]] == plain[:5]
    assert heard[-1].reason == "cancelled"


# --- over HTTP --------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 3, "maxItems": 5},
    },
    "required": ["colour", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "red red green tags colour red"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "response_format": FORMAT, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": MESSAGES, "response_format": FORMAT, "temperature": 1, "seed": 3, "n": 2}),
    (CHAT, {"messages": MESSAGES, "response_format": FORMAT, "temperature": 1, "seed": 4, "reasoning_effort": "high"}),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "temperature": 1, "seed": 2}),
    (CHAT, {"messages": MESSAGES, "temperature": 0, "frequency_penalty": 0.4, "stop": ["e"], "n": 2}),
    (COMPLETION, {"prompt": ["one two one", "two one two"], "logprobs": 3, "echo": True, "temperature": 0}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip("llguidance")
    with (
        gemma_py.load(write_checkpoint(tmp_path_factory.mktemp("speculation") / "gemma4"), threads=2) as engine,
        serving(engine) as running,
    ):
        yield running


def response(server: Running, path: str, body: dict[str, Any], **more: Any) -> Any:
    """The choices of a response, without their random ids."""
    status, document = server.post(path, max_tokens=60, **body, **more)
    return status, re.sub(r"call_\w+", "call", str(document.get("choices", document)))


def test_responses_do_not_depend_on_speculation(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app.service.engine, "pace", Eager(6))
    for path, body in BODIES:
        want = response(server, path, body, speculate="off")
        assert want[0] == 200
        assert response(server, path, body, speculate="auto") == want
        if path == CHAT:
            _, whole = server.post(path, max_tokens=60, **body, speculate="off")
            said = whole["choices"][0]["message"]["content"] or ""
            for text in (said, said[: len(said) // 2] + " else " + said, "something else"):
                if text:
                    assert response(server, path, body, prediction={"type": "content", "content": text}) == want
    assert server.scheduler.stats().accepted_tokens > 0
    _, metrics, _ = server.request("GET", "/metrics")
    assert re.search(r"gemma_py_accepted_tokens_total [1-9]", metrics)
    assert re.search(r"gemma_py_guessed_tokens_total [1-9]", metrics)


def test_tokens_that_a_grammar_forces_are_guessed_and_accepted(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.app.service.engine, "pace", Eager(6))
    for path, body in (BODIES[0], BODIES[1], BODIES[3]):
        want = response(server, path, body, speculate="off")
        before = server.scheduler.stats()
        with drafting("none", {}, server.app.service.engine.config.vocab_size):
            assert response(server, path, body) == want
        after = server.scheduler.stats()
        guessed, accepted = after.guessed_tokens - before.guessed_tokens, after.accepted_tokens - before.accepted_tokens
        # The guess of an end token is never accepted, because no token follows.
        assert guessed - body.get("n", 1) <= accepted > 0


def test_the_usage_counts_predicted_tokens(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app.service.engine, "pace", Eager(6))
    path, body = BODIES[4]
    body = {name: value for name, value in body.items() if name not in ("n", "stop")}
    _, plain = server.post(path, max_tokens=30, **body)
    assert "completion_tokens_details" not in plain["usage"] or "accepted_prediction_tokens" not in str(plain["usage"])
    content = [{"type": "text", "text": plain["choices"][0]["message"]["content"]}]
    _, made = server.post(path, max_tokens=30, **body, prediction={"type": "content", "content": content})
    details, tokens = made["usage"]["completion_tokens_details"], plain["usage"]["completion_tokens"]
    assert made["choices"] == plain["choices"]
    assert 0 < details["accepted_prediction_tokens"] <= tokens
    assert details["rejected_prediction_tokens"] >= 0


@pytest.mark.parametrize(
    "field", [{"speculate": "on"}, {"prediction": "text"}, {"prediction": {"type": "content", "content": 1}}]
)
def test_malformed_fields_are_refused(server: Running, field: dict[str, Any]) -> None:
    status, document = server.post(CHAT, messages=MESSAGES, **field)
    assert status == 400
    assert document["error"]["param"].startswith(next(iter(field)))


def test_control_a_grammar_advanced_by_a_guess(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app.service.engine, "pace", Eager(6))
    honest = Generation.guess_chances

    def chances(self: Generation) -> list[float]:
        made = honest(self)
        if made and self.request.constraint is not None:
            self.request.constraint.accept(self.speculation.guesses(1)[0])
        return made

    path, body = BODIES[0]
    want = response(server, path, body, speculate="off")
    monkeypatch.setattr(Generation, "guess_chances", chances)
    assert response(server, path, body) != want
