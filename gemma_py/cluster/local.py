"""Shards in processes on this machine."""

from dataclasses import replace

from gemma_py.cluster.links import Join, PipeLink, identity_of
from gemma_py.cluster.shard import Shard, SpanRunner
from gemma_py.cluster.shards import Shards
from gemma_py.cluster.spans import choose_cuts, make_spans
from gemma_py.errors import InputError
from gemma_py.runtime.program import link
from gemma_py.runtime.runner import Runner, SharedTeam
from gemma_py.weights.checkpoint import Checkpoint, open_checkpoint
from gemma_py.weights.store import packed_weights

_TOKENS = 4096  # the number of tokens whose KV rows count for the sizes of spans


def local_shards(checkpoint: Checkpoint, whole: Runner, quant: str | None, shards: int, lost: list[str]) -> Shards:
    """Start processes for all shards but the last, which is in this process.

    whole: the runner of the undivided model, whose worker team the last shard uses. lost: see `Shards`.
    """
    config, program, shared, kv = whole.config, whole.program, whole.shared, whole.kv
    if config.embedding is not None:
        raise InputError(f"{checkpoint.path}: an embedding model cannot be divided into shards")
    cuts = choose_cuts(config, program, shards, kv, min(_TOKENS, config.max_position_embeddings))
    spans, identity = make_spans(config, program, cuts), identity_of(checkpoint)

    def connect(number: int) -> PipeLink:
        join = Join(
            checkpoint.path, checkpoint.cacheable, quant, kv, shared.team.workers, shared.team.deadline, tuple(cuts),
            number, identity,
        )  # fmt: skip
        return PipeLink(join, str(spans[number]), shards)

    return Shards(program, config, shared, kv, spans, connect, lost)


def joined_shard(join: Join) -> Shard:
    """Load a shard. Only the shard's process calls this function."""
    checkpoint = replace(open_checkpoint(join.path), cacheable=join.cacheable)
    found = identity_of(checkpoint)
    for name, mine, theirs in zip(found._fields, found, join.identity, strict=True):
        if mine != theirs:
            raise InputError(f"{join.path}: a shard has another {name} than the process that started it")
    program = link(checkpoint.family.program(checkpoint.config), packed_weights(checkpoint, join.quant))
    span = make_spans(checkpoint.config, program, join.cuts)[join.number]
    return Shard(SpanRunner(span, SharedTeam(join.threads, join.deadline), join.kv))
