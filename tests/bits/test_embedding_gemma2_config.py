from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_checkpoints as tiny
import tiny_families
from gguf_files import write_model

from gemma_py import reference
from gemma_py.checks import shapes
from gemma_py.errors import ConfigError, GemmaError, InputError
from gemma_py.formats.blocks import F32
from gemma_py.formats.tensor import StoredTensor
from gemma_py.generate import embedding
from gemma_py.models import families
from gemma_py.models.config import Config
from gemma_py.weights.checkpoint import open_checkpoint
from gemma_py.weights.modules import Modules

PLAIN = tiny_families.VARIANTS["embeddinggemma2"]
# The metadata that llama.cpp's converter writes for PLAIN. Layers 2 and 6 have full attention.
METADATA: dict[str, Any] = {
    "general.architecture": "gemma-embedding2", "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.bos_token_id": 2,
    **{f"gemma-embedding2.{name}": value for name, value in {
        "block_count": 7, "context_length": 128, "embedding_length": 32, "embedding_length_out": 20,
        "embedding_length_per_layer_input": 6, "feed_forward_length": 48, "attention.head_count": 4,
        "attention.head_count_kv": [2, 2, 1, 2, 2, 2, 1], "attention.key_length": 24, "attention.value_length": 24,
        "attention.key_length_swa": 12, "attention.value_length_swa": 12, "rope.dimension_count": 24,
        "rope.dimension_count_swa": 12, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 18, "attention.shared_kv_layers": 0,
        "attention.sliding_window_pattern": [True, True, False, True, True, True, False],
        "attention.causal": False, "pooling_type": 1}.items()},
}  # fmt: skip


def from_hf(config: dict[str, Any], dense: families.Shapes = ()) -> Config:
    return families.config_from_hf(config, "config.json", dense=dense)[1]


def from_gguf(changes: dict[str, Any], tensors: dict[str, StoredTensor] | None = None) -> Config:
    return families.config_from_gguf(METADATA | changes, "file", 64, False, tensors or {})[1]


def test_a_config_is_the_same_from_every_form() -> None:
    config = from_hf(PLAIN.config)
    assert from_gguf({}) == config
    without_type = {key: value for key, value in PLAIN.config.items() if key != "model_type"}
    for text in (PLAIN.config, without_type):
        assert from_hf({"model_type": "embedding_gemma2", "text_config": text}) == config
    old = {key: value for key, value in PLAIN.config.items() if key != "per_layer_config"}
    assert from_hf(old | {"global_head_dim": 24}) == config
    assert from_hf(old | {"global_head_dim": 24, "num_global_key_value_heads": 2}) != config
    assert [layer.head_dim for layer in config.layers] == [12, 12, 24, 12, 12, 12, 24]
    assert [layer.num_key_value_heads for layer in config.layers] == [2, 2, 1, 2, 2, 2, 1]
    # A query sees nine keys on either side and its own.
    assert [layer.sliding_window for layer in config.layers] == [10, 10, None, 10, 10, 10, None]
    assert all(layer.bidirectional for layer in config.layers)


def test_missing_fields_have_the_values_of_the_released_model() -> None:
    assert from_hf({"model_type": "embedding_gemma2"}) == shapes.config_of("embeddinggemma-2")[1]
    every_third = from_hf({"model_type": "embedding_gemma2_text", "sliding_window_pattern": 3, "num_hidden_layers": 4})
    assert [layer.sliding_window for layer in every_third.layers] == [513, 513, None, None]


