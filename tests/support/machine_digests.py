import hashlib
import json
import tempfile
from pathlib import Path

import tiny_checkpoints as tiny
import tiny_families
import tiny_models
from equivalence import PARTS, WIDE, prompt
from gguf_files import write_model
from golden_bits import EMBEDDING, digest_of_embeddings

import gemma_py

FLOATS = ("gemma1-multi-query", "gemma2", "gemma3-scaled-untied", "gemma3n", "gemma4-e2b", "gemma4-dense",
          "gemma4-experts")  # fmt: skip


def digests() -> dict[str, list[str]]:
    """Digests of logits or embeddings and of KV rows, computed by several workers, for float and for quantised weights."""
    made = {}
    with tempfile.TemporaryDirectory() as scratch:
        paths = {}
        for name in (*FLOATS, *EMBEDDING):
            paths[name] = Path(scratch) / name
            tiny.write((tiny.VARIANTS | tiny_families.VARIANTS)[name], paths[name], seed=1)
        for name, variant in tiny_models.WIDE.items():
            paths[f"{name} in Q8_0"] = write_model(Path(scratch) / f"{name}.gguf", variant, seed=3, quant="Q8_0")
        for kind in ("Q8_0", "Q2_K", "Q4_K", "Q6_K"):
            paths[kind] = write_model(Path(scratch) / f"{kind}.gguf", WIDE, seed=4, kinds=dict.fromkeys(PARTS, kind))
        for name, path in paths.items():
            with gemma_py.load(path, threads=2) as engine:
                ids = prompt(engine.config, 50)
                if engine.config.embedding:
                    made[name] = [digest_of_embeddings(engine, [ids, ids[:7]])]
                    continue
                session = engine.session()
                logits = [session.prefill(ids[:33], all_logits=True), session.prefill(ids[33:], all_logits=True)]
                made[name] = [hashlib.sha256(part.tobytes()).hexdigest() for part in logits] + session.kv_digest()
    return made


if __name__ == "__main__":
    print(json.dumps(digests()))
