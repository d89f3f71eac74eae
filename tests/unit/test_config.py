import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
import tiny_families
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_py.errors import ConfigError, GemmaError, UnsupportedError
from gemma_py.formats.blocks import F32
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models import families
from gemma_py.models.config import Config, Rope

# config.json of released models, shortened to the fields that matter.
GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"], "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu",
    "hidden_size": 2048, "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
    "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000, "attention_bias": False,
}  # fmt: skip
GEMMA_2_27B = {
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_size": 4608,
    "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 36864, "max_position_embeddings": 8192,
    "model_type": "gemma2", "num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_4B_IT = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip


def config_from_hf(document: Any, where: str, generation: Any = None) -> Config:
    return families.config_from_hf(document, where, generation)[1]


def config_from_gguf(metadata: dict[str, Any], where: str, vocab_size: int, tied: bool) -> Config:
    return families.config_from_gguf(metadata, where, vocab_size, tied, {})[1]


def norms(config: Config) -> set[str]:
    specs = families.FAMILIES[0].tensors(config)
    return {name.split(".")[2] for name, spec in specs.items() if name.startswith("layers.0.") and len(spec.shape) == 1}


def windows(config: Config) -> list[int | None]:
    return [layer.sliding_window for layer in config.layers]


def test_gemma_1() -> None:
    config = config_from_hf(GEMMA_2B, "config.json")
    assert windows(config) == [None] * 18
    assert norms(config) == {"input_norm", "pre_feedforward_norm"}
    assert config.query_pre_attn_scalar == 256.0
    assert config.attn_logit_softcapping is None
    assert (config.bos_token_id, config.eos_token_ids) == (2, (1,))


def test_gemma_2() -> None:
    config = config_from_hf(GEMMA_2_27B, "config.json")
    assert windows(config) == [4096, None] * 23
    assert config.attention_scale == 1 / 12
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)


def test_gemma_3_inside_a_multimodal_config_that_leaves_defaults_out() -> None:
    config = config_from_hf(GEMMA_3_4B_IT, "config.json")
    assert windows(config)[:7] == [1024] * 5 + [None, 1024]
    assert windows(config).count(None) == 5
    assert config.layers[5].rope == Rope(1e6, 8.0)
    assert config.layers[0].rope == Rope(1e4)
    assert (config.layers[0].num_attention_heads, config.layers[0].num_key_value_heads) == (8, 4)
    assert config.vocab_size == 262_208
    assert config.eos_token_ids == (1, 106)
    assert norms(config) == {
        "input_norm", "q_norm", "k_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm",
    }  # fmt: skip


def test_vaultgemma_obeys_the_config() -> None:
    new = tiny.VARIANTS["vaultgemma"].config
    config = config_from_hf(new, "c")
    assert windows(config) == [8, None, None, 8]
    assert config.layers[0].rope == Rope(2e4)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (5.0, 3.0)
    assert norms(config) == {"input_norm", "pre_feedforward_norm"}
    shorter = {key: value for key, value in new.items() if "softcapping" not in key and key != "layer_types"}
    defaults = config_from_hf(shorter, "c")
    assert windows(defaults) == [8, None, 8, None]
    assert (defaults.attn_logit_softcapping, defaults.final_logit_softcapping) == (50.0, 30.0)


SHIELDGEMMA_2 = GEMMA_3_4B_IT | {
    "architectures": ["ShieldGemma2ForImageClassification"], "model_type": "shieldgemma2", "yes_token_index": 10_784,
}  # fmt: skip


@pytest.mark.parametrize(
    ("document", "kind", "base"),
    [
        (GEMMA_2_27B | {"architectures": ["Gemma2ForSequenceClassification"]}, "gemma2", GEMMA_2_27B),  # ShieldGemma 1
        (SHIELDGEMMA_2, "gemma3", GEMMA_3_4B_IT),
        (GEMMA_3_4B_IT | {"mm_tokens_per_image": 256}, "gemma3", GEMMA_3_4B_IT),  # MedGemma
    ],
    ids=["ShieldGemma 1", "ShieldGemma 2", "MedGemma"],
)  # fmt: skip
def test_derived_models_have_the_config_of_their_base(
    document: dict[str, Any], kind: str, base: dict[str, Any]
) -> None:
    config = config_from_hf(document, "c")
    assert config.model_type == kind
    assert config == config_from_hf(base, "c")


