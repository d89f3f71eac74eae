"""The forward pass of embedding models. Each layer is computed for all tokens of a text before the next layer.

Attention is bidirectional: a query at position t attends to the positions from t - W + 1 to t + W - 1, or to all
positions if the layer has no window. So a layer needs all keys and values before it computes the first query.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gemma_py.models.config import Config
from gemma_py.reference import gemma, gemma4
from gemma_py.reference import operations as op
from gemma_py.reference.cache import ReferenceCache

_F = np.float32
# query(hidden state, weights of the layer, config, cache, number of the layer) -> the query heads [H, E]
Query = Callable[[np.ndarray, Mapping[str, Any], Config, ReferenceCache, int], np.ndarray]


def embedding(weights: Mapping[str, Any], config: Config, cache: ReferenceCache, ids: Sequence[int]) -> np.ndarray:
    """Return EmbeddingGemma's embedding of a text with all dimensions, not normalised. Add keys and values to the cache."""
    rows = [op.embed(weights["embed_tokens"], token) for token in ids]
    for number in range(len(config.layers)):
        w = op.of_layer(weights, number)
        attended = attention(rows, gemma.query, w, config, cache, number)
        rows = [gemma.after_attention(x, out, w, config) for x, out in zip(rows, attended, strict=True)]
    return pooled(rows, weights, config, cache)


def embedding2(weights: Mapping[str, Any], config: Config, cache: ReferenceCache, ids: Sequence[int]) -> np.ndarray:
    """Return EmbeddingGemma 2's embedding, as `embedding` does. Its layers are those of Gemma 4 with per-layer inputs."""
    rows = [op.embed(weights["embed_tokens"], token) for token in ids]
    own = [gemma4.projected_inputs(weights, config, x) for x in rows]
    for number in range(len(config.layers)):
        w = op.of_layer(weights, number)
        attended = attention(rows, gemma4.query, w, config, cache, number)
        rows = [gemma4.after_attention(x, out, inputs[number], w, config)
                for x, out, inputs in zip(rows, attended, own, strict=True)]  # fmt: skip
    return pooled(rows, weights, config, cache)


def attention(
    rows: Sequence[np.ndarray],
    query: Query,
    w: Mapping[str, Any],
    config: Config,
    cache: ReferenceCache,
    number: int,
) -> list[np.ndarray]:
    """Return the attention [H, E] of each token of a text in a layer.    rows: T hidden states [D], before the layer"""
    queries, W = [], config.layers[number].sliding_window or len(rows)
    for position, x in enumerate(rows):
        cache.position = position
        queries.append(query(x, w, config, cache, number))
    keys, values = cache.rows(config.layers[number])
    made = []
    for position, q in enumerate(queries):
        first, end = max(0, position - W + 1), min(len(rows), position + W)
        made.append(gemma.attend(q, keys[:end], values[:end], first, config))
    return made


def pooled(rows: Sequence[np.ndarray], weights: Mapping[str, Any], config: Config, cache: ReferenceCache) -> np.ndarray:
    """Return the mean of the normalised hidden states, multiplied with the projection, if the model has one, and then with
    each dense layer in turn.

    rows: T hidden states [D], after the last layer
    """
    assert config.embedding is not None
    cache.position = len(rows)
    y = op.mean_rows(np.stack([op.rms_norm(x, _F(config.rms_norm_eps), weights["norm"]) for x in rows]))
    if config.embedding.projection is not None:
        y = op.matmul(y, weights["embedding_projection"])
    for number in range(len(config.embedding.dense)):
        y = op.matmul(y, weights[f"dense.{number}"])
    return np.asarray(y)
