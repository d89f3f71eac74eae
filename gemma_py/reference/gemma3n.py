"""Gemma 3n: one token at a time, with the operations of operations.py and, below, those that only Gemma 3n has.

    n streams   a the active stream   L layers   P width of a per-layer input   R rank of LAuReL

A token has n hidden states, its streams, and a layer works on one of them, the active stream. Before the layer, AltUp
predicts each stream. After the feed-forward, AltUp corrects each prediction by the difference between the layer's hidden
state and the prediction of the active stream. Each layer has attention, LAuReL (a product with two narrow matrices) and a
per-layer input, a vector that depends only on the token. The last layers store no KV rows. Such a layer reads the KV rows of
the last layer of its type that stores some.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gemma_py.models.config import Config
from gemma_py.reference import operations as op
from gemma_py.reference.arithmetic import fma, jit
from gemma_py.reference.cache import ReferenceCache

_F = np.float32
_ZERO, _ONE = _F(0.0), _F(1.0)
_LEAST = _F(1e-5)  # a lower limit for a stream's mean square (see `match_magnitude`)
_HALF_ROOT = _F(math.sqrt(0.5))


def logits(weights: Mapping[str, Any], config: Config, cache: ReferenceCache, token: int) -> np.ndarray:
    """Return the logits [V] after a token, and store the token's keys and values at the cache's next position."""
    x = op.embed(weights["embed_tokens"], token)
    inputs = layer_inputs(x, weights, config, token)
    streams = np.stack([x] + [
        match_magnitude(op.matmul(x, weights[f"altup_projections.{i}"]), x, _LEAST)
        for i in range(config.altup_num_inputs - 1)
    ])  # fmt: skip
    for number in range(len(config.layers)):
        streams = layer(streams, inputs[number], op.of_layer(weights, number), config, cache, number)
    cache.position += 1
    total = streams[0]
    for i in range(1, config.altup_num_inputs):
        own = op.matmul(streams[i], weights[f"altup_unembed_projections.{i - 1}"])
        total = op.add(total, match_magnitude(own, streams[0], _LEAST))
    x = op.scale_row(total, _F(1.0 / config.altup_num_inputs))
    x = op.rms_norm(x, _F(config.rms_norm_eps), weights["norm"])
    return np.asarray(op.soft_cap_row(op.matmul(x, weights["lm_head"]), _F(config.final_logit_softcapping or 0.0)))


def layer_inputs(x: np.ndarray, weights: Mapping[str, Any], config: Config, token: int) -> np.ndarray:
    """Return the per-layer inputs of all layers, [L, P]: (projection + row) * 2^-1/2.

    The projection is that of the token's embedding x, normalised. The row is the token's row of a table, times sqrt(P). A
    token id beyond the last row selects row 0.
    """
    L, P = len(config.layers), config.hidden_size_per_layer_input
    own = op.embed(weights["embed_tokens_per_layer"], token, math.sqrt(P))
    made = op.scale_row(op.matmul(x, weights["per_layer_model_projection"]), _F(1.0 / math.sqrt(config.hidden_size)))
    made = op.rms_norm_heads(made.reshape(L, P), _F(config.rms_norm_eps), weights["per_layer_projection_norm"])
    return np.asarray(op.scale_row(op.add(made.reshape(-1), own), _HALF_ROOT)).reshape(L, P)


def layer(
    streams: np.ndarray, own: np.ndarray, w: Mapping[str, Any], config: Config, cache: ReferenceCache, number: int
) -> np.ndarray:
    """Return the streams [n, D] after a layer.

    streams: [n, D]   own: the layer's per-layer input, [P]   w: the layer's weights
    """
    a, eps = config.altup_active_idx, _F(config.rms_norm_eps)
    mixing = op.matmul(router(streams[a], w, config), w["prediction_coefs"])
    predictions = predict(streams, mixing.reshape(len(streams), len(streams)))
    x = predictions[a]

    h = op.rms_norm(x, eps, w["input_norm"])
    laurel = op.matmul(op.matmul(h, w["laurel_left"]), w["laurel_right"])
    laurel = op.add(h, op.rms_norm(laurel, eps, w["post_laurel_norm"]))
    y = op.rms_norm(attention(h, w, config, cache, number), eps, w["post_attention_norm"])
    x = op.scale_row(op.add(op.add(x, y), laurel), _HALF_ROOT)

    h = op.rms_norm(x, eps, w["pre_feedforward_norm"])
    gate, up = op.matmul(h, w["gate_proj"]), op.matmul(h, w["up_proj"])
    cutoff = config.layers[number].sparsity_cutoff
    if cutoff is not None:
        gate = sparsify(gate, _F(cutoff))
    y = op.matmul(op.gelu_gate(gate, up), w["down_proj"])
    x = op.add(x, op.rms_norm(y, eps, w["post_feedforward_norm"]))

    streams = correct(predictions, x, a, op.matmul(router(x, w, config), w["correction_coefs"]))
    x = streams[a]
    if "correct_output_scale" in w:
        x = op.multiply_row(x, w["correct_output_scale"])
    x = op.gelu_gate(op.matmul(x, w["per_layer_input_gate"]), own)
    x = op.rms_norm(op.matmul(x, w["per_layer_projection"]), eps, w["post_per_layer_input_norm"])
    return np.stack([streams[0]] + [op.add(stream, x) for stream in streams[1:]])


def router(x: np.ndarray, w: Mapping[str, Any], config: Config) -> np.ndarray:
    """Return the router's output [n], with which AltUp's coefficients are computed.    x: [D]"""
    x = op.rms_norm(x, _F(config.rms_norm_eps), w["router_norm"])
    return np.asarray(op.tanh_row(op.matmul(op.scale_row(x, _F(1.0 / config.hidden_size)), w["modality_router"])))


def attention(x: np.ndarray, w: Mapping[str, Any], config: Config, cache: ReferenceCache, number: int) -> np.ndarray:
    """Return the attention [D] of a normalised hidden state x [D] to the KV rows that the layer reads.

    If the layer stores KV rows, the row of this position is stored first.
    """
    layer, eps = config.layers[number], _F(config.rms_norm_eps)
    E, frequencies = layer.head_dim, op.rope_frequencies(layer.head_dim, layer.rope.theta, _F(layer.rope.factor))
    if layer.kv_source == number:
        k = op.rms_norm_heads(op.matmul(x, w["k_proj"]).reshape(-1, E), eps, w["k_norm"])
        v = op.rms_norm_heads(op.matmul(x, w["v_proj"]).reshape(-1, E), eps)
        cache.store(number, op.rope(k, cache.position, frequencies), v)
    q = op.rms_norm_heads(op.matmul(x, w["q_proj"]).reshape(-1, E), eps, w["q_norm"])
    q = op.rope(q, cache.position, frequencies)
    out = op.attend(q, *cache.rows(layer), cache.first_visible(layer), _ONE, _ZERO)
    return op.matmul(out.reshape(-1), w["o_proj"])


# --- operations -------------------------------------------------------------------------------------------------------


@jit
def match_magnitude(x, like, least):
    """Return y[d] = x[d] * factor, where the factor gives y the root mean square of `like`.    x, like: [D]

    If the mean square of x is below `least`, the factor is computed with `least` instead.
    """
    square, wanted = _mean_square(x), _mean_square(like)
    if square < least:
        square = least
    factor = np.sqrt(wanted) / np.sqrt(square)
    y = np.empty_like(x)
    for d in range(x.shape[0]):
        y[d] = x[d] * factor
    return y


@jit
def _mean_square(x):
    total = _ZERO
    for d in range(x.shape[0]):
        total = fma(x[d], x[d], total)
    return total / _F(x.shape[0])


@jit
def predict(streams, mixing):
    """Return y[i, d] = streams[i, d] + sum over p of mixing[i, p] * streams[p, d].    streams: [n, D]   mixing: [n, n]"""
    y = np.empty_like(streams)
    for i in range(streams.shape[0]):
        for d in range(streams.shape[1]):
            y[i, d] = streams[i, d]
            for p in range(streams.shape[0]):
                y[i, d] = fma(mixing[i, p], streams[p, d], y[i, d])
    return y


@jit
def correct(predictions, activated, active, coefficients):
    """Return y[i, d] = predictions[i, d] + (1 + coefficients[i]) * (activated[d] - predictions[active, d]).

    predictions: [n, D]   activated: [D]   coefficients: [n]
    """
    y = np.empty_like(predictions)
    for i in range(predictions.shape[0]):
        for d in range(predictions.shape[1]):
            difference = activated[d] - predictions[active, d]
            y[i, d] = fma(_ONE + coefficients[i], difference, predictions[i, d])
    return y


@jit
def sparsify(x, deviations):
    """Return y[f] = max(x[f] - cutoff, 0), where cutoff = mean(x) + deviations * (standard deviation of x). NaN stays NaN.

    The variance is the mean of the squared differences from mean(x).    x, y: [F]
    """
    F = x.shape[0]
    total, squares = _ZERO, _ZERO
    for f in range(F):
        total = total + x[f]
    mean = total / _F(F)
    for f in range(F):
        difference = x[f] - mean
        squares = fma(difference, difference, squares)
    cutoff = fma(np.sqrt(squares / _F(F)), deviations, mean)
    y = np.empty_like(x)
    for f in range(F):
        y[f] = x[f] - cutoff
        if y[f] < _ZERO:
            y[f] = _ZERO
    return y