def test_shieldgemma_2_whose_text_config_names_no_model_type() -> None:
    text = {key: value for key, value in GEMMA_3_4B_IT["text_config"].items() if key != "model_type"}  # type: ignore[attr-defined]
    assert config_from_hf(SHIELDGEMMA_2 | {"text_config": text}, "c") == config_from_hf(GEMMA_3_4B_IT, "c")


# config.json of the released model, shortened to the fields that matter.
GEMMA_3N_E2B = {
    "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "eos_token_id": [1, 106],
    "text_config": {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "intermediate_size": [8192] * 30, "hidden_size": 2048,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6, "model_type": "gemma3n_text",
        "num_hidden_layers": 30, "num_kv_shared_layers": 10, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "vocab_size": 262_400, "vocab_size_per_layer_input": 262_144,
    },
    "vision_config": {"architecture": "mobilenetv5_300m_enc"}, "audio_config": {"hidden_size": 1536},
}  # fmt: skip


def test_gemma_3n() -> None:
    config = config_from_hf(GEMMA_3N_E2B, "config.json")
    assert [layer.kv_source for layer in config.layers] == [*range(20), *([18] * 4 + [19]) * 2]
    assert windows(config)[:5] == [512] * 4 + [None]
    assert config.layers[0].sparsity_cutoff == float(np.float32(1.6448536269514722))
    assert config.layers[10].sparsity_cutoff is None
    assert config.layers[4].rope == Rope(1e6) and config.layers[3].rope == Rope(1e4)
    assert (config.attention_scale, config.final_logit_softcapping) == (1.0, 30.0)
    assert (config.altup_num_inputs, config.laurel_rank, config.hidden_size_per_layer_input) == (4, 64, 256)
    assert config.eos_token_ids == (1, 106)


def test_gemma_3n_whose_config_leaves_defaults_out() -> None:
    config = config_from_hf({"model_type": "gemma3n_text"}, "config.json")
    assert len(config.layers) == 35
    assert [layer.kv_source for layer in config.layers][19:24] == [19, 18, 18, 18, 18]
    assert [layer.sparsity_cutoff is None for layer in config.layers] == [False] * 10 + [True] * 25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": [64] * 6}, "list of 7 positive integers"),
        ({"intermediate_size": [64] * 6 + [0]}, "intermediate_size"),
        ({"intermediate_size": [64] * 6 + [1 << 40]}, "intermediate_size"),
        ({"intermediate_size": "64"}, "intermediate_size"),
        ({"activation_sparsity_pattern": [0.5] * 8}, "activation_sparsity_pattern should be 7 entries"),
        ({"activation_sparsity_pattern": [0.5] * 6 + [1.0]}, "each a number from 0 to below 1"),
        ({"activation_sparsity_pattern": [0.5] * 6 + [-0.1]}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [0.5] * 6 + [float("nan")]}, "activation_sparsity_pattern"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types should be 7 entries"),
        ({"layer_types": ["full_attention"] * 6 + ["wide_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": [["full_attention"]] * 7}, "layer_types"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers should be fewer than the 7 layers.*found 7"),
        ({"num_kv_shared_layers": 10**9}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 5}, "with a layer of every type before them, found 5"),
        ({"altup_active_idx": 4}, "altup_active_idx should be below altup_num_inputs 4, found 4"),
        ({"altup_active_idx": -1}, "altup_active_idx"),
        ({"altup_num_inputs": 0}, "altup_num_inputs"),
        ({"altup_num_inputs": 10**9}, "altup_num_inputs should be 1 to 64"),
        ({"altup_correct_scale": 1}, "altup_correct_scale"),
        ({"laurel_rank": 0}, "laurel_rank"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
        ({"vocab_size_per_layer_input": 1.5}, "vocab_size_per_layer_input"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers should be at most 10000"),
        ({"num_hidden_layers": 5}, "should be .*5"),
        ({"use_bidirectional_attention": True}, "but Gemma 3n has causal attention"),
    ],
)
def test_a_wrong_field_of_gemma_3n_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message) as caught:
        config_from_hf(tiny.VARIANTS["gemma3n"].config | change, "some/config.json")
    assert "some/config.json" in str(caught.value)


