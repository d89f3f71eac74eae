"""The config of a model: one dataclass for all families, with one entry for each layer."""

import math
from dataclasses import dataclass
from functools import cached_property

from gemma_py.errors import ConfigError


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: the pair (i, i + E / 2) turns by position * theta^(-2i / E) / factor.

    share: only the first share * E / 2 pairs turn; the frequency of the others is 0 (transformers' "proportional" rope).
    """

    theta: float
    factor: float = 1.0
    share: float = 1.0

    def turning(self, width: int) -> int:
        """The number of pairs that turn in a head of this width."""
        return int(self.share * width // 2)


@dataclass(frozen=True)
class Layer:
    """sliding_window: how many keys a query sees, its own included; None means all.
    kv_source: the number of the layer whose KV rows this one reads: its own, or that of an earlier layer."""

    sliding_window: int | None
    rope: Rope
    num_attention_heads: int  # H
    num_key_value_heads: int  # G
    head_dim: int  # E
    intermediate_size: int  # F
    kv_source: int


@dataclass(frozen=True)
class Config:
    """Field names are Hugging Face's where it has one."""

    model_type: str  # of the family, see models/families.py
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
    hidden_size_per_layer_input: int = 0  # P; 0: the layers have no inputs of their own
    vocab_size_per_layer_input: int = 0  # rows of the table of per-layer inputs

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(
            self.query_pre_attn_scalar
        )  # sqrt is exactly rounded (IEEE 754); a power would depend on libm

    @cached_property
    def kv_owners(self) -> tuple[int, ...]:
        """The numbers of the layers that have KV rows of their own, which are the layers of a KV cache."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.kv_source == number)

    @cached_property
    def kv_layers(self) -> tuple[Layer, ...]:
        """The layers of `kv_owners`."""
        return tuple(self.layers[number] for number in self.kv_owners)

    @cached_property
    def kv_numbers(self) -> tuple[int, ...]:
        """For each layer, the index in `kv_layers` of the layer whose KV rows it reads."""
        return tuple(self.kv_owners.index(layer.kv_source) for layer in self.layers)


def checked(config: Config, where: str) -> Config:
    """Return the config, after the checks that do not depend on its format."""
    if not config.layers:
        raise ConfigError(f"{where}: the model has no layers")
    for number, layer in enumerate(config.layers):
        if layer.num_attention_heads % layer.num_key_value_heads:
            raise ConfigError(
                f"{where}: num_attention_heads {layer.num_attention_heads} should be a multiple of "
                f"num_key_value_heads {layer.num_key_value_heads}"
            )
        if layer.head_dim % 2:
            raise ConfigError(f"{where}: head_dim should be even, found {layer.head_dim}")
        if not 0 <= layer.kv_source <= number or config.layers[layer.kv_source].kv_source != layer.kv_source:
            raise ConfigError(f"{where}: layer {number} cannot share the KV rows of layer {layer.kv_source}")
        source = config.layers[layer.kv_source]
        shapes = [(y.num_key_value_heads, y.head_dim, y.sliding_window) for y in (layer, source)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{where}: layer {number} shares the KV rows of layer {layer.kv_source}, whose heads or window differ"
            )
    return config
