import json
import shutil
from pathlib import Path

import tiny_checkpoints as tiny
import tiny_families
from repository import TINY
from tiny_shapes import FULL, SLIDING

PROMPTS = {"query": "q: ", "passage": "p: "}
MODELS = {
    "EmbeddingGemma": tiny.Variant(
        tiny_families.embedding_gemma(vocab_size=1536, num_hidden_layers=2), prefix="", dense=(40, 24)),
    "EmbeddingGemma 2": tiny_families.wrapped(
        tiny_families.embedding_gemma2([SLIDING, FULL], vocab_size=1536, embedding_dim=24), dtype="BF16"),
}  # fmt: skip
# The chat template of EmbeddingGemma 2 has no turns.
_TEMPLATE = "{%- for message in messages -%}{{ message['content'] }}{%- endfor -%}"


def write_tokenizer(path: Path, end: str | None) -> None:
    """Write TINY's tokenizer.json with a post-processor that puts <bos> before a text and `end` after the text."""
    document = json.loads((TINY / "tokenizer.json").read_text())
    if end is not None:
        number = next(token["id"] for token in document["added_tokens"] if token["content"] == end)
        document["post_processor"]["single"].append({"SpecialToken": {"id": end, "type_id": 0}})
        document["post_processor"]["special_tokens"][end] = {"id": end, "ids": [number], "tokens": [end]}
    (path / "tokenizer.json").write_text(json.dumps(document))


def write_checkpoint(path: Path, model: str = "EmbeddingGemma") -> None:
    tiny.write(MODELS[model], path, seed=2)
    if model == "EmbeddingGemma 2":
        (path / "chat_template.jinja").write_text(_TEMPLATE)
    shutil.copy(TINY / "tokenizer_config.json", path / "tokenizer_config.json")
    write_tokenizer(path, "<eos>")
    named = {"prompts": PROMPTS, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(named))
