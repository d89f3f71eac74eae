import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gemma4_vocabulary import CONTROL, MEDIA, USER_DEFINED, Gemma4Vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_py.errors import GemmaError, TokenizerError
from gemma_py.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_json
from gemma_py.tokenizer.corpus import texts
from gemma_py.tokenizer.vocabulary import is_gemma4_control

SPLIT = {"type": "Split", "pattern": {"Regex": r"[^\n]+|\n+"}, "behavior": "Isolated", "invert": False}
ALPHABET = st.sampled_from(
    [
        *"etaoinshrdlu <>|0.1é🙂\n\t",
        "▁",
        "  ",
        "\n\n",
        "\n" * 33,
        "\r\n",
        "the ",
        "</s>",
        "<table>",
        "<unused7>",
        *CONTROL.values(),
    ]
)
TEXTS = st.text(max_size=60) | st.lists(ALPHABET, max_size=30).map("".join)


def from_json(folder: Path, document: dict[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document))
    return tokenizer_from_json(path)


def from_gguf(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    path = folder / "x.gguf"
    path.touch()
    made = tokenizer_from_gguf(path, metadata)
    assert made is not None
    return made


# Our tokenizer from tokenizer.json, our tokenizer from GGUF, and that of the tokenizers package.
Forms = tuple[Tokenizer, Tokenizer, tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Forms]:
    made: dict[int, Forms] = {}

    def of_seed(seed: int) -> Forms:
        if seed not in made:
            vocabulary, folder = Gemma4Vocabulary(seed), tmp_path_factory.mktemp("vocabulary")
            package = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.document()))
            ours = from_json(folder, vocabulary.document()), from_gguf(folder, vocabulary.metadata())
            made[seed] = (*ours, package)
        return made[seed]

    return of_seed


def differences(forms: Forms, text: str) -> list[Any]:
    *ours, package = forms
    expected = package.encode(text, add_special_tokens=False).ids
    return [ids for ids in (tokenizer.encode(text, bos=False, control=True) for tokenizer in ours) if ids != expected]


@settings(max_examples=400, deadline=None)
@given(text=TEXTS, seed=st.integers(1, 3))
def test_both_forms_have_the_ids_of_the_tokenizers_package(forms: Callable[[int], Forms], text: str, seed: int) -> None:
    assert differences(forms(seed), text) == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_both_forms_have_the_packages_ids_for_the_corpus(forms: Callable[[int], Forms], seed: int) -> None:
    assert [text for text in texts([*CONTROL.values(), *MEDIA]) if differences(forms(seed), text)] == []


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_user_text_never_becomes_a_control_token(forms: Callable[[int], Forms], text: str) -> None:
    for tokenizer in forms(1)[:2]:
        ids = tokenizer.encode(text, bos=False)
        assert not set(ids) & tokenizer.control_ids
        assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_the_control_tokens_are_those_of_gemma_4(forms: Callable[[int], Forms]) -> None:
    vocabulary = Gemma4Vocabulary(1)
    assert all(tokenizer.control_ids == set(vocabulary.control) for tokenizer in forms(1)[:2])
    assert [piece for piece in vocabulary.pieces if is_gemma4_control(piece)] == list(vocabulary.control.values())


def test_there_is_one_bos_token(forms: Callable[[int], Forms]) -> None:
    for tokenizer in forms(1)[:2]:
        assert tokenizer.encode("a")[0] == 2
        assert tokenizer.encode("<bos>a", control=True) == tokenizer.encode("a")
        assert tokenizer.encode("<bos>a").count(2) == 1


def test_merges_across_a_newline_apply_only_where_the_file_does_not_split_at_newlines(tmp_path: Path) -> None:
    vocabulary = Gemma4Vocabulary(crossing=True)
    text = "a\na b\n\n\n c\n"
    whole, split, gguf = (
        from_json(tmp_path, vocabulary.document()),
        from_json(tmp_path, vocabulary.document(SPLIT)),
        from_gguf(tmp_path, vocabulary.metadata()),
    )
    for tokenizer, settings_of in ((whole, "as transformers saves it"), (split, SPLIT)):
        package = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.document(settings_of)))
        assert tokenizer.encode(text, bos=False) == package.encode(text, add_special_tokens=False).ids
    assert split.encode(text) == gguf.encode(text) != whole.encode(text)


