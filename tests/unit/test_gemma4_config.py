from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
import tiny_families

from gemma_py.checks import shapes
from gemma_py.checks.cost import FLOP, pass_cost
from gemma_py.errors import ConfigError, GemmaError, UnsupportedError
from gemma_py.formats.blocks import BF16, F32, BlockType
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models import families
from gemma_py.models.config import Config
from gemma_py.models.program import WANTED
from gemma_py.runtime import program as linking
from gemma_py.runtime.kv_types import KV_TYPES
from gemma_py.weights.checkpoint import open_checkpoint
from gemma_py.weights.pack import PackingPlan

E2B = tiny_families.VARIANTS["gemma4-e2b"].config
DENSE = tiny_families.VARIANTS["gemma4-dense"].config
# GGUF metadata of E2B. Layers 3 and 6 have full attention. Layers 4 and 5 read the KV rows of layer 2, and layer 6
# those of layer 3.
METADATA = {
    "general.architecture": "gemma4", "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.bos_token_id": 2,
    **{f"gemma4.{name}": value for name, value in {
        "block_count": 7, "context_length": 128, "embedding_length": 32, "attention.head_count": 4,
        "attention.head_count_kv": 1, "attention.key_length": 24, "attention.value_length": 24,
        "attention.key_length_swa": 12, "attention.value_length_swa": 12, "rope.dimension_count": 24,
        "rope.dimension_count_swa": 12, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "feed_forward_length": np.array([48] * 4 + [96] * 3), "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 9, "attention.shared_kv_layers": 3.0, "final_logit_softcapping": 5.0,
        "attention.sliding_window_pattern": [True, True, True, False, True, True, False],
        "embedding_length_per_layer_input": 6}.items()},
}  # fmt: skip


def tensor(name: str, values: Any, kind: BlockType = F32) -> StoredTensor:
    array = np.array(values, np.float32)
    return StoredTensor(name, kind, array.shape, array.view(np.uint8).reshape(-1), Path("file"))


TENSORS = {"rope_freqs.weight": tensor("rope_freqs.weight", [1.0] * 3 + [1e30] * 9)} | {
    f"blk.{number}.attn_v.weight": tensor("v", [0.0]) for number in range(4)
}


def from_hf(config: dict[str, Any]) -> Config:
    return families.config_from_hf(config, "config.json")[1]


def from_gguf(changes: dict[str, Any], tensors: dict[str, StoredTensor]) -> Config:
    return families.config_from_gguf(METADATA | changes, "file", 64, True, tensors)[1]


def test_a_config_is_the_same_from_every_form() -> None:
    config = from_hf(E2B)
    assert from_gguf({}, TENSORS) == config
    assert (
        from_gguf({"gemma4.attention.head_count_kv": [1] * 7, "gemma4.attention.head_count": [4] * 7}, TENSORS)
        == config
    )
    old = {key: value for key, value in E2B.items() if key != "per_layer_config"} | {"global_head_dim": 24}
    assert from_hf(old) == config
    assert from_hf({"model_type": "gemma4", "text_config": E2B}) == config
    assert [layer.kv_source for layer in config.layers] == [0, 1, 2, 3, 2, 2, 3]
    assert [layer.head_dim for layer in config.layers] == [12, 12, 12, 24, 12, 12, 24]
    assert [layer.intermediate_size for layer in config.layers] == [48] * 4 + [96] * 3
    assert [layer.rope.turning(layer.head_dim) for layer in config.layers] == [6, 6, 6, 3, 6, 6, 3]


def test_a_full_layer_without_attn_v_has_its_keys_as_values() -> None:
    without = {name: part for name, part in TENSORS.items() if name != "blk.3.attn_v.weight"}
    assert [layer.value_is_key for layer in from_gguf({}, without).layers] == [*[False] * 3, True, *[False] * 3]
    assert [layer.value_is_key for layer in from_hf(DENSE).layers] == [False, False, True, *[False] * 3, True]


def test_the_number_of_global_kv_heads_counts_only_where_keys_are_values() -> None:
    old = tiny_families.old_gemma4(wide_kv=1)
    assert {layer.num_key_value_heads for layer in from_hf(old).layers} == {2}
    shared = from_hf(old | {"attention_k_eq_v": True}).layers
    assert [layer.num_key_value_heads for layer in shared] == [2, 2, 1, 2, 2, 2, 1]


HOSTILE = [
    ({"per_layer_config": {"7": {"head_dim": 24}}}, "'7' should be the number of a layer, from 0 to 6"),
    ({"per_layer_config": {"-1": {"head_dim": 24}}}, "'-1' should be the number"),
    ({"per_layer_config": {"2": [24]}}, "2 should be an object"),
    ({"per_layer_config": {"2": None}}, "'2' should be the number"),
    ({"per_layer_config": {"2": {"head_dim": 25}}}, "head_dim should be even"),
    ({"per_layer_config": {"2": {"hidden_size": 64}}}, "'hidden_size' is not supported"),
    ({"per_layer_config": {"2": {"head_dim": 1 << 40}}}, "head_dim should be"),
    ({"per_layer_config": {"2": {"head_dim": 24}}}, "layer 4 reads the KV rows of layer 2"),
    ({"per_layer_config": [1]}, "per_layer_config should be an object"),
    ({"num_kv_shared_layers": 7}, "num_kv_shared_layers should be fewer than the 7 layers"),
    ({"num_kv_shared_layers": 10**6}, "num_kv_shared_layers should be fewer"),
    ({"num_kv_shared_layers": 5}, "with a layer of every type before them"),
    ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
    ({"layer_types": ["full_attention"] * 6}, "a list of 7 entries"),
    ({"layer_types": "full_attention"}, "a list of 7 entries"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers should be at most"),
    ({"hidden_size_per_layer_input": -6}, "hidden_size_per_layer_input"),
    ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input"),
    ({"enable_moe_block": True}, "num_experts is missing"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention should be 'vision'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}}}, "at most 1"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}}, "at most 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[message for _, message in HOSTILE])
