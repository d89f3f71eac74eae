import math
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from crowd import WAIT, Client, Crowd, drawn, options, scores_of, scores_told
from repository import TINY
from serving import serving

import gemma_py
from gemma_py.errors import ComputationError, ContextError, InputError, Overloaded
from gemma_py.generate import base_scheduler
from gemma_py.generate import scheduler as schedulers
from gemma_py.generate.base_scheduler import Health
from gemma_py.generate.core import Generation, Request
from gemma_py.generate.events import Event, Failed, Finished, Generated, PrefillProgress, Scored
from gemma_py.generate.options import Sampling
from gemma_py.generate.sampling import ROWS_AT_ONCE, likeliest, log_probability
from gemma_py.generate.scheduler import Scheduler, shares
from gemma_py.models.config import Config
from gemma_py.models.program import WANTED
from gemma_py.runtime import runner as runners
from gemma_py.runtime.batch import ROWS, Batch
from gemma_py.runtime.cache import bytes_needed
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS, PrefixCache
from gemma_py.runtime.runner import CHUNK, SequenceInput
from gemma_py.server.events import EventQueue


@pytest.fixture
def scheduler(tiny_engine: gemma_py.Engine) -> Iterator[Scheduler]:
    made = Scheduler(tiny_engine, parallel=4, queue=40)
    yield made
    made.close()


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    """Requests for an engine whose scratch memory and unpublished rows are NaN."""
    with gemma_py.load(TINY, threads=2) as engine:
        engine.instruments.poison = True
        yield Crowd(engine, 32, seed=5)


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the size of passes, so that prompts take several of them."""
    monkeypatch.setattr(schedulers, "_PASS_SECONDS", 0.0)
    monkeypatch.setattr(schedulers, "_PASS_SECONDS_BESIDE", 0.0)


@pytest.mark.parametrize("mutant", [False, True])
def test_several_threads_draw_and_each_request_gets_its_own_token(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch, mutant: bool
) -> None:
    """mutant: the tokens that were drawn in a pass reach the requests in reverse order."""
    threads, honest_sample, honest_step = set(), Generation.sample, Scheduler._sample

    def sample(self: Generation, logits: np.ndarray, guesses: Sequence[int] = ()) -> list[int]:
        threads.add(threading.current_thread().name.rstrip("0123456789"))
        return honest_sample(self, logits, guesses)

    monkeypatch.setattr(Generation, "sample", sample)
    if mutant:
        monkeypatch.setattr(Scheduler, "_sample", lambda self, *results: honest_step(self, *results)[::-1])
    assert same_in_shared_passes(crowd, 4) != mutant
    assert "gemma_py-sampler_" in threads and len(threads) > 1


def same_in_shared_passes(crowd: Crowd, seed: int) -> bool:
    crowd.engine.instruments.fault_plan = FaultPlan(seed=seed)
    scheduler = Scheduler(crowd.engine, parallel=8, queue=40, prefix_bytes=600_000)
    try:
        return crowd.same(scheduler)
    finally:
        scheduler.close()
        crowd.engine.instruments.fault_plan = None


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("seed", [1, 2])
def test_shared_passes_match_generate(crowd: Crowd, seed: int) -> None:
    assert same_in_shared_passes(crowd, seed)


def test_requests_share_passes_and_prefixes(crowd: Crowd) -> None:
    scheduler = Scheduler(crowd.engine, parallel=8, queue=40)
    assert crowd.same(scheduler)
    scheduler.close()
    stats = scheduler.stats()
    made = sum(len(alone) for alone in crowd.alone)
    assert stats.passes < made / 3
    assert stats.prefix_hits > 8
    assert stats.cached_tokens > 8 * 32
    assert stats.computed_tokens + stats.cached_tokens <= made + sum(len(request.ids) for request in crowd.requests)
    assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)


def test_streams_over_http_match_generate(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []
    honest = EventQueue._put

    def before(queue: EventQueue, index: int, event: Event) -> None:
        """A negative control: each client gets the previous token, which may belong to another client's answer."""
        if isinstance(event, Generated) and event.token.finish_reason is None:
            made.append(event)
            event = made[-2:][0]
        honest(queue, index, event)

    with serving(crowd.engine, parallel=8, queue=40) as server:
        assert crowd.same_over_http(server)
        monkeypatch.setattr(EventQueue, "_put", before)
        assert not crowd.same_over_http(server)


