"""Gemma 3n's text model: tensor names, the program of a forward pass, and config readers for Hugging Face and GGUF.

A token has n hidden states, its streams, and a layer works on the active one. AltUp predicts all streams before the layer and
corrects them after it. LAuReL is a product of two narrow matrices beside attention. Every layer has an input of its own, which
depends on the token alone. The last layers read the KV rows of the last earlier layer of their type, so they run only for the
rows whose logits are wanted.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from gemma_py.errors import ConfigError
from gemma_py.models.config import Config, Layer, checked
from gemma_py.models.family import Family, ModelDescription
from gemma_py.models.fields import LARGEST, Fields
from gemma_py.models.gemma import (
    FULL,
    SLIDING,
    check_supported,
    head_width,
    layer_count,
    ropes_from_gguf,
    ropes_from_hf,
)
from gemma_py.models.program import ALL, LOGITS, WANTED, Program, Tensor

# --- tensors ----------------------------------------------------------------------------------------------------------

# A layer's tensors: our name, Hugging Face's, GGUF's, and the letters of its shape, which is [N, K] or [width].
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
_OF_KV_ROWS = (
    "k_proj",
    "v_proj",
    "k_norm",
)  # checkpoints have them for every layer, also for those that store no KV rows


def tensors(config: Config) -> dict[str, Tensor]:
    """Return the tensors by our names, in the order of the packed weights."""
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
            unused = name in _OF_KV_ROWS and layer.kv_source != number
            unused |= name == "correct_output_scale" and not config.altup_correct_scale
            made[f"layers.{number}.{name}"] = Tensor(
                tuple(sizes[letter] for letter in letters), f"layers.{number}.{theirs}", f"blk.{number}.{gguf}.weight",
                unused=unused,
            )  # fmt: skip
    return made


# --- the pass ---------------------------------------------------------------------------------------------------------

_LEAST = 1e-5  # the least mean square of a stream whose magnitude is matched
_HALF_ROOT = math.sqrt(0.5)


def write(p: Program) -> None:
    """Append the operations of a forward pass to the program.

    Buffers: streams and predictions hold n streams each, x the active one, n the output of a norm, r the router's input,
    y the output of attention, of the feed-forward or of the layer's own input, and inputs the layers' own inputs.
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
    """Compute the streams and the layers' own inputs from the token."""
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
    """Compute AltUp's coefficients from x."""
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
    """Compute x = (x + attention of n + LAuReL of n) / sqrt(2), each with its norms."""
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
    """Compute x = x + feed-forward of x, with its norms."""
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
    """Read a config as transformers writes it. transformers leaves out fields that have its default values."""
    fields, outer = description.fields, description.outer
    check_supported(description)
    count = layer_count(fields, "num_hidden_layers", 35)
    types = _per_layer(fields, "layer_types", count, _default_types(count), _is_type, f"{SLIDING} or {FULL}")
    sizes = _per_layer(fields, "intermediate_size", count, 16_384, _is_size, "an integer from 1")
    sparsity = _per_layer(
        fields, "activation_sparsity_pattern", count, _default_sparsity(count), _is_share, "a number from 0 to below 1"
    )
    ropes, window = ropes_from_hf(fields, "gemma3"), fields.integer("sliding_window", 512)
    shared = fields.integer("num_kv_shared_layers", 15, least=0)
    layers = _layers(
        fields, "num_kv_shared_layers", [window if kind == SLIDING else None for kind in types], shared,
        lambda number, source: Layer(
            window if types[number] == SLIDING else None, ropes[types[number]],
            fields.integer("num_attention_heads", 8), fields.integer("num_key_value_heads", 2),
            fields.integer("head_dim", 256), sizes[number], source, _cutoff(sparsity[number]),
        ),
    )  # fmt: skip
    cap = "final_logit_softcapping"
    config = Config(
        model_type=description.name,
        vocab_size=fields.integer("vocab_size", 262_400),
        hidden_size=fields.integer("hidden_size", 2048),
        max_position_embeddings=fields.integer("max_position_embeddings", 32_768),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None if fields.values.get(cap, 0) is None else fields.number(cap, 30.0),
        tie_word_embeddings=outer.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", True)),
        bos_token_id=description.token_ids("bos_token_id", 2)[0],
        eos_token_ids=description.token_ids("eos_token_id", 1),
        layers=layers,
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


def _is_type(value: Any) -> bool:
    return value in (SLIDING, FULL)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < LARGEST


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


def _per_layer(
    fields: Fields, name: str, count: int, default: Any, valid: Callable[[Any], bool], expected: str
) -> list[Any]:
    """Return a value for each layer, where the field has one for each layer or, but for strings, one for all of them."""
    values = fields.values.get(name)
    values = default if values is None else values
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, int | float):
        values = [values] * count
    if not isinstance(values, list) or len(values) != count or not all(valid(value) for value in values):
        fields.fail(name, f"{count} entries, each {expected}")
    return values


