"""The specification, to be called beside the engine; its arithmetic is in gemma_py/reference/specification.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gemma_py.errors import ComputationError
from gemma_py.kernels.atomics import is_ieee
from gemma_py.models.digest import digest, first_readable
from gemma_py.reference import specification as spec

if TYPE_CHECKING:
    from gemma_py.generate.engine import Engine


def logits(engine: "Engine", ids: Sequence[int]) -> np.ndarray:
    """float32 [T, V]: the logits after each token, from an empty cache, with the engine's weights."""
    return logits_and_rows(engine, ids)[0]


def logits_and_rows(engine: "Engine", ids: Sequence[int]) -> tuple[np.ndarray, spec.Cache]:
    """The same, and the keys and values of every layer by position."""
    if not is_ieee():
        raise ComputationError(
            "this thread flushes subnormals to zero or does not round to nearest: no bit could be kept"
        )
    weights, cache = engine.reference_weights(), spec.Cache(engine.config, bfloat16=engine.kv_type == "bfloat16")
    rows = [
        spec.head(weights, engine.config, spec.forward(weights, engine.config, cache, token))
        for token in engine.check_ids(ids)
    ]
    return np.stack(rows), cache


def kv_digest(cache: spec.Cache) -> list[str]:
    """One a layer, as Session.kv_digest gives it."""
    made = []
    for layer, keys, values in zip(cache.config.layers, cache.keys, cache.values, strict=True):
        rows = slice(first_readable(layer, cache.position), cache.position)
        made.append(digest(keys[rows], values[rows]))
    return made
