"""Tiny variants of Gemma 3n, Gemma 4 and the embedding models, and variants with random shapes."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tiny_checkpoints import Variant, _gemma3, _gemma3n, _vaultgemma
from tiny_shapes import FULL, SLIDING, Config, Shapes, heads_of, unused_kv

# The lower bound to which a layer clips its inputs. With -infinity, a layer does not clip.
_MINUS_INFINITY: Shapes = {"audio_tower.layers.0.feed_forward1.ffw_layer_1.input_min": ()}
_GEMMA4_PARTS: Shapes = {
    "vision_tower.patch_embedder.position_embedding_table": (2, 16, 16),
    "vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight": (16, 16),
    "vision_tower.encoder.layers.0.input_layernorm.weight": (16,),
    "audio_tower.subsample_conv_projection.layer0.conv.weight": (4, 1, 3, 3),
    "audio_tower.layers.0.self_attn.per_dim_scale": (8,),
    "audio_tower.output_proj.bias": (16,),
    "embed_vision.embedding_projection.weight": (32, 16),
    "embed_audio.embedding_projection.weight": (32, 16),
    **_MINUS_INFINITY,
}
_UNIFIED_PARTS: Shapes = {
    "vision_embedder.pos_embedding": (4, 2, 16),
    "vision_embedder.patch_ln1.bias": (48,),
    "vision_embedder.patch_dense.weight": (16, 48),
    "embed_vision.embedding_projection.weight": (32, 16),
    "embed_audio.embedding_projection.weight": (32, 16),
}
_GEMMA3N_PARTS: Shapes = {
    "vision_tower.timm_model.conv_stem.conv.weight": (4, 3, 3, 3),
    "audio_tower.conformer.0.norm.weight": (16,),
    "embed_vision.embedding.weight": (8, 16),
    "embed_vision.hard_embedding_norm.weight": (16,),
    "embed_audio.embedding_projection.weight": (32, 16),
}
_GEMMA4_VISION = {"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                  "position_embedding_size": 16}  # fmt: skip
_GEMMA4_AUDIO = {"model_type": "gemma4_audio", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "subsampling_conv_channels": [4, 4], "output_proj_dims": 16}  # fmt: skip
_UNIFIED_VISION = {"model_type": "gemma4_unified_vision", "mm_embed_dim": 16, "mm_posemb_size": 4,
                   "output_proj_dims": 16, "patch_size": 4, "pooling_kernel_size": 1}  # fmt: skip
_UNIFIED_AUDIO = {"model_type": "gemma4_unified_audio", "audio_embed_dim": 16}

_MIXED = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL]
# The last three layers share KV rows, as llama.cpp assumes: the sliding ones read those of layer 2, the full one those
# of layer 3.
_SHARED = [
    SLIDING,
    SLIDING,
    SLIDING,
    FULL,
    SLIDING,
    SLIDING,
    FULL,
]
_DEFAULT_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_PROPORTIONAL_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


def _common(model_type: str, types: list[str]) -> Config:
    return {
        "model_type": model_type, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": len(types), "layer_types": types, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "sliding_window": 9,
        "max_position_embeddings": 128, "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1,
        "pad_token_id": 0,
    }  # fmt: skip


def _of_full_layers(types: list[str], own: Config) -> Config:
    """per_layer_config of the full layers. transformers pads the keys, which are layer numbers, with zeros."""
    numbers = [n for n, kind in enumerate(types) if kind == FULL]
    return {str(n).zfill(len(str(max(numbers)))): own for n in numbers}


def gemma4(types: list[str] = _MIXED, wide: int = 24, wide_kv: int | None = None, **changes: Any) -> Config:
    """A config of transformers 5.22.2 and later.

    per_layer_config has the head width (`wide`) and the number of KV heads (`wide_kv`) of the full layers.
    """
    own = {"head_dim": wide} | ({} if wide_kv is None else {"num_key_value_heads": wide_kv})
    return {
        **_common("gemma4_text", types), "architectures": ["Gemma4ForCausalLM"], "rope_parameters": _PROPORTIONAL_ROPES,
        "per_layer_config": _of_full_layers(types, own),
        "final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "attention_k_eq_v": False, "enable_moe_block": False,
        "use_bidirectional_attention": None, "tie_word_embeddings": True, **changes,
    }  # fmt: skip


def old_gemma4(types: list[str] = _MIXED, wide: int = 24, wide_kv: int | None = None, **changes: Any) -> Config:
    """A config of transformers before 5.22.2, with global_head_dim instead of per_layer_config."""
    config = gemma4(types, **changes)
    del config["per_layer_config"]
    return config | {"global_head_dim": wide, "num_global_key_value_heads": wide_kv}


def unified(text: Config) -> Config:
    absent = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts",
              "top_k_experts", "moe_intermediate_size")  # fmt: skip
    kept = {key: value for key, value in text.items() if key not in absent}
    names = {"model_type": "gemma4_unified_text", "architectures": ["Gemma4UnifiedForCausalLM"]}
    return kept | names | {"use_bidirectional_attention": "vision"}


def embedding_gemma(**changes: Any) -> Config:
    bidirectional = {"use_bidirectional_attention": True, "architectures": ["Gemma3TextModel"], "vocab_size": 64}
    return _gemma3(**(bidirectional | changes))


def embedding_gemma2(types: list[str] = _MIXED, wide: int = 24, wide_kv: int = 1, **changes: Any) -> Config:
    own = {"head_dim": wide, "num_key_value_heads": wide_kv}
    return {
        **_common("embedding_gemma2_text", types), "architectures": ["EmbeddingGemma2TextModel"],
        "rope_parameters": _DEFAULT_ROPES, "hidden_size_per_layer_input": 6, "embedding_dim": 20,
        "per_layer_config": _of_full_layers(types, own), **changes,
    }  # fmt: skip


def assistant(main: Variant, ordered: bool = False, sliding_layers: int = 2, **changes: Any) -> Variant:
    """An assistant for a variant of Gemma 4, in the form of current transformers. ordered: with clusters of tokens.

    One layer with full attention follows the sliding layers.
    """
    of_main = main.config.get("text_config", main.config)
    types = [*[SLIDING] * sliding_layers, FULL]
    full, sliding = (heads_of(of_main, of_main["layer_types"].index(kind)) for kind in (FULL, SLIDING))
    own = {"head_dim": full[2], "num_key_value_heads": full[1]}
    text = _common("gemma4_text", types) | {
        "vocab_size": of_main["vocab_size"], "hidden_size": 20, "num_attention_heads": of_main["num_attention_heads"],
        "num_key_value_heads": sliding[1], "head_dim": sliding[2], "sliding_window": of_main["sliding_window"],
        "rope_parameters": of_main.get("rope_parameters", _PROPORTIONAL_ROPES),
        "per_layer_config": _of_full_layers(types, own), "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "num_kv_shared_layers": len(types), "use_double_wide_mlp": False,
        "attention_k_eq_v": False, "enable_moe_block": False, "tie_word_embeddings": True, **changes,
    }  # fmt: skip
    D, B = text["hidden_size"], of_main["hidden_size"]
    config = {
        "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "text_config": text,
        "backbone_hidden_size": B, "use_ordered_embeddings": ordered, "num_centroids": 8,
        "centroid_intermediate_top_k": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    extra = {"pre_projection.weight": (D, 2 * B), "post_projection.weight": (B, D)}
    if ordered:
        extra["masked_embedding.centroids.weight"] = (8, D)
    return Variant(config, prefix="model.", extra=extra, dtype=main.dtype)


def wrapped(text: Config, **changes: Any) -> Variant:
    """A multimodal checkpoint with this text model and some tensors for images and sound."""
    outer, names, parts = {
        "gemma4_text": ("gemma4", "Gemma4ForConditionalGeneration", _GEMMA4_PARTS),
        "gemma4_unified_text": ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", _UNIFIED_PARTS),
        "gemma3n_text": ("gemma3n", "Gemma3nForConditionalGeneration", _GEMMA3N_PARTS),
        "embedding_gemma2_text": ("embedding_gemma2", "EmbeddingGemma2Model", _GEMMA4_PARTS),
    }[text["model_type"]]
    prefix = "" if outer == "embedding_gemma2" else "model."
    towers: Config = {"vision_config": _GEMMA4_VISION, "audio_config": _GEMMA4_AUDIO}
    if outer == "gemma4_unified":
        towers = {"vision_config": _UNIFIED_VISION, "audio_config": _UNIFIED_AUDIO}
    if outer == "gemma3n":
        towers = {"vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"}}
    inner = {key: value for key, value in text.items() if key != "architectures"}
    D = text["hidden_size"]
    extra = {prefix + name: (D, *shape[1:]) if "projection.weight" in name else shape for name, shape in parts.items()}
    config = {"model_type": outer, "architectures": [names], "text_config": inner, **towers}
    config["tie_word_embeddings"] = text.get("tie_word_embeddings", True)
    prefix += "language_model."
    return Variant(config, prefix=prefix, extra=extra | unused_kv(text, prefix), **changes)


_E: Config = {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 3}
_EXPERTS: Config = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 10}
_REUSED: Config = {"attention_k_eq_v": True, "wide_kv": 1}

VARIANTS = {
    "gemma4-e2b": Variant(gemma4(_SHARED, **_E, num_key_value_heads=1, use_double_wide_mlp=True)),
    "gemma4-e4b-wrapped-old-config": wrapped(old_gemma4(**_E), dtype="BF16", shards=2),
    "gemma4-dense": Variant(gemma4(**_REUSED, num_attention_heads=6, sliding_window=3)),
    "gemma4-dense-untied-old-config": Variant(
        old_gemma4(**_REUSED, wide=20, tie_word_embeddings=False, final_logit_softcapping=None), dtype="F16",
        head="lm_head.weight"),
    "gemma4-experts": Variant(gemma4(**_REUSED, **_EXPERTS)),
    "gemma4-experts-wrapped-old-config": wrapped(
        old_gemma4(**_REUSED, **(_EXPERTS | {"num_experts": 5, "top_k_experts": 3})), dtype="BF16"),
    "gemma4-unified": Variant(unified(gemma4(**_REUSED))),
    "gemma4-unified-wrapped": wrapped(unified(gemma4(**_REUSED)), dtype="F16"),
    "gemma3n-wrapped": wrapped(
        _gemma3n(altup_active_idx=1, altup_num_inputs=3, altup_correct_scale=False, num_key_value_heads=1,
                intermediate_size=[40 + 4 * n for n in range(7)]), dtype="BF16"),
    "embeddinggemma": Variant(embedding_gemma(), prefix="", dense=(40, 32)),
    "embeddinggemma-backbone": Variant(
        embedding_gemma(num_key_value_heads=1, sliding_window=6), prefix="", dtype="BF16"),
    "embeddinggemma2": Variant(embedding_gemma2(), prefix=""),
    "embeddinggemma2-wrapped": wrapped(embedding_gemma2(sliding_window=3), dtype="BF16"),
    # Norms hide the scale of the per-layer inputs, unless the norms' epsilon is large.
    "embeddinggemma2-large-epsilon": Variant(
        embedding_gemma2(num_key_value_heads=1, wide_kv=2, rms_norm_eps=0.05), prefix="", dense=(40,)),
}  # fmt: skip

# The first word of an assistant's name is its main model in VARIANTS.
ASSISTANTS = {
    "gemma4-e2b": assistant(VARIANTS["gemma4-e2b"]),
    "gemma4-e2b with clusters": assistant(VARIANTS["gemma4-e2b"], ordered=True),
    "gemma4-dense": assistant(VARIANTS["gemma4-dense"]),
    "gemma4-experts": assistant(VARIANTS["gemma4-experts"], hidden_size=24),
    "gemma4-e4b-wrapped-old-config": assistant(VARIANTS["gemma4-e4b-wrapped-old-config"]),
}


# --- random shapes ----------------------------------------------------------------------------------------------------


def drawn(kind: str, seed: int) -> Variant:
    rng = random.Random(f"{kind} {seed}")
    return _DRAWN[kind](rng) if kind in _DRAWN else _drawn_gemma4(rng, kind)


def _drawn_types(rng: random.Random, shared: bool) -> tuple[list[str], int]:
    """Random layer types, the last of which is full, and the number of layers that share KV rows.

    The type of each sharing layer also occurs in an earlier layer that stores KV rows.
    """
    count = rng.randint(2, 11)
    types = [rng.choice([FULL, SLIDING, SLIDING]) for _ in range(count - 1)] + [FULL]
    possible = [n for n in range(count) if set(types[: count - n]) == set(types)]
    return types, rng.choice(possible) if shared else 0


def _drawn_sizes(rng: random.Random) -> Config:
    kv = rng.choice([1, 1, 2, 3])
    heads = kv * rng.choice([1, 2, 3, 4])
    return {
        "hidden_size": heads * rng.choice([n for n in (4, 7, 8, 16, 24) if heads * n >= 16]),
        "intermediate_size": rng.choice([17, 32, 45, 64]), "num_attention_heads": heads, "num_key_value_heads": kv,
        "head_dim": 2 * rng.randint(1, 17), "sliding_window": rng.choice([1, 2, 3, 8, 9, 31, 33, 500]),
        "vocab_size": rng.choice([33, 64, 101]), "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
    }  # fmt: skip


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _drawn_layout(rng: random.Random, text: Config) -> Variant:
    untied = rng.random() < 0.3
    text["tie_word_embeddings"] = not untied
    plain = Variant(text, extra=unused_kv(text, "model.") if rng.random() < 0.5 else {})
    return replace(
        wrapped(text) if rng.random() < 0.5 else plain,
        dtype=rng.choice(["F32", "BF16", "F16"]), shards=rng.choice([1, 1, 3]),
        head="lm_head.weight" if untied else None,
    )  # fmt: skip


def _drawn_gemma4(rng: random.Random, kind: str) -> Variant:
    # transformers shares KV rows only in models with per-layer inputs.
    types, shared = _drawn_types(rng, kind == "gemma4-e")
    sizes, reused = _drawn_sizes(rng), kind != "gemma4-e" and rng.random() < 0.8
    full = _PROPORTIONAL_ROPES[FULL] | {
        "partial_rotary_factor": rng.choice([0.25, 0.25, 0.5, 1.0]), "rope_theta": rng.choice([1e6, 5e4])}  # fmt: skip
    options = sizes | {
        "num_kv_shared_layers": shared, "attention_k_eq_v": reused, "wide": 2 * rng.randint(1, 33),
        "wide_kv": rng.choice([None, *_divisors(sizes["num_attention_heads"])]) if reused else None,
        "use_double_wide_mlp": rng.random() < 0.5, "final_logit_softcapping": rng.choice([None, 2.0, 30.0]),
        "rope_parameters": _PROPORTIONAL_ROPES | {FULL: full},
    }  # fmt: skip
    if kind == "gemma4-e":
        options["hidden_size_per_layer_input"] = rng.choice([2, 3, 5, 16])
        options["vocab_size_per_layer_input"] = sizes["vocab_size"]
    if kind == "gemma4-experts":
        experts = rng.randint(1, 9)
        options |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": rng.randint(1, experts),
                    "moe_intermediate_size": rng.choice([2, 7, 32])}  # fmt: skip
    config = (gemma4 if rng.random() < 0.5 else old_gemma4)(types, **options)
    return _drawn_layout(rng, unified(config) if kind == "gemma4-unified" else config)


def _drawn_gemma3n(rng: random.Random) -> Variant:
    sizes = _drawn_sizes(rng)
    types, shared = _drawn_types(rng, True)
    n = rng.randint(1, 5)
    own = {
        "num_kv_shared_layers": shared, "altup_num_inputs": n, "altup_active_idx": rng.randrange(n),
        "altup_correct_scale": rng.random() < 0.5, "laurel_rank": rng.choice([2, 3, 16]),
        "hidden_size_per_layer_input": rng.choice([2, 3, 5, 16]),
        "vocab_size_per_layer_input": rng.choice([1, 30, sizes["vocab_size"]]),
        "intermediate_size": [rng.choice([17, 32, 45]) for _ in types],
        "activation_sparsity_pattern": [rng.choice([0.0, 0.1, 0.5, 0.95]) for _ in types],
        "final_logit_softcapping": rng.choice([2.0, 30.0]),
    }  # fmt: skip
    return _drawn_layout(rng, _gemma3n(types, **(sizes | own)))


def _drawn_vaultgemma(rng: random.Random) -> Variant:
    caps = {name: rng.choice([None, 2.0, 50.0]) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    types = [rng.choice([FULL, SLIDING]) for _ in range(rng.randint(1, 6))]
    own = caps | {"num_hidden_layers": len(types), "query_pre_attn_scalar": rng.choice([7, 16, 64])}
    config = _vaultgemma(**(_drawn_sizes(rng) | own)) | {"layer_types": types}
    return Variant(config, dtype=rng.choice(["F32", "BF16"]))


def _drawn_embedding_gemma(rng: random.Random) -> Variant:
    sizes = _drawn_sizes(rng)
    return Variant(
        embedding_gemma(**sizes, query_pre_attn_scalar=sizes["head_dim"]), prefix=rng.choice(["", "model."]),
        dtype=rng.choice(["F32", "BF16"]),
        dense=rng.choice([(), (40, sizes["hidden_size"]), (64, 7), (64, sizes["hidden_size"])]),
    )  # fmt: skip


def _drawn_embedding_gemma2(rng: random.Random) -> Variant:
    sizes = _drawn_sizes(rng)
    types, _ = _drawn_types(rng, False)
    own = {"hidden_size_per_layer_input": rng.choice([2, 3, 5, 16]), "embedding_dim": rng.choice([8, 19, 48])}
    wide, wide_kv = 2 * rng.randint(1, 33), rng.choice(_divisors(sizes["num_attention_heads"]))
    config = embedding_gemma2(types, wide, wide_kv, **(sizes | own))
    return replace(
        wrapped(config) if rng.random() < 0.5 else Variant(config, prefix=""), dtype=rng.choice(["F32", "BF16"]),
        dense=rng.choice([(), (), (40,)]),
    )  # fmt: skip


_DRAWN: dict[str, Callable[[random.Random], Variant]] = {
    "gemma3n": _drawn_gemma3n, "vaultgemma": _drawn_vaultgemma, "embeddinggemma": _drawn_embedding_gemma,
    "embeddinggemma2": _drawn_embedding_gemma2,
}  # fmt: skip
KINDS = ("gemma4-e", "gemma4-dense", "gemma4-experts", "gemma4-unified", *_DRAWN)
