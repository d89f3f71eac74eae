"""Random vocabularies like Gemma 4's: control tokens, runs of newlines, byte tokens, and merges by rank."""

import random
from typing import Any

import numpy as np

# id in Gemma 4's vocabulary -> token
CONTROL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>",
    49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>", 100: "<|channel>",
    101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}  # fmt: skip
# The vocabulary ends with these tokens.
MEDIA = ["<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>"]
USER_DEFINED = {48, 49, 50, 51, 52, 100, 101}  # GGUF files call these ids "user-defined" instead of "control"
ENDS = (1, 106, 50)  # <eos>, <turn|>, <|tool_response>
_TAGS = ["<table>", "</table>", "<b>", "</b>", "<h1>", "</s>"]
_LETTERS = "▁etaoinshrdlucmfwypvbgkjqxzETAOIN0123456789.,:;!?'\"()[]{}<>|/-_=+*&%$#@éüñ中文日本аяα🙂"


def _pieces(rng: random.Random, words: int) -> list[str]:
    """Tokens in the order of their ids. A long token is joined from shorter tokens, so that merges can produce it."""
    pieces = [CONTROL.get(number, f"<unused{number}>") for number in range(107)]
    pieces += ["\n" * count for count in range(1, 32)] + ["▁" * count for count in range(2, 32)]
    pieces += _TAGS
    pieces += [f"<unused{number}>" for number in range(len(pieces), 238)]
    pieces += [f"<0x{value:02X}>" for value in range(256)]
    short = list(_LETTERS)
    known = set(pieces)
    made: list[str] = []
    while len(made) < words:
        word = rng.choice(short) + rng.choice(short)
        if len(word) <= 12 and word not in known:
            known.add(word)
            made.append(word)
            short.append(word)
    return [*pieces, *made, *(letter for letter in _LETTERS if letter not in known), *MEDIA]


class Gemma4Vocabulary:
    """crossing: add merges of a newline with a letter, which Gemma 4's tokenizer does not have."""

    def __init__(self, seed: int = 1, words: int = 700, crossing: bool = False) -> None:
        rng = random.Random(seed)
        self.pieces = _pieces(rng, words)
        if crossing:
            self.pieces += ["a\n", "\na", "\n\n▁"]
        self.control = CONTROL | {self.pieces.index(name): name for name in MEDIA}
        ids = {piece: number for number, piece in enumerate(self.pieces)}
        skipped = set(self.control) | set(range(238, 494))
        self.merges = []
        for number, piece in enumerate(self.pieces):
            if number not in skipped:
                splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
                self.merges += [split for split in splits if split[0] in ids and split[1] in ids]
        rng.shuffle(self.merges)  # a merge's rank is its index in this list

    def document(self, pre_tokenizer: Any = "as transformers saves it") -> dict[str, Any]:
        if isinstance(pre_tokenizer, str):
            pre_tokenizer = {
                "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False
            }  # fmt: skip
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        decoders = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}
        ]  # fmt: skip
        return {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": number, "content": name, **flags} for number, name in sorted(self.control.items())],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": pre_tokenizer,
            "post_processor": {
                "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {},
            },
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                "vocab": {piece: number for number, piece in enumerate(self.pieces)},
                "merges": [list(merge) for merge in self.merges],
            },
        }  # fmt: skip

    def metadata(self) -> dict[str, Any]:
        """GGUF metadata. The scores are random, because they must have no effect."""
        kinds = np.ones(len(self.pieces), np.int32)
        kinds[list(self.control)] = 3
        kinds[list(USER_DEFINED)] = 4
        kinds[238:494] = 6
        return {
            "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": self.pieces,
            "tokenizer.ggml.scores": np.random.default_rng(1).standard_normal(len(self.pieces)).astype(np.float32),
            "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": [" ".join(merge) for merge in self.merges],
            "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 106, "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_space_prefix": False,
        }  # fmt: skip
