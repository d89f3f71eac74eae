import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints as tiny
import tiny_families
import tiny_models
from equivalence import bits, opened
from gguf_files import write_model
from golden_bits import GOLDEN
from repository import DATA

import gemma_py
from gemma_py import reference
from gemma_py.errors import ContextError, InputError, WorkerError
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.runner import CHUNK, SequenceInput

RESULTS = np.load(DATA / "tiny_logits.npz")
WIDE = {name: variant for name, variant in tiny_models.WIDE.items() if tiny.is_embedding(variant)}
# Lengths below, at and above those of a window and of an attention tile.
LENGTHS = (70, 1, 33, 2, 100, 64, 20, 21, 40, 7)
NAMES = [name for name, variant in tiny_families.VARIANTS.items() if tiny.is_embedding(variant)]


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(64) for _ in range(length)] for length in lengths]


def expected(engine: gemma_py.Engine, ids: Sequence[list[int]]) -> np.ndarray:
    return np.stack([reference.embedding(engine, text) for text in ids])


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {name: write_model(folder / f"{name}.gguf", WIDE[name], seed=3, quant="Q8_0") for name in WIDE}


@pytest.fixture(params=WIDE)
def quantised(request: pytest.FixtureRequest, ggufs: dict[str, Path]) -> Path:
    return ggufs[request.param]


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "q8_0"])
@pytest.mark.parametrize("name", WIDE)
def test_embeddings_match_the_reference(ggufs: dict[str, Path], tmp_path: Path, name: str, kv: str) -> None:
    tiny.write(WIDE[name], tmp_path, 3)
    for path, threads in itertools.product((tmp_path, ggufs[name]), (1, 2, 3)):
        with opened(path, threads, kv=kv) as engine:
            ids = texts()
            if threads == 1:
                want = expected(engine, ids)
            order = random.Random(threads).sample(range(len(ids)), len(ids))
            made = engine.embed([ids[number] for number in order])
            assert (bits(made) == bits(want[order])).all()
            assert (bits(engine.embed([ids[4]])) == bits(want[4])).all()


@pytest.mark.parametrize("name", WIDE)
def test_a_text_may_exceed_the_usual_size_of_a_pass(tmp_path: Path, name: str) -> None:
    config = WIDE[name].config | {"max_position_embeddings": 2048}
    path = write_model(tmp_path / "m.gguf", replace(WIDE[name], config=config), seed=3, quant="Q8_0")
    with opened(path, 3) as engine:
        ids = texts((CHUNK + 90, 3))
        assert (bits(engine.embed(ids)) == bits(expected(engine, ids))).all()


def test_kv_rows_match_the_reference(quantised: Path) -> None:
    with opened(quantised, 3) as engine:
        ids, caches = texts(), [engine.new_cache() for _ in LENGTHS]
        engine.run_together([SequenceInput(*pair) for pair in zip(caches, ids, strict=True)])
        for cache, text in zip(caches, ids, strict=True):
            assert cache.digest() == reference.kv_digest(reference.embedding_and_rows(engine, text)[1])


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    tiny.write(tiny_families.VARIANTS[name], tmp_path, GOLDEN["seed"])
    with gemma_py.load(tmp_path) as engine:
        made = engine.embed(GOLDEN["ids"][name])
    assert tiny.largest_cosine_distance(made, RESULTS[name]) < 1e-9


def test_a_gguf_has_the_bits_of_the_directory(tmp_path: Path) -> None:
    for name in NAMES:
        variant = replace(tiny_families.VARIANTS[name], dtype="F32")
        tiny.write(variant, tmp_path / name, 1)
        path = write_model(tmp_path / f"{name}.gguf", variant, seed=1)
        with gemma_py.load(tmp_path / name) as one, gemma_py.load(path) as other:
            assert (bits(one.embed(texts())) == bits(other.embed(texts()))).all()
            assert one.fingerprint() == other.fingerprint()


def caught(engine: gemma_py.Engine, want: np.ndarray, ids: list[list[int]], plans: Sequence[FaultPlan]) -> bool:
    for plan in plans:
        engine.instruments.fault_plan = plan
        try:
            if (bits(engine.embed(ids)) != bits(want)).any():
                return True
        except (WorkerError, gemma_py.GemmaError):
            return True
    return False


