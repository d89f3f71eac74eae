"""Gemma 4's assistants: tensor names, the program of a step, and config readers for Hugging Face and GGUF.

An assistant guesses tokens for the Gemma 4 model with which it was trained, the main model. An assistant has a few layers,
which compute no keys and values. The assistant's sliding layers read the KV rows of the main model's last sliding layer that
stores KV rows, and the full layers those of the last such full layer. So an assistant is like more layers of the main model.

A step takes a token, and the previous token's hidden state, which is the output of the final norm. To guess several tokens,
the assistant runs several steps. The first step takes the main model's hidden state, and each later step takes the hidden
state that the previous step returned. B is the main model's hidden size:

    x = pre_projection [embedding of the token in the main model * sqrt(B), hidden state]
    x = the layers of x, with queries at the position of the first step's token, which see the KV rows before this position
    y = RMSNorm(x);  logits = output matrix y;  the hidden state for the next step = post_projection y

Assistants of small models (E2B, E4B) can restrict the logits to the tokens of a few clusters, which saves time. Here, the
logits of all tokens are computed, as in llama.cpp.
"""

import math
from dataclasses import replace

from gemma_py.errors import ConfigError, InputError, UnsupportedError
from gemma_py.models.config import Config, Layer, Rope
from gemma_py.models.family import Family, ModelDescription
from gemma_py.models.fields import Fields
from gemma_py.models.gemma import FULL, LAYER_NORMS, MATRICES, SLIDING, check_text_model
from gemma_py.models.gemma4 import DEFAULT_ROPES, head_shapes, head_width, layer_types, rope_share, ropes_by_type
from gemma_py.models.program import LOGITS, WANTED, Program, Tensor

# The names of the two inputs of a step, which are copied to buffers before the step: the token's row of the main model's
# embedding matrix, and the hidden state.
BACKBONE_EMBEDDING, HIDDEN_STATE = "backbone embedding", "hidden state"
NEXT_HIDDEN = "next hidden"  # the buffer with the hidden state for the next step
_NO_SOURCE = -1  # the `kv_source` of a layer that reads KV rows of the main model
_ABSENT = ("k_proj", "v_proj")
_HEAD_NORM = ("q_norm", "self_attn.q_norm", "attn_q_norm", "E")


def tensors(config: Config) -> dict[str, Tensor]:
    """Return the assistant's tensors by name, in the order in which they are packed."""
    D, V, B = config.hidden_size, config.vocab_size, config.backbone_hidden_size
    made = {
        "embed_tokens": Tensor((V, D), "embed_tokens.weight", "token_embd.weight"),
        "lm_head": Tensor((V, D), "lm_head.weight", "output.weight"),
        "norm": Tensor((D,), "norm.weight", "output_norm.weight"),
        "pre_projection": Tensor((D, 2 * B), "pre_projection.weight", "nextn.pre_projection.weight"),
        "post_projection": Tensor((B, D), "post_projection.weight", "nextn.post_projection.weight"),
    }
    for number, layer in enumerate(config.layers):
        sizes = {"D": D, "F": layer.intermediate_size, "E": layer.head_dim}
        sizes["HE"] = layer.num_attention_heads * layer.head_dim
        for name, theirs, gguf, *letters in (*MATRICES, *LAYER_NORMS, _HEAD_NORM):
            if name not in _ABSENT:
                shape = tuple(sizes[letter] for letter in letters)
                made[f"layers.{number}.{name}"] = Tensor(
                    shape, f"layers.{number}.{theirs}.weight", f"blk.{number}.{gguf}.weight"
                )
        made[f"layers.{number}.scalar"] = Tensor(
            (1,), f"layers.{number}.layer_scalar", f"blk.{number}.layer_output_scale.weight"
        )
    return made


def unused(config: Config) -> frozenset[str]:
    """Return the names of tensors that a checkpoint may have although a step does not use them.

    These are the clusters of tokens, and a GGUF file's divisors of rope frequencies, which only the config reader needs.
    """
    return frozenset(("masked_embedding.centroids.weight", "masked_embedding.token_ordering", "rope_freqs.weight"))


