import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from talking import fresh_digest

import gemma_py
from gemma_py.errors import InputError, WorkerError


@pytest.mark.parametrize("name", ["gemma1-multi-query", "gemma2-no-caps", "gemma3", "gemma3-multi-query"])
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "q8_0"])
def test_a_rewound_session_matches_a_fresh_one(checkpoints: dict[str, Path], name: str, kv: str) -> None:
    """Random prefills and rewinds give the bits of one prefill. Rows that must not be read are NaN."""
    rng = random.Random(name)
    with gemma_py.load(checkpoints[name], threads=2, kv=kv) as engine:
        engine.instruments.poison = True
        for keep in (0, 7):
            session = engine.session(keep)
            ids: list[int] = []
            furthest = 0
            for _ in range(16):
                back = rng.randrange(len(ids) + 1) if rng.random() < 0.4 else len(ids)
                if session.can_rewind_to(back):
                    session.rewind(back)
                    del ids[back:]
                else:
                    with pytest.raises(InputError, match="cannot rewind from position"):
                        session.rewind(back)
                    assert furthest - back > keep
                more = [rng.randrange(96) for _ in range(rng.choice((1, 1, 2, 7, 20)))]
                if len(ids) + len(more) < 100:
                    session.prefill(more, chunk=rng.choice((1, 3, 64)))
                    ids += more
                    furthest = max(furthest, len(ids))
                assert session.ids == ids
                assert session.position == len(ids)
            assert session.kv_digest() == fresh_digest(engine, ids)


def test_reallocated_rings_keep_their_rows(checkpoints: dict[str, Path]) -> None:
    """The rings have wrapped around before a larger chunk makes them grow."""
    ids = [number % 96 for number in range(128)]
    with gemma_py.load(checkpoints["gemma3"]) as engine:
        engine.instruments.poison = True
        grown = 0
        for first, keep in itertools.product((40, 66, 70, 100), (0, 20, 40)):
            session = engine.session(keep)
            session.prefill(ids[:first], chunk=1)
            rings = [layer.capacity for layer in session._cache.layers]
            session.reserve(128 - first)
            grown += sum(now.capacity > before for now, before in zip(session._cache.layers, rings, strict=True))
            session.rewind(first - keep)
            session.prefill(ids[first - keep :])
            assert session.kv_digest() == fresh_digest(engine, ids)
        assert grown > 20


def test_keep_is_what_a_session_can_go_back(checkpoints: dict[str, Path]) -> None:
    with gemma_py.load(checkpoints["gemma3"]) as engine:
        for keep, chunk in itertools.product((0, 1, 10), (1, 5, 60)):
            session = engine.session(keep)
            session.prefill(list(range(60)), chunk=chunk)
            assert [session.can_rewind_to(60 - back) for back in (0, keep, keep + 1)] == [True, True, False]
            assert not session.can_rewind_to(61)
            assert not session.can_rewind_to(-1)


def test_a_failed_pass_does_not_overwrite_rows_that_rewind_needs(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass writes only to rows of the ring that no rewind needs."""
    with gemma_py.load(checkpoints["gemma3"]) as engine:
        session = engine.session(keep=10)
        session.prefill(list(range(60)), chunk=1)
        assert session.can_rewind_to(50)

        honest = engine.runner.team.run

        def fail(*args: Any, **options: Any) -> None:
            honest(*args, **options)
            raise WorkerError(0, 1, None, None, "failed")

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.team, "run", fail)
            with pytest.raises(WorkerError):
                session.prefill(list(range(20)))
        session.rewind(50)
        session.prefill([5, 6, 7])
        assert session.kv_digest() == fresh_digest(engine, [*range(50), 5, 6, 7])
