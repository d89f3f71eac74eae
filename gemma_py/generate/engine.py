"""The engine, which is a loaded model."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_py import machine
from gemma_py.catalog import as_other_processes_name, resolve
from gemma_py.errors import ComputationError, InputError
from gemma_py.formats.blocks import QUANTS
from gemma_py.formats.floats import bytes_for_digest
from gemma_py.generate import drafting, embedding, sampling
from gemma_py.generate.answer import stop_strings
from gemma_py.generate.assistant import Assistant
from gemma_py.generate.core import Generation, Request, Token, check_ids, is_whole
from gemma_py.generate.draft_model import DraftModel, GuessingModel, check_draft
from gemma_py.generate.options import BASE_MODEL, GEMMA, OPTIONS, Sampling, asked, check_mode, recommended, with_options
from gemma_py.generate.sampling import ROWS_AT_ONCE, log_probability
from gemma_py.generate.session import Decoder, Session
from gemma_py.generate.speculation import Pace
from gemma_py.hub import repository_of
from gemma_py.kernels.atomics import is_ieee
from gemma_py.progress import ReportProgress, no_report
from gemma_py.receipts.receipt import ModelIdentity
from gemma_py.runtime.cache import Cache, bytes_needed, check_context
from gemma_py.runtime.compiling import Compilation, first_time
from gemma_py.runtime.instruments import Instruments
from gemma_py.runtime.kv_types import check_kv_type
from gemma_py.runtime.program import LinkedProgram, link
from gemma_py.runtime.runner import Runner, SequenceInput, SharedTeam
from gemma_py.templates.chat_format import ChatFormat
from gemma_py.templates.notation import end_ids
from gemma_py.templates.template import TRANSCRIPT, Template, choose
from gemma_py.tokenizer import Tokenizer
from gemma_py.weights.checkpoint import Checkpoint, open_checkpoint
from gemma_py.weights.store import check_memory, file_digests, packed_weights
from gemma_py.weights.tensors import Weights, stays_float

if TYPE_CHECKING:
    from gemma_py.cluster.hosts import Hosts
    from gemma_py.runtime.prefix_cache import PrefixCache


class Engine:
    """A loaded model: weights, config and tokenizer. Use an engine as a context manager, or call `close`.

    Several sessions can be used at once, from several Python threads; the engine computes one pass at a time. After a
    fork, the child process can use the engine too, and then starts its own worker threads.
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
                "this thread flushes subnormals to zero or does not round to nearest, which would change the logits"
            )
        check_kv_type(kv)
        if quant is not None and (not isinstance(quant, str) or quant not in QUANTS):
            raise InputError(f"quant should be one of {', '.join(QUANTS)}, found {quant!r:.40}")
        if context is not None and not is_whole(context, 1):
            raise InputError(f"context should be at least 1 token, found {context!r:.40}")
        if threads is not None and not (is_whole(threads, 1) and threads <= _MOST_THREADS):
            raise InputError(f"threads should be 1 to {_MOST_THREADS}, found {threads!r:.40}")
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline <= _LONGEST_DEADLINE:
            raise InputError(
                f"deadline should be at most {_LONGEST_DEADLINE:g} seconds and above 0, found {deadline!r:.40}"
            )
        if checkpoint.config.backbone_hidden_size:
            raise InputError(
                f"{checkpoint.path}: an assistant only guesses tokens for another model; give it as draft (--draft)"
            )
        self.checkpoint, self.config, self.path = checkpoint, checkpoint.config, checkpoint.path
        self.context = min(context or self.config.max_position_embeddings, self.config.max_position_embeddings)
        self.quant, self.shards = quant, 1
        self.lost_shards: list[str] = []  # for each shard whose process is being replaced, the reason
        self.pace = Pace()
        self.speculate = "auto"  # the option of requests that do not set it
        self.draft: GuessingModel | None = None
        self._recommended: Sampling | None = None
        self._fingerprint: str | None = None
        self._identity: ModelIdentity | None = None
        # While the weights are packed, the tokenizer loads and the kernels compile in the background.
        with ThreadPoolExecutor(1, "gemma_py-tokenizer") as aside, Compilation(kv, progress) as compilation:
            tokenizer = aside.submit(checkpoint.tokenizer)
            packed = packed_weights(checkpoint, quant, progress)
            self.tokenizer = tokenizer.result()
            if first_time(kv):
                self._warm_up()
            compilation.wait()
            program = link(checkpoint.family.program(self.config), packed)
            team = SharedTeam(threads or machine.threads(), deadline)
            self._runner: Runner | None = Runner(program, self.config, team, kv)

    def _warm_up(self) -> None:
        """Call the kernels of sampling, drafting and tokenizer once, so that no answer waits for their compilation."""
        sampling.warm_up()
        drafting.warm_up()
        if self.tokenizer is not None:
            self.tokenizer.encode("a")

    @property
    def name(self) -> str:
        """The model's repository on the Hugging Face hub, or without a repository the name of the file or directory."""
        return repository_of(self.path) or self.path.name

    @property
    def threads(self) -> int:
        return self.runner.team.workers

    @property
    def kv_type(self) -> str:
        """The number type of the KV cache: "float32", "bfloat16" or "q8_0"."""
        return self.runner.kv

    def divide(self, shards: int, hosts: "Hosts | None", model: str) -> None:
        """Divide the layers among processes. Call this before the first session. model: what the processes open"""
        from gemma_py.cluster import divide  # imported here, so that engines without shards start faster

        division = divide.Division(shards, hosts, model)
        self._runner = divide.divide(self.checkpoint, self.runner, self.quant, division, self.lost_shards)
        self.shards = shards

    def use_draft(self, checkpoint: Checkpoint, progress: ReportProgress = no_report) -> None:
        """Let a draft model with this model's vocabulary, or an assistant, guess tokens. The guesses change only the speed."""
        embedding.check_generates(self)
        check_draft(checkpoint, self.tokenizer, self.config.vocab_size)
        if checkpoint.config.backbone_hidden_size:
            if self.shards > 1:
                raise InputError("an assistant reads the model's KV rows, which other processes have (--shards)")
            self.draft = Assistant(checkpoint, self.checkpoint, self.runner, self.quant, progress)
        else:
            self.draft = DraftModel(checkpoint, self.runner, self.quant, progress)
        self.pace.draft_share = self.draft.share

    def reference_weights(self) -> Weights:
        """Read the checkpoint again, and return the weights for the reference implementation.

        The engine itself keeps only packed weights, which the reference implementation cannot use.
        """
        return self.checkpoint.weights(self.quant)

    @property
    def kept_float(self) -> list[str]:
        """The names of the float matrices that `quant` could not quantise, because their rows are not whole blocks."""
        tensors = self.checkpoint.tensors.values()
        return [] if self.quant is None else [tensor.name for tensor in tensors if stays_float(self.quant, tensor)]

    def set_threads(self, threads: int) -> None:
        """Change the number of worker threads. Sessions stay usable, and the logits do not change."""
        if not (is_whole(threads, 1) and threads <= _MOST_THREADS):
            raise InputError(f"threads should be 1 to {_MOST_THREADS}, found {threads!r:.40}")
        self.runner.set_workers(threads)

    def session(self, keep: int = 0) -> "Session":
        """Return a new session. keep: the most tokens that `Session.rewind` must be able to remove."""
        embedding.check_generates(self)
        return Session(self, keep)

    @property
    def sampling(self) -> Sampling:
        """The default sampling options: the recommendation of the checkpoint.

        A checkpoint without a recommendation gets greedy decoding if it is a base model without a chat template, and
        otherwise Google's recommendation for Gemma.
        """
        if self._recommended is None:
            own = self.checkpoint.chat_template
            base = own is None and self.tokenizer is not None and self.template() is TRANSCRIPT
            default = BASE_MODEL if base else GEMMA
            self._recommended = recommended(self.path, self.checkpoint.metadata, default)
        return self._recommended

    def text_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raise InputError if the checkpoint has none."""
        if self.tokenizer is None:
            raise InputError(f"{self.path}: the checkpoint has no tokenizer; give token ids instead of text")
        return self.tokenizer

    def template(self, wanted: str | Path | None = None) -> Template:
        """Return a chat template: "gemma", "gemma4", "transcript", or the path of a file. By default, return the checkpoint's
        own template.
        """
        return choose(self.text_tokenizer(), self.checkpoint.chat_template, self.config.eos_token_ids, wanted)

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids of the tokens that end a text, from the checkpoint's config and from the vocabulary."""
        return frozenset(self.config.eos_token_ids) | (end_ids(self.tokenizer) if self.tokenizer else frozenset())

    def ends(self, template: Template) -> frozenset[int]:
        """Return the ids of the tokens that end an answer: those of `end_ids`, and those of the template."""
        named = (self.text_tokenizer().token_id(end) for end in template.ends)
        return self.end_ids.union(end for end in named if end is not None)

    def fingerprint(self) -> str:
        """Return a sha256 that identifies the model. It covers the logits, or the embedding, of eight fixed tokens.

        Threads, chunk size, machine and file format do not change the fingerprint. A change of a weight does, except in
        experts that are not chosen for any of the eight tokens.
        """
        if self._fingerprint is None:
            self._fingerprint = self.compute_fingerprint()
        return self._fingerprint

    def fingerprint_ids(self) -> list[int]:
        return [number * (self.config.vocab_size - 1) // 7 for number in range(8)][: self.context]

    def compute_fingerprint(self, chunk: int | None = None) -> str:
        """Compute what `fingerprint` returns. chunk: the number of tokens in a pass."""
        if self.config.embedding is None:
            logits = self.session().prefill(self.fingerprint_ids(), chunk, all_logits=True)
        else:
            logits = embedding.embed_all(self, [self.fingerprint_ids()])
        return hashlib.sha256(bytes_for_digest(logits)).hexdigest()

    def identity(self) -> ModelIdentity:
        """Return the part of a receipt that identifies the model. The first call reads the model's files, unless a record on
        disk has the files' digests.
        """
        if self._identity is None:
            files = file_digests(self.checkpoint)
            self._identity = ModelIdentity(files, self.fingerprint(), self.quant, self.kv_type)
        return self._identity

    def check_ids(self, ids: Any) -> list[int]:
        return check_ids(ids, self.config.vocab_size)

    def encode(self, prompt: str | Sequence[int], control: bool = False) -> list[int]:
        """Return the token ids of a prompt. Text is tokenised with a bos token in front; ids are only checked.

        control: whether the text may contain control tokens such as <end_of_turn>
        """
        if not isinstance(prompt, str):
            return self.check_ids(prompt)
        return self.check_ids(self.text_tokenizer().encode(prompt, control=control))

    def encode_prediction(self, text: str | Sequence[int]) -> list[int]:
        """Return the token ids of a text that an answer is expected to repeat in large parts, without a bos token. Ids are
        only checked.
        """
        ids = self.text_tokenizer().encode(text, bos=False) if isinstance(text, str) and text else text
        return self.check_ids(ids) if ids else []

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
        logprobs: bool = True,
        speculate: str | None = None,
        prediction: str | Sequence[int] = "",
        receipt: bool = False,
    ) -> Iterator[Token]:
        """Return an iterator over the tokens that continue a prompt. The options are the fields of `Sampling`.

        Decoding is greedy by default. If temperature, top_k, top_p, min_p or seed is given, tokens are drawn at random,
        and the options that are not given have the values that the checkpoint recommends.

        logprobs: compute `Token.logprob`, which takes time, because it needs the exponentials of all logits.
        speculate: "auto" or "off"; by default, the option of `load`.
        prediction: a text, or token ids, that the continuation is expected to repeat in large parts. A good prediction saves
        time. The tokens do not depend on the prediction.
        receipt: whether the last token has a receipt, with which anyone who has the model can check the continuation.
        """
        options = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty, "logit_bias": logit_bias, "seed": seed,
        }  # fmt: skip
        sampling, ends = asked(options, self.sampling), self.end_ids
        request = Request(
            self.encode(prompt), max_tokens, sampling, stop=stop_strings(stop), ends=ends, logprobs=logprobs,
            speculate=speculate, prediction=self.encode_prediction(prediction), receipt=receipt,
        )  # fmt: skip
        return self._answer(request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int = 512,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
        stop: str | Sequence[str] | None = None,
        template: str | Path | None = None,
        logprobs: bool = True,
        speculate: str | None = None,
        prediction: str | Sequence[int] = "",
        receipt: bool = False,
        **options: Any,
    ) -> Iterator[Token]:
        """Return an iterator over the tokens of the answer to messages in OpenAI's format.

        tools: functions that the model may call, in OpenAI's format. The calls are in `Token.calls`.
        thinking: whether the model should think before it answers; by default, the chat template decides. Thoughts are
        in `Token.reasoning`.
        logprobs, speculate, prediction, receipt: see `generate`.
        options: fields of `Sampling`. Options that are not given have the values of `Engine.sampling`.

        For several turns use `Conversation`, which keeps the KV cache from turn to turn.
        """
        sampling, form = self.chat_sampling(options), self.chat_format(self.template(template))
        ids = form.prompt(messages, tools, thinking)
        stop = (*form.template.stop, *stop_strings(stop))
        request = Request(
            ids, max_tokens, sampling, stop=stop, ends=self.ends(form.template), trim=True, logprobs=logprobs,
            marks=form.marks(bool(tools)), speculate=speculate, prediction=self.encode_prediction(prediction),
            receipt=receipt,
        )  # fmt: skip
        return self._answer(request)

    def chat_format(self, template: Template) -> ChatFormat:
        """Return a chat template together with the model's marks of thoughts and tool calls."""
        return ChatFormat(template, self.text_tokenizer())

    def chat_sampling(self, options: Mapping[str, Any]) -> Sampling:
        """Return `Engine.sampling`, with the given options instead of the defaults. None means that an option is not given."""
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise InputError(f"{unknown[0]}: unknown sampling option, expected one of {', '.join(OPTIONS)}")
        return with_options(self.sampling, options)

    def generation(self, request: Request, least_tokens: int = 1) -> Generation:
        """Check a request against the model and the context. least_tokens: the smallest max_tokens that is allowed."""
        embedding.check_generates(self)
        if request.speculate is None:
            request = replace(request, speculate=self.speculate)
        vocab_size = self.config.vocab_size
        made = Generation(request, vocab_size, self.context, self.tokenizer, self.pace, least_tokens)
        if request.receipt:
            made.collect_evidence(self.identity())
        return made

    def _answer(self, request: Request) -> Iterator[Token]:
        """Check a request now, and return an iterator that computes the answer later."""
        return self._tokens(self.generation(request))

    def _tokens(self, generation: Generation) -> Iterator[Token]:
        session = self.session()
        logits = session.prefill(generation.prompt)
        yield from generation.tokens(logits, Decoder(session, generation).decode, session.kv_digest)

    def embed(
        self, texts_or_ids: Sequence[str | Sequence[int]], task: str | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """Return the embeddings of texts, float32 [N, D], each of length 1. A model that generates text raises InputError.

        texts_or_ids: a list of texts or of lists of token ids. A text gets the prompt of the task, and bos and eos tokens.
        task: the name of a prompt, for example "query" or "document". The prompts are in the checkpoint's
        config_sentence_transformers.json; without this file, those of EmbeddingGemma's model card are used.
        dimensions: the number of leading elements of an embedding to keep; the embedding is normalised afterwards.
        """
        return embedding.embeddings(self, texts_or_ids, task, dimensions)

    def score(self, ids: Sequence[int]) -> Iterator[float]:
        """Return an iterator over the negative log likelihoods, in nats, of all tokens except the first."""
        embedding.check_generates(self)
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
        """The runner, which computes forward passes. Only this module uses the runner directly."""
        if self._runner is None:
            raise InputError("the engine is closed")
        return self._runner

    @property
    def program(self) -> LinkedProgram:
        """The operations of a forward pass, linked to the packed weights."""
        return self.runner.program

    @property
    def instruments(self) -> Instruments:
        """Settings of later passes, for tests and benchmarks: injected faults, NaN in unwritten memory, profile, traces."""
        return self.runner.instruments

    def new_cache(self, keep: int = 0) -> Cache:
        """Return an empty KV cache for `run_together`. keep: the most tokens that a rewind must be able to remove."""
        return self.runner.cache(keep)

    def new_prefix_cache(self, budget: int) -> "PrefixCache":
        return self.runner.prefix_cache(budget)

    def cache_bytes(self, tokens: int, keep: int = 0) -> int:
        """Return the size in bytes of a cache from `new_cache(keep)` that holds `tokens` tokens.

        The tokens are assumed to be prefilled in chunks of the default size.
        """
        return bytes_needed(self.config, self.kv_type, tokens, self.runner.chunk, keep)

    def run_together(self, inputs: Sequence[SequenceInput]) -> list[np.ndarray]:
        """Run one pass for several sequences. Return the logits of each sequence. If the pass fails, no cache changes."""
        return self.runner.run_together(inputs)

    def accept(self, cache: Cache, tokens: Sequence[int]) -> None:
        """Append the first guesses of the last pass to the cache. `tokens` must be equal to these guesses."""
        self.runner.accept(cache, tokens)

    def run_kernel(self, kernel: Callable[..., Any], *args: Any, counters: int = 0) -> None:
        self.runner.team.run(kernel, *args, counters=counters)

    def close(self) -> None:
        """End the worker threads and release the weights. An engine may be closed twice."""
        if self._runner is not None:
            self._runner.close()
        self._runner = self.draft = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


_MOST_THREADS = 1024
_LONGEST_DEADLINE = 86_400.0


def load(
    model: str | Path, threads: int | None = None, context: int | None = None, deadline: float = 5.0, kv: str = "float32",
    quant: str | None = None, progress: ReportProgress = no_report, *, pack: bool = True, speculate: str = "auto",
    draft: str | Path | None = None, shards: int = 1, hosts: "Hosts | None" = None,
) -> Engine:  # fmt: skip
    """Load a model: a GGUF file, a Hugging Face directory, a name from the catalogue, or `hf:owner/name` (extra `hf`).

    threads: the number of worker threads; by default, one per physical core that CPU affinity and cgroup quota allow.
    context: the most tokens of a sequence; by default, the model's max_position_embeddings.
    deadline: seconds after which a worker thread that makes no progress is reported as stalled. On Linux, time in which the
        thread waits for a core does not count.
    kv: the number type of the KV cache, "float32", "bfloat16" (half the memory) or "q8_0" (about a quarter).
    quant: "q8_0" or "q4_0" quantises float matrices while loading, to the same values as in a GGUF file of that type.
    progress: called as `progress(what, done, total, unit)` while the first start downloads, compiles and packs, which
    may take minutes; see `gemma_py.progress`.
    pack: whether packed weights are stored in a file. If False, every start packs the weights again, into memory.
    speculate: "auto" or "off". With "auto", a pass also computes tokens that were guessed from earlier text, where that is
    expected to save time. A request can choose another value.
    draft: a smaller model with the vocabulary of this model, or an assistant of this model, which then guesses tokens too.
    With speculate "off", a draft raises InputError.
    shards: how many groups of consecutive layers to make. Each group but the last is computed by a process of its own.
    hosts: where these processes run: on this machine, or on the hosts that `cluster.ray_hosts.connect` returns.

    The options kv and quant change the logits, in the same way on every machine; the other options do not.
    """
    check_mode(speculate)
    if speculate == "off" and draft is not None:
        raise InputError(
            "speculate off (--speculate off) forbids guesses, so a draft model (--draft) has no use; leave one of the two out"
        )
    checkpoint = replace(open_checkpoint(resolve(model, progress)), cacheable=pack)
    if hosts is None:
        check_memory(checkpoint, quant)
    engine = Engine(checkpoint, threads, context, deadline, kv, quant, progress)
    engine.speculate = speculate
    try:
        if shards != 1:
            engine.divide(shards, hosts, as_other_processes_name(model))
        if draft is not None:
            engine.use_draft(replace(open_checkpoint(resolve(draft, progress)), cacheable=pack), progress)
    except BaseException:
        engine.close()
        raise
    return engine
