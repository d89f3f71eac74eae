from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from crowd import Client
from drafters import Eager
from repository import TINY

import gemma_py
from gemma_py.generate.core import Request
from gemma_py.generate.events import Finished
from gemma_py.generate.options import Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.generate.session import Decoder
from gemma_py.receipts.receipt import Receipt
from gemma_py.runtime.fault_injection import FaultPlan

PROMPT = [2, *(3 + 7 * number % 500 for number in range(60))]
SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(1.0, top_k=40, top_p=0.9, seed=11),
    "penalised": Sampling(0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, seed=5),
}
NO_END = {1: -100.0, 6: -100.0}


@pytest.fixture(scope="module")
def engine() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=2) as made:
        yield made


@pytest.fixture(params=SAMPLINGS)
def request_(request: pytest.FixtureRequest) -> Request:
    return asked(PROMPT, SAMPLINGS[request.param])


def asked(prompt: Sequence[int], sampling: Sampling, count: int = 40) -> Request:
    return Request(prompt, count, replace(sampling, logit_bias=NO_END), stop=("qqqq",), speculate="off", receipt=True)


def receipt_of(engine: gemma_py.Engine, request: Request, chunk: int | None = None) -> bytes:
    generation, session = engine.generation(request), engine.session()
    logits = session.prefill(generation.prompt, chunk)
    tokens = list(generation.tokens(logits, Decoder(session, generation).decode, session.kv_digest))
    assert tokens[-1].receipt is not None
    return tokens[-1].receipt.to_bytes()


def test_threads_and_chunks_change_no_byte(engine: gemma_py.Engine, request_: Request) -> None:
    alone = receipt_of(engine, request_)
    try:
        for threads in range(1, 9):
            engine.set_threads(threads)
            for chunk in (1, 7, 61) if threads in (1, 3) else (None,):
                assert receipt_of(engine, request_, chunk) == alone, (threads, chunk)
    finally:
        engine.set_threads(2)


def test_speculation_changes_no_byte(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked([2, 5, 6, 7] * 12, Sampling(logit_bias=NO_END), 60)
    alone = receipt_of(engine, request)
    monkeypatch.setattr(engine, "pace", Eager())
    generation, session = engine.generation(replace(request, speculate="auto")), engine.session()
    logits = session.prefill(generation.prompt)
    *_, last = generation.tokens(logits, Decoder(session, generation).decode, session.kv_digest)
    assert generation.speculation.accepted > 5 and generation.speculation.guessed > generation.speculation.accepted
    assert last.receipt is not None and last.receipt.to_bytes() == alone


def scheduled(scheduler: Scheduler, requests: Sequence[Request]) -> list[bytes]:
    clients = [Client(scheduler, request) for request in requests]
    made = []
    for client in clients:
        end = client.end()
        assert isinstance(end, Finished) and end.receipt is not None
        made.append(end.receipt().to_bytes())
    return made


def test_other_requests_and_prefix_hits_change_no_byte(engine: gemma_py.Engine) -> None:
    requests = [asked(PROMPT[: 20 + 4 * n], sampling, 24) for n, sampling in enumerate(SAMPLINGS.values())]
    alone = [receipt_of(engine, request) for request in requests]
    for speculate in ("off", "auto"):
        scheduler = Scheduler(engine, parallel=3, queue=40)
        try:
            beside = [replace(request, speculate=speculate) for request in requests]
            assert scheduled(scheduler, beside) == alone
            assert scheduled(scheduler, beside[::-1]) == alone[::-1]
            assert scheduler.stats().prefix_hits >= 3 and scheduler.stats().passes < 3 * 2 * 24
        finally:
            scheduler.close()


@pytest.mark.parametrize("fault", ["raise", "stall"])
def test_a_pass_that_is_repeated_after_a_fault_changes_no_byte(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    requests = [asked(PROMPT[: 20 + 4 * n], sampling, 24) for n, sampling in enumerate(SAMPLINGS.values())]
    with gemma_py.load(TINY, threads=2, deadline=1.0) as engine:
        alone = [receipt_of(engine, request) for request in requests]
        count = 0
        honest = engine.run_together

        def failing(inputs: Any) -> Any:
            nonlocal count
            count += 1
            engine.instruments.fault_plan = FaultPlan(fault=fault, worker=1) if count in (2, 12) else None
            return honest(inputs)

        monkeypatch.setattr(engine, "run_together", failing)
        scheduler = Scheduler(engine, parallel=3, queue=40)
        try:
            assert scheduled(scheduler, requests) == alone
            assert scheduler.stats().failed_passes == 2
        finally:
            scheduler.close()
            engine.instruments.fault_plan = None


def test_a_conversation_and_generate_make_equal_receipts(engine: gemma_py.Engine) -> None:
    conversation = gemma_py.Conversation(engine, sampling=replace(SAMPLINGS["drawn"], logit_bias=NO_END), max_tokens=50)
    for text in ("Hello there.", "And then?"):
        tokens = list(conversation.send(text))
        made = conversation.receipt()
        assert list(made.answer) == [token.id for token in tokens]
        assert conversation._last is not None
        assert made.to_bytes() == receipt_of(engine, replace(conversation._last[0], receipt=True))
    (again,) = [token for token in conversation.retry() if token.finish_reason]
    assert again.receipt is None and conversation.receipt().answer != made.answer


def test_what_is_not_asked_for_is_not_computed(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(PROMPT, SAMPLINGS["greedy"], 4)
    failing: Any = partial(pytest.fail, "computed")
    for name in ("identity", "fingerprint"):
        monkeypatch.setattr(engine, name, failing)
    monkeypatch.setattr("gemma_py.generate.evidence.row_digest", failing)
    monkeypatch.setattr("gemma_py.runtime.cache.digest", failing)
    session = engine.session()
    generation = engine.generation(replace(request, receipt=False))
    logits = session.prefill(generation.prompt)
    assert len(list(generation.tokens(logits, Decoder(session, generation).decode, session.kv_digest))) == 4
    with pytest.raises(pytest.fail.Exception):
        engine.generation(request)


def test_a_bit_of_a_row_or_of_the_kv_cache_changes_the_receipt(engine: gemma_py.Engine) -> None:
    request = asked(PROMPT, SAMPLINGS["greedy"], 6)
    alone = receipt_of(engine, request)
    for where in ("logits", "kv"):
        generation, session = engine.generation(request), engine.session()
        logits = session.prefill(generation.prompt)
        if where == "logits":
            logits = logits.copy()
            logits.view(np.uint32)[0] ^= 1
        else:
            keys = session._cache.layers[0].keys
            keys.view(np.uint32)[0, len(PROMPT) - 1, 0] ^= 1
        *_, last = generation.tokens(logits, Decoder(session, generation).decode, session.kv_digest)
        assert last.receipt is not None and last.receipt.to_bytes() != alone


def test_bfloat16_rows_and_quantised_weights_have_receipts_of_their_own() -> None:
    made: list[Receipt] = []
    for options in ({}, {"kv": "bfloat16"}, {"quant": "q8_0"}):
        with gemma_py.load(TINY, **options) as engine:  # type: ignore[arg-type]
            last = list(engine.generate("Hello", 5, receipt=True))[-1]
            assert last.receipt is not None
            made.append(last.receipt)
    assert len({receipt.model.fingerprint for receipt in made}) == 3
    assert len({receipt.model.files for receipt in made}) == 1
