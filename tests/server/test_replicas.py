"""Replicas in processes: their answers, and what clients see while processes are killed and stopped."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from answers import requests, told
from equivalence import prompt
from pools import Listening, pooled, process_with_most, processes
from repository import TINY
from serving import NO_END, Client, Process, Running, serving, wait_until

import gemma_py
from gemma_py.cluster.hosts import Host, ThisMachine
from gemma_py.errors import ComputationError, GemmaError, InputError, Overloaded
from gemma_py.generate.base_scheduler import BaseScheduler
from gemma_py.generate.core import Request
from gemma_py.generate.embedding_scheduler import EmbeddingScheduler
from gemma_py.generate.events import Embedded, Failed, Finished, Scored
from gemma_py.generate.options import Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.replicas.pool import Pool

PROMPT = [2, *range(100, 160)]


@pytest.fixture(scope="module")
def engine() -> Iterator[gemma_py.Engine]:
    with gemma_py.load(TINY, threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def pool(engine: gemma_py.Engine) -> Iterator[Pool]:
    """Tests end and stop its processes, which the pool then replaces."""
    with pooled(engine) as made:
        yield made


def contents(listening: Listening) -> list[Any]:
    """All that a client may see of an answer, without times."""
    last = listening.end()
    assert isinstance(last, Finished), last
    scored = [event for event in listening.events if isinstance(event, Scored)]
    receipt = None if last.receipt is None else last.receipt().document()
    return [scored, [(told(event.token), event.top) for event in listening.tokens], last.reason, receipt]


def answers(scheduler: BaseScheduler[Any, Any], asked: list[Request]) -> list[list[Any]]:
    return [contents(each) for each in [Listening(scheduler, request) for request in asked]]


def test_answers_have_the_bits_of_one_engine(engine: gemma_py.Engine, pool: Pool) -> None:
    asked = [*requests(engine), Request(PROMPT, 5, scored=True, top_logprobs=3), Request(PROMPT, 0, scored=True)]
    asked += [
        Request([*PROMPT, number], 9, Sampling(temperature=1.0, seed=number), receipt=True) for number in range(4)
    ]
    scheduler = Scheduler(engine, parallel=8, queue=40)
    try:
        assert answers(pool, asked) == answers(scheduler, asked)
    finally:
        scheduler.close()
    assert all(replica.known for replica in pool._links)  # each replica had requests


def seed_of(receipt: dict[str, Any]) -> int:
    return int(receipt["predicate"]["request"]["sampling"]["seed"])


def test_an_answer_without_a_seed_is_that_of_the_seed_in_its_receipt(engine: gemma_py.Engine, pool: Pool) -> None:
    asked = Request(PROMPT, 30, Sampling(temperature=1.0), receipt=True)
    (first,), (second,) = answers(pool, [asked]), answers(pool, [asked])
    assert first != second
    scheduler = Scheduler(engine)
    try:
        seeded = replace(asked, sampling=Sampling(temperature=1.0, seed=seed_of(first[-1])))
        assert answers(scheduler, [seeded]) == [first]
    finally:
        scheduler.close()


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request([], 5), "at least one token"),
        (Request([5000], 5), "outside the vocabulary"),
        (Request(PROMPT, 5, Sampling(logit_bias={9999: 1.0})), "logit_bias"),
    ],
)
def test_an_invalid_request_is_refused_at_once(pool: Pool, request_: Request, said: str) -> None:
    with pytest.raises(InputError, match=said):
        pool.submit(request_, lambda event: None)


def test_a_cancelled_request_ends_in_its_replica_too(pool: Pool) -> None:
    listening = Listening(pool, Request(PROMPT, 4000))
    listening.until_tokens(3)
    listening.ticket.cancel()
    last = listening.end()
    assert isinstance(last, Finished) and last.reason == "cancelled"
    assert last.usage.generated == len(listening.ids) >= 3 and last.usage.prompt == len(PROMPT)
    wait_until(lambda: pool.stats().kv_bytes == 0)


def test_a_listener_that_raises_is_cancelled(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    def listen(event: Any) -> None:
        raise RuntimeError("this listener is broken")

    ticket = pool.submit(Request(PROMPT, 4000), listen)
    wait_until(lambda: ticket.cancelled and pool.stats().kv_bytes == pool.stats().running == 0)
    assert "this listener is broken" in capsys.readouterr().err


def test_a_full_queue_and_a_drain(engine: gemma_py.Engine) -> None:
    with pooled(engine, parallel=1, queue=1) as pool, serving(engine, scheduler=pool) as server:
        listening = [Listening(pool, Request([*PROMPT, number], 4000)) for number in range(3)]
        for each in listening[:2]:
            each.until_tokens(1)
        with pytest.raises(Overloaded, match="the queue is full: 1 requests are waiting"):
            Listening(pool, Request(PROMPT, 1))
        assert server.post("/v1/completions", prompt="a", max_tokens=1)[0] == 429
        assert (pool.stats().running, pool.stats().waiting) == (2, 1)
        assert pool.drain(0.1) == 3
        assert all(isinstance(last := each.end(), Finished) and last.reason == "cancelled" for each in listening)
        with pytest.raises(Overloaded, match="shutting down"):
            Listening(pool, Request(PROMPT, 1))


def test_a_drain_waits_for_running_requests(engine: gemma_py.Engine) -> None:
    with pooled(engine, count=1) as pool:
        listening = Listening(pool, Request(PROMPT, 50))
        assert pool.drain(60) == 0
        assert isinstance(last := listening.end(), Finished) and last.reason == "length"


def cached_tokens(scheduler: BaseScheduler[Any, Any]) -> int:
    """Hold twelve conversations of three turns at once. Return how many tokens of prompts were in a prefix cache."""
    conversations = [[2, *range(200 + 50 * number, 240 + 50 * number)] for number in range(12)]
    cached = 0
    for turn in range(3):
        listening = [Listening(scheduler, Request(ids, 20)) for ids in conversations]
        for ids, each in zip(conversations, listening, strict=True):
            last = each.end()
            assert isinstance(last, Finished)
            cached += last.usage.cached
            ids += [*each.ids, *range(1000, 1030 + turn)]
    return cached


def test_conversations_find_their_prefixes(engine: gemma_py.Engine) -> None:
    scheduler = Scheduler(engine, parallel=16)
    try:
        wanted = cached_tokens(scheduler)
    finally:
        scheduler.close()
    with pooled(engine, parallel=8) as pool:
        assert cached_tokens(pool) == wanted > 1000
        wait_until(lambda: pool.stats().cached_tokens == wanted)
        computed = [link.stats.computed_tokens for link in pool._links]
    assert max(computed) < 2 * sum(computed) / len(computed)


# --- schemas ----------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "good": {"type": "boolean"}},
    "required": ["name", "good"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def test_answers_that_follow_a_schema(engine: gemma_py.Engine, pool: Pool) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 3, "n": 3, "receipt": True}
    with serving(engine) as server:
        wanted = server.post("/v1/chat/completions", response_format=FORM, **asked)
    with serving_pool(engine, pool) as server:
        found = server.post("/v1/chat/completions", response_format=FORM, **asked)
    assert found[0] == wanted[0] == 200
    for part in ("choices", "receipts"):
        assert found[1][part] == wanted[1][part]


@contextlib.contextmanager
def serving_pool(engine: gemma_py.Engine, pool: Pool) -> Iterator[Running]:
    """Serve with a pool of its own, because a server closes its scheduler."""
    with pooled(engine) as made, serving(engine, scheduler=made) as server:
        yield server


# --- faults: clients see a pause --------------------------------------------------------------------------------------


def stream(client: Client, **asked: Any) -> str:
    """All bytes of a stream, without the id and the time of creation."""
    body = {"prompt": "Once", "max_tokens": 60, "temperature": 1, "logprobs": 2, "logit_bias": NO_END, **asked}
    status, text, _ = client.request("POST", "/v1/completions", {**body, "stream": True})
    assert status == 200
    return re.sub(r'"id":"[^"]*"|"created":\d+', "", text)


def test_streams_do_not_notice_a_lost_replica(engine: gemma_py.Engine) -> None:
    with serving(engine) as server:
        wanted = [stream(server, seed=seed) for seed in range(6)]
    with pooled(engine, deadline=2.0) as pool, serving(engine, scheduler=pool) as server:
        for kind in (signal.SIGKILL, signal.SIGSTOP):
            with ThreadPoolExecutor(len(wanted)) as threads:
                streams = [threads.submit(stream, server, seed=seed) for seed in range(len(wanted))]
                wait_until(lambda: any(len(request.generated) > 5 for request in pool._running))
                lost = process_with_most(pool)
                os.kill(lost.pid, kind)
                assert [each.result() for each in streams] == wanted
            assert lost.poll() is not None  # the pool has killed the stopped process too
            wait_until(lambda: len(pool._links) == 2)


def test_an_answer_without_a_seed_survives_a_lost_replica(engine: gemma_py.Engine, pool: Pool) -> None:
    listening = Listening(pool, Request(PROMPT, 60, Sampling(temperature=1.0), receipt=True))
    listening.until_tokens(20)
    process_with_most(pool).kill()
    answer = contents(listening)
    scheduler = Scheduler(engine)
    try:
        seeded = Request(PROMPT, 60, Sampling(temperature=1.0, seed=seed_of(answer[-1])), receipt=True)
        assert answers(scheduler, [seeded]) == [answer]
    finally:
        scheduler.close()


def test_scores_survive_a_lost_replica(engine: gemma_py.Engine, pool: Pool) -> None:
    asked = Request(prompt(engine.config, 900), 20, scored=True)
    listening = Listening(pool, asked)
    while sum(isinstance(event, Scored) for event in listening.events) < 100:
        listening.next()
    process_with_most(pool).kill()
    scheduler = Scheduler(engine)
    try:
        assert [contents(listening)] == answers(scheduler, [asked])
    finally:
        scheduler.close()


def test_requests_wait_while_no_replica_is_left(engine: gemma_py.Engine, pool: Pool) -> None:
    asked = [Request([*PROMPT, number], 60, Sampling(temperature=1.0, seed=number)) for number in range(6)]
    wanted = answers(pool, asked)
    listening = [Listening(pool, request) for request in asked]
    for each in listening:
        each.until_tokens(4)
    wait_until(lambda: len(pool._links) == 2)
    for process in processes(pool):
        process.kill()
    wait_until(lambda: not pool._links)
    health = pool.health()
    assert not health.ok and not health.permanent and health.why == "a replica was ended by SIGKILL"
    late = Listening(pool, asked[0])
    assert [contents(each) for each in listening] == wanted
    assert contents(late) == wanted[0]
    wait_until(lambda: pool.health().ok and len(pool._links) == 2)


class Leaving(ThisMachine):
    """This machine, until it is no longer a host."""

    patience = 0.5

    def __init__(self) -> None:
        self.left = False

    def usable(self) -> list[Host]:
        return [] if self.left else [self]


def test_without_a_host_every_client_gets_one_error(engine: gemma_py.Engine) -> None:
    hosts = Leaving()
    with pooled(engine, hosts=hosts) as pool:
        listening = [Listening(pool, Request([*PROMPT, number], 4000)) for number in range(3)]
        for each in listening:
            each.until_tokens(2)
        hosts.left = True
        for process in processes(pool):
            process.kill()
        for each in listening:
            last = each.end()
            assert isinstance(last, Failed)
            assert str(last.error) == "no replica could be started for 0.5 s: no host is left"
        assert pool.health().permanent and not pool.health().ok
        with pytest.raises(ComputationError, match="no host is left"):
            Listening(pool, Request(PROMPT, 1))


def test_a_model_that_cannot_be_loaded_is_named(engine: gemma_py.Engine, tmp_path: Path) -> None:
    with (
        pytest.raises(GemmaError, match="nothing-here"),
        pooled(engine, model=tmp_path / "nothing-here"),
    ):
        pass


def test_a_replica_of_another_model_does_not_join(engine: gemma_py.Engine, tmp_path: Path) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes() + b"\n" * (file.name == "config.json"))
    said = "a replica cannot be used: .*: its model differs from that of the process that started it"
    with pytest.raises(InputError, match=said), pooled(engine, model=tmp_path):
        pass


def test_embeddings_survive_a_lost_replica(embedding_folder: Path) -> None:
    with gemma_py.load(embedding_folder) as engine:
        texts = [[2, *range(10, 10 + number % 40), 1] for number in range(600)]
        scheduler = EmbeddingScheduler(engine)
        try:
            wanted = embedded(Listening(scheduler, texts))
        finally:
            scheduler.close()
        with pooled(engine, model=embedding_folder) as pool:
            listening = [Listening(pool, texts) for _ in range(4)]
            process_with_most(pool).kill()
            assert [embedded(each) for each in listening] == [wanted] * len(listening)


def embedded(listening: Listening) -> bytes:
    assert isinstance(listening.end(), Finished)
    (rows,) = [event.rows for event in listening.events if isinstance(event, Embedded)]
    return rows.tobytes()


# --- the command line -------------------------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--replicas", "2", "--shards", "2"], 1, "--replicas and --shards cannot be used together"),
        (["--replicas", "all"], 1, "--replicas all means one replica on each host of a cluster: give --address"),
        (["--replicas", "0"], 2, "or all"),
        (["--replicas", "some"], 2, "or all"),
    ],
)
def test_wrong_options_are_refused(run: Run, arguments: list[str], code: int, said: str) -> None:
    found, _, error = run("serve", TINY, "--port", "0", *arguments)
    assert found == code and said in error
    assert code == 2 or error.count("\n") == 1


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    try:
        return ") Z " not in stat.read_text()
    except OSError:
        return False


def replicas_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in children if b"cluster.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_when_the_server_ends(kind: signal.Signals) -> None:
    if not Path("/proc/self/task").exists():
        pytest.skip("needs Linux's /proc")
    with Process("--replicas", "2", "--drain", "1") as server:
        assert "2 replicas: API at" in server.ready
        started = replicas_of(server.child.pid)
        assert len(started) == 2
        connection = server.open_stream(4000)
        server.child.send_signal(kind)
        code, _ = server.end()
        connection.close()
        assert code == {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[kind]
        wait_until(lambda: not any(map(is_running, started)))


def test_a_stopped_front_loses_no_replica(engine: gemma_py.Engine) -> None:
    """While the front is stopped, it hears no heartbeats, but its replicas are not lost."""
    with Process("--replicas", "2") as server:
        before = replicas_of(server.child.pid)
        server.child.send_signal(signal.SIGSTOP)
        time.sleep(6)  # longer than the deadline
        server.child.send_signal(signal.SIGCONT)
        assert server.post("/v1/completions", prompt="a", max_tokens=3)[0] == 200
        assert replicas_of(server.child.pid) == before
