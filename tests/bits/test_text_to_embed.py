import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from embedding_model import PROMPTS as OF_THE_FILE
from embedding_model import write_tokenizer
from gguf_files import write_model
from tiny_families import VARIANTS

import gemma_py
from gemma_py.errors import ConfigError, InputError, TokenizerError
from gemma_py.formats.gguf import read_gguf
from gemma_py.generate.embedding import prompt_of, texts_to_ids
from gemma_py.weights.checkpoint import open_checkpoint

Changed = Callable[..., Path]


@pytest.fixture
def changed(embedding_folder: Path, tmp_path: Path) -> Changed:
    def copy(files: dict[str, object]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(embedding_folder, folder)
        for name, document in files.items():
            if document is None:
                (folder / name).unlink()
            else:
                (folder / name).write_text(json.dumps(document))
        return folder

    return copy


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("end", [None, "<eos>", "<end_of_turn>"])
def test_the_ids_are_those_of_the_tokenizers_package(changed: Changed, end: str | None, flag: bool | None) -> None:
    """As in transformers 5, add_eos_token in tokenizer_config.json has no effect."""
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"} | ({} if flag is None else {"add_eos_token": flag})
    folder = changed({"tokenizer_config.json": settings})
    write_tokenizer(folder, end)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["a word", "", "  two\nlines "]
    with gemma_py.load(folder, threads=1) as engine:
        assert texts_to_ids(engine, texts) == [theirs.encode(text).ids for text in texts]
        assert texts_to_ids(engine, texts, "query") == [theirs.encode("q: " + text).ids for text in texts]
        assert texts_to_ids(engine, [[5, 6]]) == [[5, 6]]


def test_a_token_outside_the_vocabulary_is_refused(changed: Changed) -> None:
    folder = changed({})
    document = json.loads((folder / "tokenizer.json").read_text())
    document["post_processor"]["special_tokens"]["<eos>"]["ids"] = [1536]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with gemma_py.load(folder, threads=1) as engine, pytest.raises(InputError, match="1536"):
        texts_to_ids(engine, ["a"])


@pytest.mark.parametrize("ids", [[], [1, 2], ["1"], [-1], [True], None])
def test_an_end_that_is_not_one_token_is_refused(changed: Changed, ids: object) -> None:
    folder = changed({})
    document = json.loads((folder / "tokenizer.json").read_text())
    document["post_processor"]["special_tokens"]["<eos>"]["ids"] = ids
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match="post_processor should have one id"):
        _ = open_checkpoint(folder).text_end


@pytest.mark.parametrize("flag", [None, True, False])
def test_the_flag_of_a_gguf_file(tmp_path: Path, flag: bool | None) -> None:
    path = write_model(tmp_path / "m.gguf", VARIANTS["embeddinggemma"], 1)
    checkpoint = open_checkpoint(path)
    metadata = dict(read_gguf(path).metadata) | {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 3}
    if flag is not None:
        metadata["tokenizer.ggml.add_eos_token"] = flag
    object.__setattr__(checkpoint, "metadata", metadata)
    assert checkpoint.text_end == (7 if flag else None)
    if flag:
        del metadata["tokenizer.ggml.eos_token_id"], checkpoint.__dict__["text_end"]
        with pytest.raises(ConfigError, match="eos_token_id is missing"):
            _ = checkpoint.text_end


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_the_prompts_of_the_file_and_its_default(changed: Changed) -> None:
    name = "config_sentence_transformers.json"
    with gemma_py.load(
        changed({name: {"prompts": OF_THE_FILE, "default_prompt_name": "passage"}}), threads=1
    ) as engine:
        assert (prompt_of(engine, None), prompt_of(engine, "query")) == ("p: ", "q: ")
        assert texts_to_ids(engine, ["a"]) == texts_to_ids(engine, ["a"], "passage")
        with pytest.raises(InputError, match="task should be one of 'query', 'passage', found 'STS'"):
            prompt_of(engine, "STS")


def test_the_documented_prompts_without_a_file(changed: Changed) -> None:
    """Names and texts are from Google's conversion script for sentence-transformers."""
    documented = {
        "query": "task: search result | query: ", "document": "title: none | text: ",
        "BitextMining": "task: search result | query: ", "Clustering": "task: clustering | query: ",
        "Classification": "task: classification | query: ", "InstructionRetrieval": "task: code retrieval | query: ",
        "MultilabelClassification": "task: classification | query: ",
        "PairClassification": "task: sentence similarity | query: ", "Reranking": "task: search result | query: ",
        "Retrieval": "task: search result | query: ", "Retrieval-query": "task: search result | query: ",
        "Retrieval-document": "title: none | text: ", "STS": "task: sentence similarity | query: ",
        "Summarization": "task: summarization | query: ",
    }  # fmt: skip
    with gemma_py.load(changed({"config_sentence_transformers.json": None}), threads=1) as engine:
        assert prompt_of(engine, None) == ""
        assert all(prompt_of(engine, task) == prompt for task, prompt in documented.items())
