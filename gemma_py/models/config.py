"""The description of a model. Each layer is described by data, so the forward pass asks for no family."""

import math
from dataclasses import dataclass
from enum import Enum


class Norm(Enum):
    """The places where a layer may normalise."""

    ATTENTION = "before attention"
    QUERY = "each query head"
    KEY = "each key head"
    ATTENTION_OUTPUT = "after attention"
    FEED_FORWARD = "before the feed-forward"
    FEED_FORWARD_OUTPUT = "after the feed-forward"


@dataclass(frozen=True)
class Rope:
    """Angles are position * theta^(-2i / E) / factor."""

    theta: float
    factor: float = 1.0


@dataclass(frozen=True)
class Layer:
    """sliding_window: keys that a query sees, itself included; None: all. kv_source: the layer whose KV rows it reads."""

    sliding_window: int | None
    rope: Rope
    num_attention_heads: int  # H
    num_key_value_heads: int  # G
    head_dim: int  # E
    intermediate_size: int  # F
    kv_source: int
    norms: frozenset[Norm]


@dataclass(frozen=True)
class Config:
    """Hugging Face's names where it has one."""

    model_type: str  # gemma, gemma2, gemma3
    vocab_size: int  # V
    hidden_size: int  # D
    max_position_embeddings: int
    rms_norm_eps: float
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    layers: tuple[Layer, ...]

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.query_pre_attn_scalar)  # the root is IEEE's; a power would be libm's


GEMMA1_NORMS = frozenset({Norm.ATTENTION, Norm.FEED_FORWARD})
GEMMA2_NORMS = GEMMA1_NORMS | {Norm.ATTENTION_OUTPUT, Norm.FEED_FORWARD_OUTPUT}
GEMMA3_NORMS = GEMMA2_NORMS | {Norm.QUERY, Norm.KEY}
NORMS = {"gemma": GEMMA1_NORMS, "gemma2": GEMMA2_NORMS, "gemma3": GEMMA3_NORMS}
