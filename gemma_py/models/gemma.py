"""Gemma 1, 2 and 3, VaultGemma and EmbeddingGemma: tensor names, programs, and config readers for Hugging Face and GGUF.

Gemma 2 is Gemma 1 with soft caps, sliding windows, and norms after attention and after the feed-forward.
VaultGemma is Gemma 2 without the norms after attention and after the feed-forward.
Gemma 3 is Gemma 2 without soft caps, but with norms of queries and keys, and with another rope in sliding layers.
EmbeddingGemma is Gemma 3 with bidirectional attention. Instead of logits, the program computes the mean of a text's hidden
states, and then the dense layers.
"""

from itertools import pairwise

from gemma_py.errors import ConfigError, UnsupportedError
from gemma_py.models.config import Config, EmbeddingHead, Layer, Rope, checked
from gemma_py.models.family import Family, ModelDescription, dense_name
from gemma_py.models.fields import Fields
from gemma_py.models.program import LOGITS, WANTED, Program, Tensor

# --- tensors ----------------------------------------------------------------------------------------------------------

# The matrices of a layer. Columns: name in this package, name in Hugging Face, name in GGUF, and N and K of the shape
# [N, K]. D: width of hidden states, F: width of the feed-forward, E: width of a head, HE: number of query heads * E, GE:
# number of key/value heads * E.
MATRICES = (
    ("q_proj", "self_attn.q_proj", "attn_q", "HE", "D"),
    ("k_proj", "self_attn.k_proj", "attn_k", "GE", "D"),
    ("v_proj", "self_attn.v_proj", "attn_v", "GE", "D"),
    ("o_proj", "self_attn.o_proj", "attn_output", "D", "HE"),
    ("gate_proj", "mlp.gate_proj", "ffn_gate", "F", "D"),
    ("up_proj", "mlp.up_proj", "ffn_up", "F", "D"),
    ("down_proj", "mlp.down_proj", "ffn_down", "D", "F"),
)
# The norms of a layer. Columns: name in this package, name in Hugging Face, name in GGUF, width.
# In Gemma 1, post_attention_layernorm is Hugging Face's name of the norm before the feed-forward.
_GEMMA1_NORMS = (
    ("input_norm", "input_layernorm", "attn_norm", "D"),
    ("pre_feedforward_norm", "post_attention_layernorm", "ffn_norm", "D"),
)
LAYER_NORMS = (
    ("input_norm", "input_layernorm", "attn_norm", "D"),
    ("post_attention_norm", "post_attention_layernorm", "post_attention_norm", "D"),
    ("pre_feedforward_norm", "pre_feedforward_layernorm", "ffn_norm", "D"),
    ("post_feedforward_norm", "post_feedforward_layernorm", "post_ffw_norm", "D"),
)
HEAD_NORMS = (
    ("q_norm", "self_attn.q_norm", "attn_q_norm", "E"),
    ("k_norm", "self_attn.k_norm", "attn_k_norm", "E"),
)
_NORMS = {
    "gemma": _GEMMA1_NORMS,
    "gemma2": LAYER_NORMS,
    "vaultgemma": tuple(norm for norm in LAYER_NORMS if not norm[0].startswith("post_")),
    "gemma3": LAYER_NORMS + HEAD_NORMS,
    "gemma-embedding": LAYER_NORMS + HEAD_NORMS,
}
_GEMMA3 = ("gemma3", "gemma-embedding")  # model types whose sliding layers have another rope than full layers


def tensors(config: Config) -> dict[str, Tensor]:
    """Return the family's tensors by name, in the order in which they are packed."""
    D, V = config.hidden_size, config.vocab_size
    made = {"embed_tokens": Tensor((V, D), "embed_tokens.weight", "token_embd.weight")}
    if config.embedding is None:
        made["lm_head"] = Tensor((V, D), "lm_head.weight", "output.weight")
    made["norm"] = Tensor((D,), "norm.weight", "output_norm.weight", plus_one=True)
    made |= dense_tensors(config)
    for number, layer in enumerate(config.layers):
        E = layer.head_dim
        sizes = {"D": D, "F": layer.intermediate_size, "E": E}
        sizes |= {"HE": layer.num_attention_heads * E, "GE": layer.num_key_value_heads * E}
        for name, theirs, gguf, N, K in MATRICES:
            made[f"layers.{number}.{name}"] = Tensor(
                (sizes[N], sizes[K]), f"layers.{number}.{theirs}.weight", f"blk.{number}.{gguf}.weight"
            )
        for name, theirs, gguf, width in _NORMS[config.model_type]:
            made[f"layers.{number}.{name}"] = Tensor(
                (sizes[width],), f"layers.{number}.{theirs}.weight", f"blk.{number}.{gguf}.weight", plus_one=True
            )
    return made


