import collections
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import TINY

import gemma_py
from gemma_py.errors import ComputationError, ConfigError, InputError
from gemma_py.generate.options import BASE_MODEL, GEMMA, Sampling, asked, recommended
from gemma_py.generate.sampling import Sampler, perplexity, uniform
from gemma_py.kernels.sampling import top_k

RNG = np.random.default_rng(7)
V = 5000
LOGITS = (RNG.standard_normal(V) * 3).astype(np.float32)
PROMPT, MADE = [1, 2, 3, 3, 4999], [7, 7, 8, 3]


def kept(sampling: Sampling, logits: np.ndarray = LOGITS) -> dict[int, float]:
    sampler = Sampler(sampling, len(logits), PROMPT)
    x = sampler._penalised(logits, MADE).copy() / np.float32(sampling.temperature)
    weights, ids = sampler._candidates(x, x.max())
    weights = np.where(weights >= np.float32(sampling.min_p), weights, 0).astype(np.float64)
    numbers = np.arange(len(weights)) if ids is None else ids[: len(weights)]
    return {int(t): float(w) for t, w in zip(numbers, weights / weights.sum(), strict=True) if w > 0}


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 4990},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 64, "top_p": 0.95},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 0.8, "top_k": 500, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "temperature": 0.9, "top_k": 20},
    {"logit_bias": {4: 30.0, 17: -100.0}, "repetition_penalty": 1.1, "top_p": 0.97},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_match_a_plain_computation(options: dict[str, Any]) -> None:
    """The plain computation sorts all float64 logits, and applies the filters in the documented order."""
    s = Sampling(**{"temperature": 1.0, **options})
    x = LOGITS.astype(np.float64)
    for token, bias in s.logit_bias.items():
        x[token] += bias
    for token in {*PROMPT, *MADE}:
        x[token] = x[token] * s.repetition_penalty if x[token] < 0 else x[token] / s.repetition_penalty
    x /= s.temperature
    order = np.argsort(-x, kind="stable")[: s.top_k or None]
    p = np.exp(x[order] - x.max())
    p /= p.sum()
    count = int((np.cumsum(p) - p < s.top_p).sum()) if s.top_p < 1 else len(p)
    order, p = order[:count], p[:count]
    stays = p >= s.min_p * p[0]
    expected = dict(zip(order[stays].tolist(), (p[stays] / p[stays].sum()).tolist(), strict=True))
    found = kept(s)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([found[t] for t in expected], list(expected.values()), rtol=2e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_match_transformers(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra oracle: torch")
    transformers = pytest.importorskip("transformers", reason="needs the extra oracle: transformers")
    given = {"temperature": 1.0, **options}
    bias = given.pop("logit_bias", None)
    if bias:
        given["sequence_bias"] = [[[token], value] for token, value in bias.items()]
    config = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, "top_p": 1.0, **given})
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8))  # fmt: skip
    ids = torch.tensor([[*PROMPT, *MADE]])
    processors = model._get_logits_processor(config, input_ids_seq_length=ids.shape[1], device="cpu")
    expected = processors(ids, torch.from_numpy(LOGITS)[None].clone()).softmax(-1)[0].numpy()
    found = kept(Sampling(**{"temperature": 1.0, **options}))
    assert found.keys() == set(np.flatnonzero(expected).tolist())
    np.testing.assert_allclose([found[t] for t in sorted(found)], expected[sorted(found)], rtol=2e-4)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    sampler = Sampler(Sampling(presence_penalty=0.5, frequency_penalty=0.25), V, PROMPT)
    difference = LOGITS - sampler._penalised(LOGITS, MADE)
    assert {int(t): round(float(difference[t]), 5) for t in np.flatnonzero(difference)} == {3: 0.75, 7: 1.0, 8: 0.75}
    assert sampler._penalised(LOGITS, []) is not LOGITS  # a copy: the given logits must not change


def test_the_likeliest_with_ties_has_the_smaller_id() -> None:
    x = np.zeros(300, np.float32)
    x[[20, 40, 60]] = 2
    assert Sampler(Sampling(), 300, []).choose(x, []) == 20
    assert Sampler(Sampling(logit_bias={40: 1.0}), 300, []).choose(x, []) == 40
    assert set(kept(Sampling(temperature=1.0, top_k=2), x)) == {20, 40}
    assert set(kept(Sampling(temperature=1.0, top_p=0.03), x)) == {20, 40}


