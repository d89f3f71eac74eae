"""The pool with scripted replicas, and mistakes in the pool that these tests must find."""

import contextlib
import pickle
import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pools import CONSTRAINTS, REQUEST, UNTIL_THE_END, WAIT, Listening, ScriptedChannel, ScriptedHosts, pooled, scripted
from serving import wait_until

import gemma_py
from gemma_py.cluster.hosts import Host
from gemma_py.errors import ComputationError, ContextError, GemmaError, MismatchError, WorkerError
from gemma_py.generate.base_scheduler import Health, SchedulerStats
from gemma_py.generate.events import Failed, Finished, PrefillProgress
from gemma_py.generate.options import Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.replicas import pool as pools
from gemma_py.replicas.delivery import PooledRequest
from gemma_py.replicas.pool import Pool, ReplicaOptions
from gemma_py.replicas.replica import Broken, Cancel, PrepareConstraint, Ready, Refused, Reported, Submit, _Answers

ANSWER = [*range(200, 210)]


@pytest.fixture
def hosts() -> ScriptedHosts:
    return ScriptedHosts()


@pytest.fixture
def pool(tiny_engine: gemma_py.Engine, hosts: ScriptedHosts) -> Iterator[Pool]:
    with scripted(tiny_engine, hosts=hosts) as made:
        yield made


def lost_after(pool: Pool, hosts: ScriptedHosts, tokens: int) -> tuple[Listening, ScriptedChannel, ScriptedChannel]:
    """Lose a replica after some tokens of an answer. Return the request, the lost replica, and the next one with the request."""
    listening = Listening(pool, REQUEST)
    (first,) = [hosts.with_work()]
    first.tokens(first.submission(), ANSWER[:tokens])
    listening.until_tokens(tokens)
    first.lose()
    wait_until(lambda: any(channel.submitted for channel in hosts.channels if channel is not first))
    (second,) = [channel for channel in hosts.channels if channel.submitted and channel is not first]
    return listening, first, second


def replayed(pool: Pool, hosts: ScriptedHosts) -> list[int]:
    """The tokens that a client gets if a replica is lost after three of ten tokens."""
    listening, _, second = lost_after(pool, hosts, 3)
    second.tokens(second.submission(), ANSWER, end=True)
    last = listening.end()
    assert isinstance(last, Finished), last
    return listening.ids


def test_a_client_gets_each_token_once(pool: Pool, hosts: ScriptedHosts) -> None:
    assert replayed(pool, hosts) == ANSWER


def test_texts_and_usage_after_a_replay(pool: Pool, hosts: ScriptedHosts) -> None:
    listening, _, second = lost_after(pool, hosts, 3)
    second.tokens(second.submission(), ANSWER, end=True)
    last = listening.end()
    assert isinstance(last, Finished)
    assert "".join(event.token.text for event in listening.tokens) == "".join(f"<{token}>" for token in ANSWER)
    assert (last.usage.prompt, last.usage.generated) == (len(REQUEST.ids), 10)
    assert 0 <= last.usage.queued_seconds <= last.usage.first_token_seconds <= last.usage.seconds


def test_a_request_keeps_its_seed(pool: Pool, hosts: ScriptedHosts) -> None:
    Listening(pool, replace(REQUEST, sampling=Sampling(temperature=1.0)))
    first = hosts.with_work()
    first.lose()
    wait_until(lambda: hosts.with_work() is not first)
    seeds = {channel.submission().request.sampling.seed for channel in hosts.channels if channel.submitted}
    assert len(seeds) == 1 and None not in seeds


def test_a_late_event_of_a_lost_replica_is_ignored(pool: Pool, hosts: ScriptedHosts) -> None:
    assert after_a_late_event(pool, hosts) == ANSWER


def after_a_late_event(pool: Pool, hosts: ScriptedHosts) -> list[int]:
    """The tokens that a client gets if an event of a lost replica comes after the request was submitted again."""
    links: list[Any] = []
    deliver = pool._deliver

    def record(link: Any, reported: Reported) -> None:
        links.append(link)
        deliver(link, reported)

    pool._deliver = record  # type: ignore[method-assign]
    listening, first, second = lost_after(pool, hosts, 3)
    late = ScriptedChannel([])
    late.tokens(first.submission(), [ANSWER[3]])
    second.tokens(second.submission(), ANSWER[:3])
    pool._post(links[0], late.receive(0))
    second.tokens(second.submission(), ANSWER[3:], end=True)
    listening.end()
    return listening.ids


