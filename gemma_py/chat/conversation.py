"""A conversation: its messages, and the session with their KV rows."""

import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from gemma_py.chat import saved
from gemma_py.errors import InputError, MismatchError
from gemma_py.generate.core import Generation, Request, Token, stop_strings
from gemma_py.generate.engine import Engine
from gemma_py.generate.options import Sampling
from gemma_py.paths import atomic_write
from gemma_py.runtime.runner import CHUNK
from gemma_py.templates.template import Message, Piece, checked_messages, encode

ReportPrefill = Callable[[int, int], None]  # (tokens computed so far, tokens in all)
TokenStream = Generator[Token, None, None]  # an answer, token by token; `close` ends it early

_REWIND_BYTES = 256 << 20  # of KV rows that are kept only for rewinding
_COMPARED = 1024  # tokens that are compared at a time
_FIRST_CHUNK, _SECONDS_A_CHUNK = (
    32,
    0.5,
)  # tokens of the first chunk of a long prompt, and seconds of later ones: progress is reported between chunks


@dataclass
class AnswerStats:
    """The statistics of one answer. cached_tokens: tokens of the prompt that were in the KV cache already. first_token_seconds: from
    the call of `send`, template and tokenizer included. seed: of random sampling, else None."""

    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seed: int | None = None
    finish_reason: str | None = None  # None: stopped by the user

    @property
    def prefill_rate(self) -> float:
        """Tokens a second."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens a second, without the first token, which the prefill computes."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


class Conversation:
    """Send a text, iterate over the answer; a turn costs its own tokens only.

    sampling: by default the checkpoint's recommendation. template: "gemma", "transcript" or a file; by default the
    checkpoint's own. max_tokens: of an answer; None: as many as fit into the context. stop: strings before which an answer
    ends. Closing the iterator of an answer keeps the text so far. If there is none yet, the conversation does not change.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        sampling: Sampling | None = None,
        template: str | Path | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> None:
        self.engine = engine
        self.messages: list[Message] = []
        self.sampling = engine.sampling if sampling is None else sampling
        self.max_tokens = max_tokens
        self.stop = stop_strings(stop)
        self.prefilling: ReportPrefill | None = (
            None  # called while a prompt is computed; if it raises, the prompt is interrupted
        )
        self.stats: AnswerStats | None = None  # of the last answer
        self._wanted = template
        self.template = engine.template(template)
        self._ends = engine.ends(self.template)
        self._session = engine.session(self._keep())
        self._answer_ids: dict[str, list[int]] = {}  # answers as the model wrote them
        self._encoded: dict[Piece, list[int]] = {}
        self._attempt = 0
        self._chunk = _FIRST_CHUNK  # tokens of a pass, as fast as the last ones were
        if system is not None:
            self.set_system(system)

    def _keep(self) -> int:
        """How many tokens the session must be able to rewind, so that undo and retry compute nothing again."""
        layers = [layer for layer in self.engine.config.layers if layer.sliding_window is not None]
        bytes_a_token = sum(8 * layer.num_key_value_heads * layer.head_dim for layer in layers)
        return min(self.engine.context, _REWIND_BYTES // bytes_a_token) if layers else 0

    # --- talking ------------------------------------------------------------------------------------------------------

    def send(self, text: str) -> TokenStream:
        """The answer, token by token. Errors (no room, a template that fails) are raised before anything changes."""
        return self._begin(self.messages, text, 0)

    def retry(self) -> TokenStream:
        """Another answer to the last text: with a seed one higher each time, if the sampling has one."""
        return self._begin(self.messages[:-2], self.last_text(), self._attempt + 1)

    def edit(self, text: str) -> TokenStream:
        """The answer to another text instead of the last."""
        self.last_text()
        return self._begin(self.messages[:-2], text, 0)

    def last_text(self) -> str:
        """The last message of the user that has an answer."""
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
        )  # fmt: skip
        generation = self.engine.generation(request)
        stats = AnswerStats(len(generation.prompt), first_token_seconds=time.perf_counter() - start)
        return self._answer(messages, generation, attempt, stats)

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        pieces = self.template.pieces(checked_messages(messages))
        ids = encode(pieces, self.engine.text_tokenizer(), self._answer_ids, self._encoded)
        self._encoded = {piece: self._encoded[piece] for piece in pieces}
        return ids

    def _answer(self, messages: list[Message], generation: Generation, attempt: int, stats: AnswerStats) -> TokenStream:
        start = time.perf_counter()
        logits = self._advance_to(generation.prompt, stats)
        stats.prefill_seconds = time.perf_counter() - start
        stats.seed = generation.sampling.seed if generation.sampling.temperature else None
        tokens = generation.tokens(logits, self._session.decode)
        made: list[int] = []
        text = ""
        try:
            while True:
                before = time.perf_counter()
                token = next(tokens, None)
                now = time.perf_counter()
                if token is None:
                    return
                if made:
                    stats.decode_seconds += now - before
                else:
                    stats.first_token_seconds += now - start
                made.append(token.id)
                text += token.text
                stats.generated_tokens += 1
                stats.finish_reason = token.finish_reason
                if token.finish_reason is not None:
                    self._keep_answer(messages, made, text, attempt, stats)
                    made = []
                yield token
        finally:
            if made and text.strip():  # closed or interrupted in the middle
                self._keep_answer(messages, made, text, attempt, stats)

    def _keep_answer(
        self, messages: list[Message], made: list[int], text: str, attempt: int, stats: AnswerStats
    ) -> None:
        self.messages = [*messages, {"role": "assistant", "content": text.rstrip()}]
        self._attempt, self.stats = attempt, stats
        # The ids as the model wrote them, up to where the answer ends: the next turn finds them in the cache.
        tokenizer = self.engine.text_tokenizer()
        ids = [token for token in made if token < tokenizer.size]
        while ids and len(tokenizer.decode(ids).lstrip()) > len(text.rstrip()):
            ids.pop()
        # Control tokens in an answer are plain text in the next prompt, as in any message.
        if ids and tokenizer.decode(ids).strip() == text.strip() and tokenizer.control_ids.isdisjoint(ids):
            self._answer_ids.setdefault(text.strip(), ids)
        if self._session.usable:
            self._session.reserve(CHUNK)  # now, so that the next turn does not wait for it

    def _advance_to(self, ids: list[int], stats: AnswerStats) -> np.ndarray:
        """Make the session's tokens these ids, and compute only the new ones. Returns the logits of the last."""
        common = self._common(ids)
        common = min(common, len(ids) - 1)  # the last one's logits are needed
        if self._session.usable and self._session.can_rewind_to(common):
            self._session.rewind(common)
        else:
            common = 0
            self._session = self.engine.session(self._keep())
        stats.cached_tokens = common
        return self._prefill(ids[common:])

    def _common(self, ids: list[int]) -> int:
        """How many of these ids the session begins with."""
        present = self._session.ids
        at, end = 0, min(len(present), len(ids))
        while at < end and present[at : at + _COMPARED] == ids[at : at + _COMPARED]:
            at += _COMPARED
        return next((n for n in range(at, end) if present[n] != ids[n]), end)

    def _prefill(self, ids: list[int]) -> np.ndarray:
        """Prefill in chunks of about half a second; the size of a chunk changes no bit."""
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

    # --- going back ---------------------------------------------------------------------------------------------------

    def undo(self) -> str:
        """Remove the last message of the user and its answer. Returns the text of the message."""
        text = self.last_text()
        del self.messages[-2:]
        self._forget()
        return text

    def clear(self) -> None:
        """Remove all messages except the system message."""
        self.messages = self.messages[:1] if self.system is not None else []
        self._forget()

    def _forget(self) -> None:
        """Remove from the session what is no longer part of the conversation, so that it is not saved."""
        spoken = any(message["role"] != "system" for message in self.messages)
        common = self._common(self._prompt(self.messages)) if spoken else 0
        if self._session.usable and self._session.can_rewind_to(common):
            self._session.rewind(common)
        else:
            self._session = self.engine.session(self._keep())
        answers = {message["content"].strip() for message in self.messages if message["role"] == "assistant"}
        self._answer_ids = {text: ids for text, ids in self._answer_ids.items() if text in answers}

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else None
        return first["content"] if first is not None and first["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Another system message, or none; the whole conversation is computed again at the next turn."""
        rest = self.messages[1:] if self.system is not None else self.messages
        first = [] if text is None else checked_messages([{"role": "system", "content": text}])
        self.messages = [*first, *rest]
        self._forget()

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def tokens_used(self) -> int:
        """The tokens of the conversation, including the template's text before the next message; at most the context."""
        spoken = any(message["role"] != "system" for message in self.messages)
        return min(self.context, len(self._prompt(self.messages))) if spoken else 0

    @property
    def context(self) -> int:
        """The most tokens that the conversation can have."""
        return self.engine.context

    @property
    def ids(self) -> list[int]:
        """The tokens whose KV rows are in the session."""
        return self._session.ids

    def kv_digest(self) -> list[str]:
        return self._session.kv_digest()

    def verify(self, threads: int | None = None, chunk: int = 7, progress: ReportPrefill | None = None) -> int:
        """Compute the conversation's tokens again, with another number of threads and another chunk, and compare the
        keys and values. Returns the number of tokens compared; MismatchError if a bit differs.

        threads: by default one more than now.
        """
        ids, before = self.ids, self.engine.threads
        if not ids:
            raise InputError("there is nothing to verify yet")
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
            raise MismatchError(
                f"the keys and values of layer {wrong} differ when the {len(ids)} tokens are computed again"
            )
        return len(ids)

    # --- keeping ------------------------------------------------------------------------------------------------------

    def export(self, path: str | Path, form: str = "markdown") -> None:
        """Write the text to a file, for people ("markdown") or for programs ("json": messages in OpenAI's format)."""
        if form == "json":
            text = json.dumps({"model": self.engine.name, "messages": self.messages}, ensure_ascii=False, indent=1)
        elif form == "markdown":
            text = "\n\n".join(f"**{m['role'].capitalize()}**\n\n{m['content']}" for m in self.messages)
        else:
            raise InputError(f"a conversation is exported as markdown or json, found {form!r:.40}")
        try:
            with atomic_write(Path(path)) as file:
                file.write(text.encode() + b"\n")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write text, settings and KV rows to a file, so that a loaded conversation resumes without computing them again."""
        self._forget()  # removes answers that a retry or an edit has replaced
        description = {
            "messages": self.messages,
            "sampling": asdict(self.sampling) | {"logit_bias": list(self.sampling.logit_bias.items())},
            "template": None if self._wanted is None else str(self._wanted),
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            "attempt": self._attempt,
            "known": self._answer_ids,
        }
        # A loaded conversation can rewind to the beginning of the last message, and has the rows that the next turn needs.
        since = 0
        if len(self.messages) >= 2:
            since = self._common(self._prompt([*self.messages[:-2], {"role": "user", "content": ""}]))
        if not self._session.can_rewind_to(since):
            since = self._session.position
        saved.write(Path(path), description, self._session, since)

    @classmethod
    def load(cls, engine: Engine, path: str | Path) -> "Conversation":
        """Load a conversation that `save` wrote. FormatError if the file is damaged, InputError if it is of another model."""
        file = saved.SavedConversation(Path(path), engine)
        said = file.description
        sampling = Sampling(**said["sampling"] | {"logit_bias": dict(said["sampling"]["logit_bias"])})
        conversation = cls(engine, None, sampling, said["template"], said["max_tokens"], said["stop"])
        conversation.messages = checked_messages(said["messages"]) if said["messages"] else []
        conversation._attempt, conversation._answer_ids = said["attempt"], said["known"]
        file.restore(conversation._session)
        return conversation
