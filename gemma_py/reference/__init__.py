"""The specification: a slow and simple implementation that defines every bit of the logits and of the KV cache.

Tests compare the engine with the specification. The specification shares no arithmetic code with the engine, because a
mistake in shared code would not show in the comparison. Read operations.py first, then gemma.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gemma_py.errors import ComputationError, UnsupportedError
from gemma_py.models.config import Config
from gemma_py.reference import gemma, gemma3n, gemma4
from gemma_py.reference.arithmetic import is_ieee
from gemma_py.reference.cache import ReferenceCache

# By model_type: the function logits(weights, config, cache, token) that runs the model for one token.
FAMILIES: dict[str, Callable[[Mapping[str, Any], Config, ReferenceCache, int], np.ndarray]] = {
    "gemma": gemma.logits,
    "gemma2": gemma.logits,
    "vaultgemma": gemma.logits,
    "gemma3": gemma.logits,
    "gemma3n": gemma3n.logits,
    "gemma4": gemma4.logits,
}


def logits(engine: Any, ids: Sequence[int]) -> np.ndarray:
    """Return the logits after each token, float32 [T, V], with the engine's weights and an empty KV cache."""
    return logits_and_rows(engine, ids)[0]


def logits_and_rows(engine: Any, ids: Sequence[int]) -> tuple[np.ndarray, ReferenceCache]:
    """Return what `logits` returns, and the KV cache after the last token."""
    if not is_ieee():
        raise ComputationError(
            "this thread flushes subnormals to zero or does not round to nearest, so results would not be bit-exact"
        )
    config: Config = engine.config
    if config.model_type not in FAMILIES:
        raise UnsupportedError(f"gemma_py.reference does not implement the model_type {config.model_type!r:.40}")
    weights, cache = engine.reference_weights(), ReferenceCache(config, engine.kv_type == "bfloat16")
    rows = [FAMILIES[config.model_type](weights, config, cache, token) for token in engine.check_ids(ids)]
    return np.stack(rows), cache


def kv_digest(cache: ReferenceCache) -> list[str]:
    """Return one digest per layer that stores KV rows. `Session.kv_digest` must return equal digests."""
    return cache.digests()