@pytest.mark.parametrize("k", [1, 2, 63, 64, 4999, 5000])
def test_largest_matches_a_sort(k: int) -> None:
    for x in (LOGITS, np.sort(LOGITS), np.round(LOGITS), np.full(V, -np.inf, np.float32)):
        values, ids = np.empty(k, np.float32), np.empty(k, np.int64)
        top_k(x, values, ids)
        order = np.lexsort((np.arange(V), -x))[:k]
        np.testing.assert_array_equal(ids, order)
        np.testing.assert_array_equal(values, x[order])


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 2.0, "top_k": 8}], ids=str
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    logits = np.linspace(2, -2, 12, dtype=np.float32)
    s = Sampling(**{"temperature": 1.0, "seed": 3, **options})
    sampler, count = Sampler(s, 12, []), 4000
    drawn = collections.Counter(sampler.choose(logits, [0] * position) for position in range(count))
    x = logits / np.float32(s.temperature)
    weights, ids = sampler._candidates(x, x.max())
    weights = np.where(weights >= s.min_p, weights, 0).astype(np.float64)
    expected = dict(zip(range(12) if ids is None else ids.tolist(), weights / weights.sum(), strict=False))
    assert set(drawn) <= {t for t, p in expected.items() if p > 0}
    for token, p in expected.items():
        assert abs(drawn[token] - count * p) < 5 * math.sqrt(count * p * (1 - p)) + 1


def test_random_numbers_are_keyed_by_seed_and_position() -> None:
    table = np.array([[uniform(seed, position) for position in range(500)] for seed in range(40)])
    assert len(np.unique(table)) == table.size
    assert abs(table.mean() - 0.5) < 0.01 and abs(table.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(table.T[:-1].ravel(), table.T[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    # If these numbers change, the text of every seed changes.
    assert [uniform(0, 0), uniform(1, 2), uniform(2**62, 10**6)] == [
        0.6524484863740322, 0.04525699773739167, 0.7480227189628226]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1}, {"temperature": 2.01}, {"temperature": 9999}, {"temperature": math.nan}, {"temperature": "1"},
        {"temperature": True}, {"temperature": 10**400}, {"logit_bias": {1: -(10**400)}}, {"top_k": -1},
        {"top_k": 1.5}, {"top_p": 0.0}, {"top_p": 1.01}, {"min_p": 2}, {"min_p": math.inf}, {"repetition_penalty": 0},
        {"repetition_penalty": 101}, {"presence_penalty": None}, {"presence_penalty": -2.1}, {"frequency_penalty": 1e9},
        {"logit_bias": [1]}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: 101}},
        {"logit_bias": {"a": 1.0}}, {"logit_bias": {1: math.nan}}, {"seed": -1}, {"seed": 2**63}, {"seed": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options_are_one_clear_line(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InputError, match=name) as error:
        Sampling(**options)
    assert "\n" not in str(error.value)


def test_what_the_sampler_refuses() -> None:
    with pytest.raises(InputError, match="logit_bias: token id 12 is outside the vocabulary of 12"):
        Sampler(Sampling(logit_bias={12: 1.0}), 12, [])
    bad = LOGITS.copy()
    bad[77] = np.nan
    for s in (Sampling(), GEMMA):
        with pytest.raises(ComputationError, match="NaN"):
            Sampler(s, V, []).choose(bad, [])


def test_recommended_sampling(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert recommended(tmp_path, {}) == GEMMA
    for document, expected in (
        ({"eos_token_id": 1}, GEMMA),
        ({"do_sample": True, "top_k": 40, "temperature": 0.7, "top_p": None}, Sampling(temperature=0.7, top_k=40)),
        ({"do_sample": True, "top_p": 0.9}, Sampling(temperature=1.0, top_p=0.9)),
        ({"do_sample": False, "top_p": 0.9}, Sampling()),
    ):
        file.write_text(json.dumps(document))
        assert recommended(tmp_path, {}) == expected
    for document in ([], {"do_sample": True, "top_p": 7}):  # type: ignore[assignment]
        file.write_text(json.dumps(document))
        with pytest.raises(ConfigError):
            recommended(tmp_path, {})
    said = {"general.sampling.temp": np.float32(0.5), "general.sampling.top_k": np.int32(3)}
    assert recommended(tmp_path / "model.gguf", said) == Sampling(temperature=0.5, top_k=3)


def test_options_that_are_not_given() -> None:
    base = Sampling(temperature=0.9, top_k=64, top_p=0.95)
    assert asked({"temperature": None}, base) == Sampling()
    assert asked({"repetition_penalty": 1.2}, base) == Sampling(repetition_penalty=1.2)
    assert asked({"seed": 4}, base) == Sampling(temperature=0.9, top_k=64, top_p=0.95, seed=4)
    assert asked({"temperature": 0, "seed": 4}, base) == Sampling(seed=4)
    # A seed asks for sampling, although the default is greedy.
    assert asked({"seed": 4}, BASE_MODEL) == replace(GEMMA, seed=4)
    assert asked({"top_p": 0.5}, Sampling()) == Sampling(top_p=0.5)  # for a checkpoint that recommends greedy decoding
    assert asked({"temperature": 0.5}, Sampling()) == Sampling(temperature=0.5)


def test_a_base_model_that_recommends_nothing_decodes_greedily(tmp_path: Path) -> None:
    """The model counts as a base model if it has no chat template, no recommendation, and no <end_of_turn> as an end
    token.
    """
    path = tmp_path / "base"
    shutil.copytree(TINY, path, ignore=shutil.ignore_patterns("chat_template.jinja", "generation_config.json"))
    config = json.loads((path / "config.json").read_text())
    found = {}
    for ends in ([1, 6], [1]):
        (path / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
        with gemma_py.load(path, threads=1) as engine:
            found[len(ends)] = engine.sampling
            drawn = engine.chat_sampling({"temperature": 0.7}), engine.chat_sampling({"seed": 3, "top_k": 5})
    assert found == {2: GEMMA, 1: BASE_MODEL}
    assert BASE_MODEL.temperature == 0
    assert drawn == (replace(GEMMA, temperature=0.7), replace(GEMMA, top_k=5, seed=3))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7}))
    with gemma_py.load(path, threads=1) as engine:
        assert engine.sampling == Sampling(temperature=0.7)
    for greedy in ({"do_sample": False}, {"temperature": 0, "top_k": 64, "top_p": 0.95}):
        (path / "generation_config.json").write_text(json.dumps(greedy))
        with gemma_py.load(path, threads=1) as engine:
            recommendation = engine.sampling
            assert recommendation.temperature == 0
            assert engine.chat_sampling({"seed": 3, "top_p": 0.5}) == replace(recommendation, seed=3, top_p=0.5)
            assert engine.chat_sampling({"temperature": 0.7}) == replace(recommendation, temperature=0.7)


