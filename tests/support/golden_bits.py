"""Digests of the results of every tiny model, which are the same on every machine: tests/data/tiny_bits.json."""

import hashlib
import json
from pathlib import Path

import tiny_checkpoints as tiny
import tiny_families
import tiny_models
from equivalence import PARTS
from gguf_files import write_model
from repository import DATA

import gemma_py
from gemma_py.formats.blocks import TYPES

GOLDEN = json.loads((DATA / "tiny_ids.json").read_text())
WIDE = tiny.Variant(
    tiny._gemma3(hidden_size=256, intermediate_size=256, head_dim=64, query_pre_attn_scalar=64, num_hidden_layers=2,
                 sliding_window=5, vocab_size=64)
)  # fmt: skip
EMBEDDING = ("embeddinggemma", "embeddinggemma-backbone")
QUANTISED = [name for name, kind in TYPES.items() if kind.quantised]


def digests(checkpoints: dict[str, Path], scratch: Path) -> dict[str, str]:
    """One sha256 a model: of logits and KV rows, or of embeddings."""
    paths = dict(checkpoints)
    for name in EMBEDDING:
        tiny.write(tiny_families.VARIANTS[name], scratch / name, GOLDEN["seed"])
        paths[name] = scratch / name
    for name, variant in tiny_models.WIDE.items():
        paths[f"{name} in Q8_0"] = write_model(scratch / f"{name}.gguf", variant, seed=3, quant="Q8_0")
    for kind in QUANTISED:
        kinds = dict.fromkeys(PARTS, kind)
        paths[kind] = write_model(scratch / f"{kind}.gguf", WIDE, seed=4, kinds=kinds)
    made = {}
    for name, path in paths.items():
        with gemma_py.load(path) as engine:
            ids = GOLDEN["ids"].get(name, list(range(40)))
            if engine.config.embedding:
                texts = ids if isinstance(ids[0], list) else [ids, ids[:7]]
                made[name] = hashlib.sha256(engine.embed(texts).tobytes()).hexdigest()
                continue
            session = engine.session()
            digest = hashlib.sha256(session.prefill(ids, all_logits=True).tobytes())
            digest.update("".join(session.kv_digest()).encode())
            made[name] = digest.hexdigest()
    return made