def dense_tensors(config: Config) -> dict[str, Tensor]:
    """Return the matrices of the dense layers that follow the pooling of an embedding model."""
    shapes = config.embedding.dense if config.embedding else ()
    return {f"dense.{n}": Tensor(shape, dense_name(n), f"dense_{n + 2}.weight") for n, shape in enumerate(shapes)}


# --- the pass ---------------------------------------------------------------------------------------------------------


def write(p: Program) -> None:
    """Append the operations of a forward pass to the program.

    Buffers: `x` is the residual stream, `n` the output of a norm, `a` the output of the attention heads, `y` the output
    of o_proj or of down_proj, and `last` the rows of `n` of the tokens whose logits are wanted.
    """
    config, last = p.config, len(p.config.layers) - 1
    p.embed("embed_tokens", "x")
    p.rope_tables()
    p.norm("x", "n", "layers.0.input_norm")
    for number, layer in enumerate(config.layers):
        of = f"layers.{number}."
        heads = {"q": layer.num_attention_heads, "k": layer.num_key_value_heads}

        p.phase("query, key and value", number)
        for part in ("q", "k", "v"):
            p.matmul("n", part, f"{of}{part}_proj")
        p.phase("rope and kv", number)
        if config.model_type in _GEMMA3:
            for part in ("q", "k"):
                p.norm(part, part, f"{of}{part}_norm", heads[part])
        for part in ("q", "k"):
            p.rope(part, number, heads[part])
        p.store("k", "v", number)
        p.attend("q", "a", number, config.attention_scale, config.attn_logit_softcapping)
        p.phase("output", number)
        p.matmul("a", "y", f"{of}o_proj")

        p.phase("middle", number)
        p.add("x", "y", _present(p, f"{of}post_attention_norm"))
        p.norm("x", "n", f"{of}pre_feedforward_norm")
        p.phase("gate and up", number)
        p.matmul("n", "gate", f"{of}gate_proj")
        p.matmul("n", "up", f"{of}up_proj")
        p.phase("down input", number)
        p.gelu_gate("gate", "up")
        p.phase("down", number)
        p.matmul("gate", "y", f"{of}down_proj")
        p.phase("end", number)
        p.add("x", "y", _present(p, f"{of}post_feedforward_norm"))
        p.norm("x", "n", "norm" if number == last else f"layers.{number + 1}.input_norm")
    if config.embedding is not None:
        embedding_head(p)
        return
    p.phase("end", last, WANTED)
    p.take("n", "last")
    p.phase("head", last + 1, WANTED)
    p.matmul("last", LOGITS, "lm_head", config.final_logit_softcapping)


def embedding_head(p: Program) -> None:
    """Append to the program: one mean of the rows of buffer `n` for each text, and the matrix products that follow.

    EmbeddingGemma 2 is defined as the mean of projected hidden states. A projection is linear, so the projection of the
    mean equals the mean of the projections. This program projects the mean, because this takes one product for a text
    instead of one for each token.
    """
    dense = len(p.config.embedding.dense) if p.config.embedding else 0
    matrices = [name for name in ("embedding_projection", *(f"dense.{n}" for n in range(dense))) if name in p.tensors]
    buffers = ["mean", *matrices]
    buffers[-1] = LOGITS
    p.phase("end", len(p.config.layers) - 1, WANTED)
    p.mean("n", buffers[0])
    for matrix, (source, target) in zip(matrices, pairwise(buffers), strict=True):
        p.phase("dense", len(p.config.layers), WANTED)
        p.matmul(source, target, matrix)