# --- through the engine -----------------------------------------------------------------------------------------------


def text(engine: gemma_py.Engine, **options: Any) -> str:
    return "".join(token.text for token in engine.generate("some text", 24, **options))


def test_the_same_seed_gives_the_same_text(tiny_engine: gemma_py.Engine) -> None:
    expected = text(tiny_engine, seed=11)
    assert expected != text(tiny_engine, seed=12)
    for threads in (1, 2, 4):
        with gemma_py.load(TINY, threads=threads) as engine:
            assert text(engine, seed=11) == expected
    ids = tiny_engine.encode("some text")
    made = [token.id for token in tiny_engine.generate(ids, 24, seed=11)]
    # A draw depends only on the logits and the position, so continuing in the middle gives the same tokens.
    assert [token.id for token in tiny_engine.generate(ids + made[:10], 14, seed=11)] == made[10:]


def test_without_a_seed_draws_differ(tiny_engine: gemma_py.Engine) -> None:
    assert len({text(tiny_engine, temperature=2.0) for _ in range(3)}) > 1


def test_logprobs_are_the_models_own(tiny_engine: gemma_py.Engine) -> None:
    ids = tiny_engine.encode("some text")
    drawn = list(tiny_engine.generate(ids, 5, seed=2, temperature=2.0, top_k=3))
    scores = list(tiny_engine.score(ids + [token.id for token in drawn]))[len(ids) - 1 :]
    assert [token.logprob for token in drawn] == [-score for score in scores]


@pytest.mark.parametrize(
    ("mean", "expected"),
    [(0.45361328125, "0x1.92f0f4996ec7ap+0"), (1.6357421875, "0x1.48876feb5a3acp+2"), (701.0, "inf")],
)
def test_perplexity_does_not_depend_on_the_c_library(mean: float, expected: str) -> None:
    """The expected values are from the package's own exp. glibc's exp differs in the last bit."""
    assert perplexity([mean - 0.25, mean + 0.25]) == float.fromhex(expected)
