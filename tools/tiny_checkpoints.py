"""Tiny random checkpoints of every model family and file layout, for tests. A library; needs numpy and safetensors.

The weights are computed with splitmix64 and integer arithmetic, so a seed gives equal files with any version of numpy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy


@dataclass(frozen=True)
class Variant:
    """A kind of checkpoint. config: the content of config.json. dtype: F32, F16 or BF16. shards: number of files.
    prefix: of all text tensors.
    """

    config: dict[str, Any]
    dtype: str = "F32"
    shards: int = 1
    prefix: str = "model."
    head: str | None = None  # the name of an output head that is not tied to the embedding
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of tensors outside the text model


def _gemma1(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma", "architectures": ["GemmaForCausalLM"], "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 16, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
        **changes,
    }  # fmt: skip


def _gemma2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "sliding_window": 8,
        "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
        **changes,
    }  # fmt: skip


def _vaultgemma(**changes: Any) -> dict[str, Any]:
    """As current transformers write it."""
    config = _gemma2(model_type="vaultgemma", architectures=["VaultGemmaForCausalLM"], **changes)
    del config["rope_theta"]
    types = [
        "full_attention" if n in (2, 3) else "sliding_attention" for n in range(1, config["num_hidden_layers"] + 1)
    ]
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    return config | {"layer_types": types, "rope_parameters": rope}


def _gemma3(**changes: Any) -> dict[str, Any]:
    """Return a Gemma 3 config as current versions of transformers write configs."""
    layers = changes.get("num_hidden_layers", 7)
    return {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 24, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "sliding_window": 9,
        "query_pre_attn_scalar": 24, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "layer_types": ["full_attention" if n % 6 == 0 else "sliding_attention" for n in range(1, layers + 1)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": [1, 5], "pad_token_id": 0,
        **changes,
    }  # fmt: skip


def _old_gemma3(**changes: Any) -> dict[str, Any]:
    """Return a Gemma 3 config as transformers 4.50 wrote configs."""
    config = _gemma3(rope_theta=1000000.0, rope_local_base_freq=10000.0, sliding_window_pattern=3, **changes)
    del config["rope_parameters"], config["layer_types"]
    return config


def _gemma3n(**changes: Any) -> dict[str, Any]:
    """As current transformers write it. The last three layers share KV rows; tokens from 80 on have no inputs of their own."""
    return {
        "model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"], "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": [64, 48, 64, 96, 64, 64], "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "sliding_window": 9, "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 80,
        "altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True, "laurel_rank": 6,
        "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.8, 0.0, 0.0], "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": [1, 5], "pad_token_id": 0,
        **changes,
    }  # fmt: skip


def _old_gemma3n(**changes: Any) -> dict[str, Any]:
    """As transformers 4.53 wrote it, with three streams of which the second is active."""
    config = _gemma3n(rope_theta=1000000.0, rope_local_base_freq=20000.0, intermediate_size=80, num_kv_shared_layers=1,
                      altup_num_inputs=3, altup_active_idx=1, altup_correct_scale=False, **changes)  # fmt: skip
    del config["rope_parameters"], config["layer_types"], config["activation_sparsity_pattern"]
    return config


_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 16, "patch_size": 8, "model_type": "siglip_vision_model"}  # fmt: skip


def _multimodal(text: dict[str, Any]) -> dict[str, Any]:
    text = {key: value for key, value in text.items() if key not in ("architectures", "bos_token_id", "eos_token_id")}
    return {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
        "vision_config": _VISION, "mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91,
        "eoi_token_index": 92, "eos_token_id": [1, 5], "bos_token_id": 2,
    }  # fmt: skip


_SCALED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_VISION_TENSORS = {"vision_tower.vision_model.post_layernorm.weight": (16,)}

VARIANTS = {
    "gemma1-multi-head": Variant(_gemma1()),
    "gemma1-multi-query": Variant(_gemma1(num_key_value_heads=1, head_dim=20, rope_theta=5000.0), dtype="BF16"),
    "gemma2": Variant(_gemma2()),
    "gemma2-no-caps": Variant(
        _gemma2(attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=5, num_attention_heads=6,
                num_key_value_heads=2, hidden_size=36), dtype="F16", shards=3),
    "vaultgemma": Variant(_vaultgemma()),
    "vaultgemma-no-caps": Variant(
        _vaultgemma(attn_logit_softcapping=None, final_logit_softcapping=None, num_key_value_heads=1), dtype="BF16"),
    "gemma3": Variant(_gemma3()),
    "gemma3-old-config": Variant(_old_gemma3(rope_scaling={"rope_type": "linear", "factor": 4.0}), dtype="BF16"),
    "gemma3-scaled-untied": Variant(
        _gemma3(rope_parameters=_SCALED, tie_word_embeddings=False, num_key_value_heads=4), head="lm_head.weight"),
    "gemma3-multi-query": Variant(
        _gemma3(num_key_value_heads=1, sliding_window=3, query_pre_attn_scalar=40, head_dim=10, rms_norm_eps=1e-5,
                vocab_size=97), shards=2),
    "gemma3n": Variant(_gemma3n()),
    "gemma3n-old-config": Variant(_old_gemma3n(), dtype="BF16", shards=2),
    "gemma3-multimodal": Variant(
        _multimodal(_gemma3(rope_parameters=_SCALED)), dtype="BF16", prefix="model.language_model.",
        extra={f"model.{name}": shape for name, shape in _VISION_TENSORS.items()}),
    "gemma3-multimodal-old": Variant(
        _multimodal(_old_gemma3(rope_scaling={"rope_type": "linear", "factor": 8.0})), dtype="F16",
        prefix="language_model.model.", extra=_VISION_TENSORS),
}  # fmt: skip


# A layer's norms of width D, by model type; those of other types have all four.
_NORMS = {
    "gemma": ("input_layernorm", "post_attention_layernorm"),
    "vaultgemma": ("input_layernorm", "pre_feedforward_layernorm"),
}
_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def gaussians(seed: int, count: int) -> np.ndarray:
    """Return almost normal f32 numbers of variance 1: sums of four uniform 16-bit fields of splitmix64."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed * 1_000_003)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    fields = z[:, None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)
    return ((fields.astype(np.int64).sum(1) - 2 * 65535) / (65535 / 3**0.5)).astype(np.float32)


def shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the text model's tensors, by Hugging Face name."""
    c = variant.config.get("text_config", variant.config)
    D, E, sizes = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    H, G = c["num_attention_heads"], c["num_key_value_heads"]
    p = variant.prefix
    table: dict[str, tuple[int, ...]] = {f"{p}embed_tokens.weight": (c["vocab_size"], D), f"{p}norm.weight": (D,)}
    norms = _NORMS.get(c["model_type"], _FOUR_NORMS)
    for n in range(c["num_hidden_layers"]):
        layer = f"{p}layers.{n}."
        table |= {f"{layer}self_attn.{x}_proj.weight": (rows * E, D) for x, rows in (("q", H), ("k", G), ("v", G))}
        table[f"{layer}self_attn.o_proj.weight"] = (D, H * E)
        F = sizes[n] if isinstance(sizes, list) else sizes
        table |= {f"{layer}mlp.{x}_proj.weight": (F, D) for x in ("gate", "up")}
        table[f"{layer}mlp.down_proj.weight"] = (D, F)
        table |= {f"{layer}{x}.weight": (D,) for x in norms}
        if c["model_type"] in ("gemma3_text", "gemma3n_text"):
            table |= {f"{layer}self_attn.{x}_norm.weight": (E,) for x in "qk"}
    if c["model_type"] == "gemma3n_text":
        table |= {p + name: shape for name, shape in _shapes_of_gemma3n(c).items()}
    if variant.head:
        table[variant.head] = (c["vocab_size"], D)
    return {**table, **variant.extra}


def _shapes_of_gemma3n(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that only Gemma 3n has. Layers that share KV rows have keys and values all the same, as in released files."""
    D, P, L, n, R = (c[key] for key in ("hidden_size", "hidden_size_per_layer_input", "num_hidden_layers",
                                        "altup_num_inputs", "laurel_rank"))  # fmt: skip
    table: dict[str, tuple[int, ...]] = {
        "embed_tokens_per_layer.weight": (c["vocab_size_per_layer_input"], L * P),
        "per_layer_model_projection.weight": (L * P, D),
        "per_layer_projection_norm.weight": (P,),
    }
    for i in range(n - 1):
        table |= {f"altup_{kind}projections.{i}.weight": (D, D) for kind in ("", "unembed_")}
    layer = {
        "altup.correct_output_scale": (D,), "altup.correction_coefs.weight": (n, n),
        "altup.prediction_coefs.weight": (n * n, n), "altup.modality_router.weight": (n, D),
        "altup.router_norm.weight": (D,), "laurel.linear_left.weight": (R, D), "laurel.linear_right.weight": (D, R),
        "laurel.post_laurel_norm.weight": (D,), "per_layer_input_gate.weight": (P, D),
        "per_layer_projection.weight": (D, P), "post_per_layer_input_norm.weight": (D,),
    }  # fmt: skip
    return table | {f"layers.{number}.{name}": shape for number in range(L) for name, shape in layer.items()}


def tensors(variant: Variant, seed: int) -> dict[str, np.ndarray]:
    """Return random f32 values that the variant's dtype represents exactly."""
    made = {}
    whole_gains = variant.config.get("text_config", variant.config)["model_type"] == "gemma3n_text"
    for number, (name, shape) in enumerate(shapes(variant).items()):
        spread = 0.3 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        values = gaussians(seed * 1000 + number, int(np.prod(shape))) * np.float32(spread)
        if whole_gains and len(shape) == 1:
            values += np.float32(1)
        if variant.dtype == "F16":
            values = values.astype(np.float16).astype(np.float32)
        elif variant.dtype == "BF16":
            values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        made[name] = values.reshape(shape)
    return made


def save_safetensors(path: Path, values: dict[str, np.ndarray], dtype: str) -> None:
    """Write a safetensors file. Stores bfloat16 as uint16 and renames the type in the header, because numpy has no
    bfloat16.
    """
    if dtype == "F16":
        values = {name: value.astype(np.float16) for name, value in values.items()}
    elif dtype == "BF16":
        values = {name: (value.view(np.uint32) >> np.uint32(16)).astype(np.uint16) for name, value in values.items()}
    data = safetensors.numpy.save(values)
    length = int.from_bytes(data[:8], "little")
    header = (
        data[8 : 8 + length].replace(b'"dtype":"U16"', b'"dtype":"BF16"') if dtype == "BF16" else data[8 : 8 + length]
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def write(variant: Variant, directory: Path, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = variant.config | {"dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[variant.dtype]}
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    values = tensors(variant, seed)
    if variant.shards == 1:
        save_safetensors(directory / "model.safetensors", values, variant.dtype)
        return
    names = sorted(values)
    weight_map: dict[str, str] = {}
    for n in range(variant.shards):
        file = f"model-{n + 1:05}-of-{variant.shards:05}.safetensors"
        part = {name: values[name] for name in names[n :: variant.shards]}
        save_safetensors(directory / file, part, variant.dtype)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
