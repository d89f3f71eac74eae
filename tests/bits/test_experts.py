from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from equivalence import bits, prompt
from random_model import differing_ways, random_engine

from gemma_py.kernels import experts
from gemma_py.kernels.decorator import kernel
from gemma_py.models.config import Config, Layer, Rope, checked
from gemma_py.models.gemma import FAMILY
from gemma_py.models.program import LOGITS, WANTED, Program, Tensor
from gemma_py.reference import operations as op
from gemma_py.reference.cache import ReferenceCache

X, C, D, F = 9, 3, 64, 96  # experts, experts of a token, model width, width of an expert
SCALE, EPS, NO_CAP, ONE = (np.float32(number) for number in (0.125, 1e-6, 0, 1))
LAYERS = tuple(Layer(5, Rope(1e4), 2, 1, 32, F, number) for number in range(2))
CONFIG = checked(Config("made up", 40, D, 200, 1e-6, 16.0, None, None, True, None, (), LAYERS), "here")


def tensors(config: Config) -> dict[str, Tensor]:
    made = {"embed_tokens": Tensor((40, D), "embed_tokens", "embed_tokens"), "norm": Tensor((D,), "norm", "norm")}
    for n in range(len(config.layers)):
        shapes = {"q": (64, D), "k": (32, D), "v": (32, D), "o": (D, 64), "router": (X, D), "gain": (X,), "pre": (D,)}
        shapes |= {"gate": (X, F, D), "up": (X, F, D), "down": (X, D, F)}
        for name, shape in shapes.items():
            made[f"layers.{n}.{name}"] = Tensor(shape, f"layers.{n}.{name}", f"layers.{n}.{name}")
    return made


def write(p: Program) -> None:
    p.embed("embed_tokens", "x")
    p.rope_tables()
    for n in range(len(p.config.layers)):
        p.phase("attention input", n)
        p.norm("x", "n", f"layers.{n}.pre")
        for name in ("q", "k", "v", "router"):
            p.matmul("n", name, f"layers.{n}.{name}")
        p.phase("rope and kv", n)
        p.rope("q", n, 2)
        p.rope("k", n, 1)
        p.store("k", "v", n)
        p.attend("q", "a", n, p.config.attention_scale)
        p.phase("output", n)
        p.matmul("a", "y", f"layers.{n}.o")
        p.phase("route", n)
        p.add("x", "y")
        p.route("router", "routes", f"layers.{n}.gain", C, float(SCALE))
        p.phase("experts", n)
        p.expert_matmul("n", "gate", f"layers.{n}.gate", "routes")
        p.expert_matmul("n", "up", f"layers.{n}.up", "routes")
        p.gelu_gate("gate", "up")
        p.expert_matmul("gate", "parts", f"layers.{n}.down", "routes")
        p.mix("parts", "y", "routes")
        p.add("x", "y")
    p.phase("head", 2, WANTED)
    p.take("x", "last")
    p.norm("last", "last", "norm")
    p.matmul("last", LOGITS, "embed_tokens")


MADE_UP = replace(FAMILY, tensors=tensors, write=write)


def specification(weights, cache, token):
    x = op.embed(weights["embed_tokens"], token)
    for n, y in enumerate(LAYERS):
        w, turns = op.of_layer(weights, n), op.rope_frequencies(32, 1e4, ONE)
        h = op.rms_norm(x, EPS, w["pre"])
        cache.store(
            n,
            op.rope(op.matmul(h, w["k"]).reshape(-1, 32), cache.position, turns),
            op.matmul(h, w["v"]).reshape(-1, 32),
        )
        q = op.rope(op.matmul(h, w["q"]).reshape(-1, 32), cache.position, turns)
        a = op.attend(q, *cache.rows(y), cache.first_visible(y), np.float32(0.25), NO_CAP).reshape(-1)
        x = op.add(x, op.matmul(a, w["o"]))
        chosen, shares = op.route(op.matmul(h, w["router"]), SCALE, w["gain"], C)
        parts = [
            op.matmul(op.gelu_gate(op.matmul(h, w[f"gate.{e}"]), op.matmul(h, w[f"up.{e}"])), w[f"down.{e}"])
            for e in chosen
        ]
        x = op.add(x, op.mix(np.stack(parts), shares))
    cache.position += 1
    return op.matmul(op.rms_norm(x, EPS, weights["norm"]), weights["embed_tokens"])