def joined(assistant: Config, main: Config, where: str) -> Config:
    """Return the config of an assistant whose layers follow those of the main model. where: the assistant's file.

    A layer gets the number of key/value heads of the main model's layer whose KV rows it reads. A query sees the rows that the
    main model's cache keeps for the next token. For a sliding layer, the cache keeps window - 1 rows, because the window
    includes the row of the next token itself.
    """
    for name, expected, found in (
        ("hidden_size", main.hidden_size, assistant.backbone_hidden_size),
        ("vocab_size", main.vocab_size, assistant.vocab_size),
    ):
        if expected != found:
            raise InputError(f"{where}: the assistant needs a main model with {name} {found}, found {expected}")
    layers = []
    for number, layer in enumerate(assistant.layers):
        sliding = layer.sliding_window is not None
        owners = [n for n in main.kv_owners if (main.layers[n].sliding_window is not None) == sliding]
        rows = main.layers[owners[-1]] if owners else layer
        window = rows.sliding_window
        fits = rows.head_dim == layer.head_dim and layer.num_attention_heads % rows.num_key_value_heads == 0
        if not owners or not fits or window == 1:
            rows_found = (
                f"width {rows.head_dim}, {rows.num_key_value_heads} heads, window {window}" if owners else "none"
            )
            raise InputError(
                f"{where}: layer {number} of the assistant needs a layer of the main model with the same kind of window, heads of width "
                f"{layer.head_dim}, a number of key/value heads that divides {layer.num_attention_heads}, and a window above 1, found "
                f"{rows_found}"
            )
        layers.append(
            replace(
                layer,
                num_key_value_heads=rows.num_key_value_heads,
                sliding_window=None if window is None else window - 1,
                kv_source=owners[-1],
            )
        )
    return replace(assistant, layers=(*main.layers, *layers))


# --- the step ---------------------------------------------------------------------------------------------------------


def program(assistant: Config, main: Config, where: str) -> Program:
    """Return the program of a step for an assistant of this main model."""
    B = assistant.backbone_hidden_size
    inputs = {
        BACKBONE_EMBEDDING: Tensor((main.vocab_size, B), "", "", gathered=True),
        HIDDEN_STATE: Tensor((1, B), "", "", gathered=True),
    }
    made = Program(joined(assistant, main, where), tensors(assistant) | inputs)
    made.embed(BACKBONE_EMBEDDING, "e", math.sqrt(B))
    made.embed(HIDDEN_STATE, "h", 1.0)
    made.put("e", "pair", 0, 2 * B)
    made.put("h", "pair", B, 2 * B)
    made.rope_tables()
    made.phase("pre-projection", len(main.layers))
    made.matmul("pair", "x", "pre_projection")
    made.norm("x", "n", "layers.0.input_norm")
    for number in range(len(assistant.layers)):
        _layer(made, number, len(main.layers), len(assistant.layers))
    last = len(made.config.layers)
    made.phase("wanted rows", last, WANTED)
    made.take("n", "n wanted")
    made.phase("head", last, WANTED)
    made.matmul("n wanted", LOGITS, "lm_head")
    made.matmul("n wanted", NEXT_HIDDEN, "post_projection")
    return made


def _layer(p: Program, number: int, before: int, count: int) -> None:
    """Append the operations of the assistant's layer `number` of `count`, and the norm after this layer.

    before: the number of layers of the main model, which stand before the assistant's in `config.layers`
    """
    at, of = before + number, f"layers.{number}."
    layer = p.config.layers[at]
    p.phase("query", at)
    p.matmul("n", "q", f"{of}q_proj")
    p.phase("rope", at)
    p.norm("q", "q", f"{of}q_norm", layer.num_attention_heads)
    p.rope("q", at, layer.num_attention_heads)
    p.attend("q", "a", at, p.config.attention_scale)
    p.phase("output", at)
    p.matmul("a", "y", f"{of}o_proj")
    p.phase("middle", at)
    p.add("x", "y", f"{of}post_attention_norm")
    p.norm("x", "n", f"{of}pre_feedforward_norm")
    p.phase("gate and up", at)
    p.matmul("n", "gate", f"{of}gate_proj")
    p.matmul("n", "up", f"{of}up_proj")
    p.phase("down input", at)
    p.gelu_gate("gate", "up")
    p.phase("down", at)
    p.matmul("gate", "y", f"{of}down_proj")
    p.phase("end", at)
    p.add("x", "y", f"{of}post_feedforward_norm")
    p.scale("x", f"{of}scalar")
    p.norm("x", "n", "norm" if number == count - 1 else f"layers.{number + 1}.input_norm")


