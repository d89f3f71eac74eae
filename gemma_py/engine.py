"""The engine: a loaded model, and sessions that each have their own KV cache."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gemma_py import machine
from gemma_py.catalog import resolve
from gemma_py.errors import ComputationError, ContextError, InputError
from gemma_py.kernels.atomics import is_ieee
from gemma_py.model.checkpoint import Checkpoint, open_checkpoint
from gemma_py.model.store import packed_weights
from gemma_py.model.weights import Matrix, Weights, stays_float
from gemma_py.runtime.cache import KV_TYPES
from gemma_py.runtime.runner import CHUNK, Runner
from gemma_py.score import log_probability


@dataclass(frozen=True)
class Token:
    """finish_reason is None but on the last: "stop" (an end token) or "length"."""

    id: int
    text: str
    logprob: float
    finish_reason: str | None = None


_SCORED_AT_ONCE = 32  # tokens whose logits are held at a time: of Gemma's vocabulary, 32 MiB


class Engine:
    """Weights, config and tokenizer. Use as a context manager, or close it.

    Several sessions may be alive at once and be used from several Python threads; their passes take turns. A forked child
    may go on using an engine; it gets worker threads of its own.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        threads: int | None = None,
        context: int | None = None,
        deadline: float = 5.0,
        kv: str = "float32",
        quant: str | None = None,
    ) -> None:
        if not is_ieee():
            raise ComputationError(
                "this thread flushes subnormals to zero or does not round to nearest: no bit could be kept"
            )
        if not isinstance(kv, str) or kv not in KV_TYPES:
            raise InputError(f"kv should be one of {', '.join(KV_TYPES)}, found {kv!r:.40}")
        if quant is not None and (not isinstance(quant, str) or quant not in QUANTS):
            raise InputError(f"quant should be one of {', '.join(QUANTS)}, found {quant!r:.40}")
        if context is not None and not _counts(context):
            raise InputError(f"the context should hold at least 1 token, found {context!r:.40}")
        if threads is not None and not (_counts(threads) and threads <= _MOST_THREADS):
            raise InputError(f"threads should be 1 to {_MOST_THREADS}, found {threads!r:.40}")
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline <= _LONGEST_DEADLINE:
            raise InputError(f"deadline should be seconds up to {_LONGEST_DEADLINE}, found {deadline!r:.40}")
        self.checkpoint, self.config, self.path = checkpoint, checkpoint.config, checkpoint.path
        self.context = min(context or self.config.max_position_embeddings, self.config.max_position_embeddings)
        self.quant = quant
        with ThreadPoolExecutor(1, "gemma_py-tokenizer") as aside:  # which takes seconds at the first start, as kernels do
            tokenizer = aside.submit(checkpoint.tokenizer)
            self._runner: Runner | None = Runner(
                packed_weights(checkpoint, quant), self.config, threads or machine.threads(), deadline, kv
            )
            self.tokenizer = tokenizer.result()

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            raise InputError("the engine is closed")
        return self._runner

    @property
    def threads(self) -> int:
        return self.runner.team.workers

    def reference_weights(self) -> Weights[Matrix]:
        """The weights as the specification takes them, read anew: the engine itself keeps only the packed form."""
        return self.checkpoint.weights(self.quant)

    @property
    def kept_float(self) -> list[str]:
        """Matrices that quant left as they are, because their rows are not whole blocks."""
        tensors = self.checkpoint.tensors.values()
        return [] if self.quant is None else [tensor.name for tensor in tensors if stays_float(self.quant, tensor)]

    def session(self) -> "Session":
        return Session(self)

    def check_ids(self, ids: Any) -> list[int]:
        """The ids as plain integers, all within the vocabulary."""
        try:
            checked = [int(token) for token in ids]
            exact = all(not isinstance(token, bool) and token == n for token, n in zip(ids, checked, strict=True))
        except (TypeError, ValueError, OverflowError):
            exact = False
        if not exact:
            raise InputError("token ids should be whole numbers")
        if not checked:
            raise InputError("no tokens given")
        for position, token in enumerate(checked):
            if not 0 <= token < self.config.vocab_size:
                raise InputError(
                    f"token id {token} at position {position} is outside the vocabulary of {self.config.vocab_size}"
                )
        return checked

    def encode(self, prompt: str | Sequence[int], control: bool = False) -> list[int]:
        """Ids as they are; text through the tokenizer, with its begin token."""
        if not isinstance(prompt, str):
            return self.check_ids(prompt)
        if self.tokenizer is None:
            raise InputError(f"{self.path}: the checkpoint brings no tokenizer; give token ids instead of text")
        return self.check_ids(self.tokenizer.encode(prompt, control=control))

    def generate(self, prompt: str | Sequence[int], max_tokens: int = 128) -> Iterator[Token]:
        """The likeliest continuation, token by token; of equal logits the smaller id."""
        ids = self.encode(prompt)
        if max_tokens < 1:
            raise InputError(f"max_tokens should be at least 1, found {max_tokens}")
        if len(ids) + max_tokens > self.context:
            raise ContextError(
                f"{len(ids)} prompt tokens and {max_tokens} new ones exceed the context of {self.context} tokens"
            )
        return self._generate(ids, max_tokens)

    def _generate(self, ids: list[int], max_tokens: int) -> Iterator[Token]:
        session = self.session()
        logits = session.prefill(ids)
        made: list[int] = []
        shown = ""
        for count in itertools.count(1):
            token = int(np.argmax(logits))
            ended = token in self.config.eos_token_ids
            made += [] if ended else [token]
            reason = "stop" if ended else "length" if count == max_tokens else None
            text = self._text(made, last=reason is not None)
            yield Token(token, text[len(shown) :], log_probability(logits, token), reason)
            if reason is not None:
                return
            shown = text
            logits = session.decode(token)

    def score(self, ids: Sequence[int]) -> Iterator[float]:
        """Negative log likelihood of each token after the first, given all before it; in nats, one by one."""
        tokens = self.check_ids(ids)
        if len(tokens) < 2:
            raise InputError(f"scoring needs at least 2 tokens, found {len(tokens)}")
        if len(tokens) > self.context:
            raise ContextError(f"{len(tokens)} tokens exceed the context of {self.context} tokens")
        return self._score(tokens)

    def _score(self, tokens: list[int]) -> Iterator[float]:
        session = self.session()
        for first in range(0, len(tokens) - 1, _SCORED_AT_ONCE):
            following = tokens[first + 1 : first + 1 + _SCORED_AT_ONCE]
            logits = session.prefill(tokens[first : first + len(following)], all_logits=True)
            for row, token in zip(logits, following, strict=True):
                yield -log_probability(row, token)

    def _text(self, ids: list[int], last: bool) -> str:
        """The text so far; bytes that a later token may complete or spoil are held back until the last."""
        if self.tokenizer is None:
            return ""
        # Some embeddings have more rows than the tokenizer has pieces; such ids mean no text.
        known = [token for token in ids if token < self.tokenizer.size]
        return self.tokenizer.decode(known if last else known[: self.tokenizer.settled(known)])

    def close(self) -> None:
        """Ends the worker threads and lets the weights go. Twice is once."""
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Session:
    """One sequence of tokens and its KV cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._cache = engine.runner.cache()

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self._cache.position

    def prefill(self, ids: Sequence[int], chunk: int | None = None, all_logits: bool = False) -> np.ndarray:
        """Append tokens. float32 [V] of the last one, or [T, V] of all.

        chunk is how many tokens share a pass. It changes speed and memory, never a bit.

        If a worker fails, WorkerError names it, nothing is committed of the chunk at hand, and the call may be repeated;
        only after a worker that stalled and never came back is the session lost, and says so.
        """
        engine, runner = self.engine, self.engine.runner
        tokens = engine.check_ids(ids)
        if chunk is not None and not _counts(chunk):
            raise InputError(f"chunk should be a whole number from 1, found {chunk!r:.40}")
        if self.position + len(tokens) > engine.context:
            raise ContextError(
                f"{len(tokens)} tokens after {self.position} exceed the context of {engine.context} tokens"
            )
        size = chunk or CHUNK
        rows = []
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            ahead = len(tokens) - first - len(part)
            rows.append(runner.run(self._cache, part, all_logits, limit=engine.context, ahead=ahead))
        return np.concatenate(rows) if all_logits else rows[-1]

    def decode(self, token_id: int) -> np.ndarray:
        """Append one token: float32 [V]."""
        return self.prefill([token_id])

    def kv_digest(self) -> list[str]:
        """sha256 a layer, of the rows' bits that a later token may read: the last W - 1 of a sliding layer, else all.

        Little-endian float32, keys of all those positions before values, each [positions, G, E].
        """
        return self.engine.runner.digest(self._cache)


_MOST_THREADS = 1024
_LONGEST_DEADLINE = 86_400.0


def _counts(value: object) -> bool:
    """A whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def load(
    model: str | Path,
    threads: int | None = None,
    context: int | None = None,
    deadline: float = 5.0,
    kv: str = "float32",
    quant: str | None = None,
) -> Engine:
    """A GGUF file, a Hugging Face directory, or a name from the catalogue.

    threads: worker threads; if left out, as many as physical cores within affinity and quota. They change speed, never a
    bit. deadline: seconds until a stalled worker is reported. kv: what keys and values are stored as; "bfloat16" halves
    their memory and, unlike all else here, changes the answer, in the same way everywhere. quant: "q8_0" or "q4_0" packs
    matrices of float weights to those blocks on the way in, with the codes that a converted GGUF would have; the answer is
    then that file's.
    """
    return Engine(open_checkpoint(resolve(model)), threads, context, deadline, kv, quant)
