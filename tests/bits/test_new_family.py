"""Defines a new family and its specification. The engine must give the specification's bits."""

from dataclasses import replace

import numpy as np
from random_model import differing_ways

from gemma_py.models.config import Config, Layer, Rope, checked
from gemma_py.models.gemma import FAMILY
from gemma_py.models.program import LOGITS, WANTED, Program, Tensor
from gemma_py.reference import operations as op

# Layer(window, rope, H, G, E, F, layer whose KV rows are read).
WIDE = Layer(None, Rope(1e6, share=0.25), 2, 1, 32, 64, 1)
LAYERS = (Layer(5, Rope(1e4), 4, 2, 16, 96, 0), WIDE, replace(WIDE, intermediate_size=96))
CONFIG = checked(Config("made up", 40, 64, 200, 1e-6, 16.0, None, None, True, None, (), LAYERS), "here")
P, TOKENS = 32, 30  # the width of a layer's own inputs, and the number of tokens with such inputs
EPS, SCALE, NO_CAP, ONE = (np.float32(number) for number in (1e-6, 0.25, 0, 1))


def tensors(config: Config) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (40, 64), "norm": (64,), "table": (TOKENS, len(LAYERS) * P)}
    shapes["second"] = (TOKENS, 64)
    for n, y in enumerate(config.layers):
        GE, F = y.num_key_value_heads * y.head_dim, y.intermediate_size
        of = {
            "pre": (64,),
            "scalar": (1,),
            "q": (64, 64),
            "o": (64, 64),
            "gate": (F, 64),
            "up": (F, 64),
            "down": (64, F),
            "own_gate": (P, 64),
            "own_out": (64, P),
        }
        of |= {"k": (GE, 64), "v": (GE, 64)} if y.kv_source == n else {}
        shapes |= {f"layers.{n}.{name}": shape for name, shape in of.items()}
    return {name: Tensor(shape, name, name, gathered=name == "table") for name, shape in shapes.items()}


def write(p: Program) -> None:
    p.embed("embed_tokens", "x")
    p.embed("table", "own", 0.7)
    p.embed("second", "e", 3.0)
    p.add("x", "e")
    p.rope_tables()
    for n, y in enumerate(p.config.layers):
        p.phase("layer", n)
        p.norm("x", "n", f"layers.{n}.pre")
        for name in ("q", "gate", "up", *(("k", "v") if y.kv_source == n else ())):
            p.matmul("n", name, f"layers.{n}.{name}")
        p.rope("q", n, y.num_attention_heads)
        if y.kv_source == n:
            p.rope("k", n, y.num_key_value_heads)
            p.norm("v", "v", "", heads=y.num_key_value_heads)
            p.store("k", "v", n)
        p.attend("q", "a", n, p.config.attention_scale)
        p.gelu_gate("gate", "up")
        p.matmul("a", "y", f"layers.{n}.o")
        p.matmul("gate", "z", f"layers.{n}.down")
        for half in ("y", "z"):
            p.add("x", half)
        p.matmul("x", "g", f"layers.{n}.own_gate")
        p.columns("own", "part", n * P, P)
        p.gelu_gate("g", "part")
        p.matmul("g", "y", f"layers.{n}.own_out")
        p.add("x", "y")
        p.scale("x", f"layers.{n}.scalar")
        p.multiply("x", 1.1)
    p.phase("head", 3, WANTED)
    p.take("x", "last")
    p.norm("last", "last", "norm")
    p.matmul("last", LOGITS, "embed_tokens")


def specification(weights, cache, token):
    own = op.embed(weights["table"], token, 0.7)
    x = op.add(op.embed(weights["embed_tokens"], token), op.embed(weights["second"], token, 3.0))
    for n, y in enumerate(LAYERS):
        w, E = op.of_layer(weights, n), y.head_dim
        h, turns = op.rms_norm(x, EPS, w["pre"]), op.rope_frequencies(E, y.rope.theta, ONE, y.rope.share)
        if y.kv_source == n:
            k = op.rope(op.matmul(h, w["k"]).reshape(-1, E), cache.position, turns)
            cache.store(n, k, op.rms_norm_heads(op.matmul(h, w["v"]).reshape(-1, E), EPS))
        q = op.rope(op.matmul(h, w["q"]).reshape(-1, E), cache.position, turns)
        a = op.attend(q, *cache.rows(y), cache.first_visible(y), SCALE, NO_CAP).reshape(-1)
        f = op.gelu_gate(op.matmul(h, w["gate"]), op.matmul(h, w["up"]))
        x = op.add(op.add(x, op.matmul(a, w["o"])), op.matmul(f, w["down"]))
        g = op.gelu_gate(op.matmul(x, w["own_gate"]), op.columns(own, n * P, P))
        x = op.scale_row(op.add(x, op.matmul(g, w["own_out"])), w["scalar"][0])
        x = op.scale_row(x, np.float32(1.1))
    cache.position += 1
    return op.matmul(op.rms_norm(x, EPS, weights["norm"]), weights["embed_tokens"])


def test_a_family_defined_here_matches_its_specification() -> None:
    assert differing_ways(replace(FAMILY, tensors=tensors, write=write), CONFIG, specification) == []