def _cutoff(sparsity: float) -> float | None:
    """Return the cutoff for a sparsity: the number of standard deviations below which a share of this size of a normal
    distribution lies."""
    return float(np.float32(NormalDist().inv_cdf(sparsity))) if sparsity else None


def _layers(
    fields: Fields, name: str, windows: Sequence[int | None], shared: int, made: Callable[[int, int], Layer]
) -> tuple[Layer, ...]:
    """Return the layers, of which the last `shared` read the KV rows of the last earlier layer of their type."""
    first = len(windows) - shared
    if first < 1:
        fields.fail(name, f"below the number of layers, {len(windows)}")
    last_of_type = {windows[number] is None: number for number in range(first)}
    for window in windows[first:]:
        if (window is None) not in last_of_type:
            fields.fail(name, f"smaller: no layer before the shared ones is {FULL if window is None else SLIDING}")
    sources = [*range(first), *(last_of_type[window is None] for window in windows[first:])]
    return tuple(made(number, source) for number, source in enumerate(sources))


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
    """Read a config from GGUF metadata. Fields that the file does not have get the values that llama.cpp uses."""
    fields, where = description.fields, description.outer.where
    count = layer_count(fields, "block_count")
    pattern = "attention.sliding_window_pattern"
    sliding = _per_layer(
        fields, pattern, count, [kind == SLIDING for kind in _default_types(count)], _is_flag, "a flag"
    )
    sizes = _per_layer(fields, "feed_forward_length", count, None, _is_size, "an integer from 1")
    cutoffs = _per_layer(
        fields, "activation_sparsity_scale", count, [_cutoff(share) or -math.inf for share in _default_sparsity(count)],
        _is_cutoff, "a number or -inf",
    )  # fmt: skip
    head_dim = head_width(fields)
    full, local = ropes_from_gguf(fields, "gemma3")
    window, heads = fields.integer("attention.sliding_window"), fields.integer("attention.head_count")
    shared, kv_heads = "attention.shared_kv_layers", fields.integer("attention.head_count_kv", heads)
    layers = _layers(
        fields, shared, [window if flag else None for flag in sliding], fields.integer(shared, 0, least=0),
        lambda number, source: Layer(
            window if sliding[number] else None, local if sliding[number] else full, heads, kv_heads, head_dim,
            sizes[number], source, _stored_cutoff(cutoffs[number]),
        ),
    )  # fmt: skip
    bos, ends = description.gguf_tokens()
    config = Config(
        model_type=description.name,
        vocab_size=description.vocab_size,
        hidden_size=fields.integer("embedding_length"),
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=fields.number("final_logit_softcapping", 30.0),
        tie_word_embeddings=description.tied,
        bos_token_id=bos,
        eos_token_ids=ends,
        layers=layers,
        hidden_size_per_layer_input=fields.integer("embedding_length_per_layer_input"),
        vocab_size_per_layer_input=description.rows("per_layer_token_embd.weight"),
        altup_num_inputs=fields.integer("altup.num_inputs"),
        altup_active_idx=fields.integer("altup.active_idx", 0, least=0),
        laurel_rank=description.rows("blk.0.laurel_l.weight"),
    )
    return _checked(config, where)


def _is_flag(value: Any) -> bool:
    return type(value) in (bool, int)


def _is_cutoff(value: Any) -> bool:
    return type(value) in (int, float) and value < math.inf and not math.isnan(value)


def _stored_cutoff(stored: float) -> float | None:
    """Return the cutoff that a GGUF file stores; it stores -inf for a dense layer.

    Converters compute the quantile in float32, each with rounding errors of its own. Where the stored number is within these
    errors of the quantile of a sparsity of four digits, the cutoff is that of this sparsity, so that a model has the bits that
    it has in Hugging Face's format.
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
)
