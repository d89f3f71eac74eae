from pathlib import Path

import compare_embeddings

import gemma_py
from gemma_py.generate.embedding import texts_to_ids


def test_both_checkpoints_have_the_same_bits(tmp_path: Path) -> None:
    compare_embeddings.write_models("tiny", "F32", tmp_path)
    texts = compare_embeddings.short_texts(5)
    assert len(set(texts)) == 5 and all(3 <= len(text.split()) <= 25 for text in texts)
    with gemma_py.load(tmp_path / "hf", threads=1) as one, gemma_py.load(tmp_path / "model.gguf", threads=1) as other:
        assert one.config.hidden_size == other.config.hidden_size
        assert (one.embed(texts) == other.embed(texts_to_ids(one, texts))).all()
