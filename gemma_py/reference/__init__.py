"""The specification: what every bit must be, said as plainly as it can be, for a reader and for the tests.

It is slow and stands alone: it shares no arithmetic with the engine, so that no mistake can stand on both sides of a
comparison. Read operations.py first, then gemma.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gemma_py.errors import ComputationError, UnsupportedError
from gemma_py.models.config import Config
from gemma_py.reference import gemma, gemma3n
from gemma_py.reference.arithmetic import is_ieee
from gemma_py.reference.cache import ReferenceCache

# For every model_type, the function that takes one token through the model: logits(weights, config, cache, token).
FAMILIES: dict[str, Callable[[Mapping[str, Any], Config, ReferenceCache, int], np.ndarray]] = {
    "gemma": gemma.logits,
    "gemma2": gemma.logits,
    "vaultgemma": gemma.logits,
    "gemma3": gemma.logits,
    "gemma3n": gemma3n.logits,
}


def logits(engine: Any, ids: Sequence[int]) -> np.ndarray:
    """float32 [T, V]: the logits after each token, from an empty cache, with the engine's weights."""
    return logits_and_rows(engine, ids)[0]


def logits_and_rows(engine: Any, ids: Sequence[int]) -> tuple[np.ndarray, ReferenceCache]:
    """The same logits, and the keys and values of every layer."""
    if not is_ieee():
        raise ComputationError(
            "this thread flushes subnormals to zero or does not round to nearest: no bit could be kept"
        )
    config: Config = engine.config
    if config.model_type not in FAMILIES:
        raise UnsupportedError(f"the specification of a {config.model_type!r:.40} model is not written")
    weights, cache = engine.reference_weights(), ReferenceCache(config, engine.kv_type == "bfloat16")
    rows = [FAMILIES[config.model_type](weights, config, cache, token) for token in engine.check_ids(ids)]
    return np.stack(rows), cache


def kv_digest(cache: ReferenceCache) -> list[str]:
    """One digest for each layer that has rows of its own, to be compared with what Session.kv_digest gives."""
    return cache.digests()
