"""Divide a model among shards, and choose the host of each."""

from dataclasses import dataclass

import numpy as np

from gemma_py import machine
from gemma_py.cluster.hosts import Host, Hosts, place
from gemma_py.cluster.links import Join, ShardLink, identity_of
from gemma_py.cluster.shards import Shards
from gemma_py.cluster.spans import choose_cuts, layer_bytes, make_spans
from gemma_py.errors import InputError, ShardError
from gemma_py.runtime.runner import Runner
from gemma_py.weights.checkpoint import Checkpoint

_TOKENS = 4096  # the number of tokens whose KV rows count for the sizes of spans
_PROCESS = 400 << 20  # bytes that a shard's process needs besides weights and KV rows


@dataclass(frozen=True)
class Division:
    """How to divide a model. hosts: of all shards but the last. model: what the hosts open, as `resolve` takes it."""

    shards: int
    hosts: Hosts
    model: str


def divide(checkpoint: Checkpoint, whole: Runner, quant: str | None, division: Division, lost: list[str]) -> Shards:
    """Start the processes of all shards but the last, which is in this process.

    whole: the runner of the undivided model, whose worker team the last shard uses. lost: see `Shards`.
    """
    config, program, shared, kv, shards = whole.config, whole.program, whole.shared, whole.kv, division.shards
    if config.embedding is not None:
        raise InputError(f"{checkpoint.path}: an embedding model cannot be divided into shards")
    tokens = min(_TOKENS, config.max_position_embeddings)
    hosts = division.hosts.usable()
    room = None
    if all(host.memory is not None for host in hosts):
        # Host number i gets shard number i, if there are enough hosts.
        frees = [hosts[number % len(hosts)].memory or 0 for number in range(shards - 1)]
        room = [*frees, machine.memory() or max(frees, default=1)]
    cuts = choose_cuts(config, program, shards, kv, tokens, room)
    spans, identity = make_spans(config, program, cuts), identity_of(checkpoint)
    ends = np.cumsum([0, *layer_bytes(config, program, kv, tokens)])
    needs = [int(ends[span.end] - ends[span.first]) + _PROCESS for span in spans[:-1]]
    planned: list[Host | None] = [*place(hosts, needs)]
    refused = set[str]()  # the names of hosts that have another model or package, since they were changed
    links: list[tuple[ShardLink, Host] | None] = [None] * (shards - 1)

    def connect(number: int) -> ShardLink:
        before, links[number] = links[number], None
        if before is not None and before[0].stalled:
            division.hosts.suspect(before[1])
        host, planned[number] = planned[number], None
        replaces = host is None
        if host is None:
            try:
                others = [(entry[1], needs[at]) for at, entry in enumerate(links) if entry and at != number]
                usable = [host for host in division.hosts.usable() if host.name not in refused]
                (host,) = place(usable, [needs[number]], others)
            except InputError as error:
                raise ShardError(number, shards, str(spans[number]), f"finds no host: {error}") from None
        join = Join(
            division.model, checkpoint.cacheable, quant, kv, host.threads or shared.team.workers, shared.team.deadline,
            tuple(cuts), number, identity,
        )  # fmt: skip
        link = ShardLink(join, host.start(shared.team.deadline), str(spans[number]), shards, host.name)
        links[number] = link, host
        try:
            link.join()
        except InputError as error:
            if not replaces:
                raise
            refused.add(host.name)
            raise ShardError(number, shards, str(spans[number]), f"cannot be replaced: {error}") from None
        return link

    return Shards(program, config, shared, kv, spans, connect, lost, division.hosts.patience)
