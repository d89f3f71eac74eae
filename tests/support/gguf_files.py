"""GGUF files of tiny models, written by the gguf package."""

from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import tiny_checkpoints as tiny

from gemma_py.formats.blocks import TYPES

_PARTS = {
    "embed_tokens": "token_embd", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip

PARTS_OF_A_LAYER = [part for part in _PARTS.values() if part not in ("token_embd", "output_norm", "output")]


def gguf_name(name: str, family: str) -> str:
    """Hugging Face's tensor name in GGUF's words."""
    name = name.removeprefix("model.").removesuffix(".weight")
    layer = ""
    if name.startswith("layers."):
        _, number, name = name.split(".", 2)
        layer = f"blk.{number}."
    part = _PARTS[name]
    return layer + ("ffn_norm" if (family, part) == ("gemma", "post_attention_norm") else part) + ".weight"


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Bytes of sane random values: random codes, and scales around 1 / sqrt(columns)."""
    block = TYPES[kind]
    count = rows * columns // block.block
    raw = np.random.RandomState(seed).bytes(count * block.bytes)  # a stream that numpy has frozen
    blocks = np.frombuffer(raw, np.uint8).reshape(count, block.bytes).copy()
    scale = np.float16(0.02 / columns**0.5 if block.block == 256 else 0.1 / columns**0.5)
    halves = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
    }
    for at in halves.get(kind, (0,)):
        blocks[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def write_model(
    path: Path,
    variant: tiny.Variant,
    seed: int,
    kinds: dict[str, str] | None = None,
    values: dict[str, np.ndarray] | None = None,
    quant: str | None = None,
) -> Path:
    """The variant's weights, or these values, as a GGUF.

    kinds: tensor type by part ("q_proj", ...); those parts get random blocks. quant: a type that the gguf package packs
    every matrix to whose rows are whole blocks.
    """
    c = variant.config.get("text_config", variant.config)
    family = {"gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3"}[c["model_type"]]
    dense = tiny.dense_layers(variant, seed) if variant.dense else []
    if c.get("use_bidirectional_attention"):
        family = "gemma-embedding"
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if family != "gemma":
        writer.add_sliding_window(c["sliding_window"])
    if family == "gemma-embedding":
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    if family in ("gemma3", "gemma-embedding"):
        writer.add_rope_freq_base(c["rope_parameters"]["full_attention"]["rope_theta"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    for number, matrix in enumerate(dense, 2):
        writer.add_uint32(f"{family}.dense_{number}_feat_in", matrix.shape[1])
        writer.add_uint32(f"{family}.dense_{number}_feat_out", matrix.shape[0])
    weights = {**(values or tiny.tensors(variant, seed)), **{f"dense_{n}.weight": w for n, w in enumerate(dense, 2)}}
    for number, (name, table) in enumerate(weights.items()):
        new = name if name.startswith("dense_") else gguf_name(name, family)
        kind = next((k for part, k in (kinds or {}).items() if part in name), None)
        if kind is not None:
            blocks = random_blocks(kind, table.shape[0], table.shape[1], seed * 100 + number)
            writer.add_tensor(new, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        elif quant is not None and table.ndim == 2 and table.shape[1] % TYPES[quant].block == 0:
            packed = gguf.GGMLQuantizationType[quant]
            writer.add_tensor(new, gguf.quants.quantize(table, packed), raw_dtype=packed)
        else:
            writer.add_tensor(new, table + 1 if table.ndim == 1 else table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
