"""GGUF files of tiny variants of Gemma 4, written by the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import tiny_checkpoints as tiny
from gguf_files import gguf_name

from gemma_py.formats.blocks import TYPES

_OF_LAYER = {
    "layer_scalar": "layer_output_scale.weight", "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight", "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight", "post_per_layer_input_norm.weight": "post_norm.weight",
}  # fmt: skip
FUSED = "ffn_gate_up_exps"


def gguf_tensors(variant: tiny.Variant, values: dict[str, np.ndarray], fused: bool = True) -> dict[str, np.ndarray]:
    """Rename Hugging Face's tensors. fused: whether gate and up of the experts stay in one tensor."""
    made = {}
    for name, table in values.items():
        own = name.removeprefix(variant.prefix)
        _, number, part = own.split(".", 2) if own.startswith("layers.") else ("", "", own)
        new = f"blk.{number}.{_OF_LAYER[part]}" if part in _OF_LAYER else gguf_name(own, "gemma4")
        if FUSED in new and not fused:
            half = table.shape[1] // 2
            made[new.replace("gate_up", "gate")] = np.ascontiguousarray(table[:, :half])
            made[new.replace("gate_up", "up")] = np.ascontiguousarray(table[:, half:])
        else:
            made[new] = table
    return made


def write_gemma4(
    path: Path,
    variant: tiny.Variant,
    tensors: dict[str, np.ndarray],
    quant: str | None = None,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write a GGUF file of a variant without per-layer inputs and shared KV rows.

    quant: the type of matrices whose rows are whole blocks, except the router. changes: metadata that replace the right ones.
    """
    c = tiny.text_config(variant)
    writer = gguf.GGUFWriter(str(path), "gemma4")
    full = [kind == "full_attention" for kind in c["layer_types"]]
    own = c["per_layer_config"][str(full.index(True))]
    fields = {
        "context_length": c["max_position_embeddings"], "embedding_length": c["hidden_size"], "block_count": len(full),
        "feed_forward_length": c["intermediate_size"], "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": [
            own.get("num_key_value_heads", c["num_key_value_heads"]) if wide else c["num_key_value_heads"] for wide in full
        ],
        "attention.key_length": own["head_dim"], "attention.value_length": own["head_dim"],
        "attention.key_length_swa": c["head_dim"], "attention.value_length_swa": c["head_dim"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"], "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": [not wide for wide in full], "attention.shared_kv_layers": 0,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "final_logit_softcapping": c["final_logit_softcapping"],
        "expert_count": c["num_experts"], "expert_used_count": c["top_k_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
    } | (changes or {})  # fmt: skip
    for name, value in fields.items():
        key = f"gemma4.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    pairs = own["head_dim"] // 2
    divisors = np.full(pairs, 1e30, np.float32)
    divisors[: int(0.25 * pairs)] = 1
    writer.add_tensor("rope_freqs.weight", divisors)
    for name, table in tensors.items():
        if quant and table.ndim > 1 and table.shape[-1] % TYPES[quant].block == 0 and "ffn_gate_inp" not in name:
            kind = gguf.GGMLQuantizationType[quant]
            writer.add_tensor(name, gguf.quants.quantize(table, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
