"""Spans of layers, and shards in one process, give the unsharded bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from equivalence import TOKENS, expected, expected_of_several, opened, prompt, together
from repository import TINY
from tiny_models import VARIANTS

import gemma_py
from gemma_py.checks.verify import compute
from gemma_py.cluster.shard import SequencePart, Shard, SpanRunner
from gemma_py.cluster.shards import LocalLink, Shards, divided
from gemma_py.cluster.spans import Span, allowed_cuts, choose_cuts, layer_bytes, make_spans
from gemma_py.errors import InputError
from gemma_py.runtime.runner import SequenceInput, SharedTeam

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

        class InThisProcess:
            patience = 0.0
            overlap = True

            def start(self, number: int) -> LocalLink:
                return LocalLink(Shard(SpanRunner(spans[number], SharedTeam(threads), kv)))

        made = Shards(whole.program, engine.config, SharedTeam(threads), kv, spans, InThisProcess(), [])
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


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "q8_0"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4-e2b", "gemma4-dense"])
def test_requests_in_one_pass_match_the_reference(checkpoints: dict[str, Path], name: str, kv: str) -> None:
    with opened(checkpoints[name], 2, kv=kv) as engine:
        wants = expected_of_several(f"{name} {kv}", engine)
    with sharded(checkpoints[name], 0, 2, kv) as engine:
        for seed in range(3):
            assert together(engine, wants, seed)


@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "gemma4-e2b", "gemma4-dense"])
def test_passes_in_pieces_match_the_reference(
    checkpoints: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(checkpoints[name], 2) as engine:
        want, wants = expected(name, engine), expected_of_several(f"{name} float32", engine)
    for tokens in (1, 3, 7):
        monkeypatch.setattr("gemma_py.cluster.shards._PIECE", tokens)
        with sharded(checkpoints[name], 0, 2) as engine:
            for sizes in ([TOKENS], [20, 1, 13, 2]):
                assert want.same(engine, sizes), f"chunks of {sizes} in pieces of {tokens}"
            assert want.same(engine, [33], all_logits=False)
            assert together(engine, wants, tokens)


def test_pieces_have_all_tokens_in_order() -> None:
    parts = [
        SequencePart(1, [7], 1, 0, 1),
        SequencePart(2, list(range(9)), 4, 0, 9),
        SequencePart(3, [5, 6, 7], 3, 2, 3),
    ]
    pieces = divided(parts, 4)
    assert [[(part.cache, part.tokens, part.logits, part.reserved) for part in piece] for piece in pieces] == [
        [(1, [7], 1, 1), (2, [0, 1, 2], 0, 9)],
        [(2, [3, 4, 5, 6], 2, 6)],
        [(2, [7, 8], 2, 2), (3, [5, 6, 7], 3, 3)],
    ]


@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "gemma4-e2b", "gemma4-experts"])
def test_traces_of_spans_join_to_the_unsharded_trace(checkpoints: dict[str, Path], name: str) -> None:
    with opened(checkpoints[name], 2) as engine:
        ids = prompt(engine.config, 20)
        want = compute(engine, ids, 7, trace=True).hashes
    with sharded(checkpoints[name], 0, 2) as engine:
        assert (compute(engine, ids, 7, trace=True).hashes == want).all()


def test_the_allowed_cuts_keep_layers_that_share_rows_together(checkpoints: dict[str, Path]) -> None:
    with opened(checkpoints["gemma4-e2b"], 1) as engine:
        cuts, config = allowed_cuts(engine.config), engine.config
        assert 1 < len(cuts) < len(config.layers)
        for span in spans_of(engine, len(cuts)):
            assert all(span.first <= y.kv_source for y in config.layers[span.first : span.end])
        with pytest.raises(
            InputError, match=f"at most {len(cuts)} shards, found 9; a shard can begin after layer 0 only at"
        ):
            spans_of(engine, 9)


def test_cuts_balance_the_layers() -> None:
    with opened(TINY, 1) as engine:
        for shards in (1, 2, 3, 4):
            spans = spans_of(engine, shards)
            assert [span.first for span in spans][1:] == [span.end for span in spans][:-1]
            assert spans[-1].end == len(engine.config.layers)
            sizes = [span.end - span.first for span in spans]
            assert len(sizes) == shards and max(sizes) == -(-len(engine.config.layers) // shards)


def test_cuts_balance_memory_if_a_host_has_too_little() -> None:
    """The output matrix counts for the last shard, so the last shard has fewer layers."""
    with opened(TINY, 1) as engine:
        needs = layer_bytes(engine.config, engine.program, "float32", 100)

        def cuts(room: list[int]) -> list[int]:
            return choose_cuts(engine.config, engine.program, 2, "float32", 100, room)

        equal = cuts([sum(needs)] * 2)
        assert equal == cuts([1 << 40, sum(needs[equal[1] :])])
        assert cuts([1 << 40, sum(needs[equal[1] :]) - 1])[1] > equal[1]
        assert cuts([needs[0], sum(needs)])[1] < equal[1]


# --- controls: the tests above notice a wrong cut ---------------------------------------------------------------------


def test_pieces_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(TINY, 2) as engine:
        want = expected("tiny", engine)
    monkeypatch.setattr("gemma_py.cluster.shards._PIECE", 8)
    monkeypatch.setattr("gemma_py.cluster.shards.divided", lambda parts, tokens: swapped(divided(parts, tokens)))

    def swapped(pieces: list[Any]) -> list[Any]:
        return [pieces[1], pieces[0], *pieces[2:]] if len(pieces) > 1 else pieces

    with sharded(TINY, 2, 2) as engine:
        assert not want.same(engine, [24])


def test_a_ring_without_room_for_the_whole_pass_is_noticed(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix cache copies the rows of a whole pass, after the last piece. Mutant: room for one piece only."""
    monkeypatch.setattr("gemma_py.cluster.shards._PIECE", 8)

    def logits(engine: gemma_py.Engine) -> bytes:
        engine.runner.instruments.poison = False  # poison also overwrites rows that no later row of the pass reads
        prefixes, ids = engine.new_prefix_cache(1 << 20), prompt(engine.config, 120)
        cache = engine.new_cache()
        engine.run_together([SequenceInput(cache, ids)])
        prefixes.insert(cache, 0)
        again = engine.new_cache()
        assert prefixes.restore(again, ids[:17]) == 16
        return engine.run_together([SequenceInput(again, ids[16:20])])[0].tobytes()

    with opened(checkpoints["gemma3"], 2) as engine:
        wanted = logits(engine)
    with sharded(checkpoints["gemma3"], 2, 2) as engine:
        assert logits(engine) == wanted
    honest = Shard._run

    def short(shard: Shard, order: Any, rows: Any) -> Any:
        parts = [part._replace(reserved=len(part.tokens)) for part in order.parts]
        return honest(shard, order._replace(parts=parts), rows)

    monkeypatch.setattr(Shard, "_run", short)
    with sharded(checkpoints["gemma3"], 2, 2) as engine, pytest.raises(AssertionError):
        logits(engine)


