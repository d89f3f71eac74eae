"""The config dataclass that all model families share."""

import math
from dataclasses import dataclass
from functools import cached_property

from gemma_py.errors import ConfigError


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. In a head of E elements, the elements i and i + E / 2 are a pair, for i < E / 2, and are
    rotated by the angle position * theta^(-2i / E) / factor.

    share: only pairs with i < share * E / 2 are rotated (rope_type "proportional" in transformers).
    """

    theta: float
    factor: float = 1.0
    share: float = 1.0

    def turning(self, width: int) -> int:
        """Return how many pairs are rotated in a head of `width` elements."""
        return int(self.share * width // 2)


@dataclass(frozen=True)
class Layer:
    """The shape of one transformer layer. The letters in comments are the names of sizes in the shapes of tensors.

    sliding_window: a query at position i attends to positions i - sliding_window + 1 .. i. None means full attention.
    bidirectional: whether a query at position i also attends to the positions after i. With a sliding window, these are
    the positions below i + sliding_window.
    kv_source: the number of the layer whose KV rows this layer reads: its own number or that of an earlier layer.
    """

    sliding_window: int | None
    rope: Rope
    num_attention_heads: int  # H
    num_key_value_heads: int  # G
    head_dim: int  # E
    intermediate_size: int  # F
    kv_source: int
    value_is_key: bool = False  # whether values are the keys before norm and rope
    sparsity_cutoff: float | None = None  # see `Program.sparsify`; None for a dense feed-forward
    bidirectional: bool = False


@dataclass(frozen=True)
class EmbeddingHead:
    """What an embedding model computes from the mean of a text's hidden states.

    dense: the shape [outputs, inputs] of each dense layer, in order. If there are none, the embedding is the mean itself,
    or the projection of the mean.
    projection: the width to which a matrix of EmbeddingGemma 2 projects the mean before the dense layers; None if the
    model has no such matrix.
    """

    dense: tuple[tuple[int, int], ...] = ()
    projection: int | None = None


@dataclass(frozen=True)
class Config:
    """The config of a text model. A field that also occurs in Hugging Face's config.json has the name used there.

    The letters in comments are the names of sizes in the shapes of tensors.
    """

    model_type: str  # for example "gemma2"
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
    # P, the width of a per-layer input, which is a vector for each token and layer; 0 for models without such vectors
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0  # rows of the table of per-layer inputs
    num_experts: int = 0  # X; 0 for models without a mixture of experts
    top_k_experts: int = 0  # the number of experts that are chosen for a token
    moe_intermediate_size: int = 0  # the feed-forward width of an expert
    altup_num_inputs: int = 1  # n, the number of AltUp's streams
    altup_active_idx: int = 0  # the number of the active stream, on which attention and feed-forward work
    # Whether the active stream is multiplied by a gain before the gate with the per-layer input.
    altup_correct_scale: bool = True
    laurel_rank: int = 0  # R, the rank of the product of LAuReL's two matrices
    embedding: EmbeddingHead | None = None  # None for a model that generates text
    # The hidden size of the main model for which an assistant guesses tokens; 0 for every other model.
    backbone_hidden_size: int = 0

    @property
    def attention_scale(self) -> float:
        # math.sqrt is correctly rounded on every machine. `** -0.5` would call pow, which differs between C libraries.
        return 1.0 / math.sqrt(self.query_pre_attn_scalar)

    @cached_property
    def kv_owners(self) -> tuple[int, ...]:
        """The numbers of the layers that store KV rows. Every other layer reads the KV rows of one of these layers."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.kv_source == number)

    @cached_property
    def kv_layers(self) -> tuple[Layer, ...]:
        """The layers that store KV rows, in the order of `kv_owners`."""
        return tuple(self.layers[number] for number in self.kv_owners)

    @cached_property
    def kv_numbers(self) -> tuple[int, ...]:
        """For each layer of the model, the index in `kv_owners` of the layer whose KV rows the layer reads."""
        return tuple(self.kv_owners.index(layer.kv_source) for layer in self.layers)


def checked(config: Config, where: str) -> Config:
    """Check a config and return it. Raise ConfigError if the config has no layer, or layers that contradict each other."""
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
            raise ConfigError(
                f"{where}: layer {number} cannot read the KV rows of layer {layer.kv_source}, "
                f"which is not an earlier layer that stores KV rows"
            )
        source = config.layers[layer.kv_source]
        shapes = [(y.num_key_value_heads, y.head_dim, y.sliding_window, y.bidirectional) for y in (layer, source)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{where}: layer {number} reads the KV rows of layer {layer.kv_source}, "
                f"but the two layers differ in num_key_value_heads, head_dim, sliding_window or attention's direction"
            )
    _check_embedding(config, where)
    return config


def _check_embedding(config: Config, where: str) -> None:
    """Raise ConfigError if a dense layer does not have as many inputs as the step before it has outputs."""
    if config.embedding is None:
        return
    width = config.embedding.projection or config.hidden_size
    for number, (N, K) in enumerate(config.embedding.dense):
        if width != K:
            raise ConfigError(f"{where}: dense layer {number} of the embedding should have {width} inputs, found {K}")
        width = N
