"""A request of the pool, and which events of its replicas the client has not received yet."""

import time
from dataclasses import replace
from typing import Any

from gemma_py.errors import MismatchError
from gemma_py.generate.base_scheduler import ScheduledRequest, Ticket
from gemma_py.generate.core import Request
from gemma_py.generate.events import (
    Embedded,
    Event,
    Finished,
    Generated,
    Listener,
    PrefillProgress,
    Scored,
    Usage,
)
from gemma_py.replicas.routing import block_keys


class PooledRequest(ScheduledRequest):
    """A request, which may be submitted to several replicas, one after another.

    request: without its constraint, which travels as a description; with a seed, so that every replica gives the same answer.
    keys: of the blocks of the prompt. generated: the ids of the tokens that the client has received.
    number: of the last submission, or -1.
    losses: how many replicas in a row were lost while they computed this request, and gave the client nothing new.
    lost_since: the time of the first of these losses.
    """

    def __init__(self, request: Any, listener: Listener, ticket: Ticket) -> None:
        super().__init__(listener, ticket)
        self.constraint: dict[str, Any] | None = None
        if isinstance(request, Request) and request.constraint is not None:
            self.constraint, request = request.constraint.description, replace(request, constraint=None)
        self.request = request
        # A replica computes the last id of a prompt, and all ids of a scored prompt, even if it has them in its prefix cache.
        self.ids = list(request.ids) if isinstance(request, Request) else []
        self.keys = block_keys(self.ids[:-1])
        self.generated: list[int] = []
        self.number = -1
        self.losses, self.lost_since = 0, 0.0
        self._scored, self._prefilled, self._embedded = 0, -1, False
        self._cached = self._predicted = 0
        self._queued = self._first_token = 0.0  # seconds since the request's arrival
        self._again = _Counts()

    def submitted(self, number: int) -> None:
        """Note that a replica gets the request, and will send its events from the first one on. number: of the submission"""
        self.number = number
        self._again = _Counts()
        self.admitted = time.monotonic()

    def lost(self) -> None:
        """Note that the replica that computed the request is lost."""
        if self.losses == 0:
            self.lost_since = time.monotonic()
        self.losses += 1

    def unseen(self, event: Event) -> Event | None:
        """Return an event of the current replica as the client should receive it, or None if the client has received it.

        Raise MismatchError if an event differs from the one that an earlier replica sent.
        """
        again = self._again
        if isinstance(event, Generated):
            again.generated += 1
            if again.generated <= len(self.generated):
                self._check(event.token.id == self.generated[again.generated - 1])
                return None
            self.generated.append(event.token.id)
            self._first_token = self._first_token or self._since_arrival()
        elif isinstance(event, Scored):
            again.scored += 1
            if again.scored <= self._scored:
                return None
            self._scored += 1
        elif isinstance(event, PrefillProgress):
            if self._prefilled < 0:
                self._cached = event.cached
            if event.done <= self._prefilled:
                return None
            self._prefilled = event.done
            event = replace(event, cached=self._cached)
        elif isinstance(event, Embedded):
            if self._embedded:
                return None
            self._embedded = True
        elif isinstance(event, Finished):
            self._check(again.generated == len(self.generated))
            # The replica says how long it let the request wait. An earlier replica may have sent the first token before.
            queued = self.admitted - self.arrived + event.usage.queued_seconds
            self._queued = min(queued, self._first_token or self._since_arrival())
            self._predicted = event.usage.predicted
            return replace(event, usage=self.usage())
        self.losses = 0
        return event

    def _check(self, equal: bool) -> None:
        if not equal:
            raise MismatchError(
                f"a replica that took over a request gave other tokens than the lost replica, at token {self._again.generated}"
            )

    def usage(self) -> Usage:
        seconds = self._since_arrival()
        prompt = len(self.ids) if isinstance(self.request, Request) else sum(map(len, self.request))
        return Usage(
            prompt, self._cached, len(self.generated), self._queued or seconds, self._first_token or seconds, seconds,
            self._predicted,
        )  # fmt: skip

    def _since_arrival(self) -> float:
        return time.monotonic() - self.arrived


class _Counts:
    """How many events the current replica has sent for a request."""

    generated = scored = 0
