"""The specification, to be called beside the engine; its arithmetic is in gemma_py/model/reference.py."""

import hashlib
from collections.abc import Sequence

import numpy as np

from gemma_py.engine import Engine
from gemma_py.model import reference as spec


def logits(engine: Engine, ids: Sequence[int]) -> np.ndarray:
    """float32 [T, V]: the logits after each token, from an empty cache, with the engine's weights."""
    return logits_and_rows(engine, ids)[0]


def logits_and_rows(engine: Engine, ids: Sequence[int]) -> tuple[np.ndarray, spec.Cache]:
    """The same, and the keys and values of every layer by position."""
    weights, cache = engine.reference_weights(), spec.Cache(engine.config, bfloat16=engine.runner.kv == "bfloat16")
    rows = [
        spec.head(weights, engine.config, spec.forward(weights, engine.config, cache, token))
        for token in engine.check_ids(ids)
    ]
    return np.stack(rows), cache


def digest(cache: spec.Cache) -> list[str]:
    """One a layer, as Session.kv_digest gives it."""
    digests = []
    for number, layer in enumerate(cache.config.layers):
        window = layer.sliding_window
        first = 0 if window is None else max(0, cache.position - window + 1)
        made = hashlib.sha256()
        for rows in (cache.keys, cache.values):
            made.update(np.ascontiguousarray(rows[number][first : cache.position], "<f4").tobytes())
        digests.append(made.hexdigest())
    return digests
