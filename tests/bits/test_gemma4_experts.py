import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
import tiny_families
import tiny_models
from equivalence import TOKENS, Expected, bits, caught, expected, opened, prompt, without_barrier
from gguf_files import write_model
from random_model import random_checkpoint, random_engine

import gemma_py
from gemma_py.errors import ConfigError
from gemma_py.models.families import config_from_hf
from gemma_py.models.program import EXPERT_MATMUL
from gemma_py.reference import operations as spec
from gemma_py.runtime import program as linking
from gemma_py.runtime.runner import SequenceInput
from gemma_py.weights.checkpoint import open_checkpoint

VARIANT = tiny_families.VARIANTS["gemma4-experts"]
SEED = 3
WIDE = tiny_models.WIDE["gemma4-experts"]


def logits(path: Path) -> np.ndarray:
    with gemma_py.load(path, threads=2) as engine:
        return bits(engine.session().prefill(list(range(40)), all_logits=True))


def test_safetensors_and_both_forms_of_gguf_give_equal_bits(tmp_path: Path) -> None:
    values = tiny.tensors(VARIANT, SEED)
    tiny.write(VARIANT, tmp_path / "hf", SEED)
    wanted = logits(tmp_path / "hf")
    for split in (True, False):
        path = write_model(tmp_path / f"{split}.gguf", VARIANT, SEED, split_experts=split)
        np.testing.assert_array_equal(logits(path), wanted)
    gate, up = np.split(values["model.layers.3.experts.gate_up_proj"], 2, axis=1)
    exchanged = values | {"model.layers.3.experts.gate_up_proj": np.concatenate([up, gate], axis=1)}
    assert (logits(write_model(tmp_path / "other.gguf", VARIANT, SEED, values=exchanged)) != wanted).any()


def test_both_forms_of_quantised_experts_give_equal_bits(tmp_path: Path) -> None:
    split = write_model(tmp_path / "split.gguf", WIDE, SEED, quant="Q8_0", split_experts=True)
    fused = write_model(tmp_path / "fused.gguf", WIDE, SEED, quant="Q8_0")
    np.testing.assert_array_equal(logits(split), logits(fused))


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_experts_with_17_and_with_260_rows_match_the_reference(kind: str) -> None:
    """More than 256 rows of an expert need two tiles. For up to 16 rows, codes are not unpacked."""
    few = {"num_experts": 2, "top_k_experts": 1, "num_hidden_layers": 2}
    family, config = config_from_hf(WIDE.config | few, "here")
    with random_engine(family, replace(config, max_position_embeddings=600), kind) as engine:
        engine.instruments.poison = True
        engine.set_threads(3)
        want = Expected(engine, prompt(engine.config, 560))
        for sizes in ([560], [33], [250, 60]):
            assert want.same(engine, sizes)


def test_a_token_whose_router_gives_nan_spoils_no_other_sequence_and_no_earlier_row() -> None:
    """The embedding of token 7 overflows, so its hidden state, its router and the rows that attend to it are NaN."""
    family, config = config_from_hf(WIDE.config, "here")
    made, table = random_checkpoint(family, config, "Q8_0"), "token_embd.weight"
    floats = random_checkpoint(family, config, "F32").tensors[table]
    floats.data.view(np.float32).reshape(config.vocab_size, -1)[7] = 3e38
    source = replace(made.source, tensors={**made.tensors, table: floats})
    with gemma_py.Engine(replace(made, source=source)) as engine:
        engine.set_threads(3)
        clean = [token for token in prompt(config, 90) if token != 7][:TOKENS]
        want, spoilt = Expected(engine, clean), [*clean[:30], 7, *clean[30:]]
        session = engine.session()
        logits = session.prefill(spoilt, all_logits=True)
        np.testing.assert_array_equal(bits(logits[:30]), bits(want.logits[:30]))
        assert np.isnan(logits[30:]).all()
        for first in range(0, TOKENS, 10):
            parts = [SequenceInput(engine.new_cache(), spoilt[:length], length) for length in (40, 31, 33)]
            parts.insert(first // 10 % 4, SequenceInput(engine.new_cache(), clean[: first + 10], first + 10))
            results = engine.run_together(parts)
            np.testing.assert_array_equal(bits(results[first // 10 % 4]), bits(want.logits[: first + 10]))


# --- negative controls ------------------------------------------------------------------------------------------------


def test_control_the_sum_over_experts_in_another_order(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # This model chooses three experts for a token, because a sum of two has only one order.
    name, mix = "gemma4-experts-wrapped-old-config", spec.mix
    with opened(checkpoints[name], 2) as engine:
        want = expected(name, engine)
        assert want.same(engine, [TOKENS])
        monkeypatch.setattr(spec, "mix", lambda parts, weights: mix(parts[::-1].copy(), weights[::-1].copy()))
        changed = Expected(engine, want.ids)
        # The bits of the logits differ, but their values are right within rounding errors.
        np.testing.assert_allclose(changed.logits, want.logits, atol=1e-3)
        assert not changed.same(engine, [TOKENS])


def test_control_rows_are_sent_to_the_expert_after_the_chosen_one(checkpoints: dict[str, Path]) -> None:
    with opened(checkpoints["gemma4-experts"], 2) as engine:
        want = expected("gemma4-experts", engine)
        ops = engine.program.model.ops
        ops.flags.writeable = True
        ops[ops[:, linking.OP] == EXPERT_MATMUL, linking.MATRIX] += 1
        ops.flags.writeable = False
        assert not want.same(engine, [TOKENS])


NEW_PHASES = ("middle", "gate and up", "down input", "experts' gate and up", "experts' down input", "experts' down")


@pytest.mark.parametrize("phase", NEW_PHASES, ids=lambda phase: phase.replace(" ", "-").replace("'", ""))
def test_control_a_barrier_dropped(phase: str) -> None:
    family, config = config_from_hf(WIDE.config, "here")
    with random_engine(family, config, "Q8_0") as engine:
        engine.instruments.poison = True
        engine.set_threads(4)
        want = Expected(engine, prompt(engine.config, TOKENS))
        assert want.same(engine, [TOKENS])
        assert caught(engine, want, without_barrier(engine, phase))


# --- malicious files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k_experts": 7}, "expert_used_count should be at most expert_count, 6, found 7"),
        ({"top_k_experts": 0}, "expert_used_count should be an integer from 1"),
        ({"num_experts": 0}, "blk.0.*' is not part of the model"),
        ({"num_experts": 2**31 - 1}, "the shape should be"),
        ({"num_experts": 5}, "the shape should be"),
        ({"moe_intermediate_size": 11}, r"ffn_gate_up_exps.weight': the shape should be \[6, 22, 32\]"),
    ],
)
def test_wrong_numbers_of_experts_in_gguf_are_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    changed = replace(VARIANT, config=VARIANT.config | changes)
    path = write_model(tmp_path / "m.gguf", changed, SEED, values=tiny.tensors(VARIANT, SEED))
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(path).stored_weights()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k_experts": 7}, "top_k_experts should be at most num_experts, 6, found 7"),
        ({"num_experts": 0}, "num_experts should be an integer from 1"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts": 2**31 - 1}, "the shape should be"),
        ({"moe_intermediate_size": 2**31 - 1}, "the shape should be"),
        ({"enable_moe_block": False}, "is not part of the model"),
    ],
)
def test_wrong_numbers_of_experts_in_a_config_are_one_line(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    tiny.write(VARIANT, tmp_path, SEED)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tmp_path).stored_weights()
