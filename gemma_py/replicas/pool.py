"""The pool: a scheduler that lets replicas compute its requests.

A thread for each replica, its keeper, starts the process, receives its messages, and starts another process if that one is lost.
The pool's own thread does everything else: it chooses replicas for requests, and passes their events on to the clients.

If a replica is lost, its requests are submitted to other replicas. They begin again with the same seed, so they give the same
events. Those that the client has received are left out.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from gemma_py import machine
from gemma_py.cluster.channel import HEARTBEAT, Channel, Ended, Silence
from gemma_py.cluster.hosts import Host, Hosts
from gemma_py.cluster.links import identity_of
from gemma_py.errors import ComputationError, GemmaError, InputError, MismatchError
from gemma_py.generate.base_scheduler import BaseScheduler, Health, SchedulerStats, Ticket
from gemma_py.generate.core import Request
from gemma_py.generate.engine import Engine
from gemma_py.generate.events import Failed, Finished, Listener
from gemma_py.replicas.delivery import PooledRequest
from gemma_py.replicas.replica import Broken, Cancel, PrepareConstraint, Ready, Refused, Replica, Reported, Submit
from gemma_py.replicas.routing import KnownBlocks, block_keys, choose
from gemma_py.weights.pack import drop_weights

_LEAST_LOSSES = 5  # replicas that are lost in a row while they compute a request, before the request ends with an error
_LEAST_FAILURES = 2  # failed starts in a row of every replica, before the pool gives up
_PAUSE = 0.5  # seconds after a failed start
_END = 10.0  # seconds to wait for the end of a keeper
_NO_HOST = "no host is left"
_NO_STATS = SchedulerStats(*[0] * len(fields(SchedulerStats)))
_GAUGES = ("running", "waiting", "kv_bytes", "prefix_bytes")  # the other fields of SchedulerStats only grow


@dataclass(frozen=True)
class ReplicaOptions:
    """count: how many replicas; None for one on each host.
    model, draft: what the hosts open, as `resolve` takes it.
    constraints: see `Replica`.
    threads: of each replica; by default, its share of its host's cores.
    deadline: seconds without a sign of life after which a replica counts as lost.
    report: called with a message when a replica is lost, or cannot be started again.
    """

    count: int | None
    model: str
    constraints: str
    draft: str | None = None
    threads: int | None = None
    deadline: float = 5.0
    report: Callable[[str], None] = lambda message: None


class _Link:
    """The connection to a replica's process.

    requests: the requests that the replica computes, by the number of their submission, in the order of submission.
    """

    def __init__(self, channel: Channel, blocks: int) -> None:
        self.channel = channel
        self.requests: dict[int, PooledRequest] = {}
        self.known = KnownBlocks(blocks)
        self.stats = _NO_STATS

    @property
    def load(self) -> int:
        return len(self.requests)


@dataclass(frozen=True)
class _Lost:
    why: str


@dataclass(frozen=True)
class _FailedStart:
    """failures: how many starts in a row have failed."""

    keeper: int
    failures: int
    error: GemmaError


class _ClosedError(Exception):
    """The pool was closed while a replica started."""


class Pool(BaseScheduler[Any, PooledRequest]):
    """A scheduler whose requests are computed by replicas.

    The attribute `parallel` is the largest number of requests that all replicas together run at once. `engine` is the engine of
    the front, which computes no requests.
    """

    def __init__(
        self, engine: Engine, options: ReplicaOptions, hosts: Hosts, parallel: int = 8, queue: int = 64
    ) -> None:
        """Start the replicas, and wait until all are ready. If one cannot be started, raise its error.

        parallel: the most requests that a replica runs at once. queue: the most requests that wait.
        """
        first = hosts.usable()
        self.replicas = len(first) if options.count is None else options.count
        if self.replicas < 1:
            raise InputError(f"the number of replicas should be at least 1, found {self.replicas}")
        if not first:
            raise ComputationError(_NO_HOST)
        super().__init__(engine, parallel * self.replicas, queue)
        self._options, self._hosts, self._parallel = options, hosts, parallel
        self._identity = identity_of(engine.checkpoint)
        drop_weights(engine.program.model.weights)  # this process needs them only for audits and the fingerprint
        self._numbers = itertools.count()
        # The condition self._changed guards these fields. Only the pool's thread changes _links and what belongs to a link.
        self._inbox: list[tuple[_Link | None, Any]] = []
        self._links: list[_Link] = []  # to the replicas that are ready
        self._channels: dict[int, Channel] = {}  # by the number of the keeper
        self._prepared: PrepareConstraint | None = None
        self._cancelling = False  # whether a ticket may be cancelled
        self._started, self._refused = False, list[GemmaError]()
        self._lost_stats = _NO_STATS  # the counters of lost replicas
        # Only the pool's thread uses these fields after the start.
        self._why = "the replicas are starting"
        self._without_since = time.monotonic()  # since when no replica is ready
        self._failures = Counter(dict.fromkeys(range(self.replicas), 0))
        self._placing = threading.Lock()
        # By the number of the keeper, the host of its first replica, and the name of the host of its present replica.
        self._first_hosts = [first[number % len(first)] for number in range(self.replicas)]
        self._places: list[str | None] = [host.name for host in self._first_hosts]
        self._failed_starts = Counter[str]()  # by the name of the host, since a replica was last ready there
        self._fingerprint = ""  # of the first replica that was ready
        self._keepers = [
            threading.Thread(target=self._keep, args=(number,), name="gemma_py-keeper", daemon=True)
            for number in range(self.replicas)
        ]
        try:
            self._thread.start()
            for keeper in self._keepers:
                keeper.start()
            with self._changed:
                self._changed.wait_for(lambda: self._refused or len(self._links) == self.replicas)
                self._started = True
            if self._refused:
                raise self._refused[0]
        except BaseException:
            self.close()
            raise

    # --- from any thread ----------------------------------------------------------------------------------------------

    def _scheduled(self, request: Any, listener: Listener, ticket: Ticket) -> PooledRequest:
        if isinstance(request, Request):
            # A generation checks the request, and chooses a seed if there is none.
            generation = self.engine.generation(request, least_tokens=0)
            request = replace(request, ids=generation.prompt, sampling=generation.sampling)
        return PooledRequest(request, listener, ticket)

    def prepare_constraint(self, description: dict[str, Any]) -> None:
        with self._changed:
            self._prepared = PrepareConstraint(description)
            for link in self._links:
                link.channel.send(self._prepared)

    def health(self) -> Health:
        with self._changed:
            waiting = 0.0 if self._idle() else time.monotonic() - self._stepped
            if self._error is not None:
                return Health(False, str(self._error), True, waiting)
            if not self._thread.is_alive() and not self._closed:
                return Health(False, "the pool's thread has ended", True, waiting)
            if not self._links and not self._closed:
                return Health(False, self._why, False, waiting)
            return Health(True, "", False, waiting)

    def stats(self) -> SchedulerStats:
        """Return the sums of the replicas' counters, which arrive here after half a second at most."""
        with self._changed:
            stats = [self._lost_stats, *(link.stats for link in self._links)]
            # A replica starts its requests in the order in which it got them.
            running = sum(min(link.load, self._parallel) for link in self._links)
            return replace(_sums(stats), running=running, waiting=len(self._waiting) + len(self._running) - running)

    def close(self) -> None:
        if self._thread.ident is not None:
            super().close()
        with self._changed:
            self._closed = True
            channels = list(self._channels.values())
            self._changed.notify_all()
        for channel in channels:
            channel.close()
        for keeper in self._keepers:
            if keeper.ident is not None:
                keeper.join(_END)

    def _notify(self) -> None:
        with self._changed:
            self._cancelling = True
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._inbox or self._cancelling or (self._waiting and self._links))

    # --- the pool's thread --------------------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            messages, self._inbox = self._inbox, []
            cancelling, self._cancelling = self._cancelling, False
        for link, message in messages:
            self._handle(link, message)
        if cancelling:
            self._remove_cancelled()
        self._submit_waiting()

    def _handle(self, link: _Link | None, message: Any) -> None:
        if isinstance(message, _FailedStart):
            self._note_failed_start(message)
        elif link is None:
            raise AssertionError
        elif isinstance(message, Reported):
            self._deliver(link, message)
        elif isinstance(message, _Lost):
            self._lose(link, message.why)
        elif isinstance(message, SchedulerStats):
            with self._changed:
                link.stats = message
        else:
            assert isinstance(message, Ready)
            with self._changed:
                self._links.append(link)
                if self._prepared is not None:
                    link.channel.send(self._prepared)
                self._failures = Counter(dict.fromkeys(range(self.replicas), 0))

    def _submit_waiting(self) -> None:
        with self._changed:
            waiting, links = list(self._waiting), list(self._links)
        for request in waiting if links else ():
            link = choose(links, () if self._scores(request) else request.keys, self._parallel)
            number = next(self._numbers)
            request.submitted(number)
            with self._changed:
                self._waiting.remove(request)
                self._running.append(request)
                link.requests[number] = request
            link.known.add(request.keys)
            link.channel.send(Submit(number, request.request, request.constraint))

    @staticmethod
    def _scores(request: PooledRequest) -> bool:
        """Whether a replica computes the whole prompt, whatever its prefix cache has."""
        return isinstance(request.request, Request) and request.request.scored

    def _deliver(self, link: _Link, reported: Reported) -> None:
        """Pass an event on to the client, unless the client has received it, or the request has ended."""
        request, event = link.requests.get(reported.number), reported.event
        if request is None:
            return
        try:
            unseen = request.unseen(event)
        except MismatchError as error:
            self._finish(request, Failed(error))
            return
        if isinstance(unseen, Finished | Failed):
            with self._changed:
                del link.requests[reported.number]
            if isinstance(unseen, Finished):
                link.known.add(block_keys([*request.ids, *request.generated[:-1]]))
                if (receipt := reported.receipt) is not None:
                    unseen = replace(unseen, receipt=lambda: receipt)
            self._finish(request, unseen)
        elif unseen is not None:
            request.tell(unseen)
            if request.ticket.cancelled:  # the listener raised an exception
                self._notify()

    def _finish(self, request: PooledRequest, last: Finished | Failed) -> None:
        """End a request. A replica that still computes the request stops, and is not waited for."""
        for link in self._links:
            if request.number in link.requests:
                with self._changed:
                    del link.requests[request.number]
                link.channel.send(Cancel(request.number))
        super()._finish(request, last)

    def _lose(self, link: _Link, why: str) -> None:
        """Forget a lost replica. Its requests wait for another one."""
        with self._changed:
            if link in self._links:
                self._links.remove(link)
            self._lost_stats = _sums([self._lost_stats, replace(link.stats, **dict.fromkeys(_GAUGES, 0))])
            lost, numbers, link.requests = list(link.requests.values()), set(link.requests), {}
            self._running = [request for request in self._running if request.number not in numbers]
            self._waiting = sorted([*self._waiting, *lost], key=lambda request: request.arrived)
            self._why = why
            if not self._links:
                self._without_since = time.monotonic()
        self._options.report(f"{why}; {len(lost)} requests wait for another replica")
        for request in lost[: self._parallel]:  # the replica computed these, and the others waited
            request.lost()
            # Such a request may be the cause, because it needs too much memory, for example.
            if request.losses >= _LEAST_LOSSES and time.monotonic() - request.lost_since >= self._hosts.patience:
                error = ComputationError(
                    f"{request.losses} replicas in a row were lost during this request; the last time, {why}"
                )
                self._finish(request, Failed(error))

    def _note_failed_start(self, failed: _FailedStart) -> None:
        with self._changed:
            if not self._started:
                self._refused.append(failed.error)
                return
            self._failures[failed.keeper] = failed.failures
            why, self._why = self._why, str(failed.error)
        if failed.failures == 1 or why != self._why:
            self._options.report(str(failed.error))
        with self._changed:
            patience = self._hosts.patience
            waited = time.monotonic() - self._without_since
            if self._links or waited < patience or min(self._failures.values()) < _LEAST_FAILURES:
                return
        self._fail(ComputationError(f"no replica could be started for {patience:g} s: {failed.error}"))

    # --- the keepers' threads -----------------------------------------------------------------------------------------

    def _keep(self, keeper: int) -> None:
        """Keep a replica running until the pool is closed or has failed."""
        failures = 0
        hosts: Sequence[Host] = [self._first_hosts[keeper]]
        while not self._over():
            try:
                host, sharing = self._place(keeper, hosts or self._hosts.usable())
                hosts = ()  # later, ask which hosts are usable
                link, silence, where = self._connect(keeper, host, sharing)
            except _ClosedError:
                return
            except Exception as error:
                failures += 1
                known = error if isinstance(error, GemmaError) else ComputationError(f"{type(error).__name__}: {error}")
                self._post(None, _FailedStart(keeper, failures, known))
                with self._changed:
                    self._changed.wait_for(self._over, _PAUSE)
                continue
            failures = 0
            self._post(link, _Lost(self._receive(link, silence, where)))

    def _over(self) -> bool:
        return self._closed or self._error is not None

    def _post(self, link: _Link | None, message: Any) -> None:
        with self._changed:
            self._inbox.append((link, message))
            self._changed.notify_all()

    def _connect(self, keeper: int, host: Host, sharing: int) -> tuple[_Link, Silence, str]:
        """Start a replica, wait until it is ready, and tell the pool's thread so. Also return its name for messages."""
        options, engine, where = self._options, self.engine, f"a replica{f' on {host.name}' if host.name else ''}"
        channel = host.start(options.deadline)
        with self._changed:
            if self._closed:
                channel.close()
                raise _ClosedError
            self._channels[keeper] = channel
        try:
            channel.send(
                Replica(
                    model=options.model, draft=options.draft,
                    threads=options.threads or max(1, (host.threads or machine.threads()) // sharing),
                    context=engine.context, deadline=options.deadline, kv=engine.kv_type, quant=engine.quant,
                    pack=engine.checkpoint.cacheable, speculate=engine.speculate, most_running=self._parallel,
                    sharing=sharing, identity=self._identity, constraints=options.constraints,
                )
            )  # fmt: skip
            silence = Silence(channel, options.deadline)
            ready = self._first(silence, where)
        except BaseException:
            self._failed_starts[host.name] += 1
            channel.close()
            raise
        self._failed_starts[host.name] = 0
        link = _Link(channel, ready.blocks)
        self._post(link, ready)
        return link, silence, where

    def _place(self, keeper: int, hosts: Sequence[Host]) -> tuple[Host, int]:
        """Return the best host for a replica, and how many replicas that host then has.

        Of the hosts on which the fewest starts have failed, this is the first with the fewest replicas.
        """
        if not hosts:
            raise ComputationError(_NO_HOST)
        with self._placing:
            self._places[keeper] = None
            taken = Counter(self._places)
            host = min(hosts, key=lambda host: (self._failed_starts[host.name], taken[host.name]))
            self._places[keeper] = host.name
            return host, taken[host.name] + 1

    def _first(self, silence: Silence, where: str) -> Ready:
        """Wait until a replica is ready."""
        try:
            message = HEARTBEAT
            while message is HEARTBEAT:
                message = silence.receive()
        except Ended as ended:
            raise ComputationError(f"{where} {ended}") from None
        if isinstance(message, Refused):
            raise (InputError if message.usage else ComputationError)(f"{where} cannot be used: {message.why}")
        assert isinstance(message, Ready)
        with self._changed:
            self._fingerprint = self._fingerprint or message.fingerprint
            if message.fingerprint != self._fingerprint:
                raise ComputationError(f"{where} computes other logits than the other replicas")
        return message

    def _receive(self, link: _Link, silence: Silence, where: str) -> str:
        """Pass the messages of a replica on until it is lost. Return the reason."""
        try:
            while True:
                message = silence.receive()
                if isinstance(message, Broken):
                    return f"{where} failed: {message.why}"
                if message is not HEARTBEAT:
                    self._post(link, message)
        except Ended as ended:
            return f"{where} {ended}"
        except Exception as error:
            return f"{where} sent a message that cannot be read: {type(error).__name__}: {error}"
        finally:
            link.channel.close()


def _sums(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    names = [field.name for field in fields(SchedulerStats)]
    return SchedulerStats(*(sum(getattr(each, name) for each in stats) for name in names))
