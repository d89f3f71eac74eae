"""Spans of layers, and shards in one process, give the unsharded bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from equivalence import TOKENS, expected, expected_of_several, opened, together
from tiny_models import VARIANTS

import gemma_py
from gemma_py.cluster.shard import Shard, SpanRunner
from gemma_py.cluster.shards import LocalLink, Shards
from gemma_py.cluster.spans import Span, allowed_cuts, choose_cuts, make_spans
from gemma_py.errors import InputError
from gemma_py.runtime.runner import SharedTeam

GENERATING = [name for name in VARIANTS if not name.startswith("embedding")]


def spans_of(engine: gemma_py.Engine, shards: int) -> list[Span]:
    program = engine.program
    return make_spans(engine.config, program, choose_cuts(engine.config, program, shards, engine.kv_type, 100))


@contextmanager
def sharded(path: Path, shards: int, threads: int, kv: str = "float32") -> Iterator[gemma_py.Engine]:
    """Open an engine whose shards are all in this process. shards: 0 for as many as the model allows."""
    with opened(path, threads, kv=kv) as engine:
        whole = engine.runner
        spans = spans_of(engine, shards or len(allowed_cuts(engine.config)))

        def connect(number: int) -> LocalLink:
            return LocalLink(Shard(SpanRunner(spans[number], SharedTeam(threads), kv)))

        made = Shards(whole.program, engine.config, SharedTeam(threads), kv, spans, connect)
        made.instruments.poison = True
        engine._runner = made
        try:
            yield engine
        finally:
            whole.close()


@pytest.mark.parametrize("shards", [1, 2, 0])
@pytest.mark.parametrize("name", GENERATING)
def test_shards_match_the_reference(checkpoints: dict[str, Path], name: str, shards: int) -> None:
    for threads in (1, 3):
        with opened(checkpoints[name], threads) as engine:
            want = expected(name, engine)
            if shards > len(allowed_cuts(engine.config)):
                pytest.skip("the model has only one span")
        with sharded(checkpoints[name], shards, threads) as engine:
            for sizes in ([1], [7], [TOKENS], [5, 1, 13, 2]):
                assert want.same(engine, sizes), f"chunks of {sizes}"
            assert want.same(engine, [33], all_logits=False)


@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
def test_processes_give_the_unsharded_bits(checkpoints: dict[str, Path], kv: str) -> None:
    with opened(checkpoints["gemma3"], 2, kv=kv) as engine:
        wanted = [bytes(session_of(engine).prefill([5, 6, 7, 8])), session_of(engine).kv_digest()]
    with gemma_py.load(checkpoints["gemma3"], threads=2, kv=kv, shards=2) as engine:
        session = engine.session()
        assert [bytes(session.prefill([5, 6, 7, 8])), engine.session().kv_digest()] == wanted
