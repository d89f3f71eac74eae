import contextlib
import ctypes
import ctypes.util
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
from equivalence import PARTS, WIDE, Expected, bits, prompt
from faults import PLACES
from gguf_files import write_model
from repository import TINY

import gemma_py
from gemma_py.errors import ComputationError, ContextError, InputError, WorkerError
from gemma_py.runtime.fault_injection import FaultPlan

TOKENS = 40


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gemma_py.Engine]:
    """A quantised model, because every phase then has work; four workers; a short deadline."""
    path = tmp_path_factory.mktemp("faults") / "m.gguf"
    write_model(path, WIDE, seed=4, kinds=dict.fromkeys(PARTS, "Q8_0"))
    with gemma_py.load(path, threads=4, deadline=1.0) as made:
        made.instruments.poison = True
        yield made


@pytest.fixture(scope="module")
def want(engine: gemma_py.Engine) -> Expected:
    return Expected(engine, prompt(engine.config, TOKENS))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1].replace(" ", "-"))
@pytest.mark.parametrize("fault", ["raise", "stall"])
def test_a_fault_is_reported_and_survived(
    engine: gemma_py.Engine, want: Expected, fault: str, place: tuple[int, str]
) -> None:
    layer, name = place
    phase = engine.program.label(name)
    # Only decoding has a phase for scores.
    before = TOKENS - 1 if name == "scores" else 10
    session = engine.session()
    session.prefill(want.ids[:before])
    engine.instruments.fault_plan = FaultPlan(fault=fault, worker=2, layer=layer, phase=phase, place="enter")
    with pytest.raises(WorkerError, match=name) as caught:
        session.prefill(want.ids[before:])
    assert (caught.value.worker, caught.value.layer, caught.value.phase) == (2, layer, phase)
    engine.instruments.fault_plan = None
    assert session.position == before
    assert want.same(engine, [13])  # a new session works after the fault
    if caught.value.settled:  # the old session works too, unless a stalled worker may still write to the session's rows
        np.testing.assert_array_equal(bits(session.prefill(want.ids[before:])), bits(want.logits[-1]))
        assert session.kv_digest() == want.digest
    else:
        assert fault == "stall"
        with pytest.raises(InputError, match="unusable after a failed pass"):
            session.prefill(want.ids[before:])


def test_a_stalled_worker_keeps_alive_what_it_may_write_to() -> None:
    """The kernel has only addresses of KV rows, so Python could free the rows while a stalled worker may still write."""
    with gemma_py.load(TINY, threads=2, deadline=1.0) as opened:
        session = opened.session()
        session.prefill([2, 3])
        rows = weakref.ref(session._cache.layers[0].keys)
        opened.instruments.fault_plan = FaultPlan(fault="stall", worker=1)
        with contextlib.suppress(WorkerError):
            session.prefill([4])
        opened.instruments.fault_plan = None
        assert not session.usable
        del session
        opened.session().prefill([2, 3])
        gc.collect()
        assert rows() is not None
    until = time.monotonic() + 60  # closing the engine ends the stall
    while rows() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert rows() is None


def test_several_python_threads_share_an_engine(engine: gemma_py.Engine, want: Expected) -> None:
    failures: list[str] = []

    def work(sizes: list[int]) -> None:
        for _ in range(5):
            if not want.same(engine, sizes):
                failures.append(f"chunks of {sizes}")

    crowd = [threading.Thread(target=work, args=([size],)) for size in (1, 7, 40)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert failures == []


def test_a_forked_child_can_use_the_engine(engine: gemma_py.Engine, want: Expected) -> None:
    assert want.same(engine, [TOKENS])
    child = os.fork()
    if child == 0:
        os._exit(0 if want.same(engine, [9]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert want.same(engine, [TOKENS])


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    with gemma_py.load(TINY, threads=3) as opened:
        session = opened.session()
        session.prefill([2, 3])
        assert threading.active_count() == before + 3
    assert threading.active_count() == before
    with pytest.raises(InputError, match="closed"):
        session.decode(5)


def test_the_context_is_checked_before_work_starts(checkpoints: dict[str, Path]) -> None:
    with gemma_py.load(checkpoints["gemma3"], threads=2) as opened:
        session = opened.session()
        with pytest.raises(ContextError, match="129 tokens after 0 cached tokens exceed the context of 128"):
            session.prefill([5] * 129)
        assert session.position == 0


@pytest.mark.parametrize("threads", [0, -1, 5000])
def test_impossible_numbers_of_threads(threads: int) -> None:
    with pytest.raises(InputError, match="threads"):
        gemma_py.load(TINY, threads=threads)


def test_every_phase_is_among_the_places(engine: gemma_py.Engine) -> None:
    assert WIDE.config["num_hidden_layers"] == 2
    assert [name for _, name in PLACES] == list(engine.program.labels)
    assert "gemma3" in tiny.VARIANTS


def test_a_failed_allocation_leaves_the_engine_usable(
    engine: gemma_py.Engine, want: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the new size were recorded without new scratch memory, a later pass would write beyond the end of the old
    memory.
    """
    monkeypatch.setattr(engine.runner, "_scratch", None)
    assert want.same(engine, [3])

    def refuse(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("gemma_py.runtime.runner.new_scratch", refuse)
        with pytest.raises(MemoryError):
            engine.session().prefill([5] * 90)
    assert engine.runner._rows == 3
    assert engine.runner._scratch is not None
    assert len(engine.runner._scratch.floats) == 3 * engine.program.sizes.floats
    assert want.same(engine, [TOKENS])


def test_an_interrupted_prefill_can_be_repeated(
    engine: gemma_py.Engine, want: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the calling thread watches the workers: no token is added, and the session stays usable."""
    session = engine.session()
    session.prefill(want.ids[:10])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.team, "_watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(want.ids[10:])
    assert engine.runner.team.settled
    assert session.position == 10
    np.testing.assert_array_equal(bits(session.prefill(want.ids[10:])), bits(want.logits[-1]))
    assert session.kv_digest() == want.digest


def test_another_rounding_mode_is_refused() -> None:
    """Arithmetic of the calling thread, which packs weights, must round as IEEE 754 requires."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    upward = 0x800 if os.uname().machine in ("x86_64", "AMD64") else 0x400000
    with gemma_py.load(TINY, threads=1) as sound:
        try:
            assert libm.fesetround(upward) == 0
            with pytest.raises(ComputationError, match="round to nearest"):
                gemma_py.load(TINY)
            with pytest.raises(ComputationError, match="round to nearest"):
                gemma_py.reference.logits(sound, [2])
        finally:
            libm.fesetround(0)


@pytest.mark.parametrize("bad", [
    {"threads": 2.5}, {"threads": "2"}, {"threads": True}, {"kv": ["x"]}, {"kv": "int4"}, {"context": 1.5},
    {"deadline": float("inf")}, {"deadline": 0}, {"deadline": "5"},
])  # fmt: skip
def test_impossible_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        gemma_py.load(TINY, **bad)


def test_the_context_holds_for_threads_that_share_a_session(checkpoints: dict[str, Path]) -> None:
    with gemma_py.load(checkpoints["gemma3"], threads=2, context=50) as opened:
        session = opened.session()

        def work() -> None:
            with contextlib.suppress(ContextError):
                for _ in range(5):
                    session.prefill([7] * 5)

        crowd = [threading.Thread(target=work) for _ in range(6)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        assert session.position == 50
