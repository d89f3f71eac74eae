"""Names and shapes of the text tensors of every family, as Hugging Face stores them.

Each function takes a text config. Names are without the prefix that is common to a checkpoint's text tensors.
"""

from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

FULL, SLIDING = "full_attention", "sliding_attention"
_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
# The norms of width D in a layer, by model type. Other types have _SANDWICH.
_NORMS = {
    "gemma": ("input_layernorm", "post_attention_layernorm"),
    "vaultgemma": ("input_layernorm", "pre_feedforward_layernorm"),
}


def text_shapes(c: Config) -> Shapes:
    D, L = c["hidden_size"], c["num_hidden_layers"]
    table: Shapes = {"embed_tokens.weight": (c["vocab_size"], D), "norm.weight": (D,)}
    for number in range(L):
        table |= {f"layers.{number}.{name}": shape for name, shape in _layer(c, number).items()}
    P = c.get("hidden_size_per_layer_input", 0)
    if P:
        own = "ple." if c["model_type"] == "embedding_gemma2_text" else ""
        table[f"{own}per_layer_model_projection.weight"] = (L * P, D)
        table[f"{own}per_layer_projection_norm.weight"] = (P,)
        if not own:
            table["embed_tokens_per_layer.weight"] = (c["vocab_size_per_layer_input"], L * P)
    if c["model_type"] == "gemma3n_text":
        for other in range(c["altup_num_inputs"] - 1):
            table[f"altup_projections.{other}.weight"] = (D, D)
            table[f"altup_unembed_projections.{other}.weight"] = (D, D)
    if c["model_type"] == "embedding_gemma2_text":
        table["embedding_projection.weight"] = (c["embedding_dim"], D)
    return table


def heads_of(c: Config, number: int) -> tuple[int, int, int]:
    """Return a layer's (query heads, KV heads, head width), from an old or a new form of config."""
    G, E = c["num_key_value_heads"], c["head_dim"]
    if "per_layer_config" in c:
        own: Config = next((table for key, table in c["per_layer_config"].items() if int(key) == number), {})
        G, E = own.get("num_key_value_heads", G), own.get("head_dim", E)
    elif "global_head_dim" in c and c["layer_types"][number] == FULL:
        E = c["global_head_dim"]
        if c.get("attention_k_eq_v", True):
            G = c.get("num_global_key_value_heads") or G
    return c["num_attention_heads"], G, E


def shares(c: Config, number: int) -> bool:
    return number >= c["num_hidden_layers"] - c.get("num_kv_shared_layers", 0)


def unused_kv(c: Config, prefix: str) -> Shapes:
    """Unused key and value tensors, which published checkpoints store for KV-sharing layers."""
    table: Shapes = {}
    for number in (n for n in range(c["num_hidden_layers"]) if shares(c, n)):
        _, G, E = heads_of(c, number)
        of = f"{prefix}layers.{number}.self_attn."
        table |= {f"{of}{x}_proj.weight": (G * E, c["hidden_size"]) for x in "kv"} | {f"{of}k_norm.weight": (E,)}
    return table


def _layer(c: Config, number: int) -> Shapes:
    D, kind = c["hidden_size"], c["model_type"]
    H, G, E = heads_of(c, number)
    owns = not shares(c, number)
    reuses_keys = c.get("attention_k_eq_v", False) and c["layer_types"][number] == FULL
    F = c["intermediate_size"]
    F = F[number] if isinstance(F, list) else F
    if c.get("use_double_wide_mlp") and not owns:
        F *= 2
    stored = [("q", H), *([("k", G)] if owns else []), *([("v", G)] if owns and not reuses_keys else [])]
    table: Shapes = {f"self_attn.{x}_proj.weight": (rows * E, D) for x, rows in stored}
    table["self_attn.o_proj.weight"] = (D, H * E)
    table |= {f"mlp.{x}_proj.weight": (F, D) for x in ("gate", "up")}
    table["mlp.down_proj.weight"] = (D, F)
    table |= {f"{x}.weight": (D,) for x in _NORMS.get(kind, _SANDWICH)}
    if kind not in ("gemma", "gemma2", "vaultgemma"):
        table |= {f"self_attn.{x}_norm.weight": (E,) for x in ("qk" if owns else "q")}
    if kind.startswith(("gemma4", "embedding_gemma2")):
        table["layer_scalar"] = (1,)
    P = c.get("hidden_size_per_layer_input", 0)
    if P:
        own = "ple_block." if kind == "embedding_gemma2_text" else ""
        table[f"{own}per_layer_input_gate.weight"] = (P, D)
        table[f"{own}per_layer_projection.weight"] = (D, P)
        table[f"{own}post_per_layer_input_norm.weight"] = (D,)
    if c.get("enable_moe_block"):
        table |= _experts(c)
    if kind == "gemma3n_text":
        table |= _altup_and_laurel(c)
    return table


def _experts(c: Config) -> Shapes:
    D, count, width = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    norms = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    return {
        "router.proj.weight": (count, D), "router.scale": (D,), "router.per_expert_scale": (count,),
        "experts.gate_up_proj": (count, 2 * width, D), "experts.down_proj": (count, D, width),
        **{f"{x}.weight": (D,) for x in norms},
    }  # fmt: skip


def _altup_and_laurel(c: Config) -> Shapes:
    D, n, rank = c["hidden_size"], c["altup_num_inputs"], c["laurel_rank"]
    return {
        "altup.correct_output_scale": (D,), "altup.correction_coefs.weight": (n, n),
        "altup.prediction_coefs.weight": (n * n, n), "altup.modality_router.weight": (n, D),
        "altup.router_norm.weight": (D,), "laurel.linear_left.weight": (rank, D),
        "laurel.linear_right.weight": (D, rank), "laurel.post_laurel_norm.weight": (D,),
    }  # fmt: skip
