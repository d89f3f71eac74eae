"""The link to a shard in another process.

    this process  --(number, orders, rows)-->  the shard's process
                  <--(number, results)--  or  <--(number, error's type, error's message)--

The first message is the job `Join`, whose reply has the number 0. A call raises ShardError if the process ends, fails or stalls.
A late reply to an interrupted call has an old number and is ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gemma_py.catalog import resolve
from gemma_py.cluster.channel import HEARTBEAT, Channel, Ended, Messages, Send, Silence
from gemma_py.cluster.hosts import package_digest
from gemma_py.cluster.shard import Order, Rows, SetThreads, Shard, SpanRunner
from gemma_py.cluster.spans import make_spans
from gemma_py.errors import ContextError, GemmaError, InputError, ShardError
from gemma_py.runtime.program import link
from gemma_py.runtime.runner import SharedTeam
from gemma_py.weights.checkpoint import Checkpoint, open_checkpoint
from gemma_py.weights.pack import drop_weights
from gemma_py.weights.store import file_digests, packed_weights

_SAME_ERRORS = {error.__name__: error for error in (InputError, ContextError)}


class Identity(NamedTuple):
    """The files and code that determine a shard's bits. All shards of a model must have equal identities."""

    model: tuple[str, ...]  # the sha256 of each of the model's files
    package: str  # a sha256 of the sources of gemma_py


def identity_of(checkpoint: Checkpoint) -> Identity:
    return Identity(file_digests(checkpoint), package_digest())


@dataclass(frozen=True)
class Join:
    """The job of a shard's process. model: as `resolve` takes it. number: of the shard, from 0."""

    model: str
    cacheable: bool
    quant: str | None
    kv: str
    threads: int
    deadline: float
    cuts: tuple[int, ...]
    number: int
    identity: Identity

    def run(self, messages: Messages, send: Send) -> None:
        number, shard = 0, None
        while True:
            try:
                if shard is None:
                    shard, results = self._shard(), None
                else:
                    number, *message = messages.get()
                    results = shard.apply(*message)
            except Exception as error:
                # A process that cannot become a shard has wrong files on its host, which is not a failure of the computation.
                kind = InputError if shard is None and isinstance(error, GemmaError) else type(error)
                send((number, kind.__name__, str(error)))
                if shard is None:
                    return
            else:
                send((number, results))

    def _shard(self) -> Shard:
        checkpoint = replace(open_checkpoint(resolve(self.model)), cacheable=self.cacheable)
        found = identity_of(checkpoint)
        for name, mine, theirs in zip(found._fields, found, self.identity, strict=True):
            if mine != theirs:
                raise InputError(f"{self.model}: a shard has another {name} than the process that started it")
        program = link(checkpoint.family.program(checkpoint.config), packed_weights(checkpoint, self.quant))
        drop_weights(program.model.weights)  # all of them were read when the file was checked
        span = make_spans(checkpoint.config, program, self.cuts)[self.number]
        return Shard(SpanRunner(span, SharedTeam(self.threads, self.deadline), self.kv))


class ShardLink:
    """Lets a process become a shard, and carries orders to it. See `Link` in shards.py.

    host: the name of the process's host for messages, or an empty string
    """

    def __init__(self, join: Join, channel: Channel, span: str, shards: int, host: str) -> None:
        self.channel, self.usable = channel, True
        self._join, self._span, self._shards = join, span, shards
        self._where = f" on {host}" if host else ""
        self._silence = Silence(channel, join.deadline)
        self._call = 0

    def join(self) -> None:
        """Let the process load its span."""
        try:
            self.channel.send(self._join)
            self._reply()
        except BaseException:
            self.close()
            raise

    def call(self, orders: Sequence[Order], rows: Rows) -> list[Any]:
        if not self.usable:
            raise self._error("is no longer running")
        self._call += 1
        self.channel.send((self._call, list(orders), rows))
        results: list[Any] = self._reply()
        return results

    def set_threads(self, threads: int) -> None:
        self._join = replace(self._join, threads=threads)
        self.call([SetThreads(threads)], ())

    def _reply(self) -> Any:
        """Wait for the reply to the last call, as long as the process gives signs of life."""
        while True:
            try:
                message = self._silence.receive()
            except Ended as error:
                self.close()
                raise self._error(str(error)) from None
            if message is HEARTBEAT or message[0] != self._call:
                continue
            if len(message) == 2:
                return message[1]
            _, kind, text = message
            if kind in _SAME_ERRORS:
                raise _SAME_ERRORS[kind](f"{text} (found{self._where})" if self._where else text)
            self.close()
            raise self._error(f"failed: {text}")

    def _error(self, what: str) -> ShardError:
        return ShardError(self._join.number, self._shards, f"{self._span}{self._where}", what)

    def close(self) -> None:
        """End the process. Its KV rows can be computed again."""
        self.usable = False
        self.channel.close()
