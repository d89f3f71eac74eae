"""Gemma 4, text: tensor names, the program of a forward pass, and config readers for Hugging Face and GGUF.

Full and sliding layers differ in the width and number of their heads. In models with `num_kv_shared_layers` (E2B, E4B), the
last layers have no keys and values of their own and read the KV rows of an earlier layer of the same type. These layers
write nothing that other tokens read, so they are computed only for the rows of tokens whose logits are wanted (WANTED).
In models with `attention_k_eq_v`, the values of full layers are the keys, as they are before k_norm and rope. In
models with per-layer inputs, which are a vector of width P for each token and layer, every layer ends with a gate on this
vector. In models with a mixture of experts, a router chooses experts for each token, and the weighted sum of the experts'
outputs is added to the output of the feed-forward.
"""

import math
from typing import Any

import numpy as np

from gemma_py.errors import ConfigError, UnsupportedError
from gemma_py.models.config import Config, Layer, Rope, checked
from gemma_py.models.family import Family, ModelDescription
from gemma_py.models.fields import Fields
from gemma_py.models.gemma import FULL, HEAD_NORMS, LAYER_NORMS, MATRICES, SLIDING, check_direction, check_text_model
from gemma_py.models.program import ALL, LOGITS, WANTED, Program, Tensor

# --- tensors ----------------------------------------------------------------------------------------------------------

_KEY_TENSORS, _VALUE_TENSORS = ("k_proj", "k_norm"), ("v_proj",)
# The tensors of a layer in models with per-layer inputs. Columns: name in this package, in Hugging Face, in GGUF, and the
# letters of the shape, which gemma.py explains.
PER_LAYER_INPUT = (
    ("per_layer_gate", "per_layer_input_gate", "inp_gate", "P", "D"),
    ("per_layer_projection", "per_layer_projection", "proj", "D", "P"),
    ("per_layer_norm", "post_per_layer_input_norm", "post_norm", "D"),
)
# The router and the norms of a layer with a mixture of experts. Columns as in PER_LAYER_INPUT, but names are complete: no
# ".weight" is appended to them. X: number of experts.
_ROUTER = (
    ("router", "router.proj.weight", "ffn_gate_inp.weight", "X", "D"),
    ("router_scale", "router.scale", "ffn_gate_inp.scale", "D"),
    ("expert_scale", "router.per_expert_scale", "ffn_down_exps.scale", "X"),
    ("experts_norm", "pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight", "D"),
    ("post_dense_norm", "post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight", "D"),
    ("post_experts_norm", "post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight", "D"),
)
_ROPE_DIVISORS = "rope_freqs.weight"