def test_a_skipped_order_is_noticed(checkpoints: dict[str, Path]) -> None:
    with opened(TINY, 2) as engine:
        want = expected("tiny", engine)
    with sharded(TINY, 2, 2) as engine:
        session = engine.session(keep=32)
        session.prefill(want.ids[:20])
        session.rewind(10)
        assert isinstance(engine.runner, Shards)
        del engine.runner._orders[-1]  # the order to rewind
        logits = session.prefill(want.ids[10:30])
        assert (logits.view(np.uint32) != want.logits[29].view(np.uint32)).any()


def test_rows_of_another_pass_are_noticed(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last shard gets the rows that the first shard computed for the pass before."""
    with opened(TINY, 2) as engine:
        want = expected("tiny", engine)
    earlier: list[Any] = []
    run_span = SpanRunner.run_span

    def stale(runner: SpanRunner, inputs: Any, rows: Any) -> Any:
        if runner.span.first == 0:
            return run_span(runner, inputs, rows)
        earlier.append(rows)
        return run_span(runner, inputs, earlier[max(0, len(earlier) - 2)])

    monkeypatch.setattr(SpanRunner, "run_span", stale)
    with sharded(TINY, 2, 2) as engine:
        assert not want.same(engine, [10])


def test_a_missing_buffer_is_refused(checkpoints: dict[str, Path]) -> None:
    with opened(TINY, 2) as engine:
        runner = SpanRunner(spans_of(engine, 2)[1], SharedTeam(1), "float32")
        with pytest.raises(InputError, match="needs rows of 1 buffers, found 0"):
            runner.run_span([SequenceInput(runner.cache(), [1])], ())
