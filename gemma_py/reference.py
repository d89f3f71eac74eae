"""The specification, to be called beside the engine; its arithmetic is in gemma_py/model/reference.py."""

from collections.abc import Sequence

import numpy as np

from gemma_py.engine import Engine
from gemma_py.model import reference as spec


def logits(engine: Engine, ids: Sequence[int]) -> np.ndarray:
    """float32 [T, V]: the logits after each token, from an empty cache, with the engine's weights."""
    cache = spec.Cache(engine.config)
    rows = [
        spec.head(engine.weights, engine.config, spec.forward(engine.weights, engine.config, cache, token))
        for token in engine.check_ids(ids)
    ]
    return np.stack(rows)
