"""The forward pass of embedding models. Each layer is computed for all tokens of a text before the next layer.

Attention is bidirectional: a query at position t attends to the positions from t - W + 1 to t + W - 1, or to all
positions if the layer has no window. So a layer needs all keys and values before it computes the first query.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemma_py.models.config import Config
from gemma_py.reference import gemma
from gemma_py.reference import operations as op
from gemma_py.reference.cache import ReferenceCache

_F = np.float32


def embedding(weights: Mapping[str, Any], config: Config, cache: ReferenceCache, ids: Sequence[int]) -> np.ndarray:
    """Return the embedding of a text with all dimensions, not normalised. Add the text's keys and values to the cache.

    This is the mean of the normalised hidden states [D], multiplied with each dense layer in turn.
    """
    assert config.embedding is not None
    rows = [op.embed(weights["embed_tokens"], token) for token in ids]
    for number in range(len(config.layers)):
        rows = layer(rows, op.of_layer(weights, number), config, cache, number)
    cache.position = len(ids)
    y = op.mean_rows(np.stack([op.rms_norm(x, _F(config.rms_norm_eps), weights["norm"]) for x in rows]))
    for number in range(len(config.embedding.dense)):
        y = op.matmul(y, weights[f"dense.{number}"])
    return np.asarray(y)


def layer(
    rows: Sequence[np.ndarray], w: Mapping[str, Any], config: Config, cache: ReferenceCache, number: int
) -> list[np.ndarray]:
    """Return the hidden states after a layer.    rows: T hidden states [D]"""
    queries, W = [], config.layers[number].sliding_window or len(rows)
    for position, x in enumerate(rows):
        cache.position = position
        queries.append(gemma.query(x, w, config, cache, number))
    keys, values = cache.rows(config.layers[number])
    made = []
    for position, (x, q) in enumerate(zip(rows, queries, strict=True)):
        first, end = max(0, position - W + 1), min(len(rows), position + W)
        made.append(gemma.after_attention(x, gemma.attend(q, keys[:end], values[:end], first, config), w, config))
    return made