def test_hostile_configs_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GemmaError) as error:
        from_hf(E2B | change)
    assert message in str(error.value) and "\n" not in str(error.value)


def divisors(values: list[float], kind: BlockType = F32) -> dict[str, StoredTensor]:
    return TENSORS | {"rope_freqs.weight": replace(tensor("rope_freqs.weight", values), type=kind)}


HOSTILE_GGUF = [
    ({"attention.sliding_window_pattern": [True] * 6}, TENSORS, "a list of 7 flags"),
    ({"attention.sliding_window_pattern": None}, TENSORS, "sliding_window_pattern is missing"),
    ({"attention.shared_kv_layers": 7}, TENSORS, "shared_kv_layers should be fewer"),
    ({"attention.shared_kv_layers": 2.5}, TENSORS, "shared_kv_layers"),
    ({"attention.head_count_kv": [1] * 6 + [0]}, TENSORS, "a list of 7 positive integers"),
    ({"feed_forward_length": [48] * 8}, TENSORS, "a list of 7 positive integers"),
    ({"attention.value_length_swa": 10}, TENSORS, "value_length_swa should be 12, as attention.key_length_swa is"),
    ({"rope.dimension_count": 12}, TENSORS, "rope.dimension_count should be 24, as attention.key_length is"),
    ({"block_count": 10**9}, TENSORS, "block_count should be at most"),
    ({"expert_count": 8}, TENSORS, "expert_used_count is missing"),
    ({}, {}, "'rope_freqs.weight' is missing"),
    ({}, divisors([1.0] * 3 + [np.inf] * 9), "found other values"),
    ({}, divisors([1.0] * 3 + [1e30] * 8 + [1.0]), "found other values"),
    ({}, divisors([1.0] * 3 + [1e30] * 8), "should hold 12 float32"),
    ({}, divisors([1.0] * 12, BF16), "found BF16"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "tensors", "message"), HOSTILE_GGUF, ids=[message for *_, message in HOSTILE_GGUF])
def test_hostile_gguf_metadata_is_refused_in_one_line(
    change: dict[str, Any], tensors: dict[str, StoredTensor], message: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedError)) as error:
        from_gguf({f"gemma4.{name}": value for name, value in change.items()}, tensors)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["embed_tokens_per_layer.weight", "per_layer_model_projection.weight", "layers.2.layer_scalar",
             "layers.5.per_layer_input_gate.weight"],
)  # fmt: skip
def test_a_tensor_of_another_shape_is_refused_before_anything_is_packed(tmp_path: Path, name: str) -> None:
    variant = tiny_families.VARIANTS["gemma4-e2b"]
    shape = tiny.shapes(variant)[f"model.{name}"]
    wrong = {f"model.{name}": (*shape[:-1], shape[-1] + 2)}
    tiny.write(replace(variant, extra=wrong), tmp_path, seed=1)
    with pytest.raises(ConfigError, match=r"the shape should be \[.*\] according to the config, found") as error:
        open_checkpoint(tmp_path).stored_weights()
    assert "\n" not in str(error.value)


def test_keys_of_a_sharing_layer_may_be_there_and_those_of_others_may_not(tmp_path: Path) -> None:
    variant = tiny_families.VARIANTS["gemma4-e2b"]
    tiny.write(replace(variant, extra={"model.layers.4.self_attn.k_proj.weight": (12, 32)}), tmp_path / "a", seed=1)
    assert "layers.4.k_proj" not in open_checkpoint(tmp_path / "a").stored_weights()
    dense = tiny_families.VARIANTS["gemma4-dense"]
    tiny.write(replace(dense, extra={"model.layers.2.self_attn.v_norm.weight": (24,)}), tmp_path / "b", seed=1)
    with pytest.raises(ConfigError, match="is not part of the model"):
        open_checkpoint(tmp_path / "b").stored_weights()


# --- the released shapes ----------------------------------------------------------------------------------------------

RELEASED = ("gemma-4-e2b-it", "gemma-4-e4b-it", "gemma-4-12b-it", "gemma-4-31b-it", "gemma-4-26b-a4b-it")


@pytest.mark.parametrize(("name", "most"), list(zip(RELEASED, (0.45, 0.70, 1, 1, 1), strict=True)))
def test_prompt_rows_take_this_share_of_the_work_of_all_layers(name: str, most: float) -> None:
    """If only the last of 512 tokens needs logits, most layers of E2B compute only one row. The work is compared with
    that for all logits.
    """
    family, config = shapes.config_of(name)
    blank = shapes._checkpoint(name, family, config, F32, shapes._blank)
    plan = PackingPlan(blank.stored_weights())
    linked = linking.link(family.program(config), plan.packed([np.empty(1, arena.kind) for arena in plan.arenas]))
    ops = linked.model.ops
    layers = replace(linked, model=linked.model._replace(ops=ops[ops[:, linking.LAYER] < len(config.layers)]))
    every = layers.model.ops.copy()
    every[every[:, linking.ROWS_OF] == WANTED, linking.ROWS_OF] = 0
    needed = pass_cost(layers, KV_TYPES["float32"], 0, 512)[:, FLOP].sum()
    whole = pass_cost(replace(layers, model=layers.model._replace(ops=every)), KV_TYPES["float32"], 0, 512)[
        :, FLOP
    ].sum()
    print(f"{name}: {needed / whole:.1%} of the layers' work")
    assert needed <= most * whole
