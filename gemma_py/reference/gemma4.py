"""Gemma 4, text: one token at a time, with the operations of operations.py, which also explains the letters.

P is the width of a per-layer input, a vector for each token and layer. Here, every layer is computed for every token. The
engine computes what follows the last layer's KV rows only for tokens whose logits are wanted. Attention scores are not
scaled, because queries and keys are normalised.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gemma_py.models.config import Config
from gemma_py.reference import operations as op
from gemma_py.reference.cache import ReferenceCache
from gemma_py.weights.tensors import Matrix

_F = np.float32
_ONE, _NO_CAP = _F(1), _F(0)


def logits(weights: Mapping[str, Any], config: Config, cache: ReferenceCache, token: int) -> np.ndarray:
    """Return the logits [V] after a token, and store the token's keys and values at the cache's next position."""
    x = op.embed(weights["embed_tokens"], token)
    own = per_layer_inputs(weights, config, x, token) if config.hidden_size_per_layer_input else None
    for number in range(len(config.layers)):
        x = layer(x, None if own is None else own[number], op.of_layer(weights, number), config, cache, number)
    cache.position += 1
    x = op.rms_norm(x, _F(config.rms_norm_eps), weights["norm"])
    return np.asarray(op.soft_cap_row(op.matmul(x, weights["lm_head"]), _F(config.final_logit_softcapping or 0.0)))


def per_layer_inputs(weights: Mapping[str, Any], config: Config, x: np.ndarray, token: int) -> np.ndarray:
    """Return the per-layer inputs of all layers, [L, P]: (projection + row) * 2^-1/2.

    The projection is that of the token's embedding x, normalised. The row is the token's row of a table, times sqrt(P).
    """
    P = config.hidden_size_per_layer_input
    from_table = op.embed(weights["per_layer_table"], token, math.sqrt(P))
    from_embedding = projected_inputs(weights, config, x).reshape(-1)
    return np.asarray(op.scale_row(op.add(from_table, from_embedding), _F(math.sqrt(0.5)))).reshape(-1, P)


def projected_inputs(weights: Mapping[str, Any], config: Config, x: np.ndarray) -> np.ndarray:
    """Return the normalised projection of the embedding x for each layer, [L, P]."""
    P, D = config.hidden_size_per_layer_input, config.hidden_size
    projected = op.scale_row(op.matmul(x, weights["per_layer_model_projection"]), _F(1.0 / math.sqrt(D)))
    gain = weights["per_layer_projection_norm"]
    return np.asarray(op.rms_norm_heads(projected.reshape(-1, P), _F(config.rms_norm_eps), gain))


def layer(
    x: np.ndarray, own: np.ndarray | None, w: Mapping[str, Any], config: Config, cache: ReferenceCache, number: int
) -> np.ndarray:
    """Return the hidden state [D] after a layer.

    x: [D], the hidden state before   own: [P], the per-layer input, or None   w: the layer's weights
    """
    y = config.layers[number]
    q = query(x, w, config, cache, number)
    return after_attention(x, op.attend(q, *cache.rows(y), cache.first_visible(y), _ONE, _NO_CAP), own, w, config)


def after_attention(
    x: np.ndarray, out: np.ndarray, own: np.ndarray | None, w: Mapping[str, Any], config: Config
) -> np.ndarray:
    """Return the hidden state [D] after a layer.

    x: [D], the hidden state before the layer   out: [H, E], the output of attention   own: [P], the per-layer input, or None
    """
    eps = _F(config.rms_norm_eps)
    y = op.matmul(out.reshape(-1), w["o_proj"])
    x = op.add(x, op.rms_norm(y, eps, w["post_attention_norm"]))
    y = feed_forward(op.rms_norm(x, eps, w["pre_feedforward_norm"]), w["gate_proj"], w["up_proj"], w["down_proj"])
    if config.num_experts:
        from_experts = op.rms_norm(experts(x, w, config), eps, w["post_experts_norm"])
        y = op.add(op.rms_norm(y, eps, w["post_dense_norm"]), from_experts)
    x = op.add(x, op.rms_norm(y, eps, w["post_feedforward_norm"]))
    if own is not None:
        gated = op.gelu_gate(op.matmul(x, w["per_layer_gate"]), own)
        y = op.matmul(gated, w["per_layer_projection"])
        x = op.add(x, op.rms_norm(y, eps, w["per_layer_norm"]))
    return np.asarray(op.scale_row(x, w["scalar"][0]))


def feed_forward(n: np.ndarray, gate: Matrix, up: Matrix, down: Matrix) -> np.ndarray:
    return op.matmul(op.gelu_gate(op.matmul(n, gate), op.matmul(n, up)), down)


def experts(x: np.ndarray, w: Mapping[str, Any], config: Config) -> np.ndarray:
    """Return the sum over the chosen experts of (an expert's output) * (the router's weight for the expert).    x: [D]"""
    eps, scale = _F(config.rms_norm_eps), _F(1.0 / math.sqrt(config.hidden_size))
    router_logits = op.matmul(op.rms_norm(x, eps, w["router_scale"]), w["router"])
    chosen, weights = op.route(router_logits, scale, w["expert_scale"], config.top_k_experts)
    n = op.rms_norm(x, eps, w["experts_norm"])
    parts = [feed_forward(n, *(w[f"experts_{name}.{number}"] for name in ("gate", "up", "down"))) for number in chosen]
    return np.asarray(op.mix(np.stack(parts), weights))


def query(x: np.ndarray, w: Mapping[str, Any], config: Config, cache: ReferenceCache, number: int) -> np.ndarray:
    """Return the query heads [H, E] for a hidden state x [D].

    If the layer stores KV rows, the keys and values are stored at the cache's position.
    """
    y, eps = config.layers[number], _F(config.rms_norm_eps)
    n = op.rms_norm(x, eps, w["input_norm"])
    E, frequencies = y.head_dim, op.rope_frequencies(y.head_dim, y.rope.theta, _F(y.rope.factor), y.rope.share)
    q = op.rms_norm_heads(op.matmul(n, w["q_proj"]).reshape(-1, E), eps, w["q_norm"])
    if y.kv_source == number:
        k = op.matmul(n, w["k_proj"]).reshape(-1, E)
        v = k if y.value_is_key else op.matmul(n, w["v_proj"]).reshape(-1, E)
        k = op.rope(op.rms_norm_heads(k, eps, w["k_norm"]), cache.position, frequencies)
        cache.store(number, k, op.rms_norm_heads(v, eps))
    return np.asarray(op.rope(q, cache.position, frequencies))
