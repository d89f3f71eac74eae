import math
import queue
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serving import Heard, Running

import gemma_py
from gemma_py.generate.base_scheduler import BaseScheduler, Ticket
from gemma_py.generate.core import Request, Token
from gemma_py.generate.events import Event, Failed, Finished, Generated, Scored
from gemma_py.generate.options import Sampling

WAIT = 120  # seconds, for events that take about one second


class Client:
    def __init__(self, scheduler: BaseScheduler[Any, Any], request: Any) -> None:
        self.request = request
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.heard: list[Event] = []
        self.ticket: Ticket = scheduler.submit(request, self.events.put)

    def next(self) -> Event:
        self.heard.append(self.events.get(timeout=WAIT))
        return self.heard[-1]

    @property
    def over(self) -> bool:
        return bool(self.heard) and isinstance(self.heard[-1], Finished | Failed)

    def end(self) -> Finished | Failed:
        while True:
            event = self.next()
            if isinstance(event, Finished | Failed):
                return event

    @property
    def made(self) -> list[Generated]:
        return [event for event in self.heard if isinstance(event, Generated)]


def drawn(rng: random.Random, length: int, vocabulary: int = 1536) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(length)]


def options(sampling: Sampling) -> dict[str, Any]:
    """Options for `generate`: none for a greedy request, because `generate` would then sample by the checkpoint's
    settings.
    """
    if sampling.temperature == 0:
        return {}
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "seed")}


Scores = list[tuple[int, float | None]]


def scores_of(engine: gemma_py.Engine, ids: list[int]) -> Scores:
    """The log probability of each id, computed without other requests."""
    following = [(token, -value) for token, value in zip(ids[1:], engine.score(ids), strict=True)] if ids[1:] else []
    return [(ids[0], None), *following]


def scores_told(client: Client) -> Scores:
    return [(event.id, event.logprob) for event in client.heard if isinstance(event, Scored)]


class Crowd:
    """Random requests, and the answer to each of them without other requests.

    Prompts have random lengths, and some share a prefix. Every second request samples, and every fourth asks for log
    probabilities of the prompt.
    """

    def __init__(self, engine: gemma_py.Engine, count: int, seed: int, longest: int = 60) -> None:
        self.engine, self.rng, V = engine, random.Random(seed), engine.config.vocab_size
        ends = frozenset(engine.config.eos_token_ids)
        beginnings = [drawn(self.rng, self.rng.randint(longest // 2, 2 * longest), V) for _ in range(3)]
        self.requests = []
        for number in range(count):
            ids = self.rng.choice([[], *beginnings]) + drawn(self.rng, self.rng.randint(1, longest), V)
            sampling = Sampling(temperature=1.0, top_k=40, seed=number) if number % 2 else Sampling()
            most, scored = self.rng.randint(1, longest // 2), number % 4 == 3
            self.requests.append(Request(ids, most, sampling, ends=ends, scored=scored))
        self.alone: list[list[Token]] = [
            list(engine.generate(request.ids, request.max_tokens, speculate="off", **options(request.sampling)))
            for request in self.requests
        ]
        self.scores = [scores_of(engine, list(request.ids)) if request.scored else [] for request in self.requests]

    def same(self, scheduler: BaseScheduler[Any, Any]) -> bool:
        """Whether the requests get equal answers when they share passes. Requests arrive at random times, and some are
        cancelled.
        """
        clients, leaving = [], {}
        rng, longest = random.Random(self.rng.random()), max(request.max_tokens for request in self.requests)
        for number, request in enumerate(self.requests):
            clients.append(Client(scheduler, request))
            # The client cancels after this number of tokens. Most answers end earlier.
            leaving[number] = rng.randint(0, longest)
            for _ in range(rng.choice([0, 0, 1, 2, 10])):
                client = rng.choice(clients)
                if not client.over:
                    client.next()
        for number in rng.sample(range(len(clients)), len(clients)):
            client = clients[number]
            while not client.over:
                client.next()
                if len(client.made) == leaving[number]:
                    client.ticket.cancel()
        return all(map(self._right, clients, self.alone, self.scores))

    def same_over_http(self, server: Running) -> bool:
        """Whether the requests get equal answers as streams: first all streams at once, then one stream after another."""
        rng, count = random.Random(self.rng.random()), len(self.requests)
        most = [rng.choice((math.inf, math.inf, rng.randint(0, 20))) for _ in range(count)]
        late = [rng.random() * 0.002 * count for _ in range(count)]

        def hear(number: int) -> Heard:
            time.sleep(late[number])
            return Heard(server, self.requests[number], most[number])

        with ThreadPoolExecutor(count) as pool:
            heard = list(pool.map(hear, range(count)))
        heard += [Heard(server, request) for request in self.requests]
        limits = [*most, *[math.inf] * count]
        return all(
            one.same(alone) and (one.reason != "" or len(one.logprobs) >= limit)
            for one, limit, alone in zip(heard, limits, self.alone * 2, strict=True)
        )

    @staticmethod
    def _right(client: Client, alone: list[Token], scores: Scores) -> bool:
        end, made = client.heard[-1], [event.token for event in client.made]
        told = scores_told(client)
        if not isinstance(end, Finished) or told != scores[: None if made else len(told)]:
            return False
        return made == alone[: len(made)] and (end.reason == "cancelled" or len(made) == len(alone))
