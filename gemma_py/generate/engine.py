"""The engine: a loaded model, and sessions that each have their own KV cache."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gemma_py import machine
from gemma_py.catalog import resolve
from gemma_py.errors import ComputationError, InputError
from gemma_py.formats.blocks import QUANTS
from gemma_py.generate import sampling
from gemma_py.generate.core import Generation, Request, Token, check_ids, stop_strings
from gemma_py.generate.options import BASE_MODEL, GEMMA, OPTIONS, Sampling, asked, recommended, with_options
from gemma_py.generate.sampling import ROWS_AT_ONCE, log_probability
from gemma_py.hub import repository_of
from gemma_py.kernels.atomics import is_ieee
from gemma_py.progress import ReportProgress, no_report
from gemma_py.runtime.cache import KV_TYPES, Cache, bytes_needed, check_context
from gemma_py.runtime.compiling import Compilation, first_time
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.program import LinkedProgram, link
from gemma_py.runtime.runner import CHUNK, Runner, SequenceInput
from gemma_py.templates.template import TRANSCRIPT, Template, checked_messages, choose, encode
from gemma_py.tokenizer import Tokenizer
from gemma_py.weights.checkpoint import Checkpoint, open_checkpoint
from gemma_py.weights.store import packed_weights
from gemma_py.weights.tensors import Weights, stays_float


class Engine:
    """Weights, config and tokenizer. Use as a context manager, or close it.

    Several sessions may be alive at once and be used from several Python threads; one pass runs at a time. A forked child
    may use its parent's engine; it gets worker threads of its own.
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
                "this thread flushes subnormals to zero or does not round to nearest, so results would have other bits"
            )
        if not isinstance(kv, str) or kv not in KV_TYPES:
            raise InputError(f"kv should be one of {', '.join(KV_TYPES)}, found {kv!r:.40}")
        if quant is not None and (not isinstance(quant, str) or quant not in QUANTS):
            raise InputError(f"quant should be one of {', '.join(QUANTS)}, found {quant!r:.40}")
        if context is not None and not _counts(context):
            raise InputError(f"context should be at least 1 token, found {context!r:.40}")
        if threads is not None and not (_counts(threads) and threads <= _MOST_THREADS):
            raise InputError(f"threads should be 1 to {_MOST_THREADS}, found {threads!r:.40}")
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline <= _LONGEST_DEADLINE:
            raise InputError(f"deadline should be seconds up to {_LONGEST_DEADLINE}, found {deadline!r:.40}")
        self.checkpoint, self.config, self.path = checkpoint, checkpoint.config, checkpoint.path
        self.context = min(context or self.config.max_position_embeddings, self.config.max_position_embeddings)
        self.quant = quant
        self._recommended: Sampling | None = None
        self._fingerprint: str | None = None
        # At the first start, the tokenizer's tables and the kernels take seconds each.
        with ThreadPoolExecutor(1, "gemma_py-tokenizer") as aside, Compilation(kv, progress) as compilation:
            tokenizer = aside.submit(checkpoint.tokenizer)
            packed = packed_weights(checkpoint, quant, progress)
            self.tokenizer = tokenizer.result()
            if first_time(kv):
                self._warm_up()
            compilation.wait()
            program = link(checkpoint.family.program(self.config), packed)
            self._runner: Runner | None = Runner(program, self.config, threads or machine.threads(), deadline, kv)

    def _warm_up(self) -> None:
        """Compile the kernels of sampling and tokenizer during the first start, so that the first answer does not wait for them."""
        sampling.warm_up()
        if self.tokenizer is not None:
            self.tokenizer.encode("a")

    @property
    def name(self) -> str:
        """The model's name: that of its repository on the hub, or of its file or directory."""
        return repository_of(self.path) or self.path.name

    @property
    def threads(self) -> int:
        """Worker threads."""
        return self.runner.team.workers

    @property
    def kv_type(self) -> str:
        """The type of KV rows: one of `KV_TYPES`."""
        return self.runner.kv

    def reference_weights(self) -> Weights:
        """The weights for the specification. They are read again, because the engine has only the packed ones."""
        return self.checkpoint.weights(self.quant)

    @property
    def kept_float(self) -> list[str]:
        """The names of the matrices that stayed float despite `quant`, because their rows are not whole blocks."""
        tensors = self.checkpoint.tensors.values()
        return [] if self.quant is None else [tensor.name for tensor in tensors if stays_float(self.quant, tensor)]

    def set_threads(self, threads: int) -> None:
        """Use another number of worker threads from the next pass on. Sessions stay usable, and results keep their bits."""
        if not (_counts(threads) and threads <= _MOST_THREADS):
            raise InputError(f"threads should be 1 to {_MOST_THREADS}, found {threads!r:.40}")
        self.runner.set_workers(threads)

    def session(self, keep: int = 0) -> "Session":
        """A new session. keep: how many tokens `Session.rewind` must be able to remove."""
        return Session(self, keep)

    @property
    def sampling(self) -> Sampling:
        """The default sampling: the checkpoint's recommendation. Without one, it is Google's recommendation for Gemma if the model has a
        chat template, and greedy for a base model."""
        if self._recommended is None:
            own = self.checkpoint.chat_template
            base = own is None and self.tokenizer is not None and self.template() is TRANSCRIPT
            default = BASE_MODEL if base else GEMMA
            self._recommended = recommended(self.path, self.checkpoint.metadata, default)
        return self._recommended

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; InputError if the checkpoint has none."""
        if self.tokenizer is None:
            raise InputError(f"{self.path}: the checkpoint has no tokenizer; give token ids instead of text")
        return self.tokenizer

    def template(self, wanted: str | Path | None = None) -> Template:
        """The chat template. wanted: "gemma", "transcript" or a file; by default the checkpoint's own template."""
        return choose(self.text_tokenizer(), self.checkpoint.chat_template, self.config.eos_token_ids, wanted)

    def ends(self, template: Template) -> frozenset[int]:
        """The tokens at which an answer ends."""
        named = (self.text_tokenizer().token_id(end) for end in template.ends)
        return frozenset(self.config.eos_token_ids).union(end for end in named if end is not None)

    def fingerprint(self) -> str:
        """Identifies the model independently of its file: sha256 of its logits for a few fixed tokens.

        The logits depend on every matrix, so they differ between models, and not on threads, chunks or the machine.
        """
        if self._fingerprint is None:
            probe = [number * (self.config.vocab_size - 1) // 7 for number in range(8)]
            logits = self.session().prefill(probe[: self.context], all_logits=True)
            self._fingerprint = hashlib.sha256(np.ascontiguousarray(logits, "<f4").tobytes()).hexdigest()
        return self._fingerprint

    def check_ids(self, ids: Any) -> list[int]:
        """The ids as plain integers, all within the vocabulary."""
        return check_ids(ids, self.config.vocab_size)

    def encode(self, prompt: str | Sequence[int], control: bool = False) -> list[int]:
        """The ids of a prompt: ids are checked, text is tokenised with the bos token in front."""
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

        Decoding is greedy, so the same prompt gives the same text, unless an option of random sampling is given. Options that are
        not given then have the values that the checkpoint recommends.
        """
        options = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty, "logit_bias": logit_bias, "seed": seed,
        }  # fmt: skip
        sampling, ends = asked(options, self.sampling), frozenset(self.config.eos_token_ids)
        return self._answer(Request(self.encode(prompt), max_tokens, sampling, stop=stop_strings(stop), ends=ends))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int = 512,
        *,
        stop: str | Sequence[str] | None = None,
        template: str | Path | None = None,
        **options: Any,
    ) -> Iterator[Token]:
        """The answer to messages in OpenAI's format. The options are those of `generate`; those that are not given have the
        values that the checkpoint recommends. For a conversation of several turns use `Conversation`, which computes each token once."""
        sampling, form = self.chat_sampling(options), self.template(template)
        ids = encode(form.pieces(checked_messages(messages)), self.text_tokenizer(), {}, {})
        stop = (*form.stop, *stop_strings(stop))
        return self._answer(Request(ids, max_tokens, sampling, stop=stop, ends=self.ends(form), trim=True))

    def chat_sampling(self, options: Mapping[str, Any]) -> Sampling:
        """The recommended sampling, with these options instead where they are not None."""
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise InputError(f"{unknown[0]}: no such option; the options are {', '.join(OPTIONS)}")
        return with_options(self.sampling, options)

    def generation(self, request: Request, least_tokens: int = 1) -> Generation:
        """The request, checked against this model and its context. least_tokens: the smallest max_tokens that the caller allows."""
        return Generation(request, self.config.vocab_size, self.context, self.tokenizer, least_tokens)

    def _answer(self, request: Request) -> Iterator[Token]:
        """The answer to a request, which is checked now and not when the first token is asked for."""
        return self._tokens(self.generation(request))

    def _tokens(self, generation: Generation) -> Iterator[Token]:
        session = self.session()
        yield from generation.tokens(session.prefill(generation.prompt), session.decode)

    def score(self, ids: Sequence[int]) -> Iterator[float]:
        """Yield the negative log likelihood, in nats, of each token after the first, given the tokens before it."""
        tokens = self.check_ids(ids)
        if len(tokens) < 2:
            raise InputError(f"scoring needs at least 2 tokens, found {len(tokens)}")
        check_context(self.context, len(tokens))
        return self._score(tokens)

    def _score(self, tokens: list[int]) -> Iterator[float]:
        session = self.session()
        for first in range(0, len(tokens) - 1, ROWS_AT_ONCE):
            following = tokens[first + 1 : first + 1 + ROWS_AT_ONCE]
            logits = session.prefill(tokens[first : first + len(following)], all_logits=True)
            for row, token in zip(logits, following, strict=True):
                yield -log_probability(row, token)

    # --- for schedulers, benchmarks and checks ------------------------------------------------------------------------

    @property
    def runner(self) -> Runner:
        """The runner, which computes the passes. Only this module uses it; other modules call the methods here."""
        if self._runner is None:
            raise InputError("the engine is closed")
        return self._runner

    @property
    def program(self) -> LinkedProgram:
        """The linked program: the operations of a pass and the packed weights."""
        return self.runner.program

    @property
    def instruments(self) -> Instruments:
        """Fault plan, poison, profile and traces of every pass from now on, for tests and benchmarks."""
        return self.runner.instruments

    def new_cache(self, keep: int = 0) -> Cache:
        """An empty KV cache, for `run_together`. keep: how many tokens a rewind must be able to remove."""
        return self.runner.cache(keep)

    def cache_bytes(self, tokens: int, keep: int = 0) -> int:
        """The bytes that a cache of `new_cache(keep)` needs for so many tokens, in passes of the default chunk size."""
        return bytes_needed(self.config, self.kv_type, tokens, CHUNK, keep)

    def run_together(self, inputs: Sequence[SequenceInput]) -> list[np.ndarray]:
        """One pass for several sequences: the logits of each. The tokens are added to all of the caches, or to none."""
        return self.runner.run_together(inputs)

    def run_kernel(self, kernel: Callable[..., Any], *args: Any, counters: int = 0) -> None:
        """Call a compiled kernel on every worker thread, to measure it. counters: its number of tile counters."""
        self.runner.team.run(kernel, *args, counters=counters)

    def close(self) -> None:
        """End the worker threads and release the weights. A second call does nothing."""
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

    def kv_rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The committed keys and values of a layer that a later token may read, f32 [positions, G, E] each.

        number: the index of the layer in Config.kv_owners.
        """
        return self._cache.rows(number)

    def prefill(self, ids: Sequence[int], chunk: int | None = None, all_logits: bool = False) -> np.ndarray:
        """Append tokens. Returns the logits of the last one, float32 [V], or of all, [T, V].

        chunk: how many tokens share a pass. It changes speed and memory, but no bit.

        If a worker fails, WorkerError names it, and none of its chunk's tokens are added, so the call may be repeated. Only if
        the worker stalled and did not return is the session unusable; then every further call raises InputError.
        """
        engine, runner = self.engine, self.engine.runner
        tokens = engine.check_ids(ids)
        if chunk is not None and not _counts(chunk):
            raise InputError(f"chunk should be a whole number from 1, found {chunk!r:.40}")
        check_context(engine.context, len(tokens), after=self.position)
        size = chunk or CHUNK
        rows = []
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            ahead = len(tokens) - first - len(part)
            rows.append(runner.run(self._cache, part, all_logits, limit=engine.context, ahead=ahead))
        return np.concatenate(rows) if all_logits else rows[-1]

    def decode(self, token_id: int) -> np.ndarray:
        """Append one token. Returns its logits, float32 [V]."""
        return self.prefill([token_id])

    def reserve(self, tokens: int) -> None:
        """Allocate room for so many more tokens, within the context, so that their pass does not have to reallocate."""
        self.engine.runner.reserve(self._cache, min(tokens, self.engine.context - self.position))

    def rewind(self, position: int) -> None:
        """Remove the tokens from this position on. It takes no time, and later results are as if they had never been added.

        A sliding layer's ring has `keep` rows more than its window; rewinding further raises InputError, see `can_rewind_to`.
        """
        self.engine.runner.rewind(self._cache, position)

    @property
    def usable(self) -> bool:
        """False after a worker stalled and did not return, because it may still write to the KV rows."""
        return not self._cache.abandoned

    def can_rewind_to(self, position: int) -> bool:
        """Whether `rewind(position)` is possible."""
        return self._cache.can_rewind_to(position)

    def raw_kv_rows(self, since: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and values of each layer that has KV rows of its own, [G, positions, E] in the cache's type: the rows that
        tokens after `since` may read."""
        if not self.can_rewind_to(since):
            raise InputError(f"position {since} cannot be rewound to from {self.position}: its rows are overwritten")
        return (self._cache.raw_rows(number, since) for number in range(len(self.engine.config.kv_owners)))

    def restore(self, ids: Sequence[int], kv_rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Fill an empty session with the tokens of another session and its `raw_kv_rows`."""
        if self.position:
            raise InputError(f"only an empty session can be restored; this one has {self.position} tokens")
        tokens = self.engine.check_ids(ids)
        check_context(self.engine.context, len(tokens))
        self._cache.restore(tokens, kv_rows)

    def kv_digest(self) -> list[str]:
        """For each layer, sha256 of the KV rows that a later token may read: the last W - 1 of a sliding layer, else all.

        They are hashed as little-endian float32, the keys of all positions before the values, each [positions, G, E].
        """
        return self.engine.runner.digest(self._cache)


_MOST_THREADS = 1024
_LONGEST_DEADLINE = 86_400.0


def _counts(value: object) -> bool:
    """Whether the value is a whole number of at least 1."""
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
    """Load a model: a GGUF file, a Hugging Face directory, a name from the catalogue, or `hf:owner/name` (extra `hf`).

    threads: worker threads; by default, one for each physical core within affinity and quota. They change the speed, but no
    bit. deadline: seconds until a stalled worker is reported. kv: the type of keys and values; "bfloat16" halves their
    memory and, unlike the other options but quant, changes the answer, in the same way on every machine. quant: "q8_0" or "q4_0"
    quantises float matrices while loading, to the same codes as in a converted GGUF file, so the answer is that file's.
    progress: called as `progress(what, done, total, unit)` while a first start downloads, compiles and packs, which may take
    minutes; see `gemma_py.progress`.
    """
    return Engine(open_checkpoint(resolve(model, progress)), threads, context, deadline, kv, quant, progress)
