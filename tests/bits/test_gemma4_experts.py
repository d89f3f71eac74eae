"""Gemma 4's mixture of experts: equal bits from every file format, quantised weights, negative controls, malicious files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
import tiny_families
from equivalence import TOKENS, Expected, bits, expected, opened, prompt
from gguf_files import write_model
from random_model import random_engine

import gemma_py
from gemma_py.errors import ConfigError, WorkerError
from gemma_py.models.families import config_from_hf
from gemma_py.models.program import EXPERT_MATMUL
from gemma_py.reference import operations as spec
from gemma_py.runtime import program as linking
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.weights.checkpoint import open_checkpoint

VARIANT = tiny_families.VARIANTS["gemma4-experts"]
SEED = 3
# All rows are whole blocks of Q4_0 and Q8_0. Each token chooses 4 of 40 experts, so most experts get few rows.
_WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "vocab_size": 70,
    "num_attention_heads": 4,
}
CONFIG = tiny_families.gemma4(
    ["sliding_attention", "full_attention"], wide=32, wide_kv=1, attention_k_eq_v=True, enable_moe_block=True,
    num_experts=40, top_k_experts=4, moe_intermediate_size=96, **_WIDE)  # fmt: skip
WIDE = tiny.Variant(CONFIG)


def logits(path: Path, quant: str | None = None, threads: int = 2) -> np.ndarray:
    with gemma_py.load(path, threads=threads, quant=quant) as engine:
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


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0"])
def test_quantised_experts_match_the_reference(tmp_path: Path, quant: str) -> None:
    tiny.write(WIDE, tmp_path / "hf", SEED)
    paths = [
        write_model(tmp_path / f"{split}.gguf", WIDE, SEED, quant=quant, split_experts=split) for split in (True, False)
    ]
    wanted = logits(tmp_path / "hf", quant.lower())
    for path in paths:
        np.testing.assert_array_equal(logits(path), wanted)
    with opened(paths[0], 3) as engine:
        want = Expected(engine, prompt(engine.config, 90))
        for sizes in ([90], [1], [7, 12]):
            assert want.same(engine, sizes) and want.same(engine, sizes, all_logits=False)


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_experts_with_17_and_with_260_rows_match_the_reference(kind: str) -> None:
    """More than 256 rows of an expert need two tiles. For 16 rows or fewer, codes are not unpacked."""
    family, config = config_from_hf(CONFIG | {"num_experts": 2, "top_k_experts": 1, "num_hidden_layers": 2}, "here")
    with random_engine(family, replace(config, max_position_embeddings=600), kind) as engine:
        engine.instruments.poison = True
        engine.set_threads(3)
        want = Expected(engine, prompt(engine.config, 560))
        for sizes in ([560], [33], [250, 60]):
            assert want.same(engine, sizes)


# --- negative controls ------------------------------------------------------------------------------------------------


def test_control_the_sum_over_experts_in_another_order(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, mix = (
        "gemma4-experts-wrapped-old-config",
        spec.mix,
    )  # three experts for each token, because a sum of two does not depend on the order
    with opened(checkpoints[name], 2) as engine:
        want = expected(name, engine)
        assert want.same(engine, [TOKENS])
        monkeypatch.setattr(spec, "mix", lambda parts, weights: mix(parts[::-1].copy(), weights[::-1].copy()))
        changed = Expected(engine, want.ids)
        # The logits are correct, but not bit-identical.
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
    family, config = config_from_hf(CONFIG, "here")
    with random_engine(family, config, "Q8_0") as engine:
        engine.instruments.poison = True
        engine.set_threads(4)
        want = Expected(engine, prompt(engine.config, TOKENS))
        assert want.same(engine, [TOKENS])
        label, found = engine.program.label(phase), False
        for seed in range(1, 300):
            engine.instruments.fault_plan = FaultPlan(seed=seed, omit="barrier", omit_phase=label)
            try:
                found = not want.same(engine, [TOKENS])
            except WorkerError:
                found = True
            if found:
                break
        assert found


# malicious files


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
