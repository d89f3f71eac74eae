"""The specification: a slow and simple implementation that defines every bit of the logits and of the KV cache.

Tests compare the engine with the specification. The specification shares no arithmetic code with the engine, because a
mistake in shared code would not show in the comparison. Read operations.py first, then gemma.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from gemma_py.errors import ComputationError, UnsupportedError
from gemma_py.models.config import Config
from gemma_py.reference import bidirectional, gemma, gemma3n, gemma4, operations
from gemma_py.reference.arithmetic import is_ieee
from gemma_py.reference.cache import ReferenceCache

Function = TypeVar("Function")
# For each model_type, the function logits(weights, config, cache, token), which runs the model for one token.
FAMILIES: dict[str, Callable[[Mapping[str, Any], Config, ReferenceCache, int], np.ndarray]] = {
    "gemma": gemma.logits,
    "gemma2": gemma.logits,
    "vaultgemma": gemma.logits,
    "gemma3": gemma.logits,
    "gemma3n": gemma3n.logits,
    "gemma4": gemma4.logits,
}
# For each model_type, the function embedding(weights, config, cache, ids), which runs an embedding model for one text.
EMBEDDING_FAMILIES: dict[str, Callable[[Mapping[str, Any], Config, ReferenceCache, Sequence[int]], np.ndarray]] = {
    "gemma-embedding": bidirectional.embedding,
    "gemma-embedding2": bidirectional.embedding2,
}


def logits(engine: Any, ids: Sequence[int]) -> np.ndarray:
    """Return the logits after each token, float32 [T, V], for the engine's weights and an empty KV cache."""
    return logits_and_rows(engine, ids)[0]


def logits_and_rows(engine: Any, ids: Sequence[int]) -> tuple[np.ndarray, ReferenceCache]:
    step, weights, cache = _prepared(engine, FAMILIES)
    rows = [step(weights, engine.config, cache, token) for token in engine.check_ids(ids)]
    return np.stack(rows), cache


def embedding(engine: Any, ids: Sequence[int], dimensions: int | None = None) -> np.ndarray:
    """Return the embedding of one text, float32 [dimensions], for the engine's weights.

    dimensions: how many leading elements to keep before normalisation; None keeps all.
    """
    made = embedding_and_rows(engine, ids)[0]
    return np.asarray(operations.normalise(made[:dimensions]))


def embedding_and_rows(engine: Any, ids: Sequence[int]) -> tuple[np.ndarray, ReferenceCache]:
    """Return the embedding of one text with all dimensions, not normalised, and the KV cache after the text."""
    whole, weights, cache = _prepared(engine, EMBEDDING_FAMILIES)
    return whole(weights, engine.config, cache, engine.check_ids(ids)), cache


def _prepared(engine: Any, families: Mapping[str, Function]) -> tuple[Function, Mapping[str, Any], ReferenceCache]:
    if not is_ieee():
        raise ComputationError(
            "this thread flushes subnormals to zero or does not round to nearest, so results would not be bit-exact"
        )
    config: Config = engine.config
    if config.model_type not in families:
        raise UnsupportedError(f"gemma_py.reference does not implement the model_type {config.model_type!r:.40}")
    cache = ReferenceCache(config, engine.kv_type)
    return families[config.model_type], engine.reference_weights(), cache


def kv_digest(cache: ReferenceCache) -> list[str]:
    """Return one digest for each layer that stores KV rows. For a correct engine, `Session.kv_digest` returns equal digests."""
    return cache.digests()