def test_old_and_new_forms_say_the_same() -> None:
    new = dict(tiny.VARIANTS["gemma3"].config)
    old = {key: value for key, value in new.items() if key not in ("layer_types", "rope_parameters")}
    old |= {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert config_from_hf(old, "old") == config_from_hf(new, "new")
    old |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    scaled = copy.deepcopy(new)
    scaled["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 2.0}
    assert config_from_hf(old, "old") == config_from_hf(scaled, "new")


def test_generation_config_determines_the_end_tokens() -> None:
    config = config_from_hf(GEMMA_2B, "config.json", {"eos_token_id": [1, 107]})
    assert config.eos_token_ids == (1, 107)


def test_null_means_no_cap_but_absence_the_default() -> None:
    assert config_from_hf(GEMMA_2_27B | {"attn_logit_softcapping": None}, "c").attn_logit_softcapping is None
    absent = {key: value for key, value in GEMMA_2_27B.items() if key != "attn_logit_softcapping"}
    assert config_from_hf(absent, "c").attn_logit_softcapping == 50.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "2048"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 1 << 63}, "hidden_size"),
        ({"head_dim": 255}, "head_dim should be even"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": [1e4]}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"model_type": "llama"}, "'llama' is not a Gemma model"),
        ({"model_type": "t5gemma"}, "'t5gemma' is not supported yet"),
        ({"model_type": None}, "is not a Gemma model"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_activation": "relu"}, "'relu'"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message) as caught:
        config_from_hf(GEMMA_2B | change, "some/config.json")
    assert "some/config.json" in str(caught.value)


@pytest.mark.parametrize(("name", "field"), [
    ("gemma3", "attn_logit_softcapping"), ("gemma1-multi-head", "attn_logit_softcapping"),
    ("gemma1-multi-head", "final_logit_softcapping"),
])  # fmt: skip
def test_caps_that_a_family_does_not_have_are_ignored_as_in_transformers(name: str, field: str) -> None:
    config = tiny.VARIANTS[name].config
    assert config_from_hf(config | {field: 2.0}, "c") == config_from_hf(config, "c")


def test_the_old_fields_of_rope_are_preferred_to_the_new_ones() -> None:
    both = GEMMA_2B | {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
                       "rope_scaling": {"rope_type": "linear", "factor": 2.0}}  # fmt: skip
    assert config_from_hf(both, "c").layers[0].rope == Rope(1e4, 2.0)


@pytest.mark.parametrize("types", [["full_attention"], ["wrong"] * 7, "full_attention", [["full_attention"]] * 7])
def test_layer_types_are_checked(types: Any) -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        config_from_hf(tiny.VARIANTS["gemma3"].config | {"layer_types": types}, "c")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["gemma1-multi-head", "gemma2", "gemma3", "gemma3-old-config", "gemma3n"]), st.data())
def test_any_value_in_any_field_gives_a_config_or_a_typed_error(name: str, data: st.DataObject) -> None:
    config = dict(tiny.VARIANTS[name].config)
    config[data.draw(st.sampled_from(sorted(config)))] = data.draw(JSON)
    try:
        made = config_from_hf(config, "c")
    except GemmaError as error:
        assert str(error).startswith("c")
        return
    assert made.layers


GGUF_270M = {
    "general.architecture": "gemma3", "gemma3.context_length": 32768, "gemma3.embedding_length": 640,
    "gemma3.block_count": 18, "gemma3.feed_forward_length": 2048, "gemma3.attention.head_count": 4,
    "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07, "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256, "gemma3.rope.freq_base": 1000000.0, "gemma3.attention.sliding_window": 512,
    "gemma3.attention.head_count_kv": 1, "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
}  # fmt: skip


