import random
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from repository import TINY
from tiny_models import VARIANTS

import gemma_py
from gemma_py.runtime.cache import Cache, bytes_needed
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS, PrefixCache


def prompt(engine: gemma_py.Engine, length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(engine.config.vocab_size) for _ in range(length)]


def kept(engine: gemma_py.Engine, budget: int = 1 << 30) -> PrefixCache:
    return PrefixCache(engine.config, engine.kv_type, budget)


def computed(
    engine: gemma_py.Engine, ids: list[int], prefixes: PrefixCache, chunk: int = 23
) -> tuple[Cache, int, np.ndarray]:
    """Compute a prompt like the scheduler: copy the cached prefix, then prefill and cache the rest.

    Return (KV cache, number of cached tokens, bits of the logits of all tokens that were not cached).
    """
    cache = engine.new_cache(BLOCK_TOKENS)
    cache.prepare(len(ids), chunk)
    cached = prefixes.restore(cache, ids)
    rows = []
    for first in range(cached, len(ids), chunk):
        rows.append(engine.runner.run(cache, ids[first : first + chunk], True))
        prefixes.insert(cache, first)
    return cache, cached, np.concatenate(rows).view(np.uint32)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_hit_matches_a_cold_start(checkpoints: dict[str, Path], name: str) -> None:
    """The prefix ends at each block boundary, even far before the window."""
    with gemma_py.load(checkpoints[name], threads=2) as engine:
        engine.instruments.poison = True
        ids = prompt(engine, 110)
        cold, nothing, every = computed(engine, ids, kept(engine, 0))
        assert nothing == 0
        for length in (*range(5, 110, 9), 16, 17, 32, 33, 96, 97):
            prefixes = kept(engine)
            computed(engine, ids[:length], prefixes)
            warm, cached, rest = computed(engine, ids, prefixes)
            assert cached == length // BLOCK_TOKENS * BLOCK_TOKENS
            np.testing.assert_array_equal(rest, every[cached:])
            assert warm.digest() == cold.digest()


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "q8_0"])
def test_prepare_allocates_exactly_what_is_needed(kv: str) -> None:
    with gemma_py.load(TINY, kv=kv) as engine:
        for tokens, chunk in ((1, 1), (30, 512), (300, 7), (300, 512)):
            cache = engine.new_cache(BLOCK_TOKENS)
            cache.prepare(tokens, chunk)
            layers = cache.layers
            assert cache.nbytes == bytes_needed(engine.config, kv, tokens, chunk, BLOCK_TOKENS)
            ids = prompt(engine, tokens)
            for first in range(0, tokens, chunk):
                engine.runner.run(cache, ids[first : first + chunk], False)
            assert cache.layers is layers


def test_the_last_token_is_always_computed(tiny_engine: gemma_py.Engine) -> None:
    prefixes, ids = kept(tiny_engine), prompt(tiny_engine, 64)
    computed(tiny_engine, ids, prefixes)
    assert computed(tiny_engine, ids, prefixes)[1] == 48
    assert (prefixes.hits, prefixes.misses, prefixes.hit_tokens) == (1, 1, 48)


def test_the_common_prefix_of_texts_is_stored_once(tiny_engine: gemma_py.Engine) -> None:
    prefixes, shared = kept(tiny_engine), prompt(tiny_engine, 48)
    computed(tiny_engine, shared, prefixes)
    block = prefixes.nbytes // 3
    cached = []
    for seed in (2, 3):
        cached.append(computed(tiny_engine, shared + prompt(tiny_engine, 32, seed), prefixes)[1])
    assert cached == [48, 48]
    assert prefixes.nbytes == 7 * block
    # Equal tokens at another position must not be found.
    assert computed(tiny_engine, prompt(tiny_engine, 20, 4) + shared, prefixes)[1] == 0


def test_memory_stays_within_the_budget_and_what_is_used_stays(tiny_engine: gemma_py.Engine) -> None:
    measure = kept(tiny_engine)
    computed(tiny_engine, prompt(tiny_engine, 16), measure)
    prefixes = kept(tiny_engine, 10 * measure.nbytes)
    often = prompt(tiny_engine, 64, seed=99)
    computed(tiny_engine, often, prefixes)
    for seed in range(6):
        assert computed(tiny_engine, often + prompt(tiny_engine, 50, seed), prefixes)[1] == 64
        assert prefixes.nbytes <= 10 * measure.nbytes
    # The latest prompt is still cached, and the first prompt is not.
    assert computed(tiny_engine, often + prompt(tiny_engine, 50, 5), prefixes)[1] >= 96
    assert computed(tiny_engine, often + prompt(tiny_engine, 50, 0), prefixes)[1] == 64


def test_the_beginning_of_a_text_that_exceeds_the_budget_is_kept(tiny_engine: gemma_py.Engine) -> None:
    measure = kept(tiny_engine)
    computed(tiny_engine, prompt(tiny_engine, 16), measure)
    prefixes, ids = kept(tiny_engine, 3 * measure.nbytes), prompt(tiny_engine, 120)
    computed(tiny_engine, ids, prefixes)
    assert prefixes.nbytes == 3 * measure.nbytes
    assert computed(tiny_engine, ids, prefixes)[1] == 48


def test_without_a_budget_nothing_is_kept(tiny_engine: gemma_py.Engine) -> None:
    prefixes, ids = kept(tiny_engine, 0), prompt(tiny_engine, 40)
    computed(tiny_engine, ids, prefixes)
    assert (prefixes.nbytes, computed(tiny_engine, ids, prefixes)[1]) == (0, 0)


def test_a_failed_copy_leaves_its_block_free(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = kept(tiny_engine)
    computed(tiny_engine, prompt(tiny_engine, 16), measure)
    prefixes, ids = kept(tiny_engine, 2 * measure.nbytes), prompt(tiny_engine, 40)
    with monkeypatch.context() as patch:
        patch.setattr(Cache, "copy_block", Mock(side_effect=MemoryError))
        for _ in range(3):
            with pytest.raises(MemoryError):
                computed(tiny_engine, ids, prefixes)
    computed(tiny_engine, ids, prefixes)
    assert computed(tiny_engine, ids, prefixes)[1] == 32
