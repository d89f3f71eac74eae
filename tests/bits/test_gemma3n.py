import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_checkpoints as tiny
from equivalence import TOKENS, Expected, bits, caught, differs, expected, opened, prompt, without_barrier
from gguf_files import write_model
from random_model import random_engine
from tiny_models import WIDE

import gemma_py
from gemma_py.errors import ConfigError, GemmaError
from gemma_py.formats.gguf import read_gguf
from gemma_py.models import gemma3n
from gemma_py.models.families import config_from_hf
from gemma_py.models.program import ATTEND, MATMUL, STORE, WANTED, Program
from gemma_py.reference import gemma3n as spec
from gemma_py.reference.arithmetic import fma, jit
from gemma_py.runtime import program as p
from gemma_py.weights.checkpoint import open_checkpoint

NAME = "gemma3n"
VARIANT = tiny.VARIANTS[NAME]


def logits(path: Path) -> tuple[np.ndarray, list[str]]:
    with gemma_py.load(path, threads=2) as engine:
        session = engine.session()
        # GGUF files have rows of zeros for later ids.
        ids = [token % 50 for token in prompt(engine.config, 40)]
        return bits(session.prefill(ids, all_logits=True)), session.kv_digest()


# --- files ------------------------------------------------------------------------------------------------------------


def test_gguf_matches_hugging_face_bit_for_bit(tmp_path: Path) -> None:
    tiny.write(VARIANT, tmp_path / "hf", seed=3)
    file = write_model(tmp_path / "m.gguf", VARIANT, seed=3)
    mine, theirs = open_checkpoint(file).config, open_checkpoint(tmp_path / "hf").config
    unsaid: dict[str, Any] = {
        "rms_norm_eps": theirs.rms_norm_eps,
        "bos_token_id": 2,
        "eos_token_ids": (1,),
        "vocab_size_per_layer_input": 50,
    }
    # GGUF rounds one number to float32, adds rows of zeros, and this file has no tokenizer.
    assert replace(mine, **unsaid) == theirs
    for made, wanted in zip(logits(file), logits(tmp_path / "hf"), strict=True):
        np.testing.assert_array_equal(made, wanted)


