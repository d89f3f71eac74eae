"""The contents of an answer's receipt, which are collected while the answer is generated."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from gemma_py.errors import InputError
from gemma_py.generate.answer import stop_strings
from gemma_py.receipts.receipt import (
    DIGEST_BYTES,
    AskedFor,
    ModelIdentity,
    Receipt,
    output_digests,
    sampling_document,
)
from gemma_py.receipts.row_digests import row_digest

if TYPE_CHECKING:
    from gemma_py.generate.core import Request, Token
    from gemma_py.generate.options import Sampling


class Evidence:
    """Collects the logits' digests and the texts of one answer, for its receipt."""

    def __init__(self, model: ModelIdentity) -> None:
        self._model = model
        self._rows: list[bytes] = []
        self._tokens: list[Token] = []

    def add_row(self, logits: np.ndarray) -> None:
        """Append the logits [V] from which the next token is chosen."""
        self._rows.append(row_digest(logits))

    def add_token(self, token: "Token") -> None:
        self._tokens.append(token)

    def receipt(self, prompt: Sequence[int], asked: AskedFor, kv: Sequence[str]) -> Receipt:
        """Return the receipt of a complete answer.

        kv: the digests of the KV rows of prompt and answer, except the answer's last token
        """
        reason = self._tokens[-1].finish_reason if self._tokens else None
        if reason is None:
            raise InputError("the answer has not ended; only a complete answer has a receipt")
        return Receipt(
            self._model, tuple(prompt), asked, tuple(token.id for token in self._tokens), tuple(self._rows),
            outputs_of(self._tokens), reason, kv_digests(kv),
        )  # fmt: skip


def outputs_of(tokens: "Sequence[Token]") -> dict[str, str]:
    """Return the digests of the text, the thoughts and the tool calls of an answer's tokens."""
    return output_digests(
        "".join(token.text for token in tokens),
        "".join(token.reasoning or "" for token in tokens),
        [(call.name, call.arguments) for token in tokens for call in token.calls],
    )


def kv_digests(kv: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(digest)[:DIGEST_BYTES] for digest in kv)


def asked_for(request: "Request", max_tokens: int, sampling: "Sampling") -> AskedFor:
    """Return what a request asks for, in the form of a receipt.

    max_tokens: the most tokens of the answer within the context. sampling: the request's options with the seed
    """
    marks = None if request.marks is None else asdict(request.marks)
    if marks is not None:
        marks = {name: list(ids) if isinstance(ids, tuple) else ids for name, ids in marks.items()}
    constraint = None if request.constraint is None else request.constraint.description
    return AskedFor(
        max_tokens, sampling_document(asdict(sampling)), stop_strings(request.stop), tuple(sorted(request.ends)), request.trim,
        marks, constraint,
    )  # fmt: skip
