"""Gemma's tokenizer, built from tokenizer.json or from GGUF metadata."""

from gemma_py.tokenizer.sources import tokenizer_from_gguf, tokenizer_from_json
from gemma_py.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "tokenizer_from_gguf", "tokenizer_from_json"]
