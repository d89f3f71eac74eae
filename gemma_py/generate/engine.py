"""The engine: a loaded model, and sessions that each have their own KV cache."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gemma_py import machine
from gemma_py.catalog import resolve
from gemma_py.errors import ComputationError, ContextError, InputError
from gemma_py.formats.blocks import QUANTS
from gemma_py.generate.core import Continuation, Token, generate
from gemma_py.generate.sampling import OPTIONS, Sampler, Sampling, asked, recommended, rehearse
from gemma_py.generate.score import ROWS_AT_ONCE, log_probability
from gemma_py.generate.text_stream import TextStream, stop_strings
from gemma_py.hub import repository_of
from gemma_py.kernels.atomics import is_ieee
from gemma_py.progress import ReportProgress, no_report
from gemma_py.runtime.cache import KV_TYPES
from gemma_py.runtime.compiling import Compilation, first_time
from gemma_py.runtime.runner import CHUNK, Runner
from gemma_py.templates.template import Template, checked_messages, choose, encode
from gemma_py.tokenizer import Tokenizer
from gemma_py.weights.checkpoint import Checkpoint, open_checkpoint
from gemma_py.weights.store import packed_weights
from gemma_py.weights.tensors import Matrix, Weights, stays_float


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
        progress: ReportProgress = no_report,
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
        self._recommended: Sampling | None = None
        self._fingerprint: str | None = None
        # The tokenizer's tables take seconds at the first start, as kernels do.
        with ThreadPoolExecutor(1, "gemma_py-tokenizer") as aside, Compilation(kv, progress) as compilation:
            tokenizer = aside.submit(checkpoint.tokenizer)
            packed = packed_weights(checkpoint, quant, progress)
            self.tokenizer = tokenizer.result()
            if first_time(kv):
                self._rehearse()
            compilation.wait()
            self._runner: Runner | None = Runner(packed, self.config, threads or machine.threads(), deadline, kv)

    def _rehearse(self) -> None:
        """What an answer needs beside the forward pass is compiled while people wait anyway."""
        rehearse()
        log_probability(np.zeros(8, np.float32), 0)
        if self.tokenizer is not None:
            self.tokenizer.encode("a")

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            raise InputError("the engine is closed")
        return self._runner

    @property
    def name(self) -> str:
        """Of the model, for people."""
        return repository_of(self.path) or self.path.name

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

    def set_threads(self, threads: int) -> None:
        """Another number of worker threads. Sessions go on; no bit depends on it."""
        if not (_counts(threads) and threads <= _MOST_THREADS):
            raise InputError(f"threads should be 1 to {_MOST_THREADS}, found {threads!r:.40}")
        self.runner.set_workers(threads)

    def session(self, keep: int = 0) -> "Session":
        """keep: tokens that `Session.rewind` may take back."""
        return Session(self, keep)

    @property
    def sampling(self) -> Sampling:
        """What the checkpoint recommends, or Gemma's makers where it says nothing: how a chat samples unless told otherwise."""
        if self._recommended is None:
            self._recommended = recommended(self.path, self.checkpoint.metadata)
        return self._recommended

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, where there must be one."""
        if self.tokenizer is None:
            raise InputError(f"{self.path}: the checkpoint brings no tokenizer; give token ids instead of text")
        return self.tokenizer

    def template(self, wanted: str | Path | None = None) -> Template:
        """How a conversation becomes a prompt. wanted: "gemma", "transcript" or a file; else what the checkpoint brings."""
        return choose(self.text_tokenizer(), self.checkpoint.chat_template, self.config.eos_token_ids, wanted)

    def ends(self, template: Template) -> frozenset[int]:
        """The tokens at which an answer ends."""
        named = (self.text_tokenizer().token_id(end) for end in template.ends)
        return frozenset(self.config.eos_token_ids).union(end for end in named if end is not None)

    def fingerprint(self) -> str:
        """What this model is, whatever file it came from: sha256 of its logits' bits for a few fixed tokens.

        Every matrix has a part in them, so another model has others; and no thread, chunk or machine changes them.
        """
        if self._fingerprint is None:
            probe = [number * (self.config.vocab_size - 1) // 7 for number in range(8)]
            logits = self.session().prefill(probe[: self.context], all_logits=True)
            self._fingerprint = hashlib.sha256(np.ascontiguousarray(logits, "<f4").tobytes()).hexdigest()
        return self._fingerprint

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
        return self.check_ids(self.text_tokenizer().encode(prompt, control=control))

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Iterator[Token]:
        """The continuation of a prompt, token by token. The options are those of `Sampling`.

        The likeliest token is taken, so the same prompt gives the same text, unless an option asks for a draw; what the
        others leave open is then as the checkpoint recommends.
        """
        options = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty, "logit_bias": logit_bias, "seed": seed,
        }  # fmt: skip
        ids = self.encode(prompt)
        stream = TextStream(self.tokenizer, stop_strings(stop))
        return self._generate(ids, max_tokens, asked(options, self.sampling), stream, self.config.eos_token_ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int = 512,
        *,
        stop: str | Sequence[str] | None = None,
        template: str | Path | None = None,
        **options: Any,
    ) -> Iterator[Token]:
        """The answer to messages in OpenAI's form. The options are those of `generate`; what they leave open is as the
        checkpoint recommends. For a conversation that goes on, `Conversation` keeps what was computed."""
        sampling = self.chat_sampling(options)
        form, tokenizer = self.template(template), self.text_tokenizer()
        ids = encode(form.pieces(checked_messages(messages)), tokenizer, {}, {})
        stream = TextStream(tokenizer, (*form.stop, *stop_strings(stop)), trim=True)
        return self._generate(ids, max_tokens, sampling, stream, self.ends(form))

    def chat_sampling(self, options: Mapping[str, Any]) -> Sampling:
        """The recommended sampling, with these options instead where they are not None."""
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise InputError(f"{unknown[0]}: no such option; there are {', '.join(OPTIONS)}")
        return replace(self.sampling, **{name: value for name, value in options.items() if value is not None})

    def _generate(
        self, ids: list[int], max_tokens: int, sampling: Sampling, stream: TextStream, ends: Collection[int]
    ) -> Iterator[Token]:
        """Everything is checked before the first token is asked for."""
        if not _counts(max_tokens):
            raise InputError(f"max_tokens should be at least 1, found {max_tokens!r:.40}")
        if len(ids) + max_tokens > self.context:
            raise ContextError(
                f"{len(ids)} prompt tokens and {max_tokens} new ones exceed the context of {self.context} tokens"
            )
        sampler = Sampler(sampling, self.config.vocab_size, ids)
        return self._tokens(ids, max_tokens, sampler, stream, ends)

    def _tokens(
        self, ids: list[int], max_tokens: int, sampler: Sampler, stream: TextStream, ends: Collection[int]
    ) -> Iterator[Token]:
        session = self.session()
        yield from generate(session.prefill(ids), session.decode, Continuation(sampler, stream, ends, max_tokens))

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
        for first in range(0, len(tokens) - 1, ROWS_AT_ONCE):
            following = tokens[first + 1 : first + 1 + ROWS_AT_ONCE]
            logits = session.prefill(tokens[first : first + len(following)], all_logits=True)
            for row, token in zip(logits, following, strict=True):
                yield -log_probability(row, token)

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

    def __init__(self, engine: Engine, keep: int = 0) -> None:
        self.engine = engine
        self._cache = engine.runner.cache(keep)

    @property
    def ids(self) -> list[int]:
        """The tokens in the cache."""
        return self._cache.ids.copy()

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

    def reserve(self, tokens: int) -> None:
        """Make room for tokens to come, as far as the context goes: else their pass does, and may have to move all rows first."""
        self.engine.runner.reserve(self._cache, min(tokens, self.engine.context - self.position))

    def rewind(self, position: int) -> None:
        """Forget the tokens from this position on. It costs nothing, and nothing tells it from a fresh start.

        A sliding layer's ring holds `keep` tokens more than its window: further back is an InputError, see `reachable`.
        """
        self.engine.runner.rewind(self._cache, position)

    @property
    def usable(self) -> bool:
        """False after a worker stalled and never came back: the rows may be anything then."""
        return not self._cache.abandoned

    def reachable(self, position: int) -> bool:
        """Whether `rewind` can go there."""
        return self._cache.reachable(position)

    def stored(self, since: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """A layer at a time: the keys and values that tokens after `since` may read, as they are stored, [G, positions, E]."""
        if not self.reachable(since):
            raise InputError(f"position {since} cannot be gone back to from {self.position}: its rows are overwritten")
        return (self._cache.stored(number, since) for number in range(len(self.engine.config.layers)))

    def restore(self, ids: Sequence[int], stored: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Into a session that is empty: the tokens of another, and what it had `stored`."""
        if self.position:
            raise InputError(f"only an empty session can be restored; this one holds {self.position} tokens")
        tokens = self.engine.check_ids(ids)
        if len(tokens) > self.engine.context:
            raise ContextError(f"{len(tokens)} tokens exceed the context of {self.engine.context} tokens")
        self._cache.restore(tokens, stored)

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
    progress: ReportProgress = no_report,
) -> Engine:
    """A GGUF file, a Hugging Face directory, a name from the catalogue, or `hf:owner/name` (extra `hf`).

    threads: worker threads; if left out, as many as physical cores within affinity and quota. They change speed, never a
    bit. deadline: seconds until a stalled worker is reported. kv: what keys and values are stored as; "bfloat16" halves
    their memory and, unlike all else here, changes the answer, in the same way everywhere. quant: "q8_0" or "q4_0" packs
    matrices of float weights to those blocks on the way in, with the codes that a converted GGUF would have; the answer is
    then that file's. progress: called as `progress(what, done, total, unit)` while a first start downloads, compiles and
    packs, which may take minutes; see `gemma_py.progress`.
    """
    return Engine(open_checkpoint(resolve(model, progress)), threads, context, deadline, kv, quant, progress)