def test_gguf() -> None:
    config = config_from_gguf(GGUF_270M, "file", 262_144, tied=True)
    assert windows(config) == ([512] * 5 + [None]) * 3
    assert config.query_pre_attn_scalar == 256
    assert config.layers[5].rope == Rope(1e6)
    assert config.layers[0].rope == Rope(1e4)


def test_gguf_values_may_be_repeated_for_each_layer() -> None:
    arrays = {key: np.full(18, GGUF_270M[f"gemma3.{key}"]) for key in ("attention.head_count", "feed_forward_length")}
    config = config_from_gguf(GGUF_270M | {f"gemma3.{k}": v for k, v in arrays.items()}, "file", 262_144, tied=True)
    assert config == config_from_gguf(GGUF_270M, "file", 262_144, tied=True)


def test_gguf_27b_scales_by_hidden_over_heads() -> None:
    big = GGUF_270M | {"gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32,
                       "gemma3.attention.head_count_kv": 16, "gemma3.attention.key_length": 128,
                       "gemma3.attention.value_length": 128, "gemma3.rope.scaling.type": "linear",
                       "gemma3.rope.scaling.factor": 8.0}  # fmt: skip
    config = config_from_gguf(big, "file", 262_208, tied=True)
    assert config.query_pre_attn_scalar == 168
    assert config.layers[5].rope == Rope(1e6, 8.0)
    assert config.layers[0].rope == Rope(1e4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "llama"}, "'llama'"),
        ({"general.architecture": 3}, "general.architecture"),
        ({"gemma3.block_count": None}, "block_count is missing"),
        ({"gemma3.embedding_length": "640"}, "embedding_length"),
        ({"gemma3.attention.value_length": 128}, "value_length"),
        ({"gemma3.attention.sliding_window": None}, "sliding_window is missing"),
        ({"gemma3.attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ({"gemma3.attention.sliding_window_pattern": "x"}, "sliding_window_pattern"),
        ({"gemma3.attention.sliding_window_pattern": ["false"] * 18}, "sliding_window_pattern"),
        ({"gemma3.attention.sliding_window_pattern": [0.5] * 18}, "sliding_window_pattern"),
        ({"gemma3.attention.sliding_window_pattern": 0.5}, "sliding_window_pattern"),
        ({"gemma3.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"gemma3.attention.causal": False}, "embedding model"),
    ],
)
def test_a_wrong_gguf_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        config_from_gguf(GGUF_270M | change, "file", 262_144, tied=True)


def test_dense_layers_in_a_gguf_of_another_architecture_are_refused() -> None:
    dense = StoredTensor("dense_2.weight", F32, (1280, 640), np.empty(0, np.uint8), Path("file"))
    with pytest.raises(ConfigError, match="dense layers of an embedding are not part of a gemma3 model"):
        families.config_from_gguf(GGUF_270M, "file", 262_144, True, {dense.name: dense})


GGUF_3N = {
    "general.architecture": "gemma3n", "gemma3n.context_length": 32768, "gemma3n.embedding_length": 2048,
    "gemma3n.block_count": 30, "gemma3n.feed_forward_length": np.full(30, 8192), "gemma3n.attention.head_count": 8,
    "gemma3n.attention.head_count_kv": 2, "gemma3n.attention.key_length": 256, "gemma3n.attention.value_length": 256,
    "gemma3n.attention.layer_norm_rms_epsilon": 9.999999974752427e-07, "gemma3n.rope.freq_base": 1e6,
    "gemma3n.attention.sliding_window": 512, "gemma3n.altup.active_idx": 0, "gemma3n.altup.num_inputs": 4,
    "gemma3n.embedding_length_per_layer_input": 256, "gemma3n.attention.shared_kv_layers": 10.0,
    "gemma3n.attention.sliding_window_pattern": np.array(([True] * 4 + [False]) * 6),
    "gemma3n.activation_sparsity_scale": np.array([1.6448533535003662] * 10 + [-np.inf] * 20, np.float32),
    "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 106,
}  # fmt: skip
TENSORS_3N = {
    name: StoredTensor(name, F32, shape, np.empty(0, np.uint8), Path("file"))
    for name, shape in {"per_layer_token_embd.weight": (262_144, 7680), "blk.0.laurel_l.weight": (64, 2048)}.items()
}


def config_3n_from_gguf(change: dict[str, Any]) -> Config:
    return families.config_from_gguf(GGUF_3N | change, "file", 262_400, True, TENSORS_3N)[1]


def test_gguf_of_gemma_3n() -> None:
    theirs = config_from_hf(GEMMA_3N_E2B, "config.json")
    assert config_3n_from_gguf({}).layers == theirs.layers
    defaults = ("attention.sliding_window_pattern", "activation_sparsity_scale")
    assert config_3n_from_gguf({f"gemma3n.{key}": None for key in defaults}).layers == theirs.layers
    unsaid: dict[str, Any] = {"rms_norm_eps": 1e-6}
    assert replace(config_3n_from_gguf({"gemma3n.feed_forward_length": 8192}), **unsaid) == theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_length": None}, "feed_forward_length is missing"),
        ({"feed_forward_length": np.full(29, 8192)}, "list of 30 positive integers"),
        ({"feed_forward_length": "x"}, "feed_forward_length"),
        ({"activation_sparsity_scale": np.full(31, 1.0)}, "activation_sparsity_scale should be 30 entries"),
        ({"activation_sparsity_scale": np.full(30, np.inf)}, "each a number or -inf"),
        ({"activation_sparsity_scale": np.full(30, np.nan)}, "each a number or -inf"),
        (
            {"attention.sliding_window_pattern": [True]},
            "sliding_window_pattern should be an integer or a list of 30 flags",
        ),
        ({"attention.sliding_window_pattern": ["x"] * 30}, "sliding_window_pattern"),
        ({"attention.shared_kv_layers": 10.5}, "shared_kv_layers should be an integer"),
        ({"attention.shared_kv_layers": 30.0}, "shared_kv_layers should be fewer than the 30 layers"),
        ({"attention.shared_kv_layers": 26}, "with a layer of every type before them"),
        ({"attention.shared_kv_layers": float("nan")}, "shared_kv_layers"),
        ({"altup.num_inputs": None}, "altup.num_inputs is missing"),
        ({"altup.num_inputs": 1 << 30}, "altup_num_inputs should be 1 to 64"),
        ({"altup.active_idx": 4}, "altup_active_idx should be below"),
        ({"embedding_length_per_layer_input": None}, "embedding_length_per_layer_input is missing"),
        ({"attention.value_length": 128}, "value_length"),
        ({"block_count": 10_001}, "block_count should be at most 10000"),
        ({"attention.causal": False}, "gemma3n is no architecture of embedding models"),
    ],
)
def test_a_wrong_gguf_field_of_gemma_3n_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message) as caught:
        config_3n_from_gguf({f"gemma3n.{key}": value for key, value in change.items()})
    assert len(str(caught.value).splitlines()) == 1