def test_perturbed_schedules_change_no_bit(quantised: Path) -> None:
    with opened(quantised, 4) as engine:
        ids = texts()
        want = expected(engine, ids)
        assert not caught(engine, want, ids, [FaultPlan(seed=seed) for seed in range(1, 12)])


def test_control_attention_does_not_wait_for_later_rows(quantised: Path) -> None:
    with opened(quantised, 4) as engine:
        # Texts are longer than a tile of queries, so attention can read rows that are not published yet.
        ids = texts((100, 100, 100))
        want = expected(engine, ids)
        plans = [FaultPlan(seed=seed, omit="ahead") for seed in range(1, 300)]
        assert caught(engine, want, ids, plans)
        assert caught(engine, want[:1], ids[:1], plans)


@pytest.mark.parametrize(
    ("name", "phase"),
    [*itertools.product(WIDE, ("end", "dense", "dense input")),
     *(("embeddinggemma2", phase) for phase in ("per-layer inputs", "per-layer gate", "per-layer projection"))],
)  # fmt: skip
def test_control_a_dropped_barrier(ggufs: dict[str, Path], name: str, phase: str) -> None:
    with opened(ggufs[name], 4) as engine:
        ids = texts()
        want, label = expected(engine, ids), engine.program.label(phase)
        last = len(engine.config.layers)
        layer = last - 1 if phase == "end" else -1
        plans = [FaultPlan(seed=seed, omit="barrier", omit_phase=label, omit_layer=layer) for seed in range(1, 200)]
        assert caught(engine, want, ids, plans)


def test_a_text_is_embedded_whole_or_not_at_all(quantised: Path) -> None:
    with gemma_py.load(quantised, context=50) as engine:
        with pytest.raises(ContextError, match="text 1: 51 tokens exceed the context of 50 tokens"):
            engine.embed([[1], [1] * 51])
        cache = engine.new_cache()
        engine.run_together([SequenceInput(cache, [1, 2])])
        for part in (SequenceInput(cache, [3]), SequenceInput(engine.new_cache(), [3, 4], 2)):
            with pytest.raises(InputError, match="every text whole"):
                engine.run_together([part])


def test_dimensions_are_cut_before_the_embedding_is_normalised(quantised: Path) -> None:
    with gemma_py.load(quantised) as engine:
        ids = texts()[:3]
        made = engine.embed(ids, dimensions=5)
        assert made.shape == (3, 5)
        assert made.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, rtol=1e-6)
        assert (bits(made[0]) == bits(reference.embedding(engine, ids[0], 5))).all()
        whole = engine.embed(ids)[:, :5]
        np.testing.assert_allclose(made, whole / np.linalg.norm(whole, axis=1, keepdims=True), rtol=1e-5)
        for wrong in (0, 65, -1, 2.0, True, "5"):
            with pytest.raises(InputError, match="dimensions should be 1 to 64"):
                engine.embed(ids, dimensions=wrong)  # type: ignore[arg-type]


def test_many_texts_come_back_in_their_order(quantised: Path) -> None:
    rng = random.Random(3)
    ids = [[rng.randrange(64) for _ in range(rng.randint(1, 30))] for _ in range(300)]
    with gemma_py.load(quantised) as engine:
        made = engine.embed(ids)
        for number in (0, 17, 150, 299):
            assert (bits(engine.embed([ids[number]])[0]) == bits(made[number])).all()
        assert engine.embed([]).shape == (0, 64)


def test_a_model_either_generates_or_embeds(quantised: Path, checkpoints: dict[str, Path]) -> None:
    with gemma_py.load(quantised) as engine:
        for generates in (engine.session, lambda: engine.generate([1]), lambda: engine.score([1, 2])):
            with pytest.raises(InputError, match="this is an embedding model, which generates no text; use embed"):
                generates()
    with gemma_py.load(checkpoints["gemma3"]) as engine, pytest.raises(InputError, match="only an embedding model"):
        engine.embed([[1]])
