"""Digests of logits or embeddings, and of KV rows, for every tiny model. All machines must compute the digests in
tests/data/tiny_bits.json.
"""

import hashlib
import json
from pathlib import Path

import assisted
import numpy as np
import tiny_checkpoints as tiny
import tiny_families
import tiny_models
from equivalence import PARTS
from gguf_files import write_model
from repository import DATA

import gemma_py
from gemma_py.formats.blocks import TYPES
from gemma_py.runtime.runner import SequenceInput

GOLDEN = json.loads((DATA / "tiny_ids.json").read_text())
WIDE = tiny.Variant(
    tiny._gemma3(hidden_size=256, intermediate_size=256, head_dim=64, query_pre_attn_scalar=64, num_hidden_layers=2,
                 sliding_window=5, vocab_size=64)
)  # fmt: skip
EMBEDDING = [name for name, variant in tiny_families.VARIANTS.items() if tiny.is_embedding(variant)]
QUANTISED = [name for name, kind in TYPES.items() if kind.quantised]


def digests(checkpoints: dict[str, Path], scratch: Path) -> dict[str, str]:
    paths = dict(checkpoints)
    for kind in QUANTISED:
        kinds = dict.fromkeys(PARTS, kind)
        paths[kind] = write_model(scratch / f"{kind}.gguf", WIDE, seed=4, kinds=kinds)
    for name in EMBEDDING:
        tiny.write(tiny_families.VARIANTS[name], scratch / name, seed=1)
        paths[name] = scratch / name
    for name, variant in tiny_models.WIDE.items():
        paths[f"{name} in Q8_0"] = write_model(scratch / f"{name}.gguf", variant, seed=3, quant="Q8_0")
    made = {}
    for name, path in paths.items():
        with gemma_py.load(path) as engine:
            ids = GOLDEN["ids"].get(name, list(range(40)))
            if engine.config.embedding:
                made[name] = digest_of_embeddings(engine, ids if isinstance(ids[0], list) else [ids, ids[:7]])
                continue
            session = engine.session()
            digest = hashlib.sha256(session.prefill(ids, all_logits=True).tobytes())
            digest.update("".join(session.kv_digest()).encode())
            made[name] = digest.hexdigest()
    for name in tiny_families.ASSISTANTS:
        draft = assisted.written(name, scratch / f"assistant of {name}")
        with gemma_py.load(paths[assisted.main_of(name)], draft=draft) as engine:
            session = engine.session()
            session.prefill(list(range(40)))
            made_by = assisted.steps(session, [3, 1, 4, 1])
            made[f"assistant of {name}"] = hashlib.sha256(b"".join(rows.tobytes() for rows in made_by)).hexdigest()
    return made


def digest_of_embeddings(engine: gemma_py.Engine, texts: list[list[int]]) -> str:
    caches = [engine.new_cache() for _ in texts]
    rows = engine.run_together([SequenceInput(*pair) for pair in zip(caches, texts, strict=True)])
    digest = hashlib.sha256(np.concatenate(rows).tobytes() + engine.embed(texts).tobytes())
    digest.update("".join(line for cache in caches for line in cache.digest()).encode())
    return digest.hexdigest()
