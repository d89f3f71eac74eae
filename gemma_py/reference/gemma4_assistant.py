"""Gemma 4's assistants: one step, with the operations of operations.py, which also explains the letters.

B is the hidden size of the main model. The assistant's layers follow those of the main model in the config. They compute
queries at the position of the next token, and read the KV rows of the main model before this position.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gemma_py.models.config import Config
from gemma_py.reference import operations as op
from gemma_py.reference.cache import ReferenceCache
from gemma_py.reference.gemma4 import after_attention
from gemma_py.weights.tensors import Matrix, StoredMatrix

_F = np.float32
_ONE, _NO_CAP = _F(1), _F(0)


def step(
    weights: Mapping[str, Any],
    config: Config,
    embedding: Matrix | StoredMatrix,
    cache: ReferenceCache,
    token: int,
    hidden: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits [V] after a token, and the hidden state [B] for the next step.

    config: of main model and assistant together. embedding: the main model's embedding matrix [V, B].
    cache: of the main model; its position is that of the token. hidden: [B], the hidden state of the token before.
    """
    eps = _F(config.rms_norm_eps)
    pair = np.concatenate([op.embed(embedding, token, math.sqrt(config.backbone_hidden_size)), hidden])
    x = op.matmul(pair, weights["pre_projection"])
    count = sum(name.endswith(".q_proj") for name in weights)
    first = len(config.layers) - count
    for number in range(count):
        w, y = op.of_layer(weights, number), config.layers[first + number]
        frequencies = op.rope_frequencies(y.head_dim, y.rope.theta, _F(y.rope.factor), y.rope.share)
        n = op.rms_norm(x, eps, w["input_norm"])
        q = op.rms_norm_heads(op.matmul(n, w["q_proj"]).reshape(-1, y.head_dim), eps, w["q_norm"])
        q = op.rope(q, cache.position, frequencies)
        keys, values = (rows[y.kv_source][: cache.position] for rows in (cache.keys, cache.values))
        visible = 0 if y.sliding_window is None else max(0, cache.position - y.sliding_window)
        x = after_attention(x, op.attend(q, keys, values, visible, _ONE, _NO_CAP), None, w, config)
    y = op.rms_norm(x, eps, weights["norm"])
    return op.matmul(y, weights["lm_head"]), op.matmul(y, weights["post_projection"])