def _write(p: Program) -> None:
    raise UnsupportedError("an assistant only guesses tokens for another model, and generates no text alone")


# --- Hugging Face -----------------------------------------------------------------------------------------------------

# Defaults for missing fields. Those for heads and widths are the defaults of transformers' Gemma4TextConfig.
_COUNT, _HEADS, _KV_HEADS, _WIDTH = 4, 8, 4, 256


def config_from_hf(description: ModelDescription) -> Config:
    """Read a config.json, whose text_config describes the layers."""
    fields, outer, where = description.fields, description.outer, description.outer.where
    check_text_model(description)
    for name, wanted in (
        ("hidden_size_per_layer_input", 0),
        ("enable_moe_block", False),
        ("use_double_wide_mlp", False),
    ):
        if fields.values.get(name, wanted) not in (wanted, None):
            raise UnsupportedError(f"{where}: {name} of an assistant should be {wanted}")
    types = layer_types(fields, _COUNT)
    usual = (fields.integer("num_key_value_heads", _KV_HEADS), fields.integer("head_dim", _WIDTH))
    shapes = head_shapes(fields, types, usual, (usual[0], fields.integer("global_head_dim", 512)))
    ropes, window = ropes_by_type(fields, DEFAULT_ROPES), fields.integer("sliding_window", 512)
    layers = tuple(
        Layer(window if kind == SLIDING else None, ropes[kind], fields.integer("num_attention_heads", _HEADS), kv_heads,
              head_dim, fields.integer("intermediate_size", 9216), _NO_SOURCE)
        for kind, (kv_heads, head_dim) in zip(types, shapes, strict=True)
    )  # fmt: skip
    return Config(
        model_type=description.name,
        vocab_size=fields.integer("vocab_size", 262_144),
        hidden_size=fields.integer("hidden_size", 2304),
        max_position_embeddings=fields.integer("max_position_embeddings", 131_072),
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layers=layers,
        backbone_hidden_size=outer.integer("backbone_hidden_size", 1536),
        **description.common_from_hf(),
    )


# --- GGUF -------------------------------------------------------------------------------------------------------------


def config_from_gguf(description: ModelDescription) -> Config:
    fields, where = description.fields, description.outer.where
    count = fields.layer_count("block_count")
    if fields.integer("nextn_predict_layers", count) != count:
        raise ConfigError(f"{where}: nextn_predict_layers should be {count}, as block_count is")
    types = [SLIDING if flag else FULL for flag in fields.flags("attention.sliding_window_pattern", count)]
    widths = {FULL: head_width(fields, ""), SLIDING: head_width(fields, "_swa")}
    ropes = {
        FULL: Rope(fields.number("rope.freq_base", 1e6), share=rope_share(description, widths[FULL])),
        SLIDING: Rope(fields.number("rope.freq_base_swa", 1e4)),
    }
    heads, kv_heads = fields.integers("attention.head_count", count), _kv_heads(fields, count)
    feed_forward, window = fields.integers("feed_forward_length", count), fields.integer("attention.sliding_window")
    layers = tuple(
        Layer(window if kind == SLIDING else None, ropes[kind], heads[number], kv_heads[number], widths[kind],
              feed_forward[number], _NO_SOURCE)
        for number, kind in enumerate(types)
    )  # fmt: skip
    return Config(
        model_type=description.name,
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layers=layers,
        backbone_hidden_size=fields.integer("embedding_length_out"),
        **description.common_from_gguf(),
    )


def _kv_heads(fields: Fields, count: int) -> list[int]:
    """Return the number of key/value heads of each layer, which `joined` replaces by those of the main model."""
    return (
        fields.integers("attention.head_count_kv", count) if "attention.head_count_kv" in fields.values else [1] * count
    )


_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
FAMILY = Family(
    model_types=dict.fromkeys(_MODEL_TYPES, "gemma4-assistant"),
    architectures=("gemma4-assistant",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    tensors=tensors,
    write=_write,
    unused=unused,
)
