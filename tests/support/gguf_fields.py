from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from tiny_shapes import FULL, SLIDING, heads_of, shares

ARCHITECTURES = {
    "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "gemma3n_text": "gemma3n", "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4", "embedding_gemma2_text": "gemma-embedding2",
}  # fmt: skip


def add_assistant(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the fields that only an assistant has. config: the whole config.json"""
    writer.add_embedding_length_out(config["backbone_hidden_size"])
    writer.add_nextn_predict_layers(config["text_config"]["num_hidden_layers"])


def architecture(c: dict[str, Any]) -> str:
    return "gemma-embedding" if c.get("use_bidirectional_attention") is True else ARCHITECTURES[c["model_type"]]


def add_fields(writer: gguf.GGUFWriter, c: dict[str, Any], dense: tuple[int, ...]) -> None:
    family = architecture(c)
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if family != "gemma":  # EmbeddingGemma 2's config.json has half the window's width
        writer.add_sliding_window(c["sliding_window"] * (2 if family == "gemma-embedding2" else 1))
    if family not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(c["rope_parameters"][FULL]["rope_theta"])
        writer.add_rope_freq_base_swa(c["rope_parameters"][SLIDING]["rope_theta"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(c["attn_logit_softcapping"])
    if c.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    if family == "gemma-embedding2":
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        writer.add_embedding_length_out(c["embedding_dim"])
    if family in ("gemma4", "gemma-embedding2"):
        _add_gemma4(writer, c)
        return
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    if family == "gemma3n":
        _add_gemma3n(writer, c)
    if family == "gemma-embedding":
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        for number, (into, out) in enumerate(zip((c["hidden_size"], *dense), dense, strict=False), 2):
            writer.add_dense_features_dims(f"dense_{number}", into, out)


def _add_gemma4(writer: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    """Numbers that differ by layer become arrays. Full and sliding layers have separate keys for the head width."""
    layers = range(c["num_hidden_layers"])
    F, wide = c["intermediate_size"], next(heads_of(c, n)[2] for n in layers if c["layer_types"][n] == FULL)
    doubled = c.get("use_double_wide_mlp", False)
    writer.add_feed_forward_length([2 * F if shares(c, n) else F for n in layers] if doubled else F)
    kv_heads = [heads_of(c, n)[1] for n in layers]
    writer.add_head_count_kv(kv_heads if len(set(kv_heads)) > 1 else kv_heads[0])
    for add, add_swa in (
        (writer.add_key_length, writer.add_key_length_swa),
        (writer.add_value_length, writer.add_value_length_swa),
        (writer.add_rope_dimension_count, writer.add_rope_dimension_count_swa),
    ):
        add(wide)
        add_swa(c["head_dim"])
    writer.add_shared_kv_layers(c.get("num_kv_shared_layers", 0))
    writer.add_embedding_length_per_layer_input(c.get("hidden_size_per_layer_input", 0))
    writer.add_sliding_window_pattern([kind == SLIDING for kind in c["layer_types"]])
    if c.get("enable_moe_block"):
        writer.add_expert_count(c["num_experts"])
        writer.add_expert_used_count(c["top_k_experts"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])


def rope_divisors(c: dict[str, Any]) -> np.ndarray:
    """rope_freqs.weight, by which full layers divide the rope frequencies: 1 for rotated pairs, 1e30 for pairs without
    rotation.
    """
    wide = next(heads_of(c, n)[2] for n in range(c["num_hidden_layers"]) if c["layer_types"][n] == FULL)
    turning = int(wide * c["rope_parameters"][FULL]["partial_rotary_factor"] / 2)
    return np.where(np.arange(wide // 2) < turning, 1.0, 1e30).astype(np.float32)


def _add_gemma3n(writer: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    writer.add_altup_active_idx(c["altup_active_idx"])
    writer.add_altup_num_inputs(c["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(c["num_kv_shared_layers"])
    sparsity = [NormalDist().inv_cdf(s) if s else -np.inf for s in c["activation_sparsity_pattern"]]
    writer.add_activation_sparsity_scale([float(np.float32(scale)) for scale in sparsity])
    writer.add_sliding_window_pattern([kind == SLIDING for kind in c["layer_types"]])