def _present(p: Program, gain: str) -> str:
    """Return the name of the norm's gain, or "" if the model type has no such norm."""
    return gain if gain in p.tensors else ""


# --- Hugging Face -----------------------------------------------------------------------------------------------------

SLIDING, FULL = "sliding_attention", "full_attention"
# The defaults of transformers. The text_config of a multimodal checkpoint leaves out fields that have these values.
_DEFAULTS = {
    "gemma": {"vocab_size": 256_000, "head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 16,
              "max_position_embeddings": 8192},
    "gemma2": {"vocab_size": 256_000, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
               "max_position_embeddings": 8192},
    "vaultgemma": {"vocab_size": 256_000, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
                   "max_position_embeddings": 8192},
    "gemma3": {"vocab_size": 262_208, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
               "max_position_embeddings": 131_072},
}  # fmt: skip
_DEFAULTS["gemma-embedding"] = _DEFAULTS["gemma3"]
# The default soft caps by model type. For a model type that is not listed, soft caps in the config are ignored, as in
# transformers.
_CAPS: dict[str, dict[str, float | None]] = {
    "attn_logit_softcapping": {"gemma2": 50.0, "vaultgemma": 50.0},
    "final_logit_softcapping": {"gemma2": 30.0, "vaultgemma": 30.0, "gemma3": None},
}


def config_from_hf(description: ModelDescription) -> Config:
    """Read a config.json, as old and current versions of transformers write it."""
    kind, fields, outer = description.name, description.fields, description.outer
    where = outer.where
    check_text_model(description)
    if fields.flag("use_bidirectional_attention", False):
        if kind != "gemma3":
            raise UnsupportedError(f"{where}: use_bidirectional_attention is set, which only gemma3_text supports")
        kind = "gemma-embedding"
    default = _DEFAULTS[kind]

    def dimension(name: str) -> int:
        value: int = fields.integer(name, default[name]) if name in default else fields.integer(name)
        return value

    head_dim = dimension("head_dim")
    ropes = ropes_from_hf(fields, kind)
    embedding = EmbeddingHead(description.dense) if kind == "gemma-embedding" else None
    layers = tuple(
        Layer(window, ropes[FULL if window is None else SLIDING], dimension("num_attention_heads"),
              dimension("num_key_value_heads"), head_dim, fields.integer("intermediate_size"), number,
              bidirectional=embedding is not None)
        for number, window in enumerate(_windows_from_hf(fields, kind))
    )  # fmt: skip
    config = Config(
        model_type=kind,
        vocab_size=dimension("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        max_position_embeddings=dimension("max_position_embeddings"),
        query_pre_attn_scalar=float(head_dim) if kind == "gemma" else fields.number("query_pre_attn_scalar", 256.0),
        attn_logit_softcapping=_cap_from_hf(fields, kind, "attn_logit_softcapping"),
        final_logit_softcapping=_cap_from_hf(fields, kind, "final_logit_softcapping"),
        layers=layers,
        **description.common_from_hf(),
        embedding=embedding,
    )
    return checked(config, where)


def check_text_model(description: ModelDescription) -> None:
    fields, outer, where = description.fields, description.outer, description.outer.where
    if fields.flag("attention_bias", False):
        raise UnsupportedError(f"{where}: attention_bias should be false, found true")
    # Gemma 1 checkpoints have "gelu" in hidden_act although the models were trained with gelu_pytorch_tanh.
    for name in ("hidden_activation", "hidden_act") if description.name == "gemma" else ("hidden_activation",):
        activation = fields.text(name, "gelu_pytorch_tanh")
        if activation not in ("gelu_pytorch_tanh", "gelu" if name == "hidden_act" else ""):
            raise UnsupportedError(f"{where}: {name} should be 'gelu_pytorch_tanh', found {activation!r:.40}")
    if fields.values.get("quantization_config") or outer.values.get("quantization_config"):
        raise UnsupportedError(
            f"{where}: quantization_config is set, but only unquantised safetensors are supported; use a GGUF file"
        )


def _cap_from_hf(fields: Fields, kind: str, name: str) -> float | None:
    """Return the soft cap of this name, or None. In config.json, null means no cap, and a missing field means the default."""
    if kind not in _CAPS[name]:
        return None
    if name in fields.values and fields.values[name] is None:
        return None
    value: float | None = fields.number(name, _CAPS[name][kind])
    return value


def _windows_from_hf(fields: Fields, kind: str) -> list[int | None]:
    """Return the sliding window of each layer; None for full attention."""
    count = fields.layer_count("num_hidden_layers")
    if kind == "gemma":
        return [None] * count
    window = fields.integer("sliding_window", 4096)
    types = fields.values.get("layer_types")
    if types is None:
        pattern = fields.integer("sliding_window_pattern", 6 if kind in _GEMMA3 else 2)
        types = [SLIDING if number % pattern else FULL for number in range(1, count + 1)]
    if not isinstance(types, list) or len(types) != count or not all(entry in (SLIDING, FULL) for entry in types):
        fields.fail("layer_types", f"a list of {count} entries, each {SLIDING} or {FULL}")
    window = reach_of_width(window) if kind == "gemma-embedding" else window
    return [window if entry == SLIDING else None for entry in types]


def reach_of_width(width: int) -> int:
    """Return `Layer.sliding_window` of a bidirectional layer, given the window in a checkpoint's file.

    A width of 512 means that a query reaches 256 positions in each direction. `Layer.sliding_window` also counts the
    query's own position and is 257.
    """
    return width // 2 + 1


def ropes_from_hf(fields: Fields, kind: str) -> dict[str, Rope]:
    """Return the rope of full layers and the rope of sliding layers.

    Current versions of transformers write rope_parameters, which for Gemma 3 has one object per layer type. Older
    versions wrote rope_theta, rope_local_base_freq and rope_scaling. For Gemma 3, rope_scaling applies to full layers.
    """
    parameters = fields.table("rope_parameters") or Fields(f"{fields.where}: rope_parameters", {})
    scaling = fields.table("rope_scaling")
    if kind not in _GEMMA3:
        table = parameters if scaling is None else scaling  # as in transformers, rope_scaling takes precedence
        rope = _rope(table, table.number("rope_theta", fields.number("rope_theta", 10_000.0)))
        return {FULL: rope, SLIDING: rope}
    full = parameters.table(FULL) or Fields(parameters.where, {})
    sliding = parameters.table(SLIDING) or Fields(parameters.where, {})
    full_theta = full.number("rope_theta", fields.number("rope_theta", 1_000_000.0))
    sliding_theta = sliding.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))
    return {FULL: _rope(full if scaling is None else scaling, full_theta), SLIDING: _rope(sliding, sliding_theta)}


