"""Tests of speed that count work instead of seconds, because counts are equal on every machine."""

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import pytest
import tiny_checkpoints as tiny
from equivalence import PARTS, WIDE
from gguf_files import write_model
from repository import TINY, child_environment

import gemma_py
from gemma_py.checks.cost import BYTES, pass_cost
from gemma_py.runtime.kv_types import KV_TYPES
from gemma_py.runtime.profile import Profile
from gemma_py.weights.pack import matrix_bytes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, gemma_py.Engine]]:
    """Models with float weights, with quantised weights, with minimums, and with a head that is not the embedding."""
    base = tmp_path_factory.mktemp("models")
    paths = {
        kind: write_model(base / kind, WIDE, seed=4, kinds=dict.fromkeys(PARTS, kind)) for kind in ("Q8_0", "Q4_K")
    }
    tiny.write(tiny.VARIANTS["gemma3-scaled-untied"], base / "untied", seed=1)
    engines = {
        name: gemma_py.load(path, threads=2)
        for name, path in {**paths, "bf16": TINY, "untied": base / "untied"}.items()
    }
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("name", ["bf16", "Q8_0"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_barriers_of_a_pass(models: dict[str, gemma_py.Engine], name: str, tokens: int) -> None:
    """One barrier after the embedding, nine in each layer, one after the last norm, one after the head.

    With float weights, no phase quantises the attention's output, so each layer has one barrier less.
    """
    engine = models[name]
    profile = engine.instruments.profile = Profile(engine.threads, len(engine.program.labels))
    engine.session().prefill(range(tokens))
    engine.instruments.profile = None
    assert profile.passes == 1
    assert profile.barriers == 1 + (8 if name == "bf16" else 9) * len(engine.config.layers) + 2


@pytest.mark.parametrize("name", ["bf16", "Q8_0"])
def test_a_decoded_token_allocates_no_more_than_its_logits(models: dict[str, gemma_py.Engine], name: str) -> None:
    """Counts Python's allocations. test_compiling.py tests that compiled code allocates nothing."""
    engine = models[name]
    session = engine.session()
    session.prefill(range(20))
    session.decode(1)
    scratch, layers = engine.runner._scratch, session._cache.layers
    tracemalloc.start()
    try:
        for token in range(2, 10):
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            logits = session.decode(token)
            peak = tracemalloc.get_traced_memory()[1]
            assert peak - held < logits.nbytes + 40_000  # 40,000 bytes for cells and small Python objects
    finally:
        tracemalloc.stop()
    assert engine.runner._scratch is scratch
    assert session._cache.layers is layers


@pytest.mark.parametrize("name", ["bf16", "Q8_0", "Q4_K", "untied"])
def test_a_token_reads_the_arenas_once(models: dict[str, gemma_py.Engine], name: str) -> None:
    """A pass reads all weights, except an embedding that is not also the head."""
    engine = models[name]
    packed = engine.program.model.weights
    arenas = [arena.nbytes for arena in packed[:3] if arena.size > 1]  # an unused arena has one value
    assert sum(matrix_bytes(packed, number) for number in range(len(packed.matrices))) == sum(arenas)
    unread = matrix_bytes(packed, 0) if name == "untied" else 0  # matrix 0 is the embedding
    rows = sum(2 * layer.num_key_value_heads * layer.head_dim * 4 for layer in engine.config.layers)
    assert pass_cost(engine.program, KV_TYPES["float32"], 0, 1)[:, BYTES].sum() == sum(arenas) - unread + rows


# Prints how many kernels came from the disk and how many were compiled, in a process with filled caches.
PROGRAM = f"""
import gc, json
from numba.core.dispatcher import Dispatcher
import gemma_py
with gemma_py.load({str(TINY)!r}, threads=2) as engine:
    session = engine.session()
    session.prefill(range(40), all_logits=True)
    session.decode(1)
    list(engine.generate("some text", max_tokens=3))
stats = [made.stats for made in gc.get_objects() if isinstance(made, Dispatcher)]
print(json.dumps([sum(sum(part.values()) for part in (s.cache_hits for s in stats)),
                  sum(sum(part.values()) for part in (s.cache_misses for s in stats))]))
"""


def test_a_second_process_compiles_nothing() -> None:
    with gemma_py.load(TINY, threads=1) as engine:  # fills the caches of weights and kernels
        list(engine.generate("some text", max_tokens=1))
    environment = child_environment()
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded, compiled = json.loads(done.stdout)
    assert compiled == 0
    assert loaded > 0


def test_times_are_kept_only_where_they_are_wanted(
    models: dict[str, gemma_py.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = models["bf16"]
    plain = engine.session()
    logits = plain.prefill(range(30))
    profile = engine.instruments.profile = Profile(engine.threads, len(engine.program.labels))
    watched = engine.session()
    assert watched.prefill(range(30)).tobytes() == logits.tobytes()
    assert watched.kv_digest() == plain.kv_digest()
    engine.instruments.profile = None
    before = profile.nanoseconds.copy()
    engine.session().prefill(range(30))
    assert (profile.nanoseconds == before).all()
    assert (before >= 0).all()
    assert (
        before[:, :, 0]
        .sum(0)[[engine.program.label(name) for name in ("query, key and value", "attention", "head")]]
        .all()
    )


def test_another_number_of_workers(models: dict[str, gemma_py.Engine]) -> None:
    engine = models["Q8_0"]
    made = set()
    for workers in (3, 1, 2):
        engine.set_threads(workers)
        assert engine.threads == workers
        session = engine.session()
        made.add((session.prefill(range(33)).tobytes(), *session.kv_digest()))
    assert len(made) == 1
