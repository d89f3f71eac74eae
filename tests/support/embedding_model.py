"""A tiny EmbeddingGemma with a tokenizer and the prompts of two tasks."""

import json
import shutil
from pathlib import Path

import tiny_checkpoints as tiny
import tiny_families
from repository import TINY

PROMPTS = {"query": "q: ", "passage": "p: "}


def write_checkpoint(path: Path) -> None:
    config = tiny_families.embedding_gemma(vocab_size=1536, num_hidden_layers=2)
    tiny.write(tiny.Variant(config, prefix="", dense=(40, 24)), path, seed=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path / name)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_eos_token": True}))
    named = {"prompts": PROMPTS, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(named))