def test_progress_of_a_replay_is_not_reported_again(pool: Pool, hosts: ScriptedHosts) -> None:
    listening = Listening(pool, REQUEST)
    first = hosts.with_work()
    for done in (10, 20):
        first.says(Reported(first.submission().number, PrefillProgress(done, 41, 0)))
        listening.next()
    first.lose()
    wait_until(lambda: hosts.with_work() is not first)
    second = hosts.with_work()
    for done in (16, 20, 30, 41):
        second.says(Reported(second.submission().number, PrefillProgress(done, 41, 16)))
    second.tokens(second.submission(), ANSWER, end=True)
    listening.end()
    progress = [event for event in listening.events if isinstance(event, PrefillProgress)]
    assert progress == [PrefillProgress(done, 41, 0) for done in (10, 20, 30, 41)]


def test_another_token_in_a_replay_is_an_error(pool: Pool, hosts: ScriptedHosts) -> None:
    listening, _, second = lost_after(pool, hosts, 3)
    second.tokens(second.submission(), [*ANSWER[:2], 99])
    last = listening.end()
    assert isinstance(last, Failed) and isinstance(last.error, MismatchError) and str(last.error).endswith("at token 3")
    wait_until(lambda: Cancel(second.submission().number) in second.sent)


def test_a_shorter_answer_in_a_replay_is_an_error(pool: Pool, hosts: ScriptedHosts) -> None:
    listening, _, second = lost_after(pool, hosts, 3)
    second.tokens(second.submission(), ANSWER[:2], end=True)
    last = listening.end()
    assert isinstance(last, Failed) and isinstance(last.error, MismatchError)


def test_a_request_that_ends_every_replica_ends_with_an_error(pool: Pool, hosts: ScriptedHosts) -> None:
    listening = Listening(pool, REQUEST)
    for losses in range(1, 6):
        wait_until(lambda losses=losses: sum(bool(channel.submitted) for channel in hosts.channels) == losses)  # type: ignore[misc]
        hosts.with_work().lose()
    last = listening.end()
    assert isinstance(last, Failed)
    assert str(last.error) == "5 replicas in a row were lost during this request; the last time, a replica was lost"
    wait_until(lambda: pool.health().ok)


def test_losses_count_only_without_new_events(pool: Pool, hosts: ScriptedHosts) -> None:
    listening = Listening(pool, REQUEST)
    for count in range(1, 9):
        wait_until(lambda count=count: sum(bool(channel.submitted) for channel in hosts.channels) == count)  # type: ignore[misc]
        channel = hosts.with_work()
        channel.tokens(channel.submission(), ANSWER[:count])
        listening.until_tokens(count)
        channel.lose()
    assert listening.ids == ANSWER[:8]
    listening.ticket.cancel()
    listening.end()


def test_a_replica_whose_scheduler_fails_is_replaced(pool: Pool, hosts: ScriptedHosts) -> None:
    listening = Listening(pool, REQUEST)
    first = hosts.with_work()
    first.says(Broken("worker 1 of 2 stalled"))
    wait_until(lambda: hosts.with_work() is not first)
    second = hosts.with_work()
    second.tokens(second.submission(), ANSWER, end=True)
    assert isinstance(listening.end(), Finished)


@pytest.mark.parametrize("error", [ContextError("too long"), ComputationError("NaN")])
def test_an_error_of_a_request_reaches_the_client(pool: Pool, hosts: ScriptedHosts, error: GemmaError) -> None:
    listening = Listening(pool, REQUEST)
    channel = hosts.with_work()
    channel.says(Reported(channel.submission().number, Failed(error)))
    assert listening.end() == Failed(error)
    assert pool.health().ok


def test_a_replica_that_computes_other_logits_does_not_join(tiny_engine: gemma_py.Engine) -> None:
    hosts = ScriptedHosts()
    with scripted(tiny_engine, hosts=hosts) as pool:
        hosts.first = [Ready(100, "another fingerprint")]
        started = len(hosts.channels)
        hosts.channels[0].lose()
        wait_until(lambda: len(hosts.channels) > started + 1)
        assert len(pool._links) == 1 and pool.health().ok


def test_lost_replicas_and_failed_starts_are_reported(tiny_engine: gemma_py.Engine) -> None:
    hosts, reports = ScriptedHosts(), list[str]()
    with scripted(tiny_engine, hosts=hosts, report=reports.append) as pool:
        listening = Listening(pool, REQUEST)
        hosts.first = [Refused("no memory is left", False)]
        hosts.with_work().lose()
        wait_until(lambda: len(hosts.channels) > 4)
        assert reports[0] == "a replica was lost; 1 requests wait for another replica"
        assert reports[1:] == ["a replica cannot be used: no memory is left"]  # once, however often it is tried
        listening.ticket.cancel()
        listening.end()


def test_a_refusal_at_the_start_is_raised(tiny_engine: gemma_py.Engine) -> None:
    hosts = ScriptedHosts()
    hosts.first = [Refused("no memory is left", False)]
    with (
        pytest.raises(ComputationError, match=r"^a replica cannot be used: no memory is left$"),
        scripted(tiny_engine, hosts=hosts),
    ):
        pass


