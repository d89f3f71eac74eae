"""Tiny random checkpoints of every model family and file layout, for tests. Needs numpy and safetensors.

The weights are computed with splitmix64 and integer arithmetic, so a seed gives equal files with any version of numpy.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from tiny_shapes import FULL, SLIDING, Config, text_shapes, unused_kv


@dataclass(frozen=True)
class Variant:
    """A kind of checkpoint.

    config: the content of config.json.
    dtype: F32, F16 or BF16.
    shards: the number of files.
    prefix: the beginning of the names of all text tensors.
    dense: output widths of an embedding model's dense layers, which are stored as modules of sentence-transformers.
    """

    config: dict[str, Any]
    dtype: str = "F32"
    shards: int = 1
    prefix: str = "model."
    head: str | None = None  # name of an output head that is not tied to the embedding
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of tensors outside the text model
    dense: tuple[int, ...] = ()


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
    config = _gemma2(model_type="vaultgemma", architectures=["VaultGemmaForCausalLM"], **changes)
    del config["rope_theta"]
    types = [
        "full_attention" if n in (2, 3) else "sliding_attention" for n in range(1, config["num_hidden_layers"] + 1)
    ]
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    return config | {"layer_types": types, "rope_parameters": rope}


def _gemma3(**changes: Any) -> dict[str, Any]:
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
    config = _gemma3(rope_theta=1000000.0, rope_local_base_freq=10000.0, sliding_window_pattern=3, **changes)
    del config["rope_parameters"], config["layer_types"]
    return config


_MIXED = (SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL)


def _gemma3n(types: Sequence[str] = _MIXED, **changes: Any) -> Config:
    """A Gemma 3n config of current transformers. The table of per-layer inputs has no rows for token ids from 50 on."""
    return {
        "model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": [48] * len(types), "num_hidden_layers": len(types), "layer_types": list(types),
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "sliding_window": 9, "max_position_embeddings": 128, "attention_bias": False,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 1_000_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 50,
        "num_kv_shared_layers": 3, "laurel_rank": 5, "altup_num_inputs": 4, "altup_active_idx": 0,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "tie_word_embeddings": True,
        "activation_sparsity_pattern": [0.95, 0.5] + [0.0] * (len(types) - 2), "bos_token_id": 2, "eos_token_id": 1,
        "pad_token_id": 0, **changes,
    }  # fmt: skip


def _old_gemma3n(**changes: Any) -> Config:
    """A Gemma 3n config of transformers 4.53, with three streams of which the second is active."""
    config = _gemma3n(rope_theta=1_000_000.0, rope_local_base_freq=20_000.0, intermediate_size=80, altup_num_inputs=3,
                      altup_active_idx=1, altup_correct_scale=False, num_kv_shared_layers=1, **changes)  # fmt: skip
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
    "gemma3n": Variant(_gemma3n(), extra=unused_kv(_gemma3n(), "model.")),
    "gemma3n-old-config": Variant(_old_gemma3n(), dtype="BF16", shards=2),
    "gemma3-multimodal": Variant(
        _multimodal(_gemma3(rope_parameters=_SCALED)), dtype="BF16", prefix="model.language_model.",
        extra={f"model.{name}": shape for name, shape in _VISION_TENSORS.items()}),
    "gemma3-multimodal-old": Variant(
        _multimodal(_old_gemma3(rope_scaling={"rope_type": "linear", "factor": 8.0})), dtype="F16",
        prefix="language_model.model.", extra=_VISION_TENSORS),
}  # fmt: skip


def gaussians(seed: int, count: int) -> np.ndarray:
    """Almost normal f32 numbers of variance 1: sums of four uniform 16-bit fields of splitmix64."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed * 1_000_003)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    fields = z[:, None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)
    return ((fields.astype(np.int64).sum(1) - 2 * 65535) / (65535 / 3**0.5)).astype(np.float32)


def largest_cosine_distance(a: np.ndarray, b: np.ndarray) -> float:
    x, y = (table.astype(np.float64) for table in (a, b))
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float((1 - (x * y).sum(1) / lengths).max())


def text_config(variant: Variant) -> dict[str, Any]:
    config: dict[str, Any] = variant.config.get("text_config", variant.config)
    return config


