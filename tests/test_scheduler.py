"""Requests in company: each gets what it would get alone, whoever comes, goes or fails beside it."""

import queue
import random
import threading
from collections.abc import Iterator

import pytest

import gemma_py
from gemma_py.errors import ContextError, InputError, Overloaded
from gemma_py.sampling import Sampling
from gemma_py.scheduler import Event, Failed, Finished, Made, Progress, Request, Scheduler, Ticket

WAIT = 120  # seconds, for what takes one


class Client:
    """Hears the events of one request."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self.request = request
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.heard: list[Event] = []
        self.ticket: Ticket = scheduler.submit(request, self.events.put)

    def next(self) -> Event:
        self.heard.append(self.events.get(timeout=WAIT))
        return self.heard[-1]

    def end(self) -> Finished | Failed:
        while True:
            event = self.next()
            if isinstance(event, Finished | Failed):
                return event

    @property
    def made(self) -> list[Made]:
        return [event for event in self.heard if isinstance(event, Made)]


@pytest.fixture
def scheduler(tiny_engine: gemma_py.Engine) -> Iterator[Scheduler]:
    made = Scheduler(tiny_engine, parallel=4, queue=40)
    yield made
    made.close()


def drawn(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1536) for _ in range(length)]


def test_company_matches_generate(scheduler: Scheduler, tiny_engine: gemma_py.Engine) -> None:
    rng = random.Random(5)
    requests = []
    for number in range(12):
        sampling = Sampling(temperature=1.0, top_k=40, seed=number) if number % 2 else Sampling()
        requests.append(Request(drawn(rng, rng.randint(1, 90)), rng.randint(1, 12), sampling))
    clients = [Client(scheduler, request) for request in requests]
    for client, request in zip(clients, requests, strict=True):
        end = client.end()
        s = request.sampling
        options = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "seed": s.seed} if s.seed else {}
        alone = list(tiny_engine.generate(request.ids, request.max_tokens, **options))  # type: ignore[arg-type]
        assert [event.token for event in client.made] == alone
        assert isinstance(end, Finished)
        assert (end.usage.prompt, end.usage.generated) == (len(request.ids), len(alone))
        progress = [event for event in client.heard if isinstance(event, Progress)]
        assert progress[-1].done == progress[-1].total == len(request.ids)


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


def test_what_cannot_be_is_refused_at_once(scheduler: Scheduler) -> None:
    context = scheduler.engine.context
    for request, kind in (
        (Request([], 1), InputError),
        (Request([2], 0), InputError),
        (Request([9999], 1), InputError),
        (Request([2], 1, top_logprobs=-1), InputError),
        (Request([2], context), ContextError),
        (Request([2], 1, Sampling(logit_bias={9999: 1.0})), InputError),
        (Request([2], 1, stop=("",)), InputError),
    ):
        with pytest.raises(kind):
            scheduler.submit(request, print)
    assert scheduler.stats().waiting == scheduler.stats().running == 0


def test_a_full_queue_is_said(tiny_engine: gemma_py.Engine) -> None:
    scheduler = Scheduler(tiny_engine, parallel=1, queue=1)
    clients = [Client(scheduler, Request([2], 4000)) for _ in range(2)]
    with pytest.raises(Overloaded, match="wait already") as caught:
        for _ in range(2):
            clients.append(Client(scheduler, Request([2], 4000)))
    assert caught.value.retry_after >= 1
    scheduler.close()
    assert [client.end() for client in clients]
    with pytest.raises(Overloaded, match="ending"):
        scheduler.submit(Request([2], 1), print)


def test_drain_lets_answers_end(tiny_engine: gemma_py.Engine) -> None:
    scheduler = Scheduler(tiny_engine)
    clients = [Client(scheduler, Request([2, number], 20)) for number in range(4)]
    scheduler.drain(WAIT)
    ends = [client.end() for client in clients]
    assert [end.reason for end in ends if isinstance(end, Finished)] == ["length"] * 4
    scheduler.close()
    scheduler.close()
    assert "gemma_py-scheduler" not in [thread.name for thread in threading.enumerate()]


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