@pytest.mark.usefixtures("small_passes")
@pytest.mark.parametrize("what", ["tables", "logits", "a bit of a prefix", "a prefix of another"])
def test_control_caches_logits_or_prefixes_are_exchanged(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Two sequences exchange KV caches or logits, or a cached prefix is wrong. The comparison must fail."""
    honest_batch, honest_stored = runners._batch, PrefixCache._rows_of

    def batch(parts: Sequence[SequenceInput], logits: np.ndarray) -> Batch:
        made = honest_batch(parts, logits)
        if len(parts) > 1 and what == "tables":
            made.tables[[0, 1]] = made.tables[[1, 0]]
        if what == "logits":
            count = made.counts[WANTED, ROWS]
            made.rows[WANTED, :count] = np.roll(made.rows[WANTED, :count], 1)
        return made

    def stored(prefixes: PrefixCache, config: Config, path: list[Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for keys, values in honest_stored(prefixes, config, path[::-1] if what == "a prefix of another" else path):
            if what == "a bit of a prefix":
                keys.view(np.uint32)[0, -1, 0] ^= 1 << 22
            yield keys, values

    monkeypatch.setattr(runners, "_batch", batch)
    monkeypatch.setattr(PrefixCache, "_rows_of", stored)
    assert not same_in_shared_passes(crowd, 1)


def test_usage_and_progress_are_told(scheduler: Scheduler, tiny_engine: gemma_py.Engine) -> None:
    ids = drawn(random.Random(2), 100)
    for cached in (0, 96):
        client = Client(scheduler, Request(ids, 5))
        end = client.end()
        assert isinstance(end, Finished)
        assert (end.reason, end.usage.prompt, end.usage.cached, end.usage.generated) == ("length", 100, cached, 5)
        assert 0 <= end.usage.queued_seconds <= end.usage.first_token_seconds <= end.usage.seconds
        progress = [event for event in client.heard if isinstance(event, PrefillProgress)]
        assert progress[-1] == PrefillProgress(100, 100, cached)
        assert [event.done for event in progress] == sorted({event.done for event in progress})


def test_a_prompt_that_is_being_computed_is_not_computed_twice(scheduler: Scheduler, small_passes: None) -> None:
    ids = drawn(random.Random(3), 100)
    clients = [Client(scheduler, Request(ids, 1)) for _ in range(4)]
    ends = [client.end() for client in clients]
    assert [end.usage.cached for end in ends if isinstance(end, Finished)] == [0, 96, 96, 96]
    assert scheduler.stats().computed_tokens == 100 + 3 * 4


def test_the_prompt_s_log_probabilities(
    tiny_engine: gemma_py.Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's log probabilities do not depend on the prefix cache, on how many rows of logits fit into memory, or on
    whether tokens are generated.
    """
    honest, rows = tiny_engine.run_together, []

    def run(parts: Sequence[SequenceInput]) -> list[np.ndarray]:
        rows.append(sum(part.logits for part in parts))
        return honest(parts)

    monkeypatch.setattr(tiny_engine, "run_together", run)
    ids = drawn(random.Random(4), 100)
    request = Request(ids, 0, top_logprobs=2, scored=True)
    clients = [Client(scheduler, request), Client(scheduler, request), Client(scheduler, Request(ids, 0))]
    for client in clients:
        end = client.end()
        assert isinstance(end, Finished)
        assert (end.reason, end.usage.generated, client.made) == ("length", 0, [])
    for client in clients[:2]:
        assert scores_told(client) == scores_of(tiny_engine, ids)
        told = [event for event in client.heard if isinstance(event, Scored)][1:]
        for event, logits in zip(told, tiny_engine.session().prefill(ids, all_logits=True), strict=False):
            assert [token for token, _ in event.top] == likeliest(logits, 2)[1].tolist()
            assert [logprob for _, logprob in event.top] == [log_probability(logits, token) for token, _ in event.top]
    assert max(rows) <= ROWS_AT_ONCE + 1  # a request without scores needs one row more


def test_the_rows_of_a_pass_are_divided_among_requests() -> None:
    assert shares([5], 32) == [5]
    assert shares([500], 32) == [32]
    assert shares([500, 500], 32) == [32, 0]
    assert shares([500, 500, 4], 32) == [28, 0, 4]
    assert shares([2, 500, 4], 32) == [2, 26, 4]
    assert shares([500, 1, 1], 32) == [30, 1, 1]
    assert shares([500, 20, 3, 500], 32) == [16, 13, 3, 0]


def test_keys_and_values_stay_within_their_budget(tiny_engine: gemma_py.Engine) -> None:
    need = bytes_needed(tiny_engine.config, "float32", 60, CHUNK, BLOCK_TOKENS)
    scheduler = Scheduler(tiny_engine, parallel=8, kv_bytes=2 * need + 1)
    clients = [Client(scheduler, Request([2, *range(10, 29)], 40)) for _ in range(6)]
    for client in clients:
        while not client.over:
            client.next()
            stats = scheduler.stats()
            assert stats.kv_bytes <= 2 * need and stats.running <= 2
    with pytest.raises(ContextError, match="MiB of KV cache"):
        scheduler.submit(Request([2], 500), print)
    scheduler.close()
    assert [client.heard[-1].reason for client in clients if isinstance(client.heard[-1], Finished)] == ["length"] * 6


def test_a_cancelled_request_ends_and_its_place_is_free(scheduler: Scheduler) -> None:
    clients = [Client(scheduler, Request([2, 3], 4000)) for _ in range(5)]
    first = clients[0]
    while not first.made:
        first.next()
    for client in clients[1:]:
        client.ticket.cancel()
    ends = [client.end() for client in clients[1:]]
    assert [end.reason for end in ends if isinstance(end, Finished)] == ["cancelled"] * 4
    assert isinstance(Client(scheduler, Request([2, 3], 2)).end(), Finished)
    first.ticket.cancel()
    assert isinstance(first.end(), Finished)
    assert first.events.empty()


def test_impossible_requests_are_refused_at_once(scheduler: Scheduler) -> None:
    context = scheduler.engine.context
    for request, kind in (
        (Request([], 1), InputError),
        (Request([2], -1), InputError),
        (Request([9999], 1), InputError),
        (Request([2], 1, top_logprobs=-1), InputError),
        (Request([2], context), ContextError),
        (Request([2], 1, Sampling(logit_bias={9999: 1.0})), InputError),
        (Request([2], 1, stop=("",)), InputError),
    ):
        with pytest.raises(kind):
            scheduler.submit(request, print)
    assert scheduler.stats().waiting == scheduler.stats().running == 0


def test_a_full_queue_is_an_error(tiny_engine: gemma_py.Engine) -> None:
    scheduler = Scheduler(tiny_engine, parallel=1, queue=1)
    clients = [Client(scheduler, Request([2], 4000)) for _ in range(2)]
    with pytest.raises(Overloaded, match="requests are waiting") as caught:
        for _ in range(2):
            clients.append(Client(scheduler, Request([2], 4000)))
    assert caught.value.retry_after >= 1
    scheduler.close()
    assert [client.end() for client in clients]
    with pytest.raises(Overloaded, match="shutting down"):
        scheduler.submit(Request([2], 1), print)


def test_drain_lets_answers_end(tiny_engine: gemma_py.Engine) -> None:
    scheduler = Scheduler(tiny_engine)
    clients = [Client(scheduler, Request([2, number], 20)) for number in range(4)]
    scheduler.drain(WAIT)
    ends = [client.end() for client in clients]
    assert [end.reason for end in ends if isinstance(end, Finished)] == ["length"] * 4
    scheduler.close()
    scheduler.close()
    assert not scheduler._thread.is_alive()


def test_alternatives_are_the_likeliest(scheduler: Scheduler) -> None:
    client = Client(scheduler, Request([2, 5, 7], 5, top_logprobs=4))
    client.end()
    for event in client.made:
        logprobs = [logprob for _, logprob in event.top]
        assert len(event.top) == 4 and logprobs == sorted(logprobs, reverse=True)
        assert event.top[0] == (event.token.id, event.token.logprob)


def test_a_listener_that_fails_ends_its_own_request_only(
    scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Client(scheduler, Request([2], 30))
    heard = []

    def listener(event: Event) -> None:
        heard.append(event)
        raise ValueError("this listener fails")

    scheduler.submit(Request([2], 4000), listener)
    assert isinstance(other.end(), Finished)
    assert isinstance(Client(scheduler, Request([2], 30)).end(), Finished)
    assert len(heard) <= 3
    assert "this listener fails" in capsys.readouterr().err


def test_logprobs_are_computed_only_on_request(scheduler: Scheduler) -> None:
    client = Client(scheduler, Request([2, 5, 7], 3, logprobs=False))
    client.end()
    assert [math.isnan(event.token.logprob) for event in client.made] == [True] * 3


def test_end_tokens_stop_strings_and_constraints_end_answers(
    scheduler: Scheduler, tiny_engine: gemma_py.Engine
) -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    alone = list(tiny_engine.generate([2, 5, 7], 20, **options(sampling)))
    assert len({token.id for token in alone[:5]}) == 5
    client = Client(scheduler, Request([2, 5, 7], 20, sampling, ends=frozenset([alone[4].id])))
    assert isinstance(client.end(), Finished)
    assert [event.token.id for event in client.made] == [token.id for token in alone[:5]]
    assert client.made[-1].token.finish_reason == "stop"

    text = "".join(token.text for token in alone)
    client = Client(scheduler, Request([2, 5, 7], 20, sampling, stop=(text[9:12],)))
    end = client.end()
    assert "".join(event.token.text for event in client.made) == text[: text.index(text[9:12])]
    assert isinstance(end, Finished) and end.reason == "stop"

    class Ascending:
        """Allows only 300, then 301, then 302."""

        place = 0
        description: ClassVar[dict[str, Any]] = {}

        def allowed(self, logits: np.ndarray) -> np.ndarray:
            masked = np.full_like(logits, -np.inf)
            masked[300 + self.place] = logits[300 + self.place]
            return masked

        def accept(self, token: int) -> None:
            self.place += 1

        def forced(self, most: int) -> list[int]:
            return [300, 301, 302][self.place :][:most]

        @property
        def finished(self) -> bool:
            return self.place == 3

    for sampling in (
        Sampling(),
        Sampling(temperature=1.0, top_k=5, top_p=0.9, seed=1),
        Sampling(temperature=2.0, seed=1),
    ):
        client = Client(scheduler, Request([2, 5, 7], 20, sampling, constraint=Ascending()))
        end = client.end()
        assert isinstance(end, Finished) and end.reason == "stop"
        assert [event.token.id for event in client.made] == [300, 301, 302]
        assert client.made[0].token.logprob < -1  # the logprob is the model's, before the constraint


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def weak() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=2, deadline=1.0) as engine:
        yield engine


def failing(engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch, fault: str, passes: set[int]) -> None:
    """passes: the numbers of the passes that fail, from 1."""
    honest, count = engine.run_together, 0

    def run(parts: Sequence[SequenceInput]) -> list[np.ndarray]:
        nonlocal count
        count += 1
        engine.instruments.fault_plan = FaultPlan(fault=fault, worker=1) if count in passes else None
        return honest(parts)

    monkeypatch.setattr(engine, "run_together", run)


def test_a_pass_that_fails_once_is_tried_again(weak: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(weak.generate([2, 3], 6))
    failing(weak, monkeypatch, "raise", {1, 3, 6})
    scheduler = Scheduler(weak)
    client = Client(scheduler, Request([2, 3], 6))
    assert isinstance(client.end(), Finished)
    assert [event.token for event in client.made] == alone
    scheduler.close()


def test_all_requests_get_their_answers_although_a_worker_stalls(
    weak: gemma_py.Engine, small_passes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stalls happen during prompts and during answers. Stalled passes are repeated, and no client gets an event twice."""
    rng = random.Random(6)
    requests = [
        Request(drawn(rng, 30), 12),
        Request(drawn(rng, 20), 3, top_logprobs=2, scored=True),
        Request([2, 3], 9),
    ]

    def answers() -> list[list[Event]]:
        scheduler = Scheduler(weak, parallel=3, prefix_bytes=0)
        clients = [Client(scheduler, request) for request in requests]
        assert all(isinstance(client.end(), Finished) for client in clients)
        stats = scheduler.stats()
        assert (stats.failed_passes, scheduler.health().ok) == (len(stalls), True)
        scheduler.close()
        return [[event for event in client.heard if isinstance(event, Scored | Generated)] for client in clients]

    stalls: set[int] = set()
    untroubled = answers()
    stalls = {2, 5, 12}
    failing(weak, monkeypatch, "stall", stalls)
    assert answers() == untroubled


def test_health_is_not_ok_until_a_pass_succeeds_after_a_stall(
    weak: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(weak, monkeypatch, "stall", {2})
    scheduler, honest = Scheduler(weak), weak.run_together
    healths: list[Health] = []

    def run(parts: Sequence[SequenceInput]) -> list[np.ndarray]:
        healths.append(scheduler.health())
        return honest(parts)

    monkeypatch.setattr(weak, "run_together", run)
    assert isinstance(Client(scheduler, Request([2, 3], 3)).end(), Finished)
    assert [health.ok for health in healths] == [True, True, False, True]
    assert not any(health.permanent for health in healths)
    assert "worker 1 of 2" in healths[2].why
    scheduler.close()


def test_an_engine_that_fails_again_and_again_is_given_up(
    weak: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(weak, monkeypatch, "raise", {3, 4})
    scheduler = Scheduler(weak, parallel=2)
    clients = [Client(scheduler, Request([2, 3], 9)) for _ in range(4)]
    assert all(isinstance(client.end(), Failed) for client in clients)
    health = scheduler.health()
    assert health.permanent and not health.ok and "worker 1 of 2" in health.why
    with pytest.raises(ComputationError, match="the engine has failed"):
        scheduler.submit(Request([2], 1), print)
    scheduler.close()


def test_health_reports_a_step_that_does_not_end(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_scheduler, "SLOWEST_STEP", 0.05)
    scheduler = Scheduler(tiny_engine)
    assert scheduler.health().ok
    blocked, free, honest = threading.Event(), threading.Event(), tiny_engine.run_together

    def run(parts: Sequence[SequenceInput]) -> list[np.ndarray]:
        blocked.set()
        free.wait(WAIT)
        return honest(parts)

    monkeypatch.setattr(tiny_engine, "run_together", run)
    client = Client(scheduler, Request([2], 1))
    assert blocked.wait(WAIT)
    while scheduler.health().ok:
        pass
    assert "no step has ended for" in scheduler.health().why
    free.set()
    assert isinstance(client.end(), Finished)
    scheduler.drain(WAIT)
    assert scheduler.health().ok
    scheduler.close()
