"""Digests that must be equal on every machine. A test runs this file as a program, with another instruction set."""

import hashlib
import json
import tempfile
from pathlib import Path

import tiny_checkpoints as tiny
import tiny_families
from equivalence import PARTS, WIDE, prompt
from gguf_files import write_model
from golden_bits import EMBEDDING, GOLDEN, digest_of_embeddings

import gemma_py


def digests() -> dict[str, list[str]]:
    """Return digests of logits and KV rows: of models with float weights and with quantised weights, computed by several
    workers.
    """
    made = {}
    with tempfile.TemporaryDirectory() as scratch:
        paths = {}
        for name in ("gemma1-multi-query", "gemma2", "gemma3-scaled-untied", "gemma3n"):
            paths[name] = Path(scratch) / name
            tiny.write(tiny.VARIANTS[name], paths[name], seed=1)
        for kind in ("Q8_0", "Q2_K", "Q4_K", "Q6_K"):
            paths[kind] = write_model(Path(scratch) / f"{kind}.gguf", WIDE, seed=4, kinds=dict.fromkeys(PARTS, kind))
        for name, path in paths.items():
            with gemma_py.load(path, threads=2) as engine:
                session = engine.session()
                ids = prompt(engine.config, 50)
                logits = [session.prefill(ids[:33], all_logits=True), session.prefill(ids[33:], all_logits=True)]
                made[name] = [hashlib.sha256(part.tobytes()).hexdigest() for part in logits] + session.kv_digest()
        for name in EMBEDDING:
            tiny.write(tiny_families.VARIANTS[name], Path(scratch) / name, seed=1)
            with gemma_py.load(Path(scratch) / name, threads=2) as engine:
                made[name] = [digest_of_embeddings(engine, GOLDEN["ids"][name])]
    return made


if __name__ == "__main__":
    print(json.dumps(digests()))
