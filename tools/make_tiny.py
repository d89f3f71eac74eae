"""Make models/tiny-gemma3: a Gemma 3 with random weights and a small trained tokenizer, for tests and examples.

    python tools/make_tiny.py

Needs numpy, safetensors and tokenizers. The tokenizer is trained on the texts below, with the pipeline of Gemma's
tokenizer.
"""

import json
import pydoc
from pathlib import Path

import tiny_checkpoints as tiny
import tokenizers
from tokenizers import decoders, models, normalizers, trainers

from gemma_py.tokenizer.sources import _REPLACE

TARGET = Path(__file__).parent.parent / "models" / "tiny-gemma3"
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>",
           "<end_of_image>", "<unused0>", "<unused1>"]  # fmt: skip
PLAIN = ["\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "\t", "\t\t", "<table>", "</table>", "<b>", "</b>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
PIECES = 1536
TEMPLATE = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' \
else message['role'] }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def tokenizer_document() -> dict:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=PIECES, special_tokens=[*CONTROL, *PLAIN, *BYTES], show_progress=False)
    # The trainer gets single words with a leading space, because whole sentences would become pieces.
    topics = ("str", "json", "argparse", "random", "pathlib.Path", "subprocess", "collections", "asyncio.Task")
    words = " ".join(pydoc.plain(pydoc.render_doc(topic)) for topic in topics).split()
    made.train_from_iterator((" " + word for word in words), trainer)
    document = json.loads(made.to_str())
    whitespace = [[a, b] for a in ("▁", "\n", "\t") for a, b in ((a, a), (a + a, a), (a + a, a + a), (a * 3, a))]
    runs = [[left, right] for left, right in whitespace if left + right in PLAIN]
    document["model"]["merges"] = runs + document["model"]["merges"]
    document["added_tokens"] = [
        {"id": number, "content": piece, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": piece in CONTROL[:4] or "turn" in piece or "image" in piece}
        for number, piece in enumerate([*CONTROL, *PLAIN])
    ]  # fmt: skip
    assert document["normalizer"] == _REPLACE
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
    }
    return document


def main() -> None:
    document = tokenizer_document()
    vocab_size = len(document["model"]["vocab"])
    config = tiny.VARIANTS["gemma3"].config | {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "sliding_window": 16,
        "query_pre_attn_scalar": 32, "max_position_embeddings": 4096, "eos_token_id": [1, 6],
    }  # fmt: skip
    tiny.write(tiny.Variant(config, dtype="BF16"), TARGET, seed=270)
    files = {
        "tokenizer.json": document,
        "tokenizer_config.json": {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "GemmaTokenizer"},
        "generation_config.json": {
            "bos_token_id": 2,
            "eos_token_id": [1, 6],
            "do_sample": True,
            "top_k": 64,
            "top_p": 0.95,
        },
    }
    for name, content in files.items():
        (TARGET / name).write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    (TARGET / "chat_template.jinja").write_text(TEMPLATE)
    print(f"{TARGET}: {vocab_size} pieces, {sum(file.stat().st_size for file in TARGET.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