def test_no_host_at_the_start_is_an_error(tiny_engine: gemma_py.Engine) -> None:
    hosts = ScriptedHosts()
    hosts.first = None
    with pytest.raises(ComputationError, match=r"^no host is left$"), scripted(tiny_engine, hosts=hosts):
        pass


def test_replicas_that_cannot_start_again_are_a_permanent_failure(pool: Pool, hosts: ScriptedHosts) -> None:
    listening = Listening(pool, REQUEST)
    hosts.with_work()
    hosts.first = [Refused("no memory is left", False)]
    for channel in list(hosts.channels):
        channel.lose()
    assert str(listening.end()) == str(
        Failed(ComputationError("no replica could be started for 0 s: a replica cannot be used: no memory is left"))
    )
    assert pool.health().permanent


def test_counters_of_lost_replicas_are_kept(pool: Pool, hosts: ScriptedHosts) -> None:
    for channel in hosts.channels:
        channel.says(SchedulerStats(1, 2, 100, 200, 3, 4, 5, 6, 7, 8, 9, 10))
    both = SchedulerStats(0, 0, 200, 400, 6, 8, 10, 12, 14, 16, 18, 20)
    wait_until(lambda: pool.stats() == both)
    hosts.channels[0].lose()
    wait_until(lambda: pool.stats() == replace(both, kv_bytes=100, prefix_bytes=200))


class OneOfSeveral(ScriptedHosts):
    def __init__(self, name: str, threads: int) -> None:
        super().__init__()
        self.name, self.threads = name, threads


class SeveralHosts(ScriptedHosts):
    def __init__(self) -> None:
        super().__init__()
        self.hosts = [OneOfSeveral("a", 8), OneOfSeveral("b", 6), OneOfSeveral("c", 1)]

    def usable(self) -> list[Host]:
        return [*self.hosts]


def test_replicas_share_the_threads_of_their_host(tiny_engine: gemma_py.Engine) -> None:
    hosts = SeveralHosts()
    options = ReplicaOptions(5, "model", CONSTRAINTS, deadline=UNTIL_THE_END)
    pool = Pool(tiny_engine, options, hosts)
    try:
        threads = [[channel.sent[0].threads for channel in host.channels] for host in hosts.hosts]
        assert threads == [[4, 4], [3, 3], [1]]
        first, lost = hosts.hosts[0], hosts.hosts[2].channels[0]
        hosts.hosts = [first]  # the other hosts do not answer in time, but keep their replicas
        lost.lose()
        wait_until(lambda: len(first.channels) == 3 and len(first.channels[2].sent) == 1)
        assert first.channels[2].sent[0].threads == 2 and first.channels[2].sent[0].sharing == 3
    finally:
        pool.close()


def test_one_replica_on_each_host_and_another_host_for_a_lost_one(tiny_engine: gemma_py.Engine) -> None:
    hosts = SeveralHosts()
    gone, failing = hosts.hosts[1], hosts.hosts[2]
    with scripted(tiny_engine, count=None, hosts=hosts) as pool:
        assert pool.parallel == 3 * 4 and [len(host.channels) for host in hosts.hosts] == [1, 1, 1]
        hosts.hosts.remove(gone)
        failing.first = [Refused("no memory is left", False)]
        failing.channels[0].lose()
        gone.channels[0].lose()
        wait_until(lambda: len(pool._links) == 3 and len(hosts.hosts[0].channels) == 3)
        assert len(gone.channels) == 1


def test_a_silent_replica_is_lost(tiny_engine: gemma_py.Engine) -> None:
    hosts, reports = ScriptedHosts(), list[str]()
    with pooled(tiny_engine, hosts=hosts, deadline=0.2, report=reports.append):
        wait_until(lambda: len(reports) > 1)
    assert reports[0] == "a replica gave no sign of life for 0.2 s; 0 requests wait for another replica"


# --- negative controls: mistakes that the tests above would find ------------------------------------------------------


def test_control_a_replay_with_another_seed(pool: Pool, monkeypatch: pytest.MonkeyPatch, hosts: ScriptedHosts) -> None:
    original = PooledRequest.submitted

    def submitted(self: PooledRequest, number: int) -> None:
        original(self, number)
        self.request = replace(self.request, sampling=replace(self.request.sampling, seed=number))

    monkeypatch.setattr(PooledRequest, "submitted", submitted)
    with pytest.raises(AssertionError):
        test_a_request_keeps_its_seed(pool, hosts)


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, change: Callable[[int], int]) -> Iterator[None]:
    """Let requests begin a replay with a wrong number of tokens that they take for sent again."""
    original = PooledRequest.submitted

    def submitted(self: PooledRequest, number: int) -> None:
        original(self, number)
        if self.generated:
            self._again.generated = change(len(self.generated))

    with monkeypatch.context() as patch:
        patch.setattr(PooledRequest, "submitted", submitted)
        patch.setattr(PooledRequest, "_check", lambda self, equal: None)
        yield


