"""GGUF metadata to a Config. What the format leaves unsaid is settled here, as llama.cpp settles it."""

from typing import Any

import numpy as np

from gemma_py.errors import ConfigError, UnsupportedError
from gemma_py.models.config import NORMS, Config, Layer, Rope
from gemma_py.models.config_hf import CAPS, checked
from gemma_py.models.fields import Fields

_DEFAULT_WINDOW = {"gemma2": 4096}


def config_from_gguf(metadata: dict[str, Any], where: str, vocab_size: int, tied: bool) -> Config:
    """vocab_size is the embedding's; tied: the file has no head of its own."""
    general = Fields(where, metadata)
    family = general.text("general.architecture")
    if family not in NORMS:
        raise UnsupportedError(f"{where}: architecture {family!r:.40}; readable are {', '.join(NORMS)}")
    fields = Fields(where, {k.removeprefix(f"{family}."): v for k, v in metadata.items() if k.startswith(f"{family}.")})
    if fields.values.get("attention.causal") is False:
        raise UnsupportedError(f"{where}: an embedding model is not supported yet")
    layer_count = fields.integer("block_count")
    if layer_count > 10_000:
        fields.fail("block_count", "at most 10000")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    kv_heads = fields.integer("attention.head_count_kv", heads)
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{where}: attention.value_length differs from attention.key_length {head_dim}")
    windows = _windows(fields, family, layer_count)
    full, sliding = _ropes(fields, family)
    layers = tuple(
        Layer(window, full if window is None else sliding, heads, kv_heads, head_dim,
              fields.integer("feed_forward_length"), number, NORMS[family])
        for number, window in enumerate(windows)
    )  # fmt: skip
    # The 27B models of Gemma 2 and 3 scale by hidden / heads instead of the head width; GGUF does not say so.
    wide = (family, layer_count) in (("gemma2", 46), ("gemma3", 62))
    ends = {*general.ids("tokenizer.ggml.eos_token_id"), *general.ids("tokenizer.ggml.eot_token_id")}
    bos = general.ids("tokenizer.ggml.bos_token_id")
    return checked(
        Config(
            model_type=family,
            vocab_size=vocab_size,
            hidden_size=hidden,
            max_position_embeddings=fields.integer("context_length"),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            query_pre_attn_scalar=hidden / heads if wide else float(head_dim),
            attn_logit_softcapping=_softcap(fields, family, "attn_logit_softcapping"),
            final_logit_softcapping=_softcap(fields, family, "final_logit_softcapping"),
            tie_word_embeddings=tied,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(sorted(ends)),
            layers=layers,
        ),
        where,
    )


def _softcap(fields: Fields, family: str, name: str) -> float | None:
    if family not in CAPS[name]:
        return None
    cap: float | None = fields.number(name, CAPS[name][family])
    return cap


def _windows(fields: Fields, family: str, count: int) -> list[int | None]:
    if family == "gemma":
        return [None] * count
    window = fields.integer("attention.sliding_window", _DEFAULT_WINDOW.get(family))
    if window is None:
        raise ConfigError(f"{fields.where}: {family}.attention.sliding_window is missing")
    pattern = fields.values.get("attention.sliding_window_pattern")
    if pattern is not None and not isinstance(pattern, int):  # newer converters write one flag a layer
        flags = pattern.tolist() if isinstance(pattern, np.ndarray) else pattern
        if not isinstance(flags, list) or len(flags) != count or not all(type(flag) in (bool, int) for flag in flags):
            fields.fail("attention.sliding_window_pattern", f"{count} flags or one number")
        return [window if flag else None for flag in flags]
    period = fields.integer("attention.sliding_window_pattern", 2 if family == "gemma2" else 6)
    return [window if number % period else None for number in range(1, count + 1)]


def _ropes(fields: Fields, family: str) -> tuple[Rope, Rope]:
    """The ropes of full and of sliding layers. Gemma 3 scales the full layers only."""
    kind = fields.text("rope.scaling.type", None)
    named = next((name for name in ("rope.scaling.factor", "rope.scale_linear") if fields.values.get(name)), None)
    factor = 1.0 if named is None else fields.number(named)  # 0 means: not scaled
    if kind not in (None, "none", "linear"):
        raise UnsupportedError(f"{fields.where}: rope.scaling.type {kind!r:.40}; 'none' and 'linear' are known")
    full = Rope(fields.number("rope.freq_base", 1e6 if family == "gemma3" else 1e4), 1.0 if kind == "none" else factor)
    if family != "gemma3":
        return full, full
    return full, Rope(fields.number("rope.freq_base_swa", 10_000.0))
