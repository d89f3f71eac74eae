"""Tiny variants of every family, and wider variants whose matrices can be quantised."""

from typing import Any

import tiny_checkpoints as tiny
import tiny_families
from tiny_shapes import FULL, SLIDING

GEMMA4 = ("gemma4-e2b", "gemma4-e4b-wrapped-old-config", "gemma4-dense", "gemma4-dense-untied-old-config",
          "gemma4-experts", "gemma4-experts-wrapped-old-config", "gemma4-unified", "gemma4-unified-wrapped")  # fmt: skip
# Rows are whole blocks of Q8_0 and Q4_0, except those of AltUp's coefficients. Full layers have one KV head, whose
# columns several workers share in decoding.
_WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 70, "num_attention_heads": 4}
_DENSE: dict[str, Any] = {"head_dim": 32, "wide": 64, "wide_kv": 1, "attention_k_eq_v": True} | _WIDE
WIDE = {
    "gemma4-e2b": tiny.Variant(tiny_families.gemma4(
        [SLIDING, FULL, SLIDING, FULL], head_dim=64, wide=128, num_key_value_heads=1, hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=70, num_kv_shared_layers=2, use_double_wide_mlp=True, **_WIDE)),
    "gemma4-dense": tiny.Variant(tiny_families.gemma4([SLIDING, FULL], sliding_window=5, **_DENSE)),
    "gemma4-experts": tiny.Variant(tiny_families.gemma4(
        [SLIDING, FULL], enable_moe_block=True, num_experts=40, top_k_experts=4,
        moe_intermediate_size=96, **_DENSE)),  # 4 of 40 experts a token, so most experts get few rows
    "gemma3n": tiny.Variant(tiny._gemma3n(
        [SLIDING, FULL, SLIDING, FULL], hidden_size=64, intermediate_size=[64, 96, 64, 96], head_dim=64,
        num_key_value_heads=1, num_kv_shared_layers=2, hidden_size_per_layer_input=32, vocab_size_per_layer_input=64,
        laurel_rank=32, sliding_window=5)),
    "embeddinggemma": tiny.Variant(tiny_families.embedding_gemma(
        hidden_size=64, intermediate_size=64, head_dim=32, query_pre_attn_scalar=32, sliding_window=40),
        prefix="", dense=(96, 64)),
    "embeddinggemma2": tiny.Variant(tiny_families.embedding_gemma2(
        wide=64, hidden_size=64, intermediate_size=64, head_dim=32, sliding_window=20, embedding_dim=96,
        hidden_size_per_layer_input=32), prefix="", dense=(64,)),
}  # fmt: skip
VARIANTS = tiny.VARIANTS | {name: tiny_families.VARIANTS[name] for name in ("gemma3n-wrapped", *GEMMA4)}
