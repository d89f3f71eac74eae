"""Build tokenizers from tokenizer.json and from GGUF metadata."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py.errors import TokenizerError, UnsupportedError
from gemma_py.formats.files import read_json
from gemma_py.tokenizer.package import NEWLINE_SPLIT, certified, package_from_document, package_from_vocabulary
from gemma_py.tokenizer.tokenizer import Tokenizer
from gemma_py.tokenizer.vocabulary import Tables, Vocabulary, cached, is_gemma4_control, is_gemma_control, tables

_GEMMA3_PIECES = 262_144
_LARGEST_JSON = 256 << 20  # bytes; Gemma 3's tokenizer.json has 33 MB
_LARGEST_PIECE = 4096  # characters; limited because `_scored_vocabulary` tries every split of a piece in two
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6

_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_DECODERS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_NEWLINE_SPLITS = [
    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    for pattern in (NEWLINE_SPLIT, r"[^\n]+|[\n]+", r"\n+", r"[\n]+")
]
# tokenizer.py implements these pipelines of Gemma's tokenizer.json files. A file with another pipeline is rejected. The
# pre-tokenizer _SPLIT has no effect, because the normalizer has already replaced all spaces.
_PIPELINES: dict[str, tuple[Any, ...]] = {
    "normalizer": (_REPLACE, {"type": "Sequence", "normalizers": [_REPLACE]}),
    "pre_tokenizer": (None, _SPLIT, *_NEWLINE_SPLITS),
    "decoder": ({"type": "Sequence", "decoders": _DECODERS},),
}


def tokenizer_from_gguf(path: Path, metadata: dict[str, Any]) -> Tokenizer | None:
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    model = metadata.get("tokenizer.ggml.model")
    if model not in _VOCABULARIES:
        known = " or ".join(map(repr, _VOCABULARIES))
        raise UnsupportedError(
            f"{path}: tokenizer.ggml.model should be {known}, as in Gemma files, found {model!r:.40}"
        )
    if metadata.get("tokenizer.ggml.add_space_prefix", False) is not False:
        raise UnsupportedError(f"{path}: tokenizer.ggml.add_space_prefix is set, but Gemma's tokenizer adds no space")
    made = cached(path, "gguf", lambda: _tables_of_gguf(path, metadata))
    return Tokenizer(made, bos_id=metadata.get("tokenizer.ggml.bos_token_id", 2))


def _tables_of_gguf(path: Path, metadata: dict[str, Any]) -> Tables:
    vocabulary = _VOCABULARIES[metadata["tokenizer.ggml.model"]](path, metadata)
    return certified(tables(vocabulary, str(path)), package_from_vocabulary(vocabulary), str(path))


def _tokens_of_gguf(path: Path, metadata: dict[str, Any], *numbers: str) -> list[str]:
    """Return the tokens in GGUF metadata. numbers: names of arrays that should have one element for each token."""
    tokens = metadata["tokenizer.ggml.tokens"]
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise TokenizerError(f"{path}: tokenizer.ggml.tokens should be a list of strings")
    tokens = list(tokens)
    for name in numbers:
        table = metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(table, np.ndarray) or len(table) != len(tokens):
            raise TokenizerError(
                f"{path}: tokenizer.ggml.{name} should have {len(tokens)} elements, one for each token"
            )
    return tokens


def _numbered(path: Path, pieces: list[str]) -> dict[str, int]:
    vocab = {piece: number for number, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise TokenizerError(f"{path}: tokenizer.ggml.tokens has {len(pieces) - len(vocab)} pieces that appear twice")
    return vocab


def _added(pieces: list[str], kinds: list[int]) -> list[tuple[int, str, bool]]:
    return [
        (number, pieces[number], kind == _CONTROL)
        for number, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _scored_vocabulary(path: Path, metadata: dict[str, Any]) -> Vocabulary:
    """Return the vocabulary of Gemma 1 to 3. GGUF files of these models have no merges, but the scores of pieces.

    As in converters from SentencePiece, every split of a piece into two pieces is a merge. Merges to user-defined pieces
    (runs of white space) come first. Then merges are ordered by the score of the merged piece, highest first. Merges with
    equal scores are ordered by the length of the left half, longest first.
    """
    tokens = _tokens_of_gguf(path, metadata, "scores", "token_type")
    scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    if not np.isfinite(scores).all():
        raise TokenizerError(f"{path}: tokenizer.ggml.scores has NaN or infinite elements")
    kinds = [_CONTROL if is_gemma_control(t) else kind for t, kind in zip(tokens, types.tolist(), strict=True)]
    rank = np.where(types == _USER_DEFINED, 0, scores).tolist()
    # Spaces of a text are replaced by "▁" before pieces are merged, so spaces in user-defined pieces are replaced too.
    pieces = [t.replace(" ", "▁") if kind == _USER_DEFINED else t for t, kind in zip(tokens, kinds, strict=True)]
    find = _numbered(path, pieces).get
    merges = []
    for number, piece in enumerate(pieces):
        if kinds[number] in (_CONTROL, _BYTE):
            continue
        if len(piece) > _LARGEST_PIECE:
            raise TokenizerError(
                f"{path}: token {number} has {len(piece)} characters; at most {_LARGEST_PIECE} are allowed"
            )
        splits = []
        for cut in range(1, len(piece)):
            left = find(piece[:cut])
            if left is not None:
                right = find(piece[cut:])
                if right is not None:
                    splits.append((left, right, rank[number], cut, len(piece) - cut))
        splits.sort()
        merges += splits
    merges.sort(key=lambda merge: merge[2:], reverse=True)
    added = _added(pieces, kinds)
    if len(pieces) == _GEMMA3_PIECES and pieces[255_999] == "<start_of_image>":
        # Add <image_soft_token>, which Gemma 3's tokenizer.json has. GGUF files omit this token, because text models have no
        # embedding for it.
        added.append((_GEMMA3_PIECES, "<image_soft_token>", True))
    table = np.array([merge[:2] for merge in merges], np.int32).reshape(-1, 2)
    return Vocabulary(pieces, table, added)


def _ranked_vocabulary(path: Path, metadata: dict[str, Any]) -> Vocabulary:
    """Return the vocabulary of Gemma 4. GGUF files of Gemma 4 list the merges, best merge first."""
    pieces = _tokens_of_gguf(path, metadata, "token_type")
    types = metadata["tokenizer.ggml.token_type"].tolist()
    kinds = [_CONTROL if is_gemma4_control(t) else kind for t, kind in zip(pieces, types, strict=True)]
    find = _numbered(path, pieces).get
    listed = metadata.get("tokenizer.ggml.merges")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise TokenizerError(f"{path}: tokenizer.ggml.merges should be a list of strings")
    merges = np.empty((len(listed), 2), np.int32)
    for number, merge in enumerate(listed):
        left, _, right = merge.partition(" ")
        merges[number] = find(left, -1), find(right, -1)
    if merges.size and merges.min() < 0:
        number = int(np.flatnonzero(merges.min(axis=1) < 0)[0])
        raise TokenizerError(
            f"{path}: tokenizer.ggml.merges[{number}] should be two tokens with a space between, found {listed[number]!r:.60}"
        )
    return Vocabulary(pieces, merges, _added(pieces, kinds), split_newlines=True)


# tokenizer.ggml.model -> the function that reads the vocabulary
_VOCABULARIES = {"llama": _scored_vocabulary, "gemma4": _ranked_vocabulary}


def tokenizer_from_json(path: Path, bos_token: str = "<bos>") -> Tokenizer:
    return Tokenizer(cached(path, "json", lambda: _tables_of_json(path)), bos_token=bos_token)


def appended_token(path: Path) -> int | None:
    """Return the id of the token that a tokenizer.json's post-processor appends to a text, such as eos, or None."""
    document = read_json(path, _LARGEST_JSON)
    processor = document.get("post_processor") if isinstance(document, dict) else None
    if not isinstance(processor, dict):
        return None
    parts = processor.get("single")
    if not isinstance(parts, list) or not parts or not isinstance(parts[-1], dict) or "SpecialToken" not in parts[-1]:
        return None
    try:
        (token,) = processor["special_tokens"][parts[-1]["SpecialToken"]["id"]]["ids"]
    except (KeyError, TypeError, ValueError):
        token = None
    if type(token) is not int or token < 0:
        raise TokenizerError(f"{path}: post_processor should have one id for the token that it appends to a text")
    return token


