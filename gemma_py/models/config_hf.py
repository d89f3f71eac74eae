"""Hugging Face's config.json, as written by old and by current transformers, to a Config."""

from typing import Any

from gemma_py.errors import ConfigError, UnsupportedError
from gemma_py.models.config import NORMS, Config, Layer, Rope
from gemma_py.models.fields import Fields

_FAMILIES = {"gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3", "gemma3_text": "gemma3"}
_LATER = ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "vaultgemma", "t5gemma")
_SLIDING, _FULL = "sliding_attention", "full_attention"
# transformers writes only what differs from its defaults in a multimodal checkpoint's text_config.
_DEFAULTS = {
    "gemma": {"vocab_size": 256_000, "head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 16,
              "max_position_embeddings": 8192},
    "gemma2": {"vocab_size": 256_000, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
               "max_position_embeddings": 8192},
    "gemma3": {"vocab_size": 262_208, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
               "max_position_embeddings": 131_072},
}  # fmt: skip


def config_from_hf(document: Any, where: str, generation: Any = None) -> Config:
    """document: config.json, parsed. generation: generation_config.json, parsed, or None."""
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: should be a JSON object")
    outer = Fields(where, document)
    fields = outer.table("text_config") or outer
    written = fields.text("model_type", outer.text("model_type", ""))
    if written in _LATER:
        raise UnsupportedError(
            f"{where}: model_type {written!r} is not supported yet; readable are {', '.join(_FAMILIES)}"
        )
    if written not in _FAMILIES:
        raise UnsupportedError(f"{where}: model_type {written!r:.40} is no Gemma; readable are {', '.join(_FAMILIES)}")
    family = _FAMILIES[written]
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedError(f"{where}: an embedding model (EmbeddingGemma) is not supported yet")
    if fields.flag("attention_bias", False):
        raise UnsupportedError(f"{where}: attention_bias is set; no Gemma has one")
    # Gemma 1 was released with "gelu" in hidden_act and meant the tanh form.
    for name in ("hidden_activation", "hidden_act") if family == "gemma" else ("hidden_activation",):
        activation = fields.text(name, "gelu_pytorch_tanh")
        if activation not in ("gelu_pytorch_tanh", "gelu" if name == "hidden_act" else ""):
            raise UnsupportedError(f"{where}: {name} {activation!r:.40}; Gemma's is gelu_pytorch_tanh")
    if fields.values.get("quantization_config") or outer.values.get("quantization_config"):
        raise UnsupportedError(f"{where}: quantization_config: only unquantised safetensors are read; try the GGUF")
    default = _DEFAULTS[family]

    def dimension(name: str) -> int:
        value: int = fields.integer(name, default[name]) if name in default else fields.integer(name)
        return value

    head_dim = dimension("head_dim")
    heads, kv_heads = dimension("num_attention_heads"), dimension("num_key_value_heads")
    norms = NORMS[family]
    windows = _windows(fields, family)
    ropes = _ropes(fields, family)
    layers = tuple(
        Layer(window, ropes[_FULL if window is None else _SLIDING], heads, kv_heads, head_dim,
              fields.integer("intermediate_size"), number, norms)
        for number, window in enumerate(windows)
    )  # fmt: skip
    if generation is not None and not isinstance(generation, dict):
        raise ConfigError(f"{where}: generation_config.json beside it should be a JSON object")
    tokens = Fields(f"{where}: generation_config", generation or {})

    def token_ids(name: str, default: int) -> tuple[int, ...]:
        return tokens.ids(name) or fields.ids(name) or outer.ids(name) or (default,)

    config = Config(
        model_type=family,
        vocab_size=dimension("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        max_position_embeddings=dimension("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        query_pre_attn_scalar=float(head_dim) if family == "gemma" else fields.number("query_pre_attn_scalar", 256.0),
        attn_logit_softcapping=_softcap(fields, family, "attn_logit_softcapping"),
        final_logit_softcapping=_softcap(fields, family, "final_logit_softcapping"),
        tie_word_embeddings=outer.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", True)),
        bos_token_id=token_ids("bos_token_id", 2)[0],
        eos_token_ids=token_ids("eos_token_id", 1),
        layers=layers,
    )
    return checked(config, where)


def checked(config: Config, where: str) -> Config:
    """What every Config must satisfy, wherever it came from."""
    if not config.layers:
        raise ConfigError(f"{where}: the model has no layers")
    for layer in config.layers:
        if layer.num_attention_heads % layer.num_key_value_heads:
            raise ConfigError(
                f"{where}: num_attention_heads {layer.num_attention_heads} should be a multiple of "
                f"num_key_value_heads {layer.num_key_value_heads}"
            )
        if layer.head_dim % 2:
            raise ConfigError(f"{where}: head_dim should be even, found {layer.head_dim}")
    return config


# Caps where a file does not say, by family; a family that is not listed ignores the field, as transformers does.
CAPS: dict[str, dict[str, float | None]] = {
    "attn_logit_softcapping": {"gemma2": 50.0},
    "final_logit_softcapping": {"gemma2": 30.0, "gemma3": None},
}


def _softcap(fields: Fields, family: str, name: str) -> float | None:
    """Here null is a value of its own, "no cap", while a missing field means the family's default."""
    if family not in CAPS[name]:
        return None
    default = CAPS[name][family]
    if name in fields.values and fields.values[name] is None:
        return None
    value: float | None = fields.number(name, default)
    return value


def _windows(fields: Fields, family: str) -> list[int | None]:
    """A window for each layer, None for full attention."""
    count = fields.integer("num_hidden_layers")
    if count > 10_000:
        fields.fail("num_hidden_layers", "at most 10000")
    if family == "gemma":
        return [None] * count
    window = fields.integer("sliding_window", 4096)
    types = fields.values.get("layer_types")
    if types is None:
        pattern = fields.integer("sliding_window_pattern", 2 if family == "gemma2" else 6)
        types = [_SLIDING if number % pattern else _FULL for number in range(1, count + 1)]
    if not isinstance(types, list) or len(types) != count or not all(kind in (_SLIDING, _FULL) for kind in types):
        fields.fail("layer_types", f"{count} times {_SLIDING} or {_FULL}")
    return [window if kind == _SLIDING else None for kind in types]


def _ropes(fields: Fields, family: str) -> dict[str, Rope]:
    """The rope of full and of sliding layers.

    Current transformers write rope_parameters (Gemma 3: one object a layer type); older ones wrote rope_theta,
    rope_local_base_freq and rope_scaling, which Gemma 3 applies to full layers only.
    """
    parameters = fields.table("rope_parameters") or Fields(f"{fields.where}: rope_parameters", {})
    scaling = fields.table("rope_scaling")
    if family != "gemma3":
        table = parameters if scaling is None else scaling  # where both stand, the old name wins in transformers
        rope = _rope(table, table.number("rope_theta", fields.number("rope_theta", 10_000.0)))
        return {_FULL: rope, _SLIDING: rope}
    full = parameters.table(_FULL) or Fields(parameters.where, {})
    sliding = parameters.table(_SLIDING) or Fields(parameters.where, {})
    full_theta = full.number("rope_theta", fields.number("rope_theta", 1_000_000.0))
    sliding_theta = sliding.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))
    return {_FULL: _rope(full if scaling is None else scaling, full_theta), _SLIDING: _rope(sliding, sliding_theta)}


def _rope(fields: Fields, theta: float) -> Rope:
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, fields.number("factor"))
    raise UnsupportedError(f"{fields.where}: rope_type {kind!r:.40}; 'default' and 'linear' are known")
