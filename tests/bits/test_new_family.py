"""A family that the package does not know: what it takes to define one, and that it gets the same bits as its specification.

Attention and feed-forward read the same norm side by side; the last layer reads the KV rows of the one before; heads have
two widths; values are normalised without a gain, and each layer scales the stream.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gemma_py
from gemma_py.formats.blocks import F32, TYPES
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models.config import Config, Layer, Rope, checked
from gemma_py.models.gemma import FAMILY
from gemma_py.models.program import LOGITS, WANTED, Program, Tensor
from gemma_py.reference import operations as op
from gemma_py.reference.cache import Cache
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.tensors import gguf_source

LAYERS = (Layer(5, Rope(1e4), 4, 2, 16, 96, 0), Layer(None, Rope(1e6), 2, 1, 32, 64, 1), Layer(None, Rope(1e6), 2, 1, 32, 96, 1))
CONFIG = checked(Config("made up", 40, 64, 200, 1e-6, 16.0, None, None, True, None, (), LAYERS), "here")


def tensors(config: Config) -> dict[str, Tensor]:
    made = {"embed_tokens": (40, 64), "norm": (64,)}
    for n, y in enumerate(config.layers):
        HE, GE, F = y.num_attention_heads * y.head_dim, y.num_key_value_heads * y.head_dim, y.intermediate_size
        of = {"pre": (64,), "q": (HE, 64), "o": (64, HE), "gate": (F, 64), "up": (F, 64), "down": (64, F), "scalar": (1,)}
        of |= {"k": (GE, 64), "v": (GE, 64)} if y.kv_source == n else {}
        made |= {f"layers.{n}.{name}": shape for name, shape in of.items()}
    return {name: Tensor(shape, name, name) for name, shape in made.items()}


def write(p: Program) -> None:
    p.phase("start", 0)
    p.embed("embed_tokens", "x")
    p.rope_tables()
    for n, y in enumerate(p.config.layers):
        of, own = f"layers.{n}.", y.kv_source == n
        p.phase("input", n)
        p.norm("x", "n", f"{of}pre")
        p.quantise("n")
        p.phase("products", n)
        for name in ("q", *(("k", "v") if own else ()), "gate", "up"):
            p.matmul("n", name, f"{of}{name}")
        p.phase("turn", n)
        p.rope("q", n, y.num_attention_heads)
        if own:
            p.rope("k", n, y.num_key_value_heads)
            p.norm("v", "v", "", heads=y.num_key_value_heads)
            p.store("k", "v", n)
        p.attend("q", "a", n, p.config.attention_scale)
        p.phase("codes", n)
        p.quantise("a")
        p.gelu_gate("gate", "up")
        p.quantise("gate", slot=1)
        p.phase("outputs", n)
        p.matmul("a", "y", f"{of}o")
        p.matmul("gate", "z", f"{of}down")
        p.phase("sum", n)
        p.add("x", "y")
        p.add("x", "z")
        p.scale("x", f"{of}scalar")
    p.phase("last", 3, WANTED)
    p.take("x", "last")
    p.norm("last", "last", "norm")
    p.quantise("last")
    p.phase("head", 3, WANTED)
    p.matmul("last", LOGITS, "embed_tokens")