HOSTILE = [
    ({"per_layer_config": {"7": {"head_dim": 24}}}, "'7' should be the number of a layer, from 0 to 6"),
    ({"per_layer_config": {"2": {"head_dim": 25}}}, "head_dim should be even"),
    ({"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "should be a multiple of num_key_value_heads 3"),
    ({"per_layer_config": {"2": {"sliding_window": 4}}}, "'sliding_window' is not supported"),
    ({"layer_types": ["full_attention"] * 6}, "a list of 7 entries"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers should be at most"),
    ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input should be"),
    ({"hidden_size_per_layer_input": -6}, "hidden_size_per_layer_input should be"),
    ({"embedding_dim": 0}, "embedding_dim should be"),
    ({"embedding_dim": "20"}, "embedding_dim should be"),
    ({"sliding_window": 0}, "sliding_window should be"),
    ({"sliding_window": 1 << 31}, "sliding_window should be"),
    ({"sliding_window_pattern": 0}, "sliding_window_pattern should be"),
    ({"attention_bias": True}, "attention_bias should be false"),
    ({"hidden_activation": "silu"}, "hidden_activation should be"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[message for _, message in HOSTILE])
def test_hostile_configs_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GemmaError) as error:
        from_hf(PLAIN.config | change)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_first_dense_layer_reads_the_projection() -> None:
    assert from_hf(PLAIN.config, ((40, 20), (8, 40))).embedding == families.embedding_gemma2.EmbeddingHead(
        ((40, 20), (8, 40)), 20
    )
    with pytest.raises(ConfigError, match="dense layer 0 of the embedding should have 20 inputs, found 32"):
        from_hf(PLAIN.config, ((40, 32),))


HOSTILE_GGUF = [
    ({"attention.causal": True}, "attention.causal should be false"),
    ({"pooling_type": 2}, "pooling_type should be 1 (mean), found 2"),
    ({"attention.shared_kv_layers": 2}, "shared_kv_layers should be 0"),
    ({"attention.sliding_window_pattern": [True] * 6}, "a list of 7 flags"),
    ({"attention.head_count_kv": [2] * 6}, "a list of 7 positive integers"),
    ({"attention.head_count_kv": 3}, "should be a multiple of num_key_value_heads 3"),
    ({"attention.value_length": 12}, "value_length should be 24, as attention.key_length is"),
    ({"rope.dimension_count_swa": 6}, "rope.dimension_count_swa should be 12, as attention.key_length_swa is"),
    ({"attention.key_length_swa": None}, "attention.key_length_swa is missing"),
    ({"attention.sliding_window": None}, "attention.sliding_window is missing"),
    ({"rope.freq_base": None}, "rope.freq_base is missing"),
    ({"embedding_length_per_layer_input": 0}, "embedding_length_per_layer_input should be"),
    ({"embedding_length_out": 0}, "embedding_length_out should be"),
    ({"block_count": 10**9}, "block_count should be at most"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), HOSTILE_GGUF, ids=[message for _, message in HOSTILE_GGUF])
def test_hostile_gguf_metadata_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GemmaError) as error:
        from_gguf({f"gemma-embedding2.{name}": value for name, value in change.items()})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_dense_layers_of_a_gguf_follow_the_projection() -> None:
    shape = (8, 32)
    tensor = StoredTensor("dense_2.weight", F32, shape, memoryview(b""), Path("file"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dense layer 0 of the embedding should have 20 inputs, found 32"):
        from_gguf({}, {"dense_2.weight": tensor})


@pytest.mark.parametrize(
    "name", ["ple.per_layer_model_projection.weight", "ple.per_layer_projection_norm.weight", "layers.2.layer_scalar",
             "embedding_projection.weight", "layers.5.ple_block.per_layer_input_gate.weight"],
)  # fmt: skip
def test_a_tensor_of_another_shape_is_refused_before_anything_is_packed(tmp_path: Path, name: str) -> None:
    shape = tiny.shapes(PLAIN)[name]
    tiny.write(replace(PLAIN, extra={name: (*shape[:-1], shape[-1] + 2)}), tmp_path, seed=1)
    with pytest.raises(ConfigError, match=r"the shape should be \[.*\] according to the config, found") as error:
        open_checkpoint(tmp_path).stored_weights()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["embed_tokens_per_layer.weight", "lm_head.weight"])
def test_a_tensor_that_the_model_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    tiny.write(replace(PLAIN, extra={name: (64, 42)}), tmp_path, seed=1)
    with pytest.raises(ConfigError, match="is not part of the model that the config describes"):
        open_checkpoint(tmp_path).stored_weights()


def test_a_gguf_without_its_projection_is_refused(tmp_path: Path) -> None:
    values = tiny.tensors(PLAIN, 1)
    del values["embedding_projection.weight"]
    path = write_model(tmp_path / "m.gguf", PLAIN, 1, values=values)
    with pytest.raises(ConfigError, match=r"tensor 'output.weight' is missing"):
        open_checkpoint(path).stored_weights()


def test_every_embedding_model_has_prompts_of_its_own() -> None:
    engines = {name: prompted(name) for name in reference.EMBEDDING_FAMILIES}
    first, second = engines["gemma-embedding"], engines["gemma-embedding2"]
    assert embedding.prompt_of(second, None) == ""
    assert embedding.prompt_of(second, "SearchQuery") == "task: search result | query: "
    assert embedding.prompt_of(second, "Summarization") == "task: sentence similarity | query: "
    assert embedding.prompt_of(first, "Summarization") == "task: summarization | query: "
    with pytest.raises(InputError, match="task should be one of"):
        embedding.prompt_of(first, "SearchQuery")


def prompted(model_type: str) -> Any:
    config = replace(from_hf(PLAIN.config), model_type=model_type)
    return SimpleNamespace(checkpoint=SimpleNamespace(modules=Modules(), config=config))
