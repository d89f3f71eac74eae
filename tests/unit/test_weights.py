import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints as tiny

import gemma_py
from gemma_py.cli.common import note_exceptions
from gemma_py.errors import ConfigError, FormatError, GemmaError, InputError, ModelNotFoundError

VARIANT = tiny.VARIANTS["gemma3"]
Q0 = "model.layers.0.self_attn.q_proj.weight"


def rewritten(path: Path, change: Callable[[dict[str, np.ndarray]], None], dtype: str = "F32") -> Path:
    tiny.write(VARIANT, path, seed=2)
    values = tiny.tensors(VARIANT, 2)
    change(values)
    tiny.save_safetensors(path / "model.safetensors", values, dtype)
    return path


def put(name: str, value: np.ndarray) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda values: values.__setitem__(name, value)


def poison(name: str, number: float) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda values: values[name].reshape(-1).__setitem__(7, number)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop(Q0), "q_proj.weight' is missing"),
        (lambda values: values.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda values: values.pop("model.embed_tokens.weight"), "embed_tokens"),
        (put(Q0, np.zeros((5, 32), np.float32)), r"q_proj.weight': the shape should be \[96, 32\]"),
        (put(Q0, np.zeros(96 * 32, np.float32)), r"found \[3072\]"),
        (
            put("model.layers.7.mlp.up_proj.weight", np.zeros((64, 32), np.float32)),
            "layers.7.mlp.up_proj.weight' is not part",
        ),
        (put("model.layers.0.self_attn.q_proj.bias", np.zeros(96, np.float32)), "q_proj.bias' is not part"),
        (poison(Q0, np.nan), "q_proj.weight': holds NaN"),
        (poison(Q0, np.inf), "q_proj.weight': holds NaN"),
        (poison("model.layers.3.input_layernorm.weight", -np.inf), "input_layernorm.weight': holds NaN"),
        (poison("model.embed_tokens.weight", np.nan), "embed_tokens.weight': holds NaN"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], message: str) -> None:
    with pytest.raises((ConfigError, FormatError), match=message):
        gemma_py.load(rewritten(tmp_path, change))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_not_finite_in_every_width(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(FormatError, match=r"q_proj.weight': holds NaN"):
        gemma_py.load(rewritten(tmp_path, poison(Q0, np.inf), dtype))


def test_a_sound_checkpoint_loads(tmp_path: Path) -> None:
    gemma_py.load(rewritten(tmp_path, lambda values: None)).close()


def test_an_output_head_in_the_file_is_used_even_if_the_config_says_tied(tmp_path: Path) -> None:
    """transformers also uses the output head in the file."""
    name = "model.embed_tokens.weight"
    plain, other = tmp_path / "plain", tmp_path / "other"
    rewritten(plain, lambda values: None)
    rewritten(other, lambda values: values.__setitem__("lm_head.weight", values[name] * np.float32(2)))
    with gemma_py.load(plain) as a, gemma_py.load(other) as b:
        np.testing.assert_array_equal(a.session().prefill([2, 3]) * 2, b.session().prefill([2, 3]))


def test_pipes_and_broken_links_are_refused(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda values: None)
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
        with pytest.raises(FormatError, match="a dangling link"):
            gemma_py.load(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FormatError, match="not a regular file"):
        gemma_py.load(tmp_path)


def test_rope_tables_and_second_copies_of_tied_heads_are_ignored(tmp_path: Path) -> None:
    def change(values: dict[str, np.ndarray]) -> None:
        values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(12, np.float32)
        values["lm_head.weight"] = values["model.embed_tokens.weight"].copy()

    gemma_py.load(rewritten(tmp_path, change)).close()


# Prefixes of (text model, its head, other parts) in MedGemma, in Gemma 3 of old and of current transformers, and in
# ShieldGemma 2 of the hub and of current transformers.
LAYOUTS = [
    ("language_model.model.", "language_model.", ""),
    ("model.language_model.", "", "model."),
    ("model.language_model.model.", "model.language_model.", "model."),
    ("model.model.language_model.model.", "", "model.model."),
]


@pytest.mark.parametrize(("text", "head", "others"), LAYOUTS)
def test_the_text_model_of_a_multimodal_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, head: str, others: str
) -> None:
    plain, wrapped = tmp_path / "plain", tmp_path / "wrapped"
    name = "model.embed_tokens.weight"
    rewritten(plain, lambda values: values.__setitem__("lm_head.weight", values[name] * np.float32(2)))

    def wrap(values: dict[str, np.ndarray]) -> None:
        for old in list(values):
            values[text + old.removeprefix("model.")] = values.pop(old)
        values[f"{head}lm_head.weight"] = values[f"{text}embed_tokens.weight"] * np.float32(2)
        for other in (
            "vision_tower.encoder.norm.weight",
            "vision_tower.norm.weight",
            "multi_modal_projector.norm.weight",
        ):
            values[others + other] = np.ones(3, np.float32)

    rewritten(wrapped, wrap)
    with gemma_py.load(plain) as a, gemma_py.load(wrapped) as b:
        np.testing.assert_array_equal(a.session().prefill([2, 3]), b.session().prefill([2, 3]))
        assert a.checkpoint.left_out == {}
        assert b.checkpoint.left_out == {"vision_tower": 2, "multi_modal_projector": 1}
        note_exceptions(a)
        assert capsys.readouterr().err == ""
        note_exceptions(b)
        assert "tensors left out: multi_modal_projector 1, vision_tower 2" in capsys.readouterr().err


