import copy
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
from gguf_files import write_model
from golden_bits import GOLDEN, PARTS, QUANTISED, WIDE, digests
from repository import DATA
from tiny_models import GEMMA4, VARIANTS

import gemma_py
from gemma_py.reference import elementary
from gemma_py.reference import operations as spec
from gemma_py.reference.arithmetic import fma, jit
from gemma_py.weights.tensors import CodeMatrix

LOGITS = np.load(DATA / "tiny_logits.npz")
# The largest error of a logit, in standard deviations of the logits. The measured error is 1e-5, because transformers
# sums in another order.
BARS = 1e-4


def error(engine: gemma_py.Engine, name: str) -> float:
    ours = gemma_py.reference.logits(engine, GOLDEN["ids"][name])
    return float(np.abs(ours - LOGITS[name]).max() / LOGITS[name].std())


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_match_transformers(checkpoints: dict[str, Path], name: str) -> None:
    with gemma_py.load(checkpoints[name]) as engine:
        assert error(engine, name) < BARS


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "wider window": ("gemma3", {"sliding_window": 10}),
    "narrower window": ("gemma2", {"sliding_window": 7}),
    "windows elsewhere": ("gemma3", {"layer_types": ["full_attention"] + ["sliding_attention"] * 6}),
    "no attention cap": ("gemma2", {"attn_logit_softcapping": None}),
    "no final cap": ("gemma2", {"final_logit_softcapping": None}),
    "query scalar": ("gemma2", {"query_pre_attn_scalar": 12}),
    "wider window of Gemma 4": ("gemma4-e2b", {"sliding_window": 10}),
    "no final cap of Gemma 4": ("gemma4-dense", {"final_logit_softcapping": None}),
    "all pairs turned": (
        "gemma4-dense",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6}}},
    ),
    "no final cap of VaultGemma": ("vaultgemma", {"final_logit_softcapping": None}),
    "windows of VaultGemma elsewhere": ("vaultgemma", {"layer_types": None}),
    "rope theta": ("gemma1-multi-head", {"rope_theta": 20000.0}),
    "local rope theta": ("gemma3-old-config", {"rope_local_base_freq": 20000.0}),
    "rope scale": ("gemma3-old-config", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "correction without its scale": ("gemma3n", {"altup_correct_scale": False}),
    "correction with a scale": ("gemma3n-old-config", {"altup_correct_scale": True}),
    "another active stream": ("gemma3n-wrapped", {"altup_active_idx": 0}),
    "less sparse": ("gemma3n", {"activation_sparsity_pattern": [0.9, 0.5] + [0.0] * 5}),
    "epsilon": ("gemma3-multi-query", {"rms_norm_eps": 1e-2}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_control_each_wrong_field_of_the_config_changes_the_logits(tmp_path: Path, change: str) -> None:
    name, fields = CHANGES[change]
    variant = copy.deepcopy(VARIANTS[name])
    tiny.text_config(variant).update(fields)
    tiny.write(variant, tmp_path, seed=GOLDEN["seed"])
    with gemma_py.load(tmp_path) as engine:
        assert error(engine, name) > 1e-3


# --- one arithmetic for every format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma1-multi-head", "gemma2", "gemma3", "gemma3-scaled-untied", *GEMMA4])
def test_gguf_matches_hugging_face_bit_for_bit(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    if name == "gemma2":  # GGUF does not store the query scalar, so both checkpoints use the head width
        variant = copy.deepcopy(variant)
        variant.config["query_pre_attn_scalar"] = variant.config["head_dim"]
    if name == "gemma3-scaled-untied":
        variant = copy.deepcopy(variant)
        variant.config["rope_parameters"] = tiny.VARIANTS["gemma3"].config["rope_parameters"]
    tiny.write(variant, tmp_path / "hf", seed=3)
    gguf = write_model(tmp_path / "model.gguf", variant, seed=3)
    ids = GOLDEN["ids"][name][:20]
    with gemma_py.load(tmp_path / "hf") as a, gemma_py.load(gguf) as b:
        left, right = a.session(), b.session()
        x, y = left.prefill(ids, all_logits=True), right.prefill(ids, all_logits=True)
        np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))
        assert left.kv_digest() == right.kv_digest()


def wide_logits(path: Path) -> np.ndarray:
    with gemma_py.load(path) as engine:
        return engine.session().prefill(list(range(12)), all_logits=True)


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_match_the_float_weights_they_stand_for(tmp_path: Path, kind: str) -> None:
    """Activations cause the only difference: for quantised matrices, activations are quantised to 16 bits (an error of
    2^-16).
    """
    codes = write_model(tmp_path / "codes.gguf", WIDE, seed=4, kinds=dict.fromkeys(PARTS, kind))
    with gemma_py.load(codes) as engine:
        values = {tensor.name: tensor.to_float32() for tensor in stored(codes)}
        matrix = engine.reference_weights()["layers.0.down_proj"]
        assert isinstance(matrix, CodeMatrix)
        np.testing.assert_array_equal(spec.matrix_row(matrix, 3), values["blk.0.ffn_down.weight"][3])
        quantised = gemma_py.reference.logits(engine, list(range(12)))
    floats = write_floats(tmp_path / "floats.gguf", values)
    expected = wide_logits(floats)
    assert np.abs(quantised - expected).max() / expected.std() < 1e-3
    assert (quantised != expected).any()


def stored(path: Path) -> list[Any]:
    from gemma_py.formats.gguf import read_gguf

    return list(read_gguf(path).tensors.values())


def write_floats(path: Path, values: dict[str, np.ndarray]) -> Path:
    write_model(path, WIDE, seed=4)
    data = bytearray(path.read_bytes())
    size = sum(tensor.data.nbytes for tensor in stored(path))
    start = len(data) - size  # tensor sizes are multiples of the alignment
    for tensor in stored(path):
        raw = values[tensor.name].tobytes()
        data[start : start + len(raw)] = raw
        start += len(raw)
    path.write_bytes(data)
    return path


# --- equal bits on every machine --------------------------------------------------------------------------------------


def test_bits_match_the_stored_digests(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """tools/make_bits.py stored the digests. They change if the order of a sum changes."""
    assert digests(checkpoints, tmp_path) == json.loads((DATA / "tiny_bits.json").read_text())


# --- the parts --------------------------------------------------------------------------------------------------------


def nearest_f32(exact: Fraction) -> np.float32:
    """The float32 nearest to an exact number, ties to even."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]

    def badness(value: np.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(value)) - exact), int(value.view(np.uint32)) & 1

    return min(around, key=badness)


def exact_fma(a: Any, b: Any, c: Any) -> np.float32:
    return nearest_f32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


@jit
def fma_each(a, b, c, out):
    for i in range(len(a)):
        out[i] = fma(a[i], b[i], c[i])


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(500).astype(np.float32) for _ in range(3))
    c[:250] = -(a * b)[:250]  # the products cancel, and only an fma keeps their rounding error
    out = np.empty(500, np.float32)
    fma_each(a, b, c, out)
    expected = np.array([exact_fma(*row) for row in zip(a, b, c, strict=True)])
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
    assert (out[:250] != 0).any()


@pytest.mark.parametrize(("width", "with_minimum"), [(32, False), (32, True), (16, False), (16, True)])
def test_matmul_codes_matches_exact_arithmetic(width: int, with_minimum: bool) -> None:
    """The expected result is computed with Python's integers and fractions."""
    rng = np.random.default_rng(2)
    K, N = 96, 5
    x = rng.integers(-32767, 32768, K).astype(np.int16)
    x[:32] = 32767
    w = rng.integers(-128, 128, (N, K)).astype(np.int8)
    w[0, :32] = -128
    groups = K // width
    sx = rng.random(K // 32).astype(np.float32)
    sw = rng.standard_normal((N, groups)).astype(np.float32)
    low = rng.standard_normal((N, groups) if with_minimum else (0, 0)).astype(np.float32)
    y = spec.matmul_codes(x.reshape(groups, -1), sx, w.reshape(N, groups, -1), sw, low)
    for n in range(N):
        total = np.float32(0)
        for group in range(groups):
            span = range(group * width, (group + 1) * width)
            dot, codes = sum(int(x[k]) * int(w[n, k]) for k in span), sum(int(x[k]) for k in span)
            scale = sx[group * width // 32]
            total = exact_fma(scale * sw[n, group], nearest_f32(Fraction(dot)), total)
            if with_minimum:
                total = exact_fma(-(scale * low[n, group]), nearest_f32(Fraction(codes)), total)
        assert y[n].view(np.uint32) == total.view(np.uint32)


def test_matmul_float_is_one_chain() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal(37).astype(np.float32), rng.standard_normal((4, 37)).astype(np.float32)
    y = spec.matmul_float(x, w)
    for n in range(4):
        total = np.float32(0)
        for k in range(37):
            total = exact_fma(x[k], w[n, k], total)
        assert y[n] == total


def quantised(x: Any) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = spec.quantise(np.asarray(x, np.float32))
    return codes, scales


def test_quantise() -> None:
    x = np.random.default_rng(4).standard_normal(320).astype(np.float32)
    codes, scales = quantised(x)
    restored = codes.reshape(-1, 32) * scales[:, None].astype(np.float64)
    assert np.abs(restored - x.reshape(-1, 32)).max() <= scales.max() * 0.5001
    assert (np.abs(codes.reshape(-1, 32)).max(1) == 32767).all()


def test_quantise_rounds_ties_to_even() -> None:
    x = np.zeros(32, np.float32)
    x[0] = 32767
    x[1:9] = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.4999, -3.5001]
    codes, scales = quantised(x)
    assert scales[0] == 1
    assert codes[1:9].tolist() == [0, 2, 2, 0, -2, -2, 3, -4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantise_marks_what_is_not_finite(bad: float) -> None:
    x = np.ones(64, np.float32)
    x[40] = bad
    codes, scales = quantised(x)
    assert np.isnan(scales[1])
    assert not codes[32:].any()
    assert np.isfinite(scales[0])


@pytest.mark.parametrize("size", [0.0, -0.0, 1e-45, 1e-41, 3e-38, 3.4e38])
def test_quantise_at_the_ends_of_the_range(size: float) -> None:
    codes, scales = quantised(np.full(32, size))
    assert np.isfinite(scales[0])
    assert abs(int(codes[0])) <= 32767
    if scales[0] == 0:
        assert not codes.any()


@jit
def exp_each(x, y):
    for i in range(len(x)):
        y[i] = elementary.exp(x[i])


@jit
def tanh_each(x, y):
    for i in range(len(x)):
        y[i] = elementary.tanh(x[i])


def ulps(found: np.ndarray, exact: np.ndarray) -> float:
    return float((np.abs(found.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_exp_and_tanh() -> None:
    x = np.linspace(-87, 88, 200_001).astype(np.float32)
    y = np.empty_like(x)
    exp_each(x, y)
    assert ulps(y, np.exp(x.astype(np.float64))) < 1.1
    x = np.concatenate([np.linspace(-12, 12, 200_001), np.geomspace(1e-37, 1, 1000)]).astype(np.float32)
    x = x[x != 0]
    y = np.empty_like(x)
    tanh_each(x, y)
    assert ulps(y, np.tanh(x.astype(np.float64))) < 2


def test_exp_and_tanh_at_the_ends() -> None:
    x = np.array([np.nan, -np.inf, np.inf, -87.1, 88.1, 0.0], np.float32)
    y = np.empty_like(x)
    exp_each(x, y)
    np.testing.assert_array_equal(y, np.array([np.nan, 0, np.inf, 0, np.inf, 1], np.float32))
    tanh_each(x, y)
    np.testing.assert_array_equal(y, np.array([np.nan, -1, 1, -1, 1, 0], np.float32))


@jit
def tables64(x, sine, cosine, exponential, logarithm):
    for i in range(len(x)):
        sine[i], cosine[i] = elementary.sine_cosine64(x[i])
        exponential[i] = elementary.exp64(-x[i])
        logarithm[i] = elementary.log64(x[i])


def test_double_precision_functions() -> None:
    x = np.random.default_rng(5).uniform(1e-3, 300, 50_000)
    x[:20_000] *= 400
    sine, cosine, exponential, logarithm = (np.empty_like(x) for _ in range(4))
    tables64(x, sine, cosine, exponential, logarithm)
    np.testing.assert_allclose(sine, np.sin(x), rtol=0, atol=3e-16)
    np.testing.assert_allclose(cosine, np.cos(x), rtol=0, atol=3e-16)
    near = x < 600
    np.testing.assert_allclose(exponential[near], np.exp(-x[near]), rtol=5e-16)
    np.testing.assert_allclose(logarithm, np.log(x), rtol=3e-16, atol=3e-16)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize(("T", "first"), [(1, 0), (5, 0), (32, 0), (33, 0), (70, 3), (100, 31), (100, 32), (100, 99)])
def test_attention_is_a_softmax(T: int, first: int, cap: float) -> None:
    """The expected result is computed in float64. Rows before the window are NaN, so that reading one changes the
    result.
    """
    rng = np.random.default_rng(T + first)
    H, G, E = 4, 2, 10
    q = rng.standard_normal((H, E)).astype(np.float32) * 4
    keys, values = (rng.standard_normal((T, G, E)).astype(np.float32) for _ in range(2))
    keys[:first] = values[:first] = np.nan
    out = spec.attend(q, keys, values, first, np.float32(0.25), np.float32(cap))
    for h in range(H):
        scores = keys[first:, h // 2].astype(np.float64) @ q[h] * 0.25
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(out[h], weights / weights.sum() @ values[first:, h // 2], rtol=2e-5, atol=2e-6)


def test_rope_at_far_positions() -> None:
    frequencies = spec.rope_frequencies(128, 1e6, np.float32(8))
    exact = 1e6 ** (-np.arange(64) / 64) / 8
    np.testing.assert_allclose(frequencies, exact, rtol=1.2e-7)
    x = np.random.default_rng(6).standard_normal((3, 128)).astype(np.float32)
    turned = spec.rope(x, 131_071, frequencies)
    angle = (np.float32(131_071) * frequencies).astype(np.float64)  # a float32, as in transformers
    expected = np.concatenate(
        [x[:, :64] * np.cos(angle) - x[:, 64:] * np.sin(angle), x[:, 64:] * np.cos(angle) + x[:, :64] * np.sin(angle)],
        1,
    )
    np.testing.assert_allclose(turned, expected, rtol=0, atol=1e-6)
