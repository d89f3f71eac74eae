"""The job of a replica's process: an engine and a scheduler, which answer the requests of the front.

    the front  --  PrepareConstraint, Submit, Cancel  -->        the replica
               <--  Ready, then Reported, SchedulerStats  --
               <--  Refused, if loading fails; Broken, if the scheduler fails later  --

Two things cannot be sent, because they belong to one process. A request's constraint is rebuilt here from its description, as an
audit does. The receipt of an answer is made here, because it hashes the answer's KV rows.
"""

import contextlib
import os
import pkgutil
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from gemma_py.cluster.channel import Messages, Send
from gemma_py.cluster.links import Identity, identity_of
from gemma_py.errors import ComputationError, ContextError, GemmaError, InputError
from gemma_py.generate.base_scheduler import BaseScheduler, Ticket
from gemma_py.generate.embedding_scheduler import EmbeddingScheduler
from gemma_py.generate.engine import Engine, load
from gemma_py.generate.events import Event, Failed, Finished
from gemma_py.generate.scheduler import Scheduler
from gemma_py.receipts.receipt import Receipt
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS

_STATS_SECONDS = 0.5  # the time between two looks at the scheduler's counters and health
_UNLIMITED = 1 << 30  # the front limits the queue
_SENT_AS_THEY_ARE = (InputError, ContextError, ComputationError)


class Submit(NamedTuple):
    """number: of this submission; never used again. constraint: the description of the request's constraint, or None."""

    number: int
    request: Any
    constraint: dict[str, Any] | None


class PrepareConstraint(NamedTuple):
    """constraint: the description of a constraint like those that requests will have."""

    constraint: dict[str, Any]


class Cancel(NamedTuple):
    number: int


class Ready(NamedTuple):
    """blocks: the number of blocks in the prefix cache. fingerprint: see `Engine.fingerprint`."""

    blocks: int
    fingerprint: str


class Reported(NamedTuple):
    """An event of a request. receipt: of the answer, with the last event."""

    number: int
    event: Event
    receipt: Receipt | None = None


class Refused(NamedTuple):
    """Why the model cannot be loaded. usage: whether an argument is invalid."""

    why: str
    usage: bool


class Broken(NamedTuple):
    """Why the scheduler computes no more passes."""

    why: str


@dataclass(frozen=True)
class Replica:
    """The job. The fields are arguments of `load` and of the scheduler, or:

    most_running: the most requests that run at once.
    sharing: the number of replicas on this host.
    identity: of the front's model and code.
    constraints: the name of a function, as `pkgutil.resolve_name` takes it. Called with the engine, it returns a function that
    rebuilds a constraint from its description. A name, because the function belongs to the server, which is a layer above.
    """

    model: str
    draft: str | None
    threads: int
    context: int
    deadline: float
    kv: str
    quant: str | None
    pack: bool
    speculate: str
    most_running: int
    sharing: int
    identity: Identity
    constraints: str

    def run(self, messages: Messages, send: Send) -> None:
        try:
            engine = self._engine()
            scheduler = self._scheduler(engine)
            # The fingerprint's pass also reads the kernels and the weights, so that the first request need not wait for them.
            fingerprint = engine.fingerprint()
        except Exception as error:
            send(Refused(_text(error), isinstance(error, InputError)))
            return
        blocks = scheduler.prefix_tokens // BLOCK_TOKENS if isinstance(scheduler, Scheduler) else 0
        send(Ready(blocks, fingerprint))
        _Answers(scheduler, self._constraint_maker(engine), send).run(messages)

    def _engine(self) -> Engine:
        engine = load(
            self.model, self.threads, self.context, self.deadline, self.kv, self.quant, pack=self.pack,
            speculate=self.speculate, draft=self.draft,
        )  # fmt: skip
        found = identity_of(engine.checkpoint)
        for name, mine, theirs in zip(found._fields, found, self.identity, strict=True):
            if mine != theirs:
                raise InputError(f"{self.model}: its {name} differs from that of the process that started it")
        return engine

    def _scheduler(self, engine: Engine) -> BaseScheduler[Any, Any]:
        if engine.config.embedding is not None:
            return EmbeddingScheduler(engine, self.most_running, _UNLIMITED)
        return Scheduler(engine, self.most_running, _UNLIMITED, sharing=self.sharing)

    def _constraint_maker(self, engine: Engine) -> Callable[[dict[str, Any]], Any]:
        """Return a function that makes constraints. The module that it needs is imported when the first one is made."""
        made: list[Callable[[dict[str, Any]], Any]] = []

        def make(description: dict[str, Any]) -> Any:
            if not made:
                made.append(pkgutil.resolve_name(self.constraints)(engine))
            return made[0](description)

        return make