def test_coefficients_of_altup_are_not_quantised(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", WIDE["gemma3n"], seed=3, quant="Q8_0")
    types = {name: tensor.type.name for name, tensor in open_checkpoint(file).tensors.items()}
    assert types["altup_proj.weight[2]"] == types["per_layer_token_embd.weight"] == "Q8_0"
    assert types["blk.0.altup_predict_coef.weight"] == types["blk.0.altup_router.weight"] == "F32"


def test_the_text_model_of_a_checkpoint_with_images_and_sound(tmp_path: Path) -> None:
    text = {key: value for key, value in VARIANT.config.items() if key not in ("architectures", "eos_token_id")}
    document = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text,
                "vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"},
                "eos_token_id": [1, 5]}  # fmt: skip
    extra = {"model.vision_tower.timm_model.conv.weight": (3,), "model.embed_vision.embedding.weight": (3, 3),
             "model.audio_tower.conformer.0.norm.weight": (3,), "model.embed_audio.embedding.weight": (3, 3)}  # fmt: skip
    tiny.write(tiny.Variant(document, prefix="model.language_model.", extra=extra), tmp_path / "wrapped", seed=3)
    tiny.write(VARIANT, tmp_path / "plain", seed=3)
    for mine, theirs in zip(logits(tmp_path / "wrapped"), logits(tmp_path / "plain"), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    left_out = open_checkpoint(tmp_path / "wrapped").left_out
    assert left_out == {"vision_tower": 1, "embed_vision": 1, "audio_tower": 1, "embed_audio": 1}


def test_keys_and_values_of_layers_that_share_them_may_be_missing_or_worthless(tmp_path: Path) -> None:
    for kind in ("there", "missing", "worthless"):
        tiny.write(VARIANT, tmp_path / kind, seed=3)
        values = tiny.tensors(VARIANT, 3)
        for name in list(values):
            if name.startswith(("model.layers.4.", "model.layers.6.")) and (".k_" in name or ".v_" in name):
                if kind == "worthless":
                    values[name][:] = np.nan
                elif kind == "missing":
                    del values[name]
        tiny.save_safetensors(tmp_path / kind / "model.safetensors", values, "F32")
    for kind in ("missing", "worthless"):
        np.testing.assert_array_equal(logits(tmp_path / kind)[0], logits(tmp_path / "there")[0])


@pytest.mark.parametrize("name", ["k_norm", "v_proj"])
def test_keys_and_values_of_the_other_layers_are_needed(tmp_path: Path, name: str) -> None:
    tiny.write(VARIANT, tmp_path, seed=3)
    values = tiny.tensors(VARIANT, 3)
    del values[f"model.layers.2.self_attn.{name}.weight"]
    tiny.save_safetensors(tmp_path / "model.safetensors", values, "F32")
    with pytest.raises(ConfigError, match=rf"layers.2.self_attn.{name}.weight' is missing"):
        gemma_py.load(tmp_path)


@pytest.mark.parametrize(
    ("stored", "share"),
    [
        (float(np.float32(NormalDist().inv_cdf(0.95))), 0.95),
        (1.6448533535003662, 0.95),  # as torch computes it in float32
        (float(np.float32(NormalDist().inv_cdf(0.123))), 0.123),
    ],
)
def test_a_stored_quantile_gives_the_cutoff_of_its_sparsity(stored: float, share: float) -> None:
    assert gemma3n._stored_cutoff(stored) == gemma3n._cutoff(share) == float(np.float32(NormalDist().inv_cdf(share)))


def test_a_stored_quantile_of_no_round_sparsity_is_used_as_it_is() -> None:
    assert gemma3n._stored_cutoff(1.6451) == float(np.float32(1.6451))
    assert gemma3n._stored_cutoff(0.0) == 0.0
    assert gemma3n._stored_cutoff(-math.inf) is None


@pytest.mark.parametrize("name", ["altup_proj", "altup_unembd_proj", "per_layer_token_embd", "blk.0.laurel_l"])
def test_a_gguf_tensor_of_another_shape_is_named(tmp_path: Path, name: str) -> None:
    file = write_model(tmp_path / "m.gguf", VARIANT, seed=3)
    data, tensor = bytearray(file.read_bytes()), read_gguf(file).tensors[f"{name}.weight"]
    # The name is followed by the number of dimensions (4 bytes) and the dimensions.
    at = data.find(f"{name}.weight".encode()) + len(name) + 7 + 4
    size = 8 * len(tensor.shape)
    stored = np.frombuffer(data[at : at + size], "<u8").copy()
    assert stored.tolist() == list(tensor.shape)[::-1]
    stored[-1], stored[-2] = stored[-1] * 2, stored[-2] // 2
    data[at : at + size] = stored.tobytes()
    file.write_bytes(data)
    with pytest.raises(GemmaError, match=rf"{name}.weight.*shape"):
        gemma_py.load(file)


def test_a_gguf_without_the_table_is_refused(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", VARIANT, seed=3)
    file.write_bytes(file.read_bytes().replace(b"per_layer_token_embd.weight", b"per_layer_token_xxxx.weight"))
    with pytest.raises(ConfigError, match=r"'per_layer_token_embd.weight' is missing or not a matrix"):
        gemma_py.load(file)


# --- the pass ---------------------------------------------------------------------------------------------------------


def test_layers_that_share_kv_rows_run_for_wanted_rows_only(checkpoints: dict[str, Path]) -> None:
    with opened(checkpoints[NAME], 1) as engine:
        products = engine.program.model.ops[engine.program.model.ops[:, p.OP] == MATMUL]
        layers = {int(op[p.LAYER]) for op in products if op[p.ROWS_OF] == WANTED}
        assert layers == {4, 5, 6, 7}
        assert {int(op[p.LAYER]) for op in products if op[p.ROWS_OF] != WANTED} == {0, 1, 2, 3}


# --- negative controls: the specification or the program is changed, and the comparison must fail ---------------------


@jit
def correct_from_a_corrected_stream(predictions, activated, active, coefficients):
    y = predictions.copy()
    for i in range(y.shape[0]):
        for d in range(y.shape[1]):
            y[i, d] = fma(np.float32(1) + coefficients[i], activated[d] - y[active, d], y[i, d])
    return y


@jit
def predict_from_predicted_streams(streams, mixing):
    y = streams.copy()
    for i in range(y.shape[0]):
        for d in range(y.shape[1]):
            total = y[i, d]
            for q in range(y.shape[0]):
                total = fma(mixing[i, q], y[q, d], total)
            y[i, d] = total
    return y


@jit
def sparsify_by_the_sample_s_deviation(x, deviations):
    """A wrong `sparsify`: the variance is divided by F - 1, as in llama.cpp."""
    total, squares = np.float32(0), np.float32(0)
    for value in x:
        total = total + value
    mean = total / np.float32(x.shape[0])
    for value in x:
        squares = fma(value - mean, value - mean, squares)
    cutoff = fma(np.sqrt(squares / np.float32(x.shape[0] - 1)), deviations, mean)
    return np.maximum(x - cutoff, np.float32(0))


HONEST_LAYER, HONEST_INPUTS = spec.layer, spec.layer_inputs


def layer_that_adds_to_every_stream(streams, own, w, config, cache, number):
    made = HONEST_LAYER(streams, own, w, config, cache, number)
    made[0] += np.float32(1e-3)
    return made


CHANGED: dict[str, tuple[str, Callable[..., Any]]] = {
    "correct": ("correct", correct_from_a_corrected_stream),
    "predict": ("predict", predict_from_predicted_streams),
    "deviation": ("sparsify", sparsify_by_the_sample_s_deviation),
    "own input of the next layer": ("layer_inputs", lambda *a: np.roll(HONEST_INPUTS(*a), 1, axis=0)),
    "first stream": ("layer", layer_that_adds_to_every_stream),
}


@pytest.mark.parametrize("what", CHANGED)
def test_control_another_specification(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with opened(checkpoints[NAME], 2) as engine:
        assert expected(NAME, engine).same(engine, [TOKENS])
        monkeypatch.setattr(spec, *CHANGED[what])
        assert not Expected(engine, prompt(engine.config, TOKENS)).same(engine, [TOKENS])


def test_control_a_correction_that_reads_the_corrected_stream(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Program.correct

    def twice(self: Program, target: str, activated: str, coefficients: str, streams: int, active: int) -> None:
        honest(self, target, activated, coefficients, streams, active)
        honest(self, target, activated, coefficients, streams, active)

    with opened(checkpoints[NAME], 1) as engine:
        want = expected(NAME, engine)
    monkeypatch.setattr(Program, "correct", twice)
    with opened(checkpoints[NAME], 1) as engine:
        assert not want.same(engine, [TOKENS])


def test_control_a_sharing_layer_that_stores_kv_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that should only read KV rows stores the last KV layer's rows again."""

    def write(p: Program) -> None:
        gemma3n.write(p)
        _, second = (number for number, op in enumerate(p.ops) if op.kind == STORE)
        after = next(number for number, op in enumerate(p.ops) if op.phase.layer == 2 and op.kind == ATTEND)
        store = replace(p.ops[second], phase=replace(p.ops[second].phase, layer=2))
        p.ops.insert(after, store)

    family, config = config_from_hf(WIDE[NAME].config, "here")
    with random_engine(family, config, "F32") as honest:
        want = Expected(honest, prompt(config, 40))
        assert want.same(honest, [40])
    with random_engine(replace(family, write=write), config, "F32") as engine:
        assert differs(engine, want, [40])


def test_control_any_barrier_dropped(tmp_path: Path) -> None:
    """Without a barrier, workers may read unwritten rows. The head's barrier is not tested, because nothing follows the
    head.
    """
    path = write_model(tmp_path / "m.gguf", WIDE[NAME], seed=3, quant="Q8_0")
    with opened(path, 4) as engine:
        want, labels = Expected(engine, prompt(engine.config, TOKENS)), engine.program.labels
        assert want.same(engine, [TOKENS])
        ops = engine.program.model.ops
        phases = {labels[number] for number in ops[ops[:, p.BARRIER] != 0, p.LABEL]} - {"head"}
        assert len(phases) == len(labels) - 1
        for phase in phases:
            sizes = [1] if phase == "scores" else [TOKENS]
            assert caught(engine, want, without_barrier(engine, phase), sizes), phase


def test_control_a_token_without_a_row_of_the_table(tmp_path: Path) -> None:
    """A token without a row uses row 0. With a complete table, the token's logits must differ."""
    tiny.write(VARIANT, tmp_path / "short", seed=3)
    more = copy.deepcopy(VARIANT)
    more.config["vocab_size_per_layer_input"] = 64
    tiny.write(more, tmp_path / "long", seed=3)
    values = tiny.tensors(VARIANT, 3)
    name = "model.embed_tokens_per_layer.weight"
    rest = tiny.gaussians(5, 14 * 42).reshape(14, 42)
    made = []
    for folder, table in (("short", values[name]), ("long", np.concatenate([values[name], rest]))):
        tiny.save_safetensors(tmp_path / folder / "model.safetensors", values | {name: table}, "F32")
        with gemma_py.load(tmp_path / folder, threads=2) as engine:
            made.append(bits(engine.session().prefill([3, 49, 50, 4], all_logits=True)))
    np.testing.assert_array_equal(made[0][:2], made[1][:2])
    assert (made[0][2:] != made[1][2:]).any(axis=1).all()


def test_the_writer_of_the_tests_is_the_gguf_package_s(tmp_path: Path) -> None:
    names = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GEMMA3N]}
    file = write_model(tmp_path / "m.gguf", VARIANT, seed=3)
    stored = {name.removesuffix(".weight") for name in read_gguf(file).tensors}
    assert {
        name.replace("blk.0.", "blk.{bid}.")
        for name in stored
        if not name.startswith(tuple(f"blk.{n}." for n in range(1, 7)))
    } | {"output"} == names
