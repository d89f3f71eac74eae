"""Gemma 3n's text model: tensor names, the program of a forward pass, and config readers for Hugging Face and GGUF.

A token has n hidden states, its streams, and a layer works on one of them, the active stream. AltUp predicts all streams
before the layer and corrects the predictions after the layer. LAuReL is a product with two narrow matrices, and is added to
the output of attention. Every layer has a per-layer input for each token, a vector of width P that is computed from the
token alone. The layer multiplies a gate with this vector, projects the product, and adds it to all streams but stream 0.
The last layers store no KV rows, but read those of an earlier layer of the same type. So no other token needs what these
layers compute for a token, and they are computed only for the tokens whose logits are wanted.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np

from gemma_py.errors import ConfigError, UnsupportedError
from gemma_py.models.config import Config, Layer, checked
from gemma_py.models.family import Family, ModelDescription
from gemma_py.models.fields import Fields
from gemma_py.models.gemma import FULL, SLIDING, check_direction, check_text_model, ropes_from_gguf, ropes_from_hf
from gemma_py.models.gemma4 import head_width, kv_sources
from gemma_py.models.program import ALL, LOGITS, WANTED, Program, Tensor

# --- tensors ----------------------------------------------------------------------------------------------------------

# The tensors of a layer. Columns: name in this package, in Hugging Face, in GGUF, and the shape as letters, which `tensors`
# replaces by sizes. gemma.py explains HE, GE, E, F and D. R: rank of LAuReL, P: width of a per-layer input, nn: n * n.
_LAYER = (
    ("q_proj", "self_attn.q_proj.weight", "attn_q", ("HE", "D")),
    ("k_proj", "self_attn.k_proj.weight", "attn_k", ("GE", "D")),
    ("v_proj", "self_attn.v_proj.weight", "attn_v", ("GE", "D")),
    ("o_proj", "self_attn.o_proj.weight", "attn_output", ("D", "HE")),
    ("q_norm", "self_attn.q_norm.weight", "attn_q_norm", ("E",)),
    ("k_norm", "self_attn.k_norm.weight", "attn_k_norm", ("E",)),
    ("gate_proj", "mlp.gate_proj.weight", "ffn_gate", ("F", "D")),
    ("up_proj", "mlp.up_proj.weight", "ffn_up", ("F", "D")),
    ("down_proj", "mlp.down_proj.weight", "ffn_down", ("D", "F")),
    ("input_norm", "input_layernorm.weight", "attn_norm", ("D",)),
    ("post_attention_norm", "post_attention_layernorm.weight", "post_attention_norm", ("D",)),
    ("pre_feedforward_norm", "pre_feedforward_layernorm.weight", "ffn_norm", ("D",)),
    ("post_feedforward_norm", "post_feedforward_layernorm.weight", "post_ffw_norm", ("D",)),
    ("modality_router", "altup.modality_router.weight", "altup_router", ("n", "D")),
    ("router_norm", "altup.router_norm.weight", "altup_router_norm", ("D",)),
    ("prediction_coefs", "altup.prediction_coefs.weight", "altup_predict_coef", ("nn", "n")),
    ("correction_coefs", "altup.correction_coefs.weight", "altup_correct_coef", ("n", "n")),
    ("correct_output_scale", "altup.correct_output_scale", "altup_correct_scale", ("D",)),
    ("laurel_left", "laurel.linear_left.weight", "laurel_l", ("R", "D")),
    ("laurel_right", "laurel.linear_right.weight", "laurel_r", ("D", "R")),
    ("post_laurel_norm", "laurel.post_laurel_norm.weight", "laurel_post_norm", ("D",)),
    ("per_layer_input_gate", "per_layer_input_gate.weight", "inp_gate", ("P", "D")),
    ("per_layer_projection", "per_layer_projection.weight", "proj", ("D", "P")),
    ("post_per_layer_input_norm", "post_per_layer_input_norm.weight", "post_norm", ("D",)),
)
_MOST_STREAMS = 64
# The tensors that compute KV rows. Checkpoints have these tensors even for layers that store no KV rows.
_OF_KV_ROWS = (
    "k_proj",
    "v_proj",
    "k_norm",
)


def tensors(config: Config) -> dict[str, Tensor]:
    """Return the family's tensors by name, in the order in which they are packed."""
    D, V, L, n = config.hidden_size, config.vocab_size, len(config.layers), config.altup_num_inputs
    P, rows = config.hidden_size_per_layer_input, config.vocab_size_per_layer_input
    table = "embed_tokens_per_layer.weight"
    made = {
        "embed_tokens": Tensor((V, D), "embed_tokens.weight", "token_embd.weight"),
        "lm_head": Tensor((V, D), "lm_head.weight", "output.weight"),
        "norm": Tensor((D,), "norm.weight", "output_norm.weight"),
        "embed_tokens_per_layer": Tensor((rows, L * P), table, "per_layer_token_embd.weight", gathered=True),
        "per_layer_model_projection": Tensor(
            (L * P, D), "per_layer_model_projection.weight", "per_layer_model_proj.weight"
        ),
        "per_layer_projection_norm": Tensor((P,), "per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
    }
    for theirs, gguf in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
        for i in range(n - 1):
            made[f"{theirs}.{i}"] = Tensor((D, D), f"{theirs}.{i}.weight", f"{gguf}.weight", stack=(i, n - 1))
    for number, layer in enumerate(config.layers):
        E = layer.head_dim
        sizes = {"D": D, "F": layer.intermediate_size, "E": E, "P": P, "R": config.laurel_rank, "n": n, "nn": n * n}
        sizes |= {"HE": layer.num_attention_heads * E, "GE": layer.num_key_value_heads * E}
        for name, theirs, gguf, letters in _LAYER:
            if not _is_unused(config, number, name):
                made[f"layers.{number}.{name}"] = Tensor(
                    tuple(sizes[letter] for letter in letters),
                    f"layers.{number}.{theirs}",
                    f"blk.{number}.{gguf}.weight",
                    stays_float=name == "modality_router",
                )
    return made


def _is_unused(config: Config, number: int, name: str) -> bool:
    if name == "correct_output_scale":
        return not config.altup_correct_scale
    return name in _OF_KV_ROWS and config.layers[number].kv_source != number


def unused(config: Config) -> frozenset[str]:
    """Return the names of tensors that a checkpoint may have although the model does not use them."""
    names: set[str] = set()
    for number in range(len(config.layers)):
        for name, theirs, gguf, _ in _LAYER:
            if _is_unused(config, number, name):
                names |= {f"layers.{number}.{theirs}", f"blk.{number}.{gguf}.weight"}
    return frozenset(names)


# --- the pass ---------------------------------------------------------------------------------------------------------

_LEAST = 1e-5  # a lower limit for a stream's mean square (see `Program.match`)
_HALF_ROOT = math.sqrt(0.5)


def write(p: Program) -> None:
    """Append the operations of a forward pass to the program.

    Buffers: `streams` and `predictions` have n streams, and `x` has the active stream. `n` is the output of a norm, and `r`
    the router's input. `y` is the output of attention, of the feed-forward, or of the projection after the gate with the
    per-layer input. `inputs` has the per-layer inputs of all layers.
    """
    config, rows = p.config, ALL
    D, P, n = config.hidden_size, config.hidden_size_per_layer_input, config.altup_num_inputs
    active, after_kv = config.altup_active_idx * D, 1 + max(config.kv_owners)
    streams, predictions, inputs = "streams", "predictions", "inputs"
    _begin(p)
    for number, layer in enumerate(config.layers):
        of = f"layers.{number}."
        if number == after_kv:
            rows = WANTED
            p.phase("wanted rows", number, rows)
            p.take(streams, "wanted streams")
            p.take(inputs, "wanted inputs")
            p.rope_tables()
            streams, predictions, inputs = "wanted streams", "wanted predictions", "wanted inputs"
        p.columns(streams, "x", active, D)
        _router(p, number, rows, f"{of}prediction_coefs")
        p.phase("predict", number, rows)
        p.predict(streams, predictions, "coefficients", n)
        p.columns(predictions, "x", active, D)
        p.norm("x", "n", f"{of}input_norm")

        _attention(p, number, layer, rows)
        _feed_forward(p, number, layer, rows)

        _router(p, number, rows, f"{of}correction_coefs")
        p.phase("correct", number, rows)
        p.correct(predictions, "x", "coefficients", n, config.altup_active_idx)
        p.columns(predictions, "x", active, D)
        if config.altup_correct_scale:
            p.gain("x", f"{of}correct_output_scale")
        p.columns(inputs, "input", number * P, P)
        p.phase("layer input gate", number, rows)
        p.matmul("x", "input gate", f"{of}per_layer_input_gate")
        p.phase("layer input", number, rows)
        p.gelu_gate("input gate", "input")
        p.phase("layer input projection", number, rows)
        p.matmul("input gate", "y", f"{of}per_layer_projection")
        p.phase("end", number, rows)
        p.norm("y", "y", f"{of}post_per_layer_input_norm")
        if n > 1:
            p.add_to_streams(predictions, "y", n, since=1)
        streams, predictions = predictions, streams
    _end(p, streams, rows)


def _begin(p: Program) -> None:
    """Compute the streams, and the per-layer inputs of all layers, from the token's rows of two embedding matrices."""
    config = p.config
    D, n, L = config.hidden_size, config.altup_num_inputs, len(config.layers)
    p.embed("embed_tokens", "x")
    p.embed("embed_tokens_per_layer", "own", math.sqrt(config.hidden_size_per_layer_input))
    p.rope_tables()
    p.phase("stream projections", 0)
    for i in range(n - 1):
        p.matmul("x", f"stream {i + 1}", f"altup_projections.{i}")
    p.matmul("x", "inputs", "per_layer_model_projection")
    p.phase("streams", 0)
    p.multiply("inputs", 1.0 / math.sqrt(D))
    p.norm("inputs", "inputs", "per_layer_projection_norm", heads=L)
    p.add("inputs", "own")
    p.multiply("inputs", _HALF_ROOT)
    for i in range(1, n):
        p.match(f"stream {i}", "x", _LEAST)
    p.put("x", "streams", 0, n * D)
    for i in range(1, n):
        p.put(f"stream {i}", "streams", i * D, n * D)


def _router(p: Program, number: int, rows: int, coefficients: str) -> None:
    """Compute the buffer `coefficients` from `x`, as predictions and corrections of AltUp need them."""
    of = f"layers.{number}."
    p.norm("x", "r", f"{of}router_norm")
    p.multiply("r", 1.0 / p.config.hidden_size)
    p.phase("router", number, rows)
    p.matmul("r", "modalities", f"{of}modality_router")
    p.phase("modalities", number, rows)
    p.tanh("modalities")
    p.phase("coefficients", number, rows)
    p.matmul("modalities", "coefficients", coefficients)


def _attention(p: Program, number: int, layer: Layer, rows: int) -> None:
    """Compute x = (x + RMSNorm(attention(n)) + n + RMSNorm(LAuReL(n))) / sqrt(2), from the buffers `x` and `n`."""
    of, stores = f"layers.{number}.", layer.kv_source == number
    p.phase("query, key and value", number, rows)
    p.matmul("n", "q", f"{of}q_proj")
    if stores:
        p.matmul("n", "k", f"{of}k_proj")
        p.matmul("n", "v", f"{of}v_proj")
    p.matmul("n", "narrow", f"{of}laurel_left")
    p.phase("rope and kv", number, rows)
    p.norm("q", "q", f"{of}q_norm", layer.num_attention_heads)
    p.rope("q", number, layer.num_attention_heads)
    if stores:
        p.norm("k", "k", f"{of}k_norm", layer.num_key_value_heads)
        p.rope("k", number, layer.num_key_value_heads)
        p.norm("v", "v", "", layer.num_key_value_heads)
        p.store("k", "v", number)
    p.attend("q", "a", number, p.config.attention_scale)
    p.phase("output", number, rows)
    p.matmul("a", "y", f"{of}o_proj")
    p.matmul("narrow", "laurel", f"{of}laurel_right")
    p.phase("middle", number, rows)
    p.add("n", "laurel", f"{of}post_laurel_norm")
    p.add("x", "y", f"{of}post_attention_norm")
    p.add("x", "n")
    p.multiply("x", _HALF_ROOT)


def _feed_forward(p: Program, number: int, layer: Layer, rows: int) -> None:
    """Compute x = x + RMSNorm(feed_forward(RMSNorm(x))) for the buffer `x`."""
    of = f"layers.{number}."
    p.norm("x", "n", f"{of}pre_feedforward_norm")
    p.phase("gate and up", number, rows)
    p.matmul("n", "gate", f"{of}gate_proj")
    p.matmul("n", "up", f"{of}up_proj")
    p.phase("down input", number, rows)
    if layer.sparsity_cutoff is not None:
        p.sparsify("gate", layer.sparsity_cutoff)
    p.gelu_gate("gate", "up")
    p.phase("down", number, rows)
    p.matmul("gate", "y", f"{of}down_proj")
    p.phase("feed-forward end", number, rows)
    p.add("x", "y", f"{of}post_feedforward_norm")


def _end(p: Program, streams: str, rows: int) -> None:
    """Compute the logits from the mean of the streams."""
    config, last = p.config, len(p.config.layers) - 1
    D, n = config.hidden_size, config.altup_num_inputs
    if rows == ALL:
        p.phase("end", last, WANTED)
        p.take(streams, "wanted streams")
        streams = "wanted streams"
    p.columns(streams, "x", 0, D)
    for i in range(1, n):
        p.columns(streams, f"stream {i}", i * D, D)
    p.phase("stream projections", last + 1, WANTED)
    for i in range(1, n):
        p.matmul(f"stream {i}", f"projected {i}", f"altup_unembed_projections.{i - 1}")
    p.phase("streams", last + 1, WANTED)
    for i in range(1, n):
        p.match(f"projected {i}", "x", _LEAST)
    for i in range(1, n):
        p.add("x", f"projected {i}")
    p.multiply("x", 1.0 / n)
    p.norm("x", "x", "norm")
    p.phase("head", last + 1, WANTED)
    p.matmul("x", LOGITS, "lm_head", config.final_logit_softcapping)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def config_from_hf(description: ModelDescription) -> Config:
    """Read a config.json. Missing fields get the defaults of transformers, which need not write a field at its default."""
    fields, outer = description.fields, description.outer
    check_text_model(description)
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedError(f"{outer.where}: use_bidirectional_attention is set, but Gemma 3n has causal attention")
    count = fields.layer_count("num_hidden_layers", 35)
    types = _list(fields, "layer_types", _default_types(count), lambda kind: kind in (SLIDING, FULL), "a type of layer")
    sizes = (
        fields.integers("intermediate_size", count)
        if fields.values.get("intermediate_size") is not None
        else [16_384] * count
    )
    sparsity = _list(
        fields, "activation_sparsity_pattern", _default_sparsity(count),
        lambda share: type(share) in (int, float) and 0 <= share < 1, "a number from 0 to below 1",
    )  # fmt: skip
    ropes, window = ropes_from_hf(fields, "gemma3"), fields.integer("sliding_window", 512)
    layers = tuple(
        Layer(window if kind == SLIDING else None, ropes[kind], fields.integer("num_attention_heads", 8),
              fields.integer("num_key_value_heads", 2), fields.integer("head_dim", 256), sizes[number], source,
              sparsity_cutoff=_cutoff(sparsity[number]))
        for number, (kind, source) in enumerate(
            zip(types, kv_sources(fields, "num_kv_shared_layers", types, 15), strict=True))
    )  # fmt: skip
    cap = "final_logit_softcapping"
    config = Config(
        model_type=description.name,
        vocab_size=fields.integer("vocab_size", 262_400),
        hidden_size=fields.integer("hidden_size", 2048),
        max_position_embeddings=fields.integer("max_position_embeddings", 32_768),
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None if fields.values.get(cap, 0) is None else fields.number(cap, 30.0),
        layers=layers,
        **description.common_from_hf(),
        hidden_size_per_layer_input=fields.integer("hidden_size_per_layer_input", 256),
        vocab_size_per_layer_input=fields.integer("vocab_size_per_layer_input", 262_144),
        altup_num_inputs=fields.integer("altup_num_inputs", 4),
        altup_active_idx=fields.integer("altup_active_idx", 0, least=0),
        altup_correct_scale=fields.flag("altup_correct_scale", True),
        laurel_rank=fields.integer("laurel_rank", 64),
    )
    return _checked(config, outer.where)


def _default_types(count: int) -> list[str]:
    return [SLIDING if number % 5 else FULL for number in range(1, count + 1)]


def _default_sparsity(count: int) -> list[float]:
    sparse = 10 if count > 10 else 0
    return [0.95] * sparse + [0.0] * (count - sparse)


def _list(fields: Fields, name: str, default: list[Any], valid: Callable[[Any], bool], expected: str) -> list[Any]:
    """Return a list with one value for each layer. default: the list for a missing field."""
    values = fields.values.get(name)
    values = default if values is None else values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(values, list) or len(values) != len(default) or not all(valid(value) for value in values):
        fields.fail(name, f"{len(default)} entries, each {expected}")
    return values


def _cutoff(sparsity: float) -> float | None:
    """Return `Layer.sparsity_cutoff` for a layer in which the share `sparsity` of the activations is set to 0.

    If activations are normally distributed, that share of them lies below mean + cutoff * (standard deviation), where the
    cutoff is the quantile of the standard normal distribution. A layer with a share of 0 is dense and has no cutoff.
    """
    return float(np.float32(NormalDist().inv_cdf(sparsity))) if sparsity else None


def _checked(config: Config, where: str) -> Config:
    if config.altup_active_idx >= config.altup_num_inputs:
        raise ConfigError(
            f"{where}: altup_active_idx should be below altup_num_inputs {config.altup_num_inputs}, "
            f"found {config.altup_active_idx}"
        )
    if config.altup_num_inputs > _MOST_STREAMS:
        raise ConfigError(f"{where}: altup_num_inputs should be 1 to {_MOST_STREAMS}, found {config.altup_num_inputs}")
    return checked(config, where)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def config_from_gguf(description: ModelDescription) -> Config:
    """Read a config from GGUF metadata. Missing fields get the values that llama.cpp uses."""
    fields = description.fields
    check_direction(description, embeds=False)
    count = fields.layer_count("block_count")
    flags = fields.flags("attention.sliding_window_pattern", count, 5)
    types = [SLIDING if flag else FULL for flag in flags]
    cutoffs = _list(
        fields, "activation_sparsity_scale", [_cutoff(share) or -math.inf for share in _default_sparsity(count)],
        lambda value: type(value) in (int, float) and value < math.inf, "a number or -inf",
    )  # fmt: skip
    full, local = ropes_from_gguf(fields, "gemma3")
    window, heads = fields.integer("attention.sliding_window"), fields.integer("attention.head_count")
    kv_heads, sizes = fields.integer("attention.head_count_kv", heads), fields.integers("feed_forward_length", count)
    layers = tuple(
        Layer(window if kind == SLIDING else None, local if kind == SLIDING else full, heads, kv_heads,
              head_width(fields, ""), sizes[number], source, sparsity_cutoff=_stored_cutoff(cutoffs[number]))
        for number, (kind, source) in enumerate(
            zip(types, kv_sources(fields, "attention.shared_kv_layers", types), strict=True))
    )  # fmt: skip
    config = Config(
        model_type=description.name,
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=fields.number("final_logit_softcapping", 30.0),
        layers=layers,
        **description.common_from_gguf(),
        hidden_size_per_layer_input=fields.integer("embedding_length_per_layer_input"),
        vocab_size_per_layer_input=_rows(description, "per_layer_token_embd.weight"),
        altup_num_inputs=fields.integer("altup.num_inputs"),
        altup_active_idx=fields.integer("altup.active_idx", 0, least=0),
        laurel_rank=_rows(description, "blk.0.laurel_l.weight"),
    )
    return _checked(config, description.outer.where)


def _rows(description: ModelDescription, name: str) -> int:
    """Return the number of rows of a matrix, for a size that GGUF metadata do not have."""
    tensor = description.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise ConfigError(f"{description.outer.where}: tensor {name!r} is missing or not a matrix")
    return tensor.shape[0]


def _stored_cutoff(stored: float) -> float | None:
    """Return `Layer.sparsity_cutoff` for the cutoff that a GGUF file stores. A dense layer, which has -inf, has no cutoff.

    A Hugging Face checkpoint stores a layer's sparsity, the share of activations that are set to 0. The program that wrote
    the GGUF file computed the cutoff from the sparsity in float32, with rounding errors. If the stored cutoff is close to
    that of a sparsity of at most four decimals, return the exact cutoff of that sparsity, as for the Hugging Face checkpoint.
    So models of both formats compute the same bits.
    """
    if stored == -math.inf:
        return None
    share = NormalDist().cdf(stored)
    nearest = round(share, 4)
    return _cutoff(nearest) if 0 < nearest < 1 and abs(share - nearest) < 1e-7 else float(np.float32(stored))


FAMILY = Family(
    model_types={"gemma3n": "gemma3n", "gemma3n_text": "gemma3n"},
    architectures=("gemma3n",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    tensors=tensors,
    write=write,
    unused=unused,
)