def _tables_of_json(path: Path) -> Tables:
    settings = _known_settings(path)
    package = package_from_document(settings, str(path))
    vocabulary = _vocabulary_of_package(package, path, settings["pre_tokenizer"] in _NEWLINE_SPLITS)
    ids = {content: number for number, content, _ in vocabulary.added}
    for token in settings["added_tokens"]:
        if ids.get(token["content"]) != token["id"]:
            raise TokenizerError(
                f"{path}: added token {token['content']!r:.60} should have id {ids.get(token['content'])}, "
                f"found {token['id']}"
            )
    return certified(tables(vocabulary, str(path)), package, str(path))


def _known_settings(path: Path) -> dict[str, Any]:
    """Return the fields of a tokenizer.json that affect ids.

    Raise UnsupportedError for a setting that Gemma's tokenizers do not have.
    """
    document = read_json(path, _LARGEST_JSON)
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        raise TokenizerError(f"{path}: the field 'model' is missing or is not an object")
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedError(
            f"{path}: model.type should be 'BPE', as in Gemma's tokenizers, found {model.get('type')!r:.40}"
        )
    if model.get("byte_fallback") is not True:
        raise UnsupportedError(f"{path}: model.byte_fallback should be true, as in Gemma's tokenizers")
    for name in ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UnsupportedError(f"{path}: model.{name} is set, but Gemma's tokenizers do not set it")
    for name, known in _PIPELINES.items():
        if document.get(name) not in known:
            raise UnsupportedError(
                f"{path}: {name} should be as in Gemma's tokenizers, found {document.get(name)!r:.80}"
            )
    _check_listed(path, document.get("added_tokens") or [])
    kept = {name: model[name] for name in ("vocab", "merges", "unk_token", "fuse_unk") if name in model}
    return {
        "version": "1.0",
        "added_tokens": document.get("added_tokens") or [],
        **{name: document.get(name) for name in _PIPELINES},
        "model": {"type": "BPE", "byte_fallback": True, **kept},
    }


