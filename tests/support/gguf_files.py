from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import tiny_checkpoints as tiny
from gguf_fields import add_assistant, add_fields, architecture, rope_divisors

from gemma_py.formats.blocks import TYPES

_PARTS = {
    "embed_tokens": "token_embd", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip

PARTS_OF_A_LAYER = [part for part in _PARTS.values() if part not in ("token_embd", "output_norm", "output")]


_FURTHER_PARTS = {
    "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm", "altup_projections": "altup_proj",
    "altup_unembed_projections": "altup_unembd_proj", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm", "layer_scalar": "layer_output_scale",
    "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale", "experts.gate_proj": "ffn_gate_exps",
    "experts.up_proj": "ffn_up_exps", "experts.gate_up_proj": "ffn_gate_up_exps", "experts.down_proj": "ffn_down_exps",
    "router.per_expert_scale": "ffn_down_exps.scale", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "altup.correct_output_scale": "altup_correct_scale", "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef", "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm", "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm", "dense_2": "dense_2", "dense_3": "dense_3",
    "embedding_projection": "output", "ple.per_layer_model_projection": "per_layer_model_proj",
    "ple.per_layer_projection_norm": "per_layer_proj_norm", "ple_block.per_layer_input_gate": "inp_gate",
    "ple_block.per_layer_projection": "proj", "ple_block.post_per_layer_input_norm": "post_norm",
    "pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection",
}  # fmt: skip


def gguf_name(name: str, family: str) -> str:
    """name: the Hugging Face name after the checkpoint's prefix, for example "layers.0.mlp.gate_proj.weight"."""
    name = name.removesuffix(".weight")
    layer = ""
    if name.startswith("layers."):
        _, number, name = name.split(".", 2)
        layer = f"blk.{number}."
    part = (_PARTS | _FURTHER_PARTS)[name]
    if (family, part) == ("gemma", "post_attention_norm"):
        part = "ffn_norm"
    return layer + (part if part.endswith(".scale") else f"{part}.weight")


def converted(variant: tiny.Variant, values: dict[str, np.ndarray], split_experts: bool) -> dict[str, np.ndarray]:
    """The text tensors as llama.cpp's converter writes them. Keys are Hugging Face names without the prefix."""
    c, made = tiny.text_config(variant), {}
    for full_name, table in values.items():
        if full_name in variant.extra and not full_name.startswith((variant.prefix, "pre_pro", "post_pro")):
            continue
        name = "lm_head.weight" if full_name == variant.head else full_name.removeprefix(variant.prefix)
        if split_experts and name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(table, 2, axis=1), strict=True):
                made[name.replace("gate_up", part)] = np.ascontiguousarray(half)
        elif name.startswith("altup_"):
            stack, _, number = name.removesuffix(".weight").partition(".")
            made[stack] = table[None] if number == "0" else np.concatenate([made[stack], table[None]])
        elif name == "embed_tokens_per_layer.weight":  # the converter pads with zeros for image tokens
            made[name] = np.pad(table, ((0, c["vocab_size"] - len(table)), (0, 0)))
        else:
            made[name] = table + 1 if table.ndim == 1 and tiny.adds_one(variant) else table
    return made


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random codes, with scales around 1 / sqrt(columns), so that products have moderate values."""
    block = TYPES[kind]
    count = rows * columns // block.block
    raw = np.random.RandomState(seed).bytes(count * block.bytes)  # numpy guarantees that RandomState never changes
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
    split_experts: bool = False,
) -> Path:
    """Write a GGUF file of a variant, with random weights or with `values`.

    kinds: types of matrices, for example {"q_proj": "Q4_K"}. These matrices get random blocks.
    quant: a type for all other matrices whose rows are whole blocks, except routers, as in llama.cpp.
    split_experts: write the experts' gate and up as separate tensors.
    """
    c = tiny.text_config(variant)
    family = architecture(c)
    is_assistant = "backbone_hidden_size" in variant.config
    writer = gguf.GGUFWriter(str(path), "gemma4-assistant" if is_assistant else family)
    add_fields(writer, c, variant.dense)
    if is_assistant:
        add_assistant(writer, variant.config)
    tensors = converted(variant, values or tiny.tensors(variant, seed), split_experts)
    tensors |= {f"dense_{n}.weight": layer for n, layer in enumerate(tiny.dense_layers(variant, seed), 2)}
    for number, (name, table) in enumerate(tensors.items()):
        new = gguf_name(name, family)
        kind = next((k for part, k in (kinds or {}).items() if part in name), None)
        if kind is not None:
            blocks = random_blocks(kind, table.shape[0], table.shape[1], seed * 100 + number)
            writer.add_tensor(new, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        elif quant and table.ndim > 1 and table.shape[-1] % TYPES[quant].block == 0 and "router" not in name:
            packed = gguf.GGMLQuantizationType[quant]
            writer.add_tensor(new, gguf.quants.quantize(table, packed), raw_dtype=packed)
        else:
            writer.add_tensor(new, table)
    if family == "gemma4":
        writer.add_tensor("rope_freqs.weight", rope_divisors(c))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