def directory(tmp_path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"x.gguf": b"GGUF"}, "to open the GGUF file in this directory, give .*x.gguf"),
        ({"config.json": b"{"}, "not valid JSON"),
        ({"config.json": b"[]"}, "JSON object"),
        ({"config.json": b"{}"}, "is not a Gemma model"),
        ({"config.json": b"[" * 200_000}, "too deeply"),
        ({"config.json": b'{"a": 1e999}'}, "is not a Gemma model"),
        ({"config.json": b'{"a": ' + b"9" * 10_000 + b"}"}, "not valid JSON"),
        ({"config.json": json.dumps(VARIANT.config).encode()}, "neither model.safetensors"),
    ],
)
def test_an_incomplete_directory(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(GemmaError, match=message) as caught:
        gemma_py.load(directory(tmp_path, files))
    assert str(tmp_path) in str(caught.value)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "nothing", "no such file"),
        (Path("/dev/null"), "should be a file or a directory"),
    ):
        with pytest.raises((ModelNotFoundError, FormatError), match=message):
            gemma_py.load(path)
    rewritten(tmp_path, lambda values: None)
    with pytest.raises(FormatError, match="give the directory"):
        gemma_py.load(tmp_path / "model.safetensors")


def test_links_are_followed_as_in_the_hugging_face_cache(tmp_path: Path) -> None:
    blobs, snapshot = rewritten(tmp_path / "blobs", lambda values: None), tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../blobs/{file.name}")
    gemma_py.load(snapshot).close()


# Rows of o_proj have H * E = 80 weights, so they are not whole blocks of 32.
UNEVEN = tiny.Variant(tiny._gemma3(head_dim=20, query_pre_attn_scalar=20))


def test_quant_reaches_the_specification(tmp_path: Path) -> None:
    tiny.write(VARIANT, tmp_path, seed=2)
    with gemma_py.load(tmp_path, quant="q4_0") as engine:
        ids = list(range(9))
        expected = gemma_py.reference.logits(engine, ids).view(np.uint32)
        np.testing.assert_array_equal(engine.session().prefill(ids, all_logits=True).view(np.uint32), expected)


def test_quant_names_what_stays_float(tmp_path: Path) -> None:
    tiny.write(UNEVEN, tmp_path, seed=2)
    with gemma_py.load(tmp_path, quant="q8_0") as engine:
        layers = len(engine.config.layers)
        assert engine.kept_float == [f"model.layers.{n}.self_attn.o_proj.weight" for n in range(layers)]
    with gemma_py.load(tmp_path) as engine:
        assert engine.kept_float == []


@pytest.mark.parametrize("quant", ["q4_k", "Q8_0", "", 8, ["q8_0"]])
def test_quants_that_do_not_exist(tmp_path: Path, quant: object) -> None:
    tiny.write(VARIANT, tmp_path, seed=2)
    with pytest.raises(InputError, match="quant should be one of q4_0, q8_0, found"):
        gemma_py.load(tmp_path, quant=quant)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "message"), [(np.nan, "holds NaN"), (1e8, "too large for Q8_0")])
def test_quant_refuses_what_blocks_cannot_hold(tmp_path: Path, number: float, message: str) -> None:
    with pytest.raises(FormatError, match=rf"q_proj.weight': holds .*{message.split()[-1]}"):
        gemma_py.load(rewritten(tmp_path, poison(Q0, number)), quant="q8_0")