class _Answers:
    """Gives requests to the scheduler, and sends events, counters and failures to the front."""

    def __init__(
        self, scheduler: BaseScheduler[Any, Any], constraint: Callable[[dict[str, Any]], Any], send: Send
    ) -> None:
        self._scheduler, self._constraint = scheduler, constraint
        self._lock = threading.RLock()
        self._tickets: dict[int, Ticket] = {}  # of requests that have not ended; guarded by the lock
        # A thread sends, because sending may block, and the scheduler's thread must not wait.
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._receipts = ThreadPoolExecutor(1, "gemma_py-receipts")
        threading.Thread(target=self._send, args=(send,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def run(self, messages: Messages) -> None:
        while True:
            message = messages.get()
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, PrepareConstraint):
                # The tables for JSON schemas are built, which blocks all threads of this process for about a second. An error
                # is reported to each request with a schema.
                with contextlib.suppress(Exception):
                    self._constraint(message.constraint)
            else:
                with self._lock:
                    ticket = self._tickets.get(message.number)
                if ticket is not None:
                    ticket.cancel()

    def _submit(self, message: Submit) -> None:
        number, request, description = message
        try:
            if description is not None:
                request = replace(request, constraint=self._constraint(description))
            with self._lock:  # so that the request does not end before its ticket is known
                self._tickets[number] = self._scheduler.submit(request, partial(self._report, number))
        except GemmaError as error:
            self._report(number, Failed(error))
        except Exception as error:
            self._report(number, Failed(ComputationError(_text(error))))

    def _report(self, number: int, event: Event) -> None:
        if isinstance(event, Finished | Failed):
            with self._lock:
                self._tickets.pop(number, None)
        if isinstance(event, Finished) and event.receipt is not None:
            self._receipts.submit(self._finish, number, event, event.receipt)
        elif isinstance(event, Failed) and self._scheduler.health().permanent:
            self._outbox.put(Broken(str(event.error)))  # the request did not fail, but the scheduler
        else:
            self._outbox.put(Reported(number, _sendable(event)))

    def _finish(self, number: int, event: Finished, receipt: Callable[[], Receipt]) -> None:
        try:
            reported = Reported(number, replace(event, receipt=None), receipt())
        except Exception as error:
            reported = Reported(number, _sendable(Failed(ComputationError(f"the receipt failed: {_text(error)}"))))
        self._outbox.put(reported)

    def _send(self, send: Send) -> None:
        try:
            while True:
                send(self._outbox.get())
        except OSError:  # the front has ended
            os._exit(0)
        except Exception:
            traceback.print_exc()
            os._exit(1)  # the front then gives the requests to another replica

    def _watch(self) -> None:
        """Send the scheduler's counters when they have changed, and its failure."""
        pause, sent = threading.Event(), None
        while True:
            pause.wait(_STATS_SECONDS)
            health, stats = self._scheduler.health(), self._scheduler.stats()
            if stats != sent:
                self._outbox.put(stats)
                sent = stats
            if health.permanent:
                self._outbox.put(Broken(health.why))
                return


def _sendable(event: Event) -> Event:
    """Return an event that can be pickled. Errors with further fields cannot."""
    if isinstance(event, Failed) and type(event.error) not in _SENT_AS_THEY_ARE:
        return Failed(ComputationError(str(event.error)))
    return event


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, GemmaError) else f"{type(error).__name__}: {error}"