def _check_listed(path: Path, listed: Any) -> None:
    if not isinstance(listed, list):
        raise TokenizerError(f"{path}: added_tokens should be a list, found {listed!r:.80}")
    for token in listed:
        if not isinstance(token, dict) or type(token.get("id")) is not int or type(token.get("content")) is not str:
            raise TokenizerError(
                f"{path}: each of added_tokens should have an integer id and a string content, found {token!r:.80}"
            )
        if any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip")):
            raise UnsupportedError(
                f"{path}: added token {token['content']!r:.60} has the unsupported flag lstrip, rstrip or single_word"
            )


def _vocabulary_of_package(package: Any, path: Path, split_newlines: bool) -> Vocabulary:
    document = json.loads(package.to_str())
    vocab = document["model"]["vocab"]
    if not vocab or sorted(vocab.values()) != list(range(len(vocab))):
        raise TokenizerError(f"{path}: model.vocab should number its pieces 0, 1, 2 ... without gaps")
    merges = [(vocab[left], vocab[right]) for left, right in document["model"]["merges"]]
    added = sorted((token["id"], token["content"], token["special"]) for token in document["added_tokens"])
    pieces = sorted(vocab, key=vocab.__getitem__)
    return Vocabulary(pieces, np.array(merges, np.int32).reshape(-1, 2), added, split_newlines)