def test_the_scores_of_a_gguf_do_not_count(tmp_path: Path) -> None:
    metadata = Gemma4Vocabulary().metadata()
    without = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.scores"}
    (tmp_path / "other").mkdir()
    text = "the others, not at all"
    assert from_gguf(tmp_path, metadata).encode(text) == from_gguf(tmp_path / "other", without).encode(text)


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
def test_control_tokens_are_known_by_name_whatever_a_gguf_calls_them(tmp_path: Path, kind: int) -> None:
    metadata = Gemma4Vocabulary().metadata()
    metadata["tokenizer.ggml.token_type"][[*USER_DEFINED, 105, 106]] = kind
    tokenizer = from_gguf(tmp_path, metadata)
    assert tokenizer.control_ids == set(Gemma4Vocabulary().control)


@pytest.mark.parametrize(("change", "message"), [
    ({"tokenizer.ggml.merges": None}, "merges should be a list"),
    ({"tokenizer.ggml.merges": "a b"}, "merges should be a list"),
    ({"tokenizer.ggml.merges": np.zeros(3)}, "merges should be a list"),
    ({"tokenizer.ggml.merges": ["e t", "et"]}, r"merges\[1\] should be two tokens"),
    ({"tokenizer.ggml.merges": ["e nothing"]}, r"merges\[0\] should be two tokens"),
    ({"tokenizer.ggml.merges": ["e t h"]}, r"merges\[0\] should be two tokens"),
    ({"tokenizer.ggml.merges": ["<|turn> <|turn>"]}, "produces a piece that is not in the vocabulary"),
    ({"tokenizer.ggml.token_type": np.ones(3, np.int32)}, "token_type should have"),
    ({"tokenizer.ggml.token_type": None}, "token_type should have"),
    ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": np.ones(2, np.int32)}, "twice"),
    ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": np.ones(1, np.int32), "tokenizer.ggml.merges": []},
     "a piece for every byte"),
])  # fmt: skip
def test_broken_metadata_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(GemmaError, match=message) as caught:
        from_gguf(tmp_path, Gemma4Vocabulary().metadata() | change)
    assert "\n" not in str(caught.value)


def test_merges_that_produce_a_control_token_are_dropped(tmp_path: Path) -> None:
    """With such a merge, the tokenizers package encodes a user's text as the end of a turn."""
    vocabulary = Gemma4Vocabulary()
    metadata = vocabulary.metadata()
    place = metadata["tokenizer.ggml.tokens"].index("<unused60>")
    other = metadata["tokenizer.ggml.tokens"].index("<unused61>")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[place], tokens[other] = "<tu", "rn|>"
    letters = ["< t", "<t u", "r n", "rn |", "rn| >", "<tu rn|>"]
    tokens[62:65] = ["<t", "rn", "rn|"]
    kept = [merge for merge in metadata["tokenizer.ggml.merges"] if all(half in tokens for half in merge.split(" "))]
    made = {piece for merge in kept for piece in [merge.replace(" ", "")]}
    assert made <= set(tokens) | {"<t", "rn"}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [*letters, *kept]}
    tokenizer = from_gguf(tmp_path, metadata)
    ids = tokenizer.encode("<turn|>", bos=False)
    assert tokenizer.decode(ids) == "<turn|>" and not set(ids) & tokenizer.control_ids
    assert ids == [place, other]


def test_a_text_of_one_megabyte_without_a_newline_takes_seconds(forms: Callable[[int], Forms]) -> None:
    """The time is proportional to n log n. With n squared, this text would take hours."""
    rng = random.Random(1)
    text = "".join(rng.choices("etaoin shrdlu.", k=1 << 20))
    forms(1)[1].encode("compiled before the clock starts")
    start = time.perf_counter()
    ids = forms(1)[1].encode(text, bos=False)
    assert time.perf_counter() - start < 60
    assert forms(1)[1].decode(ids) == text


def test_a_tokenizer_without_merges_is_an_error_and_not_another_algorithm(tmp_path: Path) -> None:
    metadata = Gemma4Vocabulary().metadata()
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(TokenizerError, match="merges"):
        from_gguf(tmp_path, metadata)
