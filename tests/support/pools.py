"""Pools of replicas: with processes, or with scripted replicas whose messages a test writes itself."""

import contextlib
import queue
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from repository import TINY
from serving import wait_until

import gemma_py
from gemma_py.cluster.channel import Channel, Ended
from gemma_py.cluster.hosts import Facts, Host, Hosts, ThisMachine
from gemma_py.cluster.processes import PipeChannel
from gemma_py.generate.base_scheduler import BaseScheduler
from gemma_py.generate.core import Request, Token
from gemma_py.generate.events import Event, Failed, Finished, Generated
from gemma_py.replicas.pool import Pool, ReplicaOptions
from gemma_py.replicas.replica import Ready, Reported, Submit

WAIT = 120.0  # seconds
CONSTRAINTS = "gemma_py.server.openai.described_constraint:constraint_maker"
UNTIL_THE_END = 600.0  # a deadline that no test reaches


@contextlib.contextmanager
def pooled(
    engine: gemma_py.Engine, count: int | None = 2, parallel: int = 4, queue: int = 40, hosts: Hosts | None = None,
    model: Path = TINY, **options: Any,
) -> Iterator[Pool]:  # fmt: skip
    """options: of `ReplicaOptions`"""
    made = ReplicaOptions(count, str(model), CONSTRAINTS, threads=1, **options)
    pool = Pool(engine, made, hosts or ThisMachine(), parallel, queue)
    try:
        yield pool
    finally:
        started = processes(pool)
        pool.close()
        assert all(process.poll() is not None for process in started)


def processes(pool: Pool) -> "list[subprocess.Popen[bytes]]":
    """The processes of the replicas, those that are only just starting too."""
    return [channel.process for channel in pool._channels.values() if isinstance(channel, PipeChannel)]


def process_with_most(pool: Pool) -> "subprocess.Popen[bytes]":
    """The process of the replica that computes the most requests."""
    channel = max(pool._links, key=lambda link: link.load).channel
    assert isinstance(channel, PipeChannel)
    return channel.process


class Listening:
    """Submits a request and collects its events."""

    def __init__(self, scheduler: BaseScheduler[Any, Any], request: Any) -> None:
        self.events: list[Event] = []
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.ticket = scheduler.submit(request, self._queue.put)

    def next(self) -> Event:
        self.events.append(self._queue.get(timeout=WAIT))
        return self.events[-1]

    def until_tokens(self, count: int) -> None:
        while len(self.ids) < count:
            assert not isinstance(self.next(), Finished | Failed)

    def end(self) -> Finished | Failed:
        while not self.events or not isinstance(self.events[-1], Finished | Failed):
            self.next()
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        assert self._queue.empty()
        return last

    @property
    def tokens(self) -> list[Generated]:
        return [event for event in self.events if isinstance(event, Generated)]

    @property
    def ids(self) -> list[int]:
        return [event.token.id for event in self.tokens]


# --- scripted replicas ------------------------------------------------------------------------------------------------


class ScriptedChannel:
    """A channel to a replica that does only what a test says. It is ready at once."""

    start = UNTIL_THE_END

    def __init__(self, first: Sequence[Any]) -> None:
        self.sent: list[Any] = []
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for message in first:
            self._inbox.put(message)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, seconds: float) -> Any:
        message = self._inbox.get(timeout=seconds)
        if isinstance(message, Ended):
            raise message
        return message

    def close(self) -> None:
        self._inbox.put(Ended("was closed"))

    # --- for tests ---

    def says(self, *messages: Any) -> None:
        for message in messages:
            self._inbox.put(message)

    def lose(self) -> None:
        self._inbox.put(Ended("was lost"))

    @property
    def submitted(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    def submission(self, index: int = 0) -> Submit:
        """Wait for a submission."""
        wait_until(lambda: len(self.submitted) > index)
        return self.submitted[index]

    def tokens(self, submission: Submit, ids: Sequence[int], end: bool = False) -> None:
        """Send the tokens of an answer from the first one on."""
        for token in ids:
            self.says(Reported(submission.number, Generated(Token(token, f"<{token}>", 0.0), ())))
        if end:
            usage = gemma_py.generate.events.Usage(1, 0, len(ids), 0.0, 0.0, 0.0)
            self.says(Reported(submission.number, Finished("length", usage)))


class ScriptedHosts:
    """One host with scripted replicas. first: the first messages of every new replica; None if no host is left."""

    patience = 0.0
    name, memory, threads = "", None, 1

    def __init__(self) -> None:
        self.channels: list[ScriptedChannel] = []
        self.first: Sequence[Any] | None = [Ready(100, "fingerprint")]

    def start(self, deadline: float) -> Channel:
        assert self.first is not None
        self.channels.append(ScriptedChannel(self.first))
        return self.channels[-1]

    def usable(self) -> Sequence[Host]:
        return [] if self.first is None else [self]

    def ask(self, model: str | None) -> dict[str, Facts | str]:
        return {}

    def with_work(self) -> ScriptedChannel:
        """Wait until a replica has a submission, and return the last such replica."""
        wait_until(lambda: any(channel.submitted for channel in self.channels))
        return [channel for channel in self.channels if channel.submitted][-1]


scripted = partial(pooled, deadline=UNTIL_THE_END)
REQUEST = Request([2, *range(100, 140)], 10)
