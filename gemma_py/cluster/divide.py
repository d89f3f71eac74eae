"""Divide a model among shards, and choose the host of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gemma_py import machine
from gemma_py.cluster.hosts import Host, Hosts, ThisMachine, place
from gemma_py.cluster.links import Join, ShardLink, identity_of
from gemma_py.cluster.shards import Shards
from gemma_py.cluster.spans import choose_cuts, layer_bytes, make_spans
from gemma_py.errors import InputError, ShardError
from gemma_py.runtime.runner import Runner
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.pack import drop_weights

_TOKENS = 4096  # the number of tokens whose KV rows count for the sizes of spans
_PROCESS = 400 << 20  # bytes that a shard's process needs besides weights and KV rows


@dataclass(frozen=True)
class Division:
    """How to divide a model.

    elsewhere: the hosts of all shards but the last; None for this machine. model: what the hosts open, as `resolve` takes it.
    """

    shards: int
    elsewhere: Hosts | None
    model: str

    @property
    def hosts(self) -> Hosts:
        return self.elsewhere or ThisMachine()


def divide(checkpoint: Checkpoint, whole: Runner, quant: str | None, division: Division, lost: list[str]) -> Shards:
    """Start the processes of all shards but the last, which is in this process.

    whole: the runner of the undivided model, whose worker team the last shard uses. lost: see `Shards`.
    """
    config, program, shared, kv, shards = whole.config, whole.program, whole.shared, whole.kv, division.shards
    tokens = min(_TOKENS, config.max_position_embeddings)
    hosts = division.hosts.usable()
    room = None
    if any(host.memory is not None for host in hosts):
        # Shard number i goes to host number i, if there are enough hosts.
        frees = [hosts[number % len(hosts)].memory or 0 for number in range(shards - 1)]
        room = [*(max(0, free - _PROCESS) for free in frees), machine.memory() or max(frees, default=1)]
    drop_weights(program.model.weights)  # this process needs only those of the last span
    cuts = choose_cuts(config, program, shards, kv, tokens, room)
    spans = make_spans(config, program, cuts)
    sizes = np.cumsum([0, *layer_bytes(config, program, kv, tokens)])
    needs = [int(sizes[span.end] - sizes[span.first]) for span in spans]
    if room is not None and needs[-1] > room[-1]:
        raise InputError(
            f"this machine computes {spans[-1]}, which need {needs[-1] >> 20:,} MiB of memory, and {room[-1] >> 20:,} MiB are "
            "available; more shards (--shards) on more hosts need less memory each"
        )
    join = Join(
        division.model, checkpoint.cacheable, quant, kv, shared.team.workers, shared.team.deadline, tuple(cuts), 0,
        identity_of(checkpoint),
    )  # fmt: skip
    starter = _Starter(division.hosts, join, [str(span) for span in spans], [need + _PROCESS for need in needs[:-1]])
    return Shards(program, config, shared, kv, spans, starter, lost)


class _Starter:
    """Starts the processes of shards, and chooses their hosts.

    join: the job of shard 0. spans: their names. needs: the bytes of memory that each process needs
    """

    def __init__(self, hosts: Hosts, join: Join, spans: Sequence[str], needs: Sequence[int]) -> None:
        self.patience = hosts.patience
        self.overlap = not isinstance(hosts, ThisMachine) or join.threads < machine.threads()
        self._hosts, self._join, self._spans, self._needs = hosts, join, spans, needs
        self._planned: list[Host | None] = [*place(hosts.usable(), needs)]
        self._started: list[Host | None] = [None] * len(needs)
        self._refused = set[str]()  # the names of hosts that have another model or package, since they were changed

    def start(self, number: int) -> ShardLink:
        """Start the process of a shard, or another one in the place of a process that has ended or stalled."""
        self._started[number] = None
        host, self._planned[number] = self._planned[number], None
        replaces = host is None
        try:
            if host is None:
                host = self._choose(number)
            link = self._link(number, host)
            self._started[number] = host
            link.join()
        except InputError as error:
            if not replaces:
                raise
            if host is not None:
                self._refused.add(host.name)
            raise self._error(number, f"cannot be replaced: {error}") from None
        return link

    def _choose(self, number: int) -> Host:
        running = [entry.name for entry in self._started if entry is not None]
        usable = [host for host in self._hosts.usable() if host.name not in self._refused]
        return place(usable, [self._needs[number]], running)[0]

    def _link(self, number: int, host: Host) -> ShardLink:
        join = replace(self._join, number=number, threads=host.threads or self._join.threads)
        return ShardLink(join, host.start(join.deadline), self._spans[number], len(self._spans), host.name)

    def _error(self, number: int, what: str) -> ShardError:
        return ShardError(number, len(self._spans), self._spans[number], what)