def adds_one(variant: Variant) -> bool:
    return text_config(variant)["model_type"] in ("gemma", "gemma2", "gemma3_text", "vaultgemma")


def is_embedding(variant: Variant) -> bool:
    config = text_config(variant)
    return config["model_type"] == "embedding_gemma2_text" or config.get("use_bidirectional_attention") is True


def shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    c = text_config(variant)
    table = {variant.prefix + name: shape for name, shape in text_shapes(c).items()}
    if variant.head:
        table[variant.head] = (c["vocab_size"], c["hidden_size"])
    return {**table, **variant.extra}


_SCALES = ("layer_scalar", "router.scale", "per_expert_scale", "correct_output_scale")


def _distribution(name: str, shape: tuple[int, ...], plus_one: bool) -> tuple[float, float]:
    """Return a tensor's (mean, standard deviation). Gains and scales are not 1 or 0, because a test would not notice a
    missing one.
    """
    if name.endswith(_SCALES) or (len(shape) == 1 and "norm" in name and not plus_one):
        # These families do not divide scores by sqrt(head_dim), so smaller gains keep the scores moderate.
        return (0.5, 0.15) if name.endswith(("q_norm.weight", "k_norm.weight")) else (1.0, 0.3)
    return 0.0, 0.3 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5


def tensors(variant: Variant, seed: int) -> dict[str, np.ndarray]:
    """Random f32 values that the variant's dtype represents exactly."""
    made = {}
    plus_one = adds_one(variant)
    for number, (name, shape) in enumerate(shapes(variant).items()):
        # A tensor without dimensions is a bound to which the audio tower clips values.
        mean, spread = _distribution(name, shape, plus_one) if shape else (-np.inf, 0.0)
        values = gaussians(seed * 1000 + number, int(np.prod(shape))) * np.float32(spread) + np.float32(mean)
        if variant.dtype == "F16":
            values = values.astype(np.float16).astype(np.float32)
        elif variant.dtype == "BF16":
            values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        made[name] = values.reshape(shape)
    return made


def save_safetensors(path: Path, values: dict[str, np.ndarray], dtype: str) -> None:
    """numpy has no bfloat16, so BF16 values are saved as uint16, and the type in the header is then changed to BF16."""
    if dtype == "F16":
        values = {name: value.astype(np.float16) for name, value in values.items()}
    elif dtype == "BF16":
        values = {name: np.asarray(value.view(np.uint32) >> np.uint32(16), np.uint16) for name, value in values.items()}
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
    if variant.dense:
        _write_modules(variant, directory, seed)
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


def pooled_width(variant: Variant) -> int:
    config = text_config(variant)
    width: int = config.get("embedding_dim", config["hidden_size"])
    return width


def dense_layers(variant: Variant, seed: int) -> list[np.ndarray]:
    widths = (pooled_width(variant), *variant.dense)
    return [
        (gaussians(seed * 1000 + 900 + n, into * out) * np.float32(into**-0.5)).reshape(out, into)
        for n, (into, out) in enumerate(pairwise(widths))
    ]


def _write_modules(variant: Variant, directory: Path, seed: int) -> None:
    """Write sentence-transformers' modules after the transformer: pooling, dense layers, normalisation."""
    layers = dense_layers(variant, seed)
    names = ["Pooling", *["Dense"] * len(layers), "Normalize"]
    modules = [("", "Transformer"), *((f"{n}_{name}", name) for n, name in enumerate(names, 1))]
    for path, _ in modules:
        (directory / path).mkdir(exist_ok=True)
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
        for n, (path, name) in enumerate(modules)
    ]
    pooling = {
        "word_embedding_dimension": pooled_width(variant),
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    (directory / "modules.json").write_text(json.dumps(listed, indent=1) + "\n")
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=1) + "\n")
    for n, layer in enumerate(layers, 2):
        out, into = layer.shape
        config = {"in_features": into, "out_features": out, "bias": False,
                  "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
        (directory / f"{n}_Dense" / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_safetensors(directory / f"{n}_Dense" / "model.safetensors", {"linear.weight": layer}, "F32")
