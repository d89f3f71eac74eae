"""EmbeddingGemma 2, text: tensor names, the program of a forward pass, and config readers for Hugging Face and GGUF.

The layers are those of Gemma 4's models with per-layer inputs, but attention is bidirectional, every layer stores its own KV
rows, and the per-layer inputs are only a projection of the token's embedding, without a table.

The embedding of a text is a projection of the mean of the hidden states.
"""

from gemma_py.errors import UnsupportedError
from gemma_py.models.config import Config, EmbeddingHead, Layer, Rope, checked
from gemma_py.models.family import Family, ModelDescription
from gemma_py.models.gemma import (
    FULL,
    HEAD_NORMS,
    LAYER_NORMS,
    MATRICES,
    SLIDING,
    check_direction,
    check_text_model,
    dense_tensors,
    embedding_head,
    reach_of_width,
)
from gemma_py.models.gemma4 import (
    PER_LAYER_INPUT,
    head_shapes,
    head_width,
    layer_types,
    project_inputs,
    queries_keys_values,
    rest_of_layer,
    ropes_by_type,
)
from gemma_py.models.program import Program, Tensor

_ARCHITECTURE = "gemma-embedding2"


def tensors(config: Config) -> dict[str, Tensor]:
    """Return the family's tensors by name, in the order in which they are packed."""
    D, P, L = config.hidden_size, config.hidden_size_per_layer_input, len(config.layers)
    assert config.embedding is not None and config.embedding.projection is not None
    made = {
        "embed_tokens": Tensor((config.vocab_size, D), "embed_tokens.weight", "token_embd.weight"),
        "norm": Tensor((D,), "norm.weight", "output_norm.weight"),
        "per_layer_model_projection": Tensor(
            (L * P, D), "ple.per_layer_model_projection.weight", "per_layer_model_proj.weight"
        ),
        "per_layer_projection_norm": Tensor((P,), "ple.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
        "embedding_projection": Tensor(
            (config.embedding.projection, D), "embedding_projection.weight", "output.weight"
        ),
        **dense_tensors(config),
    }
    block = [(name, f"ple_block.{theirs}", *rest) for name, theirs, *rest in PER_LAYER_INPUT]
    for number, layer in enumerate(config.layers):
        E = layer.head_dim
        sizes = {"D": D, "F": layer.intermediate_size, "E": E, "P": P}
        sizes |= {"HE": layer.num_attention_heads * E, "GE": layer.num_key_value_heads * E}
        for name, theirs, gguf, *letters in (*MATRICES, *LAYER_NORMS, *HEAD_NORMS, *block):
            made[f"layers.{number}.{name}"] = Tensor(
                tuple(sizes[letter] for letter in letters),
                f"layers.{number}.{theirs}.weight",
                f"blk.{number}.{gguf}.weight",
            )
        made[f"layers.{number}.scalar"] = Tensor(
            (1,), f"layers.{number}.layer_scalar", f"blk.{number}.layer_output_scale.weight"
        )
    return made


def write(p: Program) -> None:
    """Append the operations of a forward pass to the program. The docstring of `write` in gemma4.py names the buffers."""
    p.embed("embed_tokens", "x")
    p.rope_tables()
    project_inputs(p, "own")
    p.norm("x", "n", "layers.0.input_norm")
    for number in range(len(p.config.layers)):
        queries_keys_values(p, number, ("q", "k", "v"))
        rest_of_layer(p, number)
    embedding_head(p)


_DEFAULT_ROPES = {FULL: Rope(1_000_000.0), SLIDING: Rope(10_000.0)}


def config_from_hf(description: ModelDescription) -> Config:
    """Read a config.json. Missing fields have the defaults of transformers."""
    fields = description.fields
    check_text_model(description)
    types = layer_types(fields, 24, fields.integer("sliding_window_pattern", 6))
    usual = fields.integer("num_key_value_heads", 2), fields.integer("head_dim", 256)
    full = fields.integer("num_global_key_value_heads", 1), fields.integer("global_head_dim", 512)
    ropes = ropes_by_type(fields, _DEFAULT_ROPES)
    window = fields.integer("sliding_window", 512) + 1  # the file's number does not count the query's own position
    layers = tuple(
        Layer(window if kind == SLIDING else None, ropes[kind], fields.integer("num_attention_heads", 4), kv_heads,
              head_dim, fields.integer("intermediate_size", 2048), number, bidirectional=True)
        for number, (kind, (kv_heads, head_dim)) in enumerate(
            zip(types, head_shapes(fields, types, usual, full), strict=True))
    )  # fmt: skip
    config = Config(
        model_type=description.name,
        vocab_size=fields.integer("vocab_size", 262_144),
        hidden_size=fields.integer("hidden_size", 512),
        max_position_embeddings=fields.integer("max_position_embeddings", 262_144),
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layers=layers,
        **description.common_from_hf(),
        hidden_size_per_layer_input=fields.integer("hidden_size_per_layer_input", 512),
        embedding=EmbeddingHead(description.dense, fields.integer("embedding_dim", 768)),
    )
    return checked(config, description.outer.where)


def config_from_gguf(description: ModelDescription) -> Config:
    fields, where = description.fields, description.outer.where
    check_direction(description, embeds=True)
    count = fields.layer_count("block_count")
    if fields.integer("attention.shared_kv_layers", 0, least=0):
        raise UnsupportedError(f"{where}: attention.shared_kv_layers should be 0, because every layer has KV rows")
    types = [SLIDING if flag else FULL for flag in fields.flags("attention.sliding_window_pattern", count, 6)]
    widths = {FULL: head_width(fields, ""), SLIDING: head_width(fields, "_swa")}
    ropes = {FULL: Rope(fields.number("rope.freq_base")), SLIDING: Rope(fields.number("rope.freq_base_swa"))}
    heads = fields.integers("attention.head_count", count)
    kv_heads = fields.integers("attention.head_count_kv", count)
    feed_forward = fields.integers("feed_forward_length", count)
    window = reach_of_width(fields.integer("attention.sliding_window"))
    layers = tuple(
        Layer(window if kind == SLIDING else None, ropes[kind], heads[number], kv_heads[number], widths[kind],
              feed_forward[number], number, bidirectional=True)
        for number, kind in enumerate(types)
    )  # fmt: skip
    # Files have a tensor output.weight, but it is the projection of the embedding, not an output head.
    common = description.common_from_gguf() | {"tie_word_embeddings": True}
    config = Config(
        model_type=description.name,
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layers=layers,
        **common,
        hidden_size_per_layer_input=fields.integer("embedding_length_per_layer_input"),
        embedding=EmbeddingHead(description.dense, fields.integer("embedding_length_out", common["hidden_size"])),
    )
    return checked(config, where)


FAMILY = Family(
    model_types=dict.fromkeys(("embedding_gemma2", "embedding_gemma2_text"), _ARCHITECTURE),
    architectures=(_ARCHITECTURE,),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    tensors=tensors,
    write=write,
)
