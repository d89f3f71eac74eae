"""The forward pass of Gemma 1, 2, 3 and VaultGemma for one token. operations.py explains the letters D, H, G and E.

The models differ in the norms of a layer. Gemma 2 and 3 also normalise the outputs of attention and feed-forward, and
Gemma 3 also normalises query heads and key heads. A layer has a norm if the weights contain the norm's gain. Windows,
soft caps and rope angles come from the config.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gemma_py.models.config import Config
from gemma_py.reference import operations as op
from gemma_py.reference.cache import ReferenceCache

_F = np.float32


def logits(weights: Mapping[str, Any], config: Config, cache: ReferenceCache, token: int) -> np.ndarray:
    """Return the logits [V] after a token, and add the token's keys and values to the cache."""
    x = op.embed(weights["embed_tokens"], token)
    for number in range(len(config.layers)):
        x = layer(x, op.of_layer(weights, number), config, cache, number)
    cache.position += 1
    x = op.rms_norm(x, _F(config.rms_norm_eps), weights["norm"])
    return np.asarray(op.soft_cap_row(op.matmul(x, weights["lm_head"]), _F(config.final_logit_softcapping or 0.0)))


def layer(x: np.ndarray, w: Mapping[str, Any], config: Config, cache: ReferenceCache, number: int) -> np.ndarray:
    """Return the hidden state [D] after a layer. x: [D], the hidden state before the layer; w: the layer's weights."""
    q = query(x, w, config, cache, number)
    first = cache.first_visible(config.layers[number])
    return after_attention(x, attend(q, *cache.rows(config.layers[number]), first, config), w, config)


def after_attention(x: np.ndarray, out: np.ndarray, w: Mapping[str, Any], config: Config) -> np.ndarray:
    """Return the hidden state [D] after a layer, given the output of attention.

    x: [D], the hidden state before the layer   out: [H, E], the output of attention   w: the layer's weights
    """
    eps = _F(config.rms_norm_eps)
    y = op.matmul(out.reshape(-1), w["o_proj"])
    if "post_attention_norm" in w:
        y = op.rms_norm(y, eps, w["post_attention_norm"])
    x = op.add(x, y)
    y = feed_forward(op.rms_norm(x, eps, w["pre_feedforward_norm"]), w)
    if "post_feedforward_norm" in w:
        y = op.rms_norm(y, eps, w["post_feedforward_norm"])
    return np.asarray(op.add(x, y))


def query(x: np.ndarray, w: Mapping[str, Any], config: Config, cache: ReferenceCache, number: int) -> np.ndarray:
    """Return the query heads [H, E] for a hidden state x [D]. Keys and values are stored at the cache's position."""
    layer, eps = config.layers[number], _F(config.rms_norm_eps)
    x = op.rms_norm(x, eps, w["input_norm"])
    E, frequencies = layer.head_dim, op.rope_frequencies(layer.head_dim, layer.rope.theta, _F(layer.rope.factor))
    q = op.matmul(x, w["q_proj"]).reshape(-1, E)
    k = op.matmul(x, w["k_proj"]).reshape(-1, E)
    v = op.matmul(x, w["v_proj"]).reshape(-1, E)
    if "q_norm" in w:
        q, k = op.rms_norm_heads(q, eps, w["q_norm"]), op.rms_norm_heads(k, eps, w["k_norm"])
    cache.store(number, op.rope(k, cache.position, frequencies), v)
    return np.asarray(op.rope(q, cache.position, frequencies))


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, config: Config) -> np.ndarray:
    """Return the attention [H, E] to the keys from position `first` on.    keys, values: [last + 1, G, E]"""
    scale, cap = _F(1.0 / math.sqrt(config.query_pre_attn_scalar)), _F(config.attn_logit_softcapping or 0.0)
    return np.asarray(op.attend(q, keys, values, first, scale, cap))


def feed_forward(x: np.ndarray, w: Mapping[str, Any]) -> np.ndarray:
    """Return the output [D] of the gated feed-forward for a normalised hidden state x [D]."""
    gate, up = op.matmul(x, w["gate_proj"]), op.matmul(x, w["up_proj"])
    return op.matmul(op.gelu_gate(gate, up), w["down_proj"])
