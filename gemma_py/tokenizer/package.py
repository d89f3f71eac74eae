"""The `tokenizers` package parses tokenizer.json, and is the reference for the tables of vocabulary.py.

Loading Gemma's vocabulary with the package takes 1.4 s and 350 MB. So the package is used only at the first start with a
model. Some settings make the package abort the whole process, which no `except` can prevent. Therefore sources.py rejects
settings that Gemma's files do not have.
"""

import json
from collections.abc import Iterable
from typing import Any

from gemma_py.errors import TokenizerError
from gemma_py.tokenizer.corpus import texts
from gemma_py.tokenizer.tokenizer import Tokenizer
from gemma_py.tokenizer.vocabulary import Tables, Vocabulary

NEWLINE_SPLIT = r"[^\n]+|\n+"  # matches the parts into which llama.cpp splits a text for Gemma 4


def package_from_document(document: dict[str, Any], where: str) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the package raises no more specific exception
        raise TokenizerError(
            f"{where}: the tokenizers package cannot load the file: {' '.join(str(error).split()):.200}"
        ) from None


def package_from_vocabulary(vocabulary: Vocabulary) -> Any:
    """Return a tokenizer of the `tokenizers` package for a GGUF file's vocabulary."""
    import tokenizers

    pieces = vocabulary.pieces
    model = tokenizers.models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[(pieces[left], pieces[right]) for left, right in vocabulary.merges.tolist()],
        byte_fallback=True,
        fuse_unk=True,
    )
    package = tokenizers.Tokenizer(model)
    package.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    if vocabulary.split_newlines:
        package.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(NEWLINE_SPLIT), "isolated")
    package.add_tokens(
        [tokenizers.AddedToken(content, special=special, normalized=False) for _, content, special in vocabulary.added]
    )
    return package


def certified(tables: Tables, package: Any, where: str) -> Tables:
    """Check that the tables encode test texts and all added tokens to the ids that `package` gives. Return the tables.

    package: a tokenizer of the `tokenizers` package
    """
    ours = Tokenizer(tables)
    added = [content for _, content, _ in tables.added]
    for text in certification_texts(added):
        expected = package.encode(text, add_special_tokens=False).ids
        found = ours.encode(text, bos=False, control=True)
        if found != expected:
            raise TokenizerError(
                f"{where}: {text!r:.60} should have the ids {_short(expected)} that the tokenizers package gives, "
                f"found {_short(found)}"
            )
    return tables


def certification_texts(added: list[str]) -> Iterable[str]:
    yield from texts(added)
    yield from added


def _short(ids: list[int]) -> str:
    return f"{ids!s:.60}"