def test_a_family_with_experts_matches_its_specification() -> None:
    assert differing_ways(MADE_UP, CONFIG, specification) == []


mix = op.mix  # negative controls below replace op.mix


def mix_from_the_last(parts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(mix(parts[::-1].copy(), weights[::-1].copy()))


def mix_in_two_halves(parts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(mix(parts[1:], weights[1:]) + mix(parts[:1], weights[:1]))


@pytest.mark.parametrize("other", [mix_from_the_last, mix_in_two_halves])
def test_control_experts_in_another_order(monkeypatch: pytest.MonkeyPatch, other: Callable[..., np.ndarray]) -> None:
    ids = prompt(CONFIG, 30)
    with random_engine(MADE_UP, CONFIG, "F32") as engine:
        made = engine.session().prefill(ids, all_logits=True)

        def specified() -> np.ndarray:
            cache = ReferenceCache(CONFIG)
            return np.stack([specification(engine.reference_weights(), cache, token) for token in ids])

        assert (bits(made) == bits(specified())).all()
        monkeypatch.setattr(op, "mix", other)
        changed = specified()
        np.testing.assert_allclose(changed, made, atol=1e-2)
        assert (bits(made) != bits(changed)).any()


@kernel
def route(logits, X, scale, gain, C, routes, T):
    experts.route_rows(logits, X, scale, gain, C, routes, 0, T)


@kernel
def list_products(routes, T, X, C, lists):
    experts.list_products(routes, T, X, C, lists)


def near_ties(rng: np.random.Generator, T: int, X: int) -> np.ndarray:
    x = rng.standard_normal((T, X)).astype(np.float32)
    for row in x[1::2]:
        row[:] = row[0]
        row[rng.integers(0, X, X // 2)] = np.nextafter(row[0], np.float32(9), dtype=np.float32)
    if T > 8:
        x[4, X // 2], x[6, 0], x[8] = np.nan, np.inf, -np.inf
        x[5, 1:] = -np.inf
    return x


@pytest.mark.parametrize(("count", "chosen"), [(1, 1), (2, 1), (5, 5), (8, 2), (128, 8)])
def test_routes_match_the_specification(count: int, chosen: int) -> None:
    rng, T = np.random.default_rng(count), 60
    logits, gain = near_ties(rng, T, count), rng.uniform(0.5, 2, count).astype(np.float32)
    made = np.full((T, 2 * chosen), np.nan, np.float32)
    route(logits.copy().reshape(-1), count, SCALE, gain, chosen, made.reshape(-1), T)
    for row, found in zip(logits, made, strict=True):
        numbers, weights = op.route(row, SCALE, gain, chosen)
        assert found[:chosen].tolist() == numbers.tolist() == sorted(set(numbers.tolist()))
        np.testing.assert_array_equal(found[chosen:], weights)
    equal = np.ones((1, count), np.float32)
    route(equal.reshape(-1), count, SCALE, gain, chosen, made.reshape(-1), 1)
    # Of equal probabilities, the lower expert numbers are chosen.
    assert made[0, :chosen].tolist() == list(range(chosen))


def test_products_are_listed_by_expert_in_ascending_order() -> None:
    rng, T = np.random.default_rng(3), 50
    routes = np.zeros((T, 2 * C), np.float32)
    for row in routes:
        row[:C] = np.sort(rng.choice(X, C, replace=False))
    # No expert has these numbers, so these products are left out.
    wrong = (np.nan, -1, -0.5, X, X + 1, X + 40, np.inf)
    for place, number in enumerate(wrong, 7):
        routes[place, place % C] = number
    lists = np.full(experts.lists_size(T, X, C), -9, np.int64)
    list_products(routes.reshape(-1), T, X, C, lists)
    numbers = routes[:, :C].reshape(-1)
    for expert in range(X):
        assert lists[lists[expert] : lists[expert + 1]].tolist() == np.flatnonzero(numbers == expert).tolist()
    assert lists[X] - lists[0] == T * C - len(wrong)