def test_a_gguf_without_the_tensors_that_give_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'per_layer_token_embd.weight' is missing or not a matrix"):
        families.config_from_gguf(GGUF_3N, "file", 262_400, True, {})


@pytest.mark.parametrize("keys", [("3", "10"), ("03", "10")])
def test_layer_numbers_of_gemma4_may_have_leading_zeros(keys: tuple[str, str]) -> None:
    """transformers writes leading zeros, which keep the keys sorted."""
    types = ["full_attention" if n in (3, 10) else "sliding_attention" for n in range(11)]
    document = tiny_families.gemma4(types) | {"per_layer_config": {key: {"head_dim": 24} for key in keys}}
    widths = [layer.head_dim for layer in config_from_hf(document, "c").layers]
    assert widths == [24 if n in (3, 10) else 12 for n in range(11)]


@pytest.mark.parametrize("keys", [("11",), ("003",), ("3", "03"), ("-1",), ("3.0",), ("",), ("x",)])
def test_other_layer_numbers_of_gemma4_are_refused(keys: tuple[str, ...]) -> None:
    document = tiny_families.gemma4(["full_attention"] * 11)
    document["per_layer_config"] = {key: {"head_dim": 24} for key in keys}
    with pytest.raises(ConfigError, match="should be the number of a layer, from 0 to 10"):
        config_from_hf(document, "c")