def tensors(config: Config) -> dict[str, Tensor]:
    """Return the family's tensors by name, in the order in which they are packed."""
    D, V, P, L = config.hidden_size, config.vocab_size, config.hidden_size_per_layer_input, len(config.layers)
    made = {
        "embed_tokens": Tensor((V, D), "embed_tokens.weight", "token_embd.weight"),
        "lm_head": Tensor((V, D), "lm_head.weight", "output.weight"),
        "norm": Tensor((D,), "norm.weight", "output_norm.weight"),
    }
    if P:
        rows = config.vocab_size_per_layer_input
        made |= {
            "per_layer_table": Tensor(
                (rows, L * P), "embed_tokens_per_layer.weight", "per_layer_token_embd.weight", gathered=True
            ),
            "per_layer_model_projection": Tensor(
                (L * P, D), "per_layer_model_projection.weight", "per_layer_model_proj.weight"
            ),
            "per_layer_projection_norm": Tensor((P,), "per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
        }
    for number, layer in enumerate(config.layers):
        E = layer.head_dim
        sizes = {"D": D, "F": layer.intermediate_size, "E": E, "P": P}
        sizes |= {"HE": layer.num_attention_heads * E, "GE": layer.num_key_value_heads * E}
        parts = (*MATRICES, *LAYER_NORMS, *HEAD_NORMS, *(PER_LAYER_INPUT if P else ()))
        left_out = _left_out(layer, number)
        for name, theirs, gguf, *letters in parts:
            if name not in left_out:
                made[f"layers.{number}.{name}"] = Tensor(
                    tuple(sizes[letter] for letter in letters),
                    f"layers.{number}.{theirs}.weight",
                    f"blk.{number}.{gguf}.weight",
                )
        if config.num_experts:
            made |= _expert_tensors(config, number)
        made[f"layers.{number}.scalar"] = Tensor(
            (1,), f"layers.{number}.layer_scalar", f"blk.{number}.layer_output_scale.weight"
        )
    return made


def _expert_tensors(config: Config, number: int) -> dict[str, Tensor]:
    """Return the router, norms and experts' matrices of layer `number`. M: the feed-forward width of an expert."""
    D, X, M = config.hidden_size, config.num_experts, config.moe_intermediate_size
    theirs, gguf, sizes = f"layers.{number}.", f"blk.{number}.", {"D": D, "X": X}
    made = {
        name: Tensor(tuple(sizes[letter] for letter in letters), theirs + hf, gguf + own, stays_float=name == "router")
        for name, hf, own, *letters in _ROUTER
    }
    for part, name in enumerate(("gate", "up")):
        made[f"experts_{name}"] = Tensor(
            (X, M, D), f"{theirs}experts.gate_up_proj", f"{gguf}ffn_{name}_exps.weight", part=(part, 2),
            gguf_fused=f"{gguf}ffn_gate_up_exps.weight",
        )  # fmt: skip
    made["experts_down"] = Tensor((X, D, M), f"{theirs}experts.down_proj", f"{gguf}ffn_down_exps.weight")
    return {f"layers.{number}.{name}": tensor for name, tensor in made.items()}


def _left_out(layer: Layer, number: int) -> tuple[str, ...]:
    """Return the names of the tensors that this layer does not have."""
    if layer.kv_source != number:
        return _KEY_TENSORS + _VALUE_TENSORS
    return _VALUE_TENSORS if layer.value_is_key else ()


def unused(config: Config) -> frozenset[str]:
    """Return the names of tensors that a checkpoint may have although the model does not use them.

    These are the matrices for keys and values in layers that read the KV rows of another layer, and a GGUF file's divisors of
    rope frequencies, which only the config reader needs (see `_rope_share`).
    """
    names = {_ROPE_DIVISORS}
    for number, layer in enumerate(config.layers):
        left_out = _left_out(layer, number)
        for name, theirs, gguf, *_ in (*MATRICES, *HEAD_NORMS):
            if name in left_out:
                names |= {f"layers.{number}.{theirs}.weight", f"blk.{number}.{gguf}.weight"}
    return frozenset(names)


# --- the pass ---------------------------------------------------------------------------------------------------------


def write(p: Program) -> None:
    """Append the operations of a forward pass to the program.

    Buffers: `x` is the residual stream, `n` the output of a norm, `a` the output of the attention heads, `y` the output of a
    matrix product, which is added to `x`, and `own` the per-layer inputs of all layers. In models with experts, `r` is the
    router's input and `m` the experts' input.

    The last layer that stores KV rows computes keys and values of all tokens. Everything after that is computed for WANTED
    rows only. From there on, the buffers `x wanted`, `n wanted` and `own wanted` replace `x`, `n` and `own`.
    """
    config, last_kv = p.config, p.config.kv_owners[-1]
    p.embed("embed_tokens", "x")
    p.rope_tables()
    if config.hidden_size_per_layer_input:
        _per_layer_inputs(p)
    p.norm("x", "n", "layers.0.input_norm")
    suffix = ""
    for number in range(len(config.layers)):
        if number < last_kv:
            queries_keys_values(p, number, ("q", "k", "v"))
        else:
            if number == last_kv:
                queries_keys_values(p, number, ("k", "v"))
                suffix = " wanted"
                p.phase("wanted rows", number, WANTED)
                p.rope_tables()
                for buffer in ("x", "n", "own") if config.hidden_size_per_layer_input else ("x", "n"):
                    p.take(buffer, buffer + suffix)
            queries_keys_values(p, number, ("q",), suffix)
        rest_of_layer(p, number, suffix)
    p.phase("head", len(config.layers), WANTED)
    p.matmul("n" + suffix, LOGITS, "lm_head", config.final_logit_softcapping)


def _per_layer_inputs(p: Program) -> None:
    """Compute own = (RMSNorm(projection of x * D^-1/2) + row of the table * sqrt(P)) * 2^-1/2, for all layers at once.

    x, own: buffers. The row is that of the token's id.
    """
    p.embed("per_layer_table", "own", math.sqrt(p.config.hidden_size_per_layer_input))
    project_inputs(p, "c")
    p.add("own", "c")
    p.multiply("own", math.sqrt(0.5))


def project_inputs(p: Program, target: str) -> None:
    """Compute target = RMSNorm((projection of x) * D^-1/2) for all layers at once. x: a buffer of rows of D floats"""
    p.phase("per-layer inputs", 0)
    p.matmul("x", target, "per_layer_model_projection")
    p.multiply(target, 1.0 / math.sqrt(p.config.hidden_size))
    p.norm(target, target, "per_layer_projection_norm", len(p.config.layers))


def queries_keys_values(p: Program, number: int, parts: tuple[str, ...], suffix: str = "") -> None:
    """Compute queries ("q"), keys ("k") and values ("v"), as far as `parts` names them, from the buffer `n` + suffix.

    Keys and values are stored as KV rows.
    """
    layer, of, rows = p.config.layers[number], f"layers.{number}.", WANTED if suffix else ALL
    heads = {"q": layer.num_attention_heads, "k": layer.num_key_value_heads}
    p.phase("query, key and value", number, rows)
    for part in parts:
        if part != "v" or not layer.value_is_key:
            p.matmul("n" + suffix, part, f"{of}{part}_proj")
    p.phase("rope and kv", number, rows)
    if "v" in parts:
        p.norm("k" if layer.value_is_key else "v", "v", "", layer.num_key_value_heads)
    for part in parts:
        if part != "v":
            p.norm(part, part, f"{of}{part}_norm", heads[part])
            p.rope(part, number, heads[part])
    if "v" in parts:
        p.store("k", "v", number)


def rest_of_layer(p: Program, number: int, suffix: str = "") -> None:
    """Append the operations of a layer from attention on, and the input norm of the next layer.

    suffix: " wanted" if the layer is computed for WANTED rows only, otherwise "".
    """
    config, of, rows = p.config, f"layers.{number}.", WANTED if suffix else ALL
    x, n, own, P = "x" + suffix, "n" + suffix, "own" + suffix, config.hidden_size_per_layer_input
    p.attend("q", "a", number, config.attention_scale)
    p.phase("output", number, rows)
    p.matmul("a", "y", f"{of}o_proj")
    p.phase("middle", number, rows)
    p.add(x, "y", f"{of}post_attention_norm")
    p.norm(x, n, f"{of}pre_feedforward_norm")
    if config.num_experts:
        p.norm(x, "r", f"{of}router_scale")
        p.norm(x, "m", f"{of}experts_norm")
    p.phase("gate and up", number, rows)
    p.matmul(n, "gate", f"{of}gate_proj")
    p.matmul(n, "up", f"{of}up_proj")
    if config.num_experts:
        p.matmul("r", "router", f"{of}router")
    p.phase("down input", number, rows)
    p.gelu_gate("gate", "up")
    if config.num_experts:
        p.route("router", "routes", f"{of}expert_scale", config.top_k_experts, 1.0 / math.sqrt(config.hidden_size))
    p.phase("down", number, rows)
    p.matmul("gate", "y", f"{of}down_proj")
    if config.num_experts:
        _experts(p, number, rows)
    else:
        p.phase("end", number, rows)
    p.add(x, "y", f"{of}post_feedforward_norm")
    if P:
        p.phase("per-layer gate", number, rows)
        p.matmul(x, "g", f"{of}per_layer_gate")
        p.columns(own, "part", number * P, P)
        p.gelu_gate("g", "part")
        p.phase("per-layer projection", number, rows)
        p.matmul("g", "y", f"{of}per_layer_projection")
        p.phase("end", number, rows)
        p.add(x, "y", f"{of}per_layer_norm")
    p.scale(x, f"{of}scalar")
    p.norm(x, n, "norm" if number == len(config.layers) - 1 else f"layers.{number + 1}.input_norm")


def _experts(p: Program, number: int, rows: int) -> None:
    """Compute y = RMSNorm(y) + RMSNorm(weighted sum of the chosen experts' outputs), from the buffers `y` and `m`."""
    of = f"layers.{number}."
    p.phase("experts' gate and up", number, rows)
    p.expert_matmul("m", "experts' gate", f"{of}experts_gate", "routes")
    p.expert_matmul("m", "experts' up", f"{of}experts_up", "routes")
    p.phase("experts' down input", number, rows)
    p.gelu_gate("experts' gate", "experts' up")
    p.phase("experts' down", number, rows)
    p.expert_matmul("experts' gate", "experts' outputs", f"{of}experts_down", "routes")
    p.phase("end", number, rows)
    p.norm("y", "y", f"{of}post_dense_norm")
    p.mix("experts' outputs", "mixed", "routes")
    p.add("y", "mixed", f"{of}post_experts_norm")


# --- Hugging Face -----------------------------------------------------------------------------------------------------

DEFAULT_ROPES = {FULL: Rope(1_000_000.0, share=0.25), SLIDING: Rope(10_000.0)}
_DEFAULTS = {
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}  # the defaults of transformers


def config_from_hf(description: ModelDescription) -> Config:
    """Read a config.json. The width of full layers' heads is in `global_head_dim`, or in `per_layer_config` in newer files."""
    fields, outer, where = description.fields, description.outer, description.outer.where
    unified = fields.text("model_type", outer.text("model_type", "")).startswith("gemma4_unified")
    check_text_model(description)
    # With 'vision', only the tokens of an image see each other in both directions, and this package takes no images.
    if fields.text("use_bidirectional_attention", "vision") != "vision":
        raise UnsupportedError(f"{where}: use_bidirectional_attention should be 'vision' or null")

    types = layer_types(fields, _DEFAULTS["num_hidden_layers"])
    window = fields.integer("sliding_window", 1024 if unified else 512)
    k_eq_v = fields.flag("attention_k_eq_v", False)
    usual = (
        fields.integer("num_key_value_heads", _DEFAULTS["num_key_value_heads"]),
        fields.integer("head_dim", _DEFAULTS["head_dim"]),
    )
    global_heads = fields.integer("num_global_key_value_heads", usual[0]) if k_eq_v else usual[0]
    shapes = head_shapes(fields, types, usual, (global_heads, fields.integer("global_head_dim", 512)))
    ropes = ropes_by_type(fields, DEFAULT_ROPES)
    sources = kv_sources(fields, "num_kv_shared_layers", types)
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    layers = tuple(
        Layer(window if kind == SLIDING else None, ropes[kind],
              fields.integer("num_attention_heads", _DEFAULTS["num_attention_heads"]), kv_heads, head_dim,
              fields.integer("intermediate_size", 9216) * (wide if source != number else 1), source,
              k_eq_v and kind == FULL)
        for number, (kind, (kv_heads, head_dim), source) in enumerate(zip(types, shapes, sources, strict=True))
    )  # fmt: skip
    vocab_size = fields.integer("vocab_size", _DEFAULTS["vocab_size"])
    P = 0 if unified else fields.integer("hidden_size_per_layer_input", 256, least=0)
    config = Config(
        model_type=description.name,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", 2304),
        max_position_embeddings=fields.integer("max_position_embeddings", 262_144 if unified else 131_072),
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=fields.number("final_logit_softcapping", None),
        layers=layers,
        **description.common_from_hf(),
        hidden_size_per_layer_input=P,
        vocab_size_per_layer_input=fields.integer("vocab_size_per_layer_input", 262_144) if P else 0,
        **(_experts_of(fields, _EXPERT_FIELDS) if fields.flag("enable_moe_block", False) else {}),
    )
    return checked(config, where)


_EXPERT_FIELDS = ("num_experts", "top_k_experts", "moe_intermediate_size")


def _experts_of(fields: Fields, names: tuple[str, str, str]) -> dict[str, Any]:
    """Return the fields of `Config` for a mixture of experts. names: how the file calls these fields."""
    count, chosen, width = (fields.integer(name) for name in names)
    if chosen > count:
        fields.fail(names[1], f"at most {names[0]}, {count}")
    return dict(zip(_EXPERT_FIELDS, (count, chosen, width), strict=True))


def layer_types(fields: Fields, default: int, period: int = 6) -> list[str]:
    """Return the type of each layer. The last layer is always full, even if the file says otherwise, as in transformers.

    default: the number of layers if the file does not give it.
    period: if the file does not give types, every layer whose number, counted from 1, is a multiple of `period` is full.
    """
    count = fields.layer_count("num_hidden_layers", default)
    types = fields.values.get("layer_types")
    if types is None:
        types = [SLIDING if number % period else FULL for number in range(1, count + 1)]
    if not isinstance(types, list) or len(types) != count or not all(entry in (SLIDING, FULL) for entry in types):
        fields.fail("layer_types", f"a list of {count} entries, each {SLIDING} or {FULL}")
    return [*types[:-1], FULL]


def head_shapes(
    fields: Fields, types: list[str], usual: tuple[int, int], full: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return for each layer the pair (number of key/value heads, width of a head).

    usual: the pair of sliding layers. full: the pair of full layers. If the file has `per_layer_config`, that table gives the
    pairs, and `usual` is the default for every layer.
    """
    per_layer = fields.table("per_layer_config")
    if per_layer is None:
        return [full if kind == FULL else usual for kind in types]
    shapes = [usual] * len(types)
    set_by: dict[int, str] = {}
    digits = len(str(len(types)))
    # The key of layer 3 can be "3", "03" and so on.
    names = {str(n).zfill(width): n for n in range(len(types)) for width in range(1, digits + 1)}
    for key in per_layer.values:
        layer, number = per_layer.table(key), names.get(key)
        if number is None or layer is None or set_by.setdefault(number, key) != key:
            raise ConfigError(
                f"{per_layer.where}: {key!r:.40} should be the number of a layer, from 0 to {len(types) - 1}"
            )
        if unknown := set(layer.values) - {"num_key_value_heads", "head_dim"}:
            raise UnsupportedError(f"{layer.where}: {min(unknown)!r:.40} is not supported")
        shapes[number] = (
            layer.integer("num_key_value_heads", usual[0]),
            layer.integer("head_dim", usual[1]),
        )
    return shapes


def kv_sources(fields: Fields, name: str, types: list[str], default: int = 0) -> list[int]:
    """Return, for each layer, the number of the layer whose KV rows it reads.

    The field `name`, or the default, says how many layers at the end of the model store no KV rows. Such a layer reads the
    KV rows of the last layer of its type that stores some. Every other layer reads its own KV rows.
    """
    count = fields.integer(name, default, least=0)
    first = len(types) - count
    # For each type, the number of the last layer that stores KV rows.
    own = dict(zip(types[: max(0, first)], range(first), strict=True))
    if first <= 0 or not set(types[first:]) <= set(own):
        fields.fail(name, f"fewer than the {len(types)} layers, with a layer of every type before them")
    return [number if number < first else own[kind] for number, kind in enumerate(types)]


def ropes_by_type(fields: Fields, defaults: dict[str, Rope]) -> dict[str, Rope]:
    """Return the rope of each type of layer, by default the rope in `defaults`."""
    parameters = fields.table("rope_parameters")
    ropes = dict(defaults)
    for kind in ropes:
        table = None if parameters is None else parameters.table(kind)
        if table is None:
            continue
        rope_type, theta = table.text("rope_type", "default"), table.number("rope_theta", 10_000.0)
        share = table.number("partial_rotary_factor", 1.0)
        if rope_type not in ("default", "proportional"):
            raise UnsupportedError(
                f"{table.where}: rope_type should be 'default' or 'proportional', found {rope_type!r:.40}"
            )
        if share > 1 or (rope_type == "default" and share != 1):
            table.fail("partial_rotary_factor", "at most 1, and 1 where rope_type is 'default'")
        factor = table.number("factor", 1.0) if rope_type == "proportional" else 1.0
        ropes[kind] = Rope(theta, factor, share)
    return ropes


# --- GGUF -------------------------------------------------------------------------------------------------------------


def config_from_gguf(description: ModelDescription) -> Config:
    """Read a config from GGUF metadata and from the names of tensors. In a full layer without attn_v, the values are the
    keys.
    """
    fields, where = description.fields, description.outer.where
    check_direction(description, embeds=False)
    count = fields.layer_count("block_count")
    types = [SLIDING if flag else FULL for flag in fields.flags("attention.sliding_window_pattern", count)]
    sources = kv_sources(fields, "attention.shared_kv_layers", types)
    widths = {FULL: head_width(fields, ""), SLIDING: head_width(fields, "_swa")}
    ropes = {
        FULL: Rope(fields.number("rope.freq_base", 1e6), share=rope_share(description, widths[FULL])),
        SLIDING: Rope(fields.number("rope.freq_base_swa", 1e4)),
    }
    heads = fields.integers("attention.head_count", count)
    kv_heads = fields.integers("attention.head_count_kv", count)
    feed_forward = fields.integers("feed_forward_length", count)
    window = fields.integer("attention.sliding_window")
    layers = tuple(
        Layer(window if kind == SLIDING else None, ropes[kind], heads[number], kv_heads[number], widths[kind],
              feed_forward[number], sources[number],
              sources[number] == number and f"blk.{number}.attn_v.weight" not in description.tensors)
        for number, kind in enumerate(types)
    )  # fmt: skip
    P = fields.integer("embedding_length_per_layer_input", 0, least=0)
    table = description.tensors.get("per_layer_token_embd.weight")
    config = Config(
        model_type=description.name,
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=fields.number("final_logit_softcapping", None),
        layers=layers,
        **description.common_from_gguf(),
        hidden_size_per_layer_input=P,
        vocab_size_per_layer_input=table.shape[0] if P and table is not None else description.vocab_size if P else 0,
        **(_experts_of(fields, _GGUF_EXPERT_FIELDS) if fields.integer("expert_count", 0, least=0) else {}),
    )
    return checked(config, where)


_GGUF_EXPERT_FIELDS = ("expert_count", "expert_used_count", "expert_feed_forward_length")


def head_width(fields: Fields, suffix: str) -> int:
    """Return the width of a head. suffix: "" for full layers, "_swa" for sliding layers."""
    width: int = fields.integer(f"attention.key_length{suffix}")
    for name in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        if fields.integer(name, width) != width:
            raise UnsupportedError(f"{fields.where}: {name} should be {width}, as attention.key_length{suffix} is")
    return width


def rope_share(description: ModelDescription, width: int) -> float:
    """Return the share of a head's width that full layers rotate.

    The file has a divisor of the rope frequency for each pair of elements. Pairs that are rotated come first and have the
    divisor 1. For the other pairs, the divisor is 1e30, which makes their angles 0.
    """
    tensor = description.tensors.get(_ROPE_DIVISORS)
    if tensor is None:
        raise ConfigError(f"{description.outer.where}: tensor {_ROPE_DIVISORS!r} is missing")
    expected = f"{tensor.where}: should hold {width // 2} float32, some ones and after them 1e30"
    if tensor.shape != (width // 2,) or tensor.type.name != "F32":
        raise ConfigError(f"{expected}, found {tensor.type.name} {list(tensor.shape)}")
    values = tensor.to_float32()
    turning = int((values == 1).sum())
    if (values[:turning] != 1).any() or (values[turning:] != np.float32(1e30)).any():
        raise ConfigError(f"{expected}, found other values")
    return turning / (width // 2)


_MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
FAMILY = Family(
    model_types=dict.fromkeys(_MODEL_TYPES, "gemma4"),
    architectures=("gemma4",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    tensors=tensors,
    write=write,
    unused=unused,
)