def _rope(fields: Fields, theta: float) -> Rope:
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, fields.number("factor"))
    raise UnsupportedError(f"{fields.where}: rope_type should be 'default' or 'linear', found {kind!r:.40}")


# --- GGUF -------------------------------------------------------------------------------------------------------------


def config_from_gguf(description: ModelDescription) -> Config:
    """Read a config from GGUF metadata. Missing fields get the values that llama.cpp uses."""
    kind, fields, outer = description.name, description.fields, description.outer
    where = outer.where
    embedding = EmbeddingHead(description.dense) if kind == "gemma-embedding" else None
    check_direction(description, kind == "gemma-embedding")
    layer_count = fields.layer_count("block_count")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    kv_heads = fields.integer("attention.head_count_kv", heads)
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{where}: attention.value_length should be {head_dim}, as attention.key_length is")
    full, sliding = ropes_from_gguf(fields, kind)
    layers = tuple(
        Layer(window, full if window is None else sliding, heads, kv_heads, head_dim,
              fields.integer("feed_forward_length"), number, bidirectional=embedding is not None)
        for number, window in enumerate(_windows_from_gguf(fields, kind, layer_count))
    )  # fmt: skip
    # Gemma 2 27B and Gemma 3 27B scale attention by (hidden / heads)^-0.5, the other models by head_dim^-0.5. GGUF metadata
    # do not tell which, so the models are recognised by their numbers of layers, 46 and 62.
    wide = (kind, layer_count) in (("gemma2", 46), ("gemma3", 62))
    config = Config(
        model_type=kind,
        query_pre_attn_scalar=hidden / heads if wide else float(head_dim),
        attn_logit_softcapping=_cap_from_gguf(fields, kind, "attn_logit_softcapping"),
        final_logit_softcapping=_cap_from_gguf(fields, kind, "final_logit_softcapping"),
        layers=layers,
        **description.common_from_gguf(),
        embedding=embedding,
    )
    return checked(config, where)


