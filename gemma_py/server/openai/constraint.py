"""Responses that follow a JSON schema. llguidance computes which tokens are allowed next."""

import importlib.util
import json
import re
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_py.errors import ComputationError, install_command
from gemma_py.server.openai.errors import ApiError
from gemma_py.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_SIZE, _MAX_DEPTH = 64 << 10, 64  # limits of a schema: characters, levels of nesting
# These limits on llguidance's work allow about 20 ms to compile a schema, and about 15 ms for each token.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonConstraint:
    """Keeps one response within a JSON schema. The parser has state, so each response needs an instance of its own."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, description: dict[str, Any]) -> None:
        self._matcher, self._vocab_size, self.description = matcher, vocab_size, description
        # _masks[0] has a bit for each token that is allowed next. If the schema allows only one token there, _masks[1] has the
        # tokens that are allowed after that token, and so on.
        self._masks: list[bytes] = []

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        """Return a copy of the logits [V], with minus infinity for every token that the schema forbids next."""
        mask = self._masks[0] if self._masks else self._matcher.compute_bitmask()
        self._check()
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        # The bit mask can be shorter than the logits, because ids that only pad the embedding matrix have no token.
        allowed = np.zeros(self._vocab_size, bool)
        allowed[: len(bits)] = bits[: self._vocab_size]
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        del self._masks[:1]
        self._check()

    def forced(self, most: int) -> list[int]:
        matcher, tokens = self._matcher.deep_copy(), list[int]()
        while len(tokens) < most and not matcher.is_stopped():
            if len(tokens) == len(self._masks):
                mask = matcher.compute_bitmask()
                if matcher.is_error():  # `allowed` raises this error if the answer reaches this position
                    break
                self._masks.append(mask)
            only = _only(self._masks[len(tokens)])
            if only is None or only >= self._vocab_size:
                break
            tokens.append(only)
            matcher.consume_token(only)
        return tokens

    @property
    def finished(self) -> bool:
        """Whether the JSON document is complete, so that only an end token may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ComputationError(
                f"llguidance failed to compute which tokens the JSON schema allows: {_line(self._matcher.get_error())}"
            )


def _only(mask: bytes) -> int | None:
    """Return the index of the bit that is set, or None unless exactly one bit is set."""
    bits = int.from_bytes(mask, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


class JsonConstraints:
    """Compiles JSON schemas for one tokenizer.

    llguidance's tables of the vocabulary are built by `prepare`, or when the first schema is compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(ends)
        self._lock = threading.Lock()
        self._tables: LLTokenizer | None = None

    def prepare(self) -> dict[str, Any] | None:
        """Build the tables, which blocks all Python threads for about a second, and return the description of a constraint.

        Without llguidance, return None.
        """
        if importlib.util.find_spec("llguidance") is None or not self._ends:
            return None
        return self.compile({"type": "object"}, "schema").description

    def compile(self, schema: dict[str, Any], param: str) -> JsonConstraint:
        """Compile a schema. Raise ApiError if the schema is malformed, too large, too deep, too costly or unsatisfiable."""
        try:
            import llguidance
        except ModuleNotFoundError:
            message = f"A JSON schema needs the package llguidance: {install_command('schema')}"
            raise ApiError(400, message, param, "unsupported_parameter") from None
        _check_size(schema, param)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_flexible": False}
            )
        except ValueError as error:  # such as an unpaired surrogate in a string
            raise ApiError(400, f"The schema is not valid JSON: {_line(str(error))}", param, "invalid_value") from None
        limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
        matcher = llguidance.LLMatcher(self._llguidance(), grammar, log_level=0, limits=limits)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()
            if matcher.is_stopped():
                raise ApiError(400, "No response can satisfy the schema.", param, "invalid_value")
        if first.is_error():
            raise ApiError(400, f"The schema is not supported: {_line(first.get_error())}", param, "invalid_value")
        # Store the schema as text, which preserves the order of keys. A generated document has its keys in this order.
        description = {
            "kind": "json_schema", "schema": json.dumps(schema), "ends": self._ends, "llguidance": llguidance.__version__,
            "thoughts": None,
        }  # fmt: skip
        return JsonConstraint(matcher, self._vocab_size, description)

    def _llguidance(self) -> "LLTokenizer":
        import llguidance

        with self._lock:
            if self._tables is None:
                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._ends[0]))
                self._tables = llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self._ends)
            return self._tables


class _Vocabulary:
    """An adapter from our Tokenizer to the interface that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        self.tokens = [piece_bytes(tokenizer, number) for number in range(tokenizer.size)]
        self.special_token_ids = sorted(tokenizer.control_ids)

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), bos=False)


def piece_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token's text; empty if the id has no text."""
    piece = tokenizer.piece(token) or ""
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def _check_size(schema: Any, param: str) -> None:
    deep, level = 0, [schema]
    while level and deep <= _MAX_DEPTH:
        deep += 1
        lists = (value.values() if isinstance(value, dict) else value for value in level)
        level = [inner for values in lists for inner in values if isinstance(inner, dict | list)]
    if level:
        raise ApiError(400, f"The schema is nested more than {_MAX_DEPTH} levels deep.", param, "invalid_value")
    size = len(json.dumps(schema))
    if size > _MAX_SIZE:
        raise ApiError(
            400, f"The schema has {size} characters; at most {_MAX_SIZE} are allowed.", param, "invalid_value"
        )


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
