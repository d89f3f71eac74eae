"""Engines with random weights, compared with a specification for many numbers of threads and chunk sizes."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from equivalence import bits, prompt

import gemma_py
from gemma_py.formats.blocks import TYPES
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models.config import Config
from gemma_py.models.family import Family
from gemma_py.reference.cache import ReferenceCache
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.tensors import gguf_source


def random_checkpoint(family: Family, config: Config, kind: str, seed: int = 1) -> Checkpoint:
    """Matrices have the type `kind`, if their rows are whole blocks of this type. Norms are float."""
    rng, made, specs, path = np.random.default_rng(seed), {}, family.tensors(config), Path(f"random {kind}")
    for name, spec in specs.items():
        if spec.gguf in made:
            continue  # several matrices may be parts of one GGUF tensor
        floats = len(spec.shape) == 1 or spec.shape[-1] % TYPES[kind].block
        values, stored = rng.standard_normal(spec.gguf_shape, np.float32), TYPES["F32" if floats else kind]
        data = values.view(np.uint8) if stored.pack is None else stored.pack(values.reshape(-1, stored.block))
        if stored.name == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        made[spec.gguf] = StoredTensor(name, stored, spec.gguf_shape, data.reshape(-1), path)
    source = gguf_source(made, specs, True, str(path))
    return Checkpoint(path, str(path), family, config, source, None, {}, cacheable=False)


def random_engine(family: Family, config: Config, kind: str) -> gemma_py.Engine:
    return gemma_py.Engine(random_checkpoint(family, config, kind))


# (weights, cache, token id) -> logits [V]
Specification = Callable[[Mapping[str, Any], ReferenceCache, int], np.ndarray]


def differing_ways(family: Family, config: Config, specification: Specification, tokens: int = 70) -> list[str]:
    """The combinations of weight type, threads and chunk size whose bits differ from the specification's."""
    ids, wrong = prompt(config, tokens), []
    for kind in ("F32", "BF16", "Q8_0"):
        with random_engine(family, config, kind) as engine:
            engine.instruments.poison = True
            weights, cache = engine.reference_weights(), ReferenceCache(config)
            logits = np.stack([specification(weights, cache, token) for token in ids])
            for threads, chunk in itertools.product((1, 2, 3, 4), (1, 4, 5, 6, 33, tokens)):
                engine.set_threads(threads)
                session = engine.session()
                made = session.prefill(ids, chunk, all_logits=True)
                if (bits(made) != bits(logits)).any() or session.kv_digest() != cache.digests():
                    wrong.append(f"{kind}, {threads} threads in chunks of {chunk}")
    return wrong