_MEAN = 1  # the number in pooling_type that means the mean of all hidden states


def check_direction(description: ModelDescription, embeds: bool) -> None:
    """Raise an error if the direction of attention, the pooling or the dense layers in a GGUF file are wrong for the model.

    embeds: whether the model is an embedding model, which has bidirectional attention and mean pooling. Any other model
    has causal attention and no dense layers.
    """
    fields, where = description.fields, description.outer.where
    if fields.flag("attention.causal", not embeds) is embeds:
        found = "true" if embeds else f"false; {description.name} is no architecture of embedding models"
        raise UnsupportedError(f"{where}: attention.causal should be {str(not embeds).lower()}, found {found}")
    if description.dense and not embeds:
        raise ConfigError(f"{where}: the dense layers of an embedding are not part of a {description.name} model")
    pooling = fields.integer("pooling_type", _MEAN, least=0)
    if embeds and pooling != _MEAN:
        raise UnsupportedError(f"{where}: pooling_type should be 1 (mean), found {pooling}")
    for layer in ("dense_2", "dense_3"):
        tensor, sizes = f"{layer}.weight", (f"{layer}_feat_out", f"{layer}_feat_in")
        if tensor in description.tensors:
            for name, size in zip(sizes, description.tensors[tensor].shape, strict=True):
                if fields.integer(name, size) != size:
                    raise ConfigError(f"{where}: {name} should be {size}, as in tensor {tensor}")
        elif any(fields.values.get(name) is not None for name in sizes):
            raise ConfigError(f"{where}: tensor {tensor} is missing, although {sizes[0]} or {sizes[1]} is set")


def _cap_from_gguf(fields: Fields, kind: str, name: str) -> float | None:
    if kind not in _CAPS[name]:
        return None
    cap: float | None = fields.number(name, _CAPS[name][kind])
    return cap


def _windows_from_gguf(fields: Fields, kind: str, count: int) -> list[int | None]:
    if kind == "gemma":
        return [None] * count
    window = fields.integer("attention.sliding_window", 4096 if kind == "gemma2" else None)
    if window is None:
        raise ConfigError(f"{fields.where}: {kind}.attention.sliding_window is missing")
    window = reach_of_width(window) if kind == "gemma-embedding" else window
    flags = fields.flags("attention.sliding_window_pattern", count, 2 if kind == "gemma2" else 6)
    return [window if flag else None for flag in flags]


def ropes_from_gguf(fields: Fields, kind: str) -> tuple[Rope, Rope]:
    """Return the rope of full layers and the rope of sliding layers. For Gemma 3, scaling applies to full layers only."""
    scaling = fields.text("rope.scaling.type", None)
    named = next((name for name in ("rope.scaling.factor", "rope.scale_linear") if fields.values.get(name)), None)
    # Some files store 0 for a missing factor.
    factor = 1.0 if named is None else fields.number(named)
    if scaling not in (None, "none", "linear"):
        raise UnsupportedError(f"{fields.where}: rope.scaling.type should be 'none' or 'linear', found {scaling!r:.40}")
    theta = fields.number("rope.freq_base", 1e6 if kind in _GEMMA3 else 1e4)
    full = Rope(theta, 1.0 if scaling == "none" else factor)
    if kind not in _GEMMA3:
        return full, full
    return full, Rope(fields.number("rope.freq_base_swa", 10_000.0))


# ShieldGemma 1 has Gemma 2's model type; MedGemma and FunctionGemma have those of Gemma 3.
_MODEL_TYPES = {"gemma": "gemma", "gemma2": "gemma2", "vaultgemma": "vaultgemma", "gemma3": "gemma3",
                "gemma3_text": "gemma3", "shieldgemma2": "gemma3"}  # fmt: skip
FAMILY = Family(
    model_types=_MODEL_TYPES,
    architectures=("gemma", "gemma2", "gemma3", "gemma-embedding"),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    tensors=tensors,
    write=write,
)
