"""A conversation: its messages, and a session that keeps the KV cache between turns."""

import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from gemma_py.chat import saved
from gemma_py.errors import InputError, MismatchError
from gemma_py.generate.answer import stop_strings
from gemma_py.generate.core import Generation, Request, Token, whole
from gemma_py.generate.engine import Engine
from gemma_py.generate.options import Sampling
from gemma_py.generate.sampling import ROWS_AT_ONCE
from gemma_py.generate.session import Decoder
from gemma_py.paths import atomic_write
from gemma_py.receipts.receipt import Receipt
from gemma_py.runtime.runner import CHUNK
from gemma_py.templates.template import Encoded, Message, checked_messages

ReportPrefill = Callable[[int, int], None]  # called with (tokens done, tokens in total)
TokenStream = Generator[Token, None, None]

_REWIND_BYTES = 256 << 20  # memory limit for the KV rows that are kept for undo and retry
_COMPARED = 1024
_FIRST_CHUNK = 32
# The target duration of a prefill chunk. Progress is reported after each chunk.
_SECONDS_A_CHUNK = 0.5


@dataclass
class AnswerStats:
    """Token counts and times of one answer.

    prompt_tokens: tokens of the prompt, including cached tokens
    cached_tokens: tokens of the prompt that were already in the KV cache
    passes: decode passes; the first token needs no decode pass, because the prefill computes it
    guessed_tokens: draft tokens of speculative decoding that were verified
    accepted_tokens: draft tokens of speculative decoding that were accepted
    first_token_seconds: time from the call of `send` to the first token, including template and tokenizer
    seed: the seed of random sampling; None for greedy decoding
    """

    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seed: int | None = None
    finish_reason: str | None = None  # None if the user interrupted the answer

    @property
    def prefill_rate(self) -> float:
        """Prefilled tokens per second. Cached tokens do not count."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def tokens_a_pass(self) -> float:
        """Tokens per decode pass. The first token does not count, because the prefill computes it."""
        return (self.generated_tokens - 1) / self.passes if self.passes else 0.0

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second. The first token does not count, because the prefill computes it."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


class Conversation:
    """A conversation with a model. `send` a text and iterate over the tokens of the answer.

    Each turn computes only new tokens, because the KV cache is kept between turns.

    sampling: the sampling options; by default, the options that the checkpoint recommends
    template: "gemma", "gemma4", "transcript" or the path of a chat template; by default, the checkpoint's own template
    max_tokens: the most tokens of an answer; None means as many as fit into the context
    stop: strings that end an answer
    thinking: whether the model thinks before an answer; None lets the template decide. The tokens of a thought have
    `Token.reasoning`, and the answer's message stores the thought as reasoning_content. The template omits thoughts from
    later prompts.

    If the iterator of an answer is closed early, the text generated so far becomes the answer. If there is no text yet,
    the conversation does not change.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        sampling: Sampling | None = None,
        template: str | Path | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        thinking: bool | None = None,
    ) -> None:
        self.engine = engine
        self.messages: list[Message] = []
        self.sampling = engine.sampling if sampling is None else sampling
        self.max_tokens = max_tokens
        self.stop = stop_strings(stop)
        # Whether to compute each token's log probability, which needs the exponentials of all logits.
        self.logprobs = True
        # A callback after each prefill chunk. If the callback raises an exception, the prefill stops.
        self.prefilling: ReportPrefill | None = None
        self.stats: AnswerStats | None = None
        self._wanted = template
        self.template = engine.template(template)
        self._format = engine.chat_format(self.template)
        self._format.check_thinking(thinking)
        self._thinking = thinking
        self._ends = engine.ends(self.template)
        self._session = engine.session(self._rewind_limit())
        self._answer_ids: dict[str, list[int]] = {}  # an answer's text -> the generated token ids
        self._encoded = Encoded()
        self._attempt = 0
        # The request and the token ids of the last answer, for `receipt`. None if no answer exists or the last is incomplete.
        self._last: tuple[Request, tuple[int, ...]] | None = None
        self._chunk = _FIRST_CHUNK  # tokens of the next prefill chunk
        if system is not None:
            self.set_system(system)

    @property
    def thinking(self) -> bool | None:
        return self._thinking

    def set_thinking(self, thinking: bool | None) -> None:
        """Turn thinking on or off for later turns. Raise InputError if the model cannot think."""
        self._format.check_thinking(thinking)
        self._thinking = thinking

    def _rewind_limit(self) -> int:
        """Return how many tokens `undo` and `retry` can remove. Sliding layers keep up to _REWIND_BYTES of KV rows for them."""
        layers = [layer for layer in self.engine.config.layers if layer.sliding_window is not None]
        bytes_a_token = sum(8 * layer.num_key_value_heads * layer.head_dim for layer in layers)
        return min(self.engine.context, _REWIND_BYTES // bytes_a_token) if layers else 0

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, text: str) -> TokenStream:
        """Return an iterator over the answer's tokens. Errors such as a full context are raised here, not by the iterator."""
        return self._begin(self.messages, text, 0)

    def retry(self) -> TokenStream:
        """Generate another answer to the last user message. If `sampling.seed` is set, retry number n uses seed + n."""
        return self._begin(self.messages[:-2], self.last_text(), self._attempt + 1)

    def edit(self, text: str) -> TokenStream:
        self.last_text()
        return self._begin(self.messages[:-2], text, 0)

    def last_text(self) -> str:
        """Return the last user message that has an answer."""
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise InputError("there is no answer yet")
        return self.messages[-2]["content"]

    def _begin(self, before: Sequence[Message], text: str, attempt: int) -> TokenStream:
        start = time.perf_counter()
        messages = [*before, {"role": "user", "content": text}]
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + attempt)
        request = Request(
            self._prompt(messages), self.context if self.max_tokens is None else self.max_tokens, sampling, fit=True,
            stop=(*self.template.stop, *self.stop), ends=self._ends, trim=True,
            logprobs=self.logprobs, marks=self._format.marks(tools=False),
        )  # fmt: skip
        generation = self.engine.generation(request)
        stats = AnswerStats(len(generation.prompt), first_token_seconds=time.perf_counter() - start)
        return self._answer(messages, generation, attempt, stats)

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        return self._format.prompt(messages, (), self._thinking, self._answer_ids, self._encoded)

    def _answer(self, messages: list[Message], generation: Generation, attempt: int, stats: AnswerStats) -> TokenStream:
        start = time.perf_counter()
        logits = self._advance_to(generation.prompt, stats)
        stats.prefill_seconds = time.perf_counter() - start
        stats.seed = generation.sampling.seed if generation.sampling.temperature else None
        session = self._session
        tokens = generation.tokens(logits, Decoder(session, generation).decode, session.kv_digest)
        made: list[int] = []
        text = thought = ""
        try:
            while True:
                before = time.perf_counter()
                token = next(tokens, None)
                now = time.perf_counter()
                if token is None:
                    return
                if stats.generated_tokens:
                    stats.decode_seconds += now - before
                else:
                    stats.first_token_seconds += now - start
                if token.reasoning is None:
                    made.append(token.id)
                text += token.text
                thought += token.reasoning or ""
                stats.generated_tokens += 1
                stats.finish_reason = token.finish_reason
                speculation = generation.speculation
                stats.passes, stats.guessed_tokens = speculation.passes, speculation.guessed
                stats.accepted_tokens = speculation.accepted
                if token.finish_reason is not None:
                    self._keep_answer(messages, made, _message(text, thought), attempt, stats)
                    self._last = replace(generation.request, sampling=generation.sampling), tuple(generation.generated)
                    made = []
                yield token
        finally:
            if made and text.strip():
                self._keep_answer(messages, made, _message(text, thought), attempt, stats)

    def _keep_answer(
        self, messages: list[Message], made: list[int], answer: Message, attempt: int, stats: AnswerStats
    ) -> None:
        self.messages = [*messages, answer]
        self._attempt, self.stats, self._last = attempt, stats, None
        text: str = answer["content"]
        # Keep the generated ids, because tokenising the answer's text may give ids other than those in the KV cache.
        tokenizer = self.engine.text_tokenizer()
        ids = [token for token in made if token < tokenizer.size]
        while ids and len(tokenizer.decode(ids).lstrip()) > len(text):
            ids.pop()
        # Later prompts use the stored tokens of the answer. Tokens with a control token are not stored, so that later prompts
        # tokenise the answer as plain text, and it cannot forge a turn.
        if ids and tokenizer.decode(ids).strip() == text.strip() and tokenizer.control_ids.isdisjoint(ids):
            self._answer_ids.setdefault(text.strip(), ids)
        if self._session.usable:
            self._session.reserve(CHUNK)  # allocate memory for the next turn while the user reads the answer

    def _advance_to(self, ids: list[int], stats: AnswerStats) -> np.ndarray:
        """Rewind the session to the longest common prefix with `ids`, and prefill the rest of `ids`. Return the last logits."""
        common = self._common(ids)
        common = min(common, len(ids) - 1)  # always compute the last token, because its logits are needed
        if self._session.usable and self._session.can_rewind_to(common):
            self._session.rewind(common)
        else:
            common = 0
            self._session = self.engine.session(self._rewind_limit())
        stats.cached_tokens = common
        return self._prefill(ids[common:])

    def _common(self, ids: list[int]) -> int:
        present = self._session.ids
        at, end = 0, min(len(present), len(ids))
        while at < end and present[at : at + _COMPARED] == ids[at : at + _COMPARED]:
            at += _COMPARED
        return next((n for n in range(at, end) if present[n] != ids[n]), end)

    def _prefill(self, ids: list[int]) -> np.ndarray:
        """Prefill in chunks of about _SECONDS_A_CHUNK. The logits do not depend on the chunk size."""
        done = 0
        while True:
            start = time.perf_counter()
            part = ids[done : done + self._chunk]
            logits = self._session.prefill(part)
            done += len(part)
            rate = len(part) / max(1e-6, time.perf_counter() - start)
            self._chunk = max(_FIRST_CHUNK, min(CHUNK, 2 * self._chunk, int(rate * _SECONDS_A_CHUNK)))
            if self.prefilling is not None:
                self.prefilling(done, len(ids))
            if done == len(ids):
                return logits

    # --- editing ------------------------------------------------------------------------------------------------------

    def undo(self) -> str:
        """Remove the last user message and its answer. Return the text of the user message."""
        text = self.last_text()
        del self.messages[-2:]
        self._last = None
        self._forget()
        return text

    def clear(self) -> None:
        """Remove all messages except the system message."""
        self.messages = self.messages[:1] if self.system is not None else []
        self._last = None
        self._forget()

    def _forget(self) -> None:
        """Remove deleted messages from the KV cache. Otherwise `save` would write their KV rows to the file."""
        spoken = any(message["role"] != "system" for message in self.messages)
        common = self._common(self._prompt(self.messages)) if spoken else 0
        if self._session.usable and self._session.can_rewind_to(common):
            self._session.rewind(common)
        else:
            self._session = self.engine.session(self._rewind_limit())
        answers = {message["content"].strip() for message in self.messages if message["role"] == "assistant"}
        self._answer_ids = {text: ids for text, ids in self._answer_ids.items() if text in answers}

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else None
        return first["content"] if first is not None and first["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Set the system message, or remove it if `text` is None. The next turn prefills the whole conversation again."""
        rest = self.messages[1:] if self.system is not None else self.messages
        first = [] if text is None else checked_messages([{"role": "system", "content": text}])
        self.messages = [*first, *rest]
        self._forget()

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def tokens_used(self) -> int:
        """The number of tokens of the conversation, capped at the context length."""
        spoken = any(message["role"] != "system" for message in self.messages)
        return min(self.context, len(self._prompt(self.messages))) if spoken else 0

    @property
    def context(self) -> int:
        return self.engine.context

    @property
    def ids(self) -> list[int]:
        """The token ids in the session's KV cache."""
        return self._session.ids

    def kv_digest(self) -> list[str]:
        return self._session.kv_digest()

    def verify(self, threads: int | None = None, chunk: int = 7, progress: ReportPrefill | None = None) -> int:
        """Compute all tokens again, with another number of threads and another chunk size, and compare the KV caches.

        Return the number of tokens. Raise MismatchError if a bit differs.

        threads: by default, one more than the engine has
        """
        ids, before, chunk = self.ids, self.engine.threads, whole("chunk", chunk, 1)
        if not ids:
            raise InputError("the conversation has no tokens to verify yet")
        other = self.engine.session()
        self.engine.set_threads(threads or before + 1)
        try:
            for first in range(0, len(ids), chunk):
                other.prefill(ids[first : first + chunk])
                if progress is not None:
                    progress(min(len(ids), first + chunk), len(ids))
        finally:
            self.engine.set_threads(before)
        pairs = zip(self.kv_digest(), other.kv_digest(), strict=True)
        wrong = next((layer for layer, (a, b) in enumerate(pairs) if a != b), None)
        if wrong is not None:
            raise MismatchError(f"computing the {len(ids)} tokens again gave different keys or values in layer {wrong}")
        return len(ids)

    def receipt(self, progress: ReportPrefill | None = None) -> Receipt:
        """Return a receipt, with which anyone who has the model can check the last answer.

        The receipt needs all logits of the answer. They are computed again here, in chunks, so that answers without a
        receipt need not store them.
        """
        if self._last is None:
            raise InputError(
                "there is no complete answer to make a receipt of; stopped and loaded answers have no receipt"
            )
        request, ids = self._last
        generation, session = self.engine.generation(replace(request, receipt=True)), self.engine.session()
        prompt, rest = generation.prompt[:-1], [generation.prompt[-1], *ids[:-1]]
        for first in range(0, len(prompt), CHUNK):
            session.prefill(prompt[first : first + CHUNK])
            if progress is not None:
                progress(min(len(prompt), first + CHUNK), len(prompt) + len(ids))
        for first in range(0, len(rest), ROWS_AT_ONCE):
            part = rest[first : first + ROWS_AT_ONCE]
            for row, token in zip(session.prefill(part, all_logits=True), ids[first:], strict=False):
                if generation.next(row).id != token:
                    raise MismatchError(f"computing the answer again did not give token {token}")
            if progress is not None:
                progress(len(prompt) + first + len(part), len(prompt) + len(ids))
        return generation.receipt(session.kv_digest())

    # --- saving -------------------------------------------------------------------------------------------------------

    def export(self, path: str | Path, form: str = "markdown") -> None:
        """Write the messages to a file, as "markdown" or as "json" in OpenAI's format."""
        if form == "json":
            text = json.dumps({"model": self.engine.name, "messages": self.messages}, ensure_ascii=False, indent=1)
        elif form == "markdown":
            text = "\n\n".join(f"**{m['role'].capitalize()}**\n\n{m['content']}" for m in self.messages)
        else:
            raise InputError(f"form should be markdown or json, found {form!r:.40}")
        try:
            with atomic_write(Path(path)) as file:
                file.write(text.encode() + b"\n")
        except (OSError, ValueError) as error:  # ValueError: the path contains an invalid character
            raise InputError(f"{path}: cannot be written: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write messages, settings and KV cache to a file, so that the conversation can continue without a new prefill."""
        self._forget()
        description = {
            "messages": self.messages,
            "sampling": asdict(self.sampling) | {"logit_bias": list(self.sampling.logit_bias.items())},
            "template": None if self._wanted is None else str(self._wanted),
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            "thinking": self._thinking,
            "attempt": self._attempt,
            "known": self._answer_ids,
        }
        # A sliding layer keeps only recent KV rows. Save also the older rows that undoing the last turn needs.
        since = 0
        if len(self.messages) >= 2:
            since = self._common(self._prompt([*self.messages[:-2], {"role": "user", "content": ""}]))
        if not self._session.can_rewind_to(since):
            since = self._session.position
        saved.write(Path(path), description, self._session, since)

    @classmethod
    def load(cls, engine: Engine, path: str | Path) -> "Conversation":
        """Load a saved conversation. Raise FormatError if the file is damaged, and InputError if another model wrote
        the file.
        """
        file = saved.SavedConversation(Path(path), engine)
        said = file.description
        sampling = Sampling(**said["sampling"] | {"logit_bias": dict(said["sampling"]["logit_bias"])})
        conversation = cls(engine, None, sampling, said["template"], said["max_tokens"], said["stop"])
        conversation.set_thinking(said.get("thinking"))
        conversation.messages = checked_messages(said["messages"]) if said["messages"] else []
        conversation._attempt, conversation._answer_ids = said["attempt"], said["known"]
        file.restore(conversation._session)
        return conversation


def _message(text: str, thought: str) -> Message:
    return {"role": "assistant", "content": text.rstrip()} | ({"reasoning_content": thought} if thought else {})