def test_control_a_token_that_is_sent_twice(pool: Pool, monkeypatch: pytest.MonkeyPatch, hosts: ScriptedHosts) -> None:
    with counted(monkeypatch, lambda sent: 1):
        assert replayed(pool, hosts) == [*ANSWER[:3], *ANSWER[2:]]


def test_control_a_token_that_is_left_out(pool: Pool, monkeypatch: pytest.MonkeyPatch, hosts: ScriptedHosts) -> None:
    with counted(monkeypatch, lambda sent: -1):
        assert replayed(pool, hosts) == [*ANSWER[:3], *ANSWER[4:]]


def test_control_an_unchanged_count_gives_the_answer(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, hosts: ScriptedHosts
) -> None:
    with counted(monkeypatch, lambda sent: 0):
        assert replayed(pool, hosts) == ANSWER


def test_control_a_late_event_that_counts(pool: Pool, monkeypatch: pytest.MonkeyPatch, hosts: ScriptedHosts) -> None:
    """Mutant: an event is found by the request's number alone, which every submission uses again."""
    monkeypatch.setattr(pools.itertools, "count", lambda: iter(lambda: 7, None))
    pool._numbers = iter(lambda: 7, None)  # type: ignore[assignment]
    original = Pool._deliver

    def deliver(self: Pool, link: Any, reported: Reported) -> None:
        original(self, next((other for other in self._links if reported.number in other.requests), link), reported)

    monkeypatch.setattr(Pool, "_deliver", deliver)
    with pytest.raises(AssertionError):
        test_a_late_event_of_a_lost_replica_is_ignored(pool, hosts)


def test_every_replica_prepares_for_constraints(pool: Pool, hosts: ScriptedHosts) -> None:
    prepare = PrepareConstraint({"kind": "json_schema"})
    pool.prepare_constraint(prepare.constraint)
    assert all(channel.sent[1:] == [prepare] for channel in hosts.channels)
    hosts.channels[0].lose()
    wait_until(lambda: len(hosts.channels) == 3 and hosts.channels[2].sent[1:] == [prepare])


def test_a_submission_has_no_constraint_object(tiny_engine: gemma_py.Engine) -> None:
    """A constraint cannot be pickled, so its description travels beside the request."""

    class Constraint:
        description = {"kind": "tool_call", "name": None, "thoughts": None}  # noqa: RUF012

    hosts = ScriptedHosts()
    with scripted(tiny_engine, hosts=hosts) as pool:
        Listening(pool, replace(REQUEST, constraint=Constraint()))  # type: ignore[arg-type]
        submission: Submit = hosts.with_work().submission()
        assert submission.request.constraint is None and submission.constraint == Constraint.description


# --- in the replica's process -----------------------------------------------------------------------------------------


@pytest.fixture
def replica(tiny_engine: gemma_py.Engine) -> Iterator[tuple[Scheduler, _Answers, "queue.SimpleQueue[Any]"]]:
    scheduler, sent = Scheduler(tiny_engine), queue.SimpleQueue[Any]()
    yield scheduler, _Answers(scheduler, lambda description: None, sent.put), sent
    scheduler.close()


def test_a_failed_scheduler_is_not_the_error_of_a_request(
    replica: tuple[Scheduler, _Answers, "queue.SimpleQueue[Any]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, answers, sent = replica
    error = WorkerError(0, 1, 3, 4, "stalled")
    answers._report(1, Failed(error))
    reported = pickle.loads(pickle.dumps(sent.get(timeout=WAIT)))  # a WorkerError could not be unpickled
    assert isinstance(reported, Reported) and isinstance(reported.event, Failed)
    assert type(reported.event.error) is ComputationError and str(reported.event.error) == str(error)
    monkeypatch.setattr(scheduler, "health", lambda: Health(False, str(error), True, 0.0))
    answers._report(1, Failed(error))
    while isinstance(found := sent.get(timeout=WAIT), SchedulerStats):
        pass
    assert found == Broken(str(error))


def test_an_error_of_a_submission_is_reported(replica: tuple[Scheduler, _Answers, "queue.SimpleQueue[Any]"]) -> None:
    _, answers, sent = replica
    answers._submit(Submit(7, replace(REQUEST, max_tokens=10**6), None))
    while isinstance(found := sent.get(timeout=WAIT), SchedulerStats):
        pass
    assert found.number == 7 and isinstance(found.event, Failed) and isinstance(found.event.error, ContextError)
