"""`audit` checks a receipt by computing the answer's logits again.

    T tokens of the answer   V vocabulary   L layers that store KV rows

The tokens of prompt and answer are known, so many of them share a pass, and an audit is faster than generating. A receipt
is checked in the order of STAGES, and the first difference is reported. The logits and
the choice of a token are checked before those of the next token.

If a result of a forward pass differs, it is computed twice more, the second time with one token in a pass and another number
of threads. If the three results differ from each other, this machine is at fault, and the audit says nothing about the receipt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gemma_py import machine
from gemma_py.checks.verify import compute, where_traces_part
from gemma_py.errors import ComputationError, FormatError, GemmaError, InputError
from gemma_py.generate.answer import AnswerStream, Constraint
from gemma_py.generate.core import Generation, Request, Token
from gemma_py.generate.engine import Engine
from gemma_py.generate.evidence import kv_digests
from gemma_py.generate.options import Sampling
from gemma_py.receipts.receipt import FLOATS, RULES, Receipt, output_digests
from gemma_py.receipts.row_digests import row_digest
from gemma_py.receipts.shown import ShownField
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS
from gemma_py.runtime.runner import CHUNK, SequenceInput
from gemma_py.templates.notation import Marks

STAGES = ("signature", "structure", "model", "text", "sampling", "logits", "choice", "finish", "kv")
EQUAL, DIVERGED, OTHER_MODEL = "equal", "diverged", "other model"
UNREADABLE, UNKNOWN = "unreadable", "unknown"
MakeConstraint = Callable[[Mapping[str, Any]], Constraint]

_MOST_LOGITS = 60 << 20  # the most bytes of logits that a pass computes
_MOST_TOGETHER = 8  # the most receipts that share passes
_UNKNOWN_MEMORY, _MOST_PREFIX_BYTES = 4 << 30, 1 << 30


class UndecidableError(GemmaError):
    """The receipt depends on something that this program does not have, such as another version of a package."""


@dataclass(frozen=True)
class Verdict:
    """What an audit found.

    kind: EQUAL, DIVERGED, OTHER_MODEL, UNREADABLE (the file of the receipt, or the model, cannot be read) or UNKNOWN.
    stage: where the receipt first differs, or which stage cannot be checked; None if the receipt is equal or unreadable.
    token: the index in the answer of the first token that differs. position: its position in the sequence.
    checked: the number of tokens of the answer that were found equal.
    """

    kind: str
    message: str
    stage: str | None = None
    token: int | None = None
    position: int | None = None
    checked: int = 0


class CheckedTokens(NamedTuple):
    """An event: more tokens of a receipt were found equal. texts: the texts of these tokens."""

    receipt: int
    texts: tuple[str, ...]


class Audited(NamedTuple):
    """The last event of a receipt. receipt: the index of the receipt in the call of `audit`."""

    receipt: int
    verdict: Verdict


@dataclass(frozen=True)
class _Computed:
    """A result of forward passes. again: computes the result again, with so many tokens in a pass. ids: the tokens that the
    passes computed.
    """

    result: object
    again: Callable[[int], object]
    ids: Sequence[int]


class _DiffersError(Exception):
    """The receipt differs, or a stage cannot be checked.

    kind: see `Verdict`. token: the index of the token in the answer. computed: what was computed and differs from the
    receipt; None if no forward pass computed it.
    """

    def __init__(
        self,
        stage: str,
        message: str,
        token: int | None = None,
        computed: _Computed | None = None,
        kind: str = DIVERGED,
    ) -> None:
        self.stage, self.message, self.token, self.computed, self.kind = stage, message, token, computed, kind
        super().__init__(message)


@contextmanager
def _stage(stage: str, kind: str = DIVERGED) -> Iterator[None]:
    """Raise the errors of a stage as _DiffersError. kind: the kind of verdict on invalid input."""
    try:
        yield
    except (ComputationError, UndecidableError) as error:
        raise _DiffersError(stage, str(error), kind=UNKNOWN) from error
    except (InputError, FormatError) as error:
        raise _DiffersError(stage, str(error), kind=kind) from error
    except OSError as error:  # a file of the model cannot be read
        raise _DiffersError(stage, str(error), kind=UNREADABLE) from error


class _Sequence:
    """A receipt whose tokens are being computed.

    done: the number of tokens of the answer that were found equal.
    """

    def __init__(self, number: int, receipt: Receipt, generation: Generation, cache: Cache) -> None:
        self.number, self.receipt, self.generation, self.cache = number, receipt, generation, cache
        self.ids = [*receipt.prompt, *receipt.answer[:-1]]
        self.done = 0

    @property
    def unread(self) -> int:
        """The number of pending tokens whose logits are not needed."""
        return max(0, len(self.receipt.prompt) - 1 - self.cache.position)

    def part(self, tokens: int, rows: int) -> SequenceInput | None:
        """Return the next tokens to compute, or None if the pass has no room for them.

        tokens: the most tokens. rows: the most tokens whose logits are computed
        """
        count = min(self.unread or rows, tokens, len(self.ids) - self.cache.position)
        if count < 1:
            return None
        part = self.ids[self.cache.position : self.cache.position + count]
        return SequenceInput(self.cache, part, 0 if self.unread else count)


class Auditor:
    """Checks receipts with an engine, whose quant and kv must be those of the receipts.

    make_constraint: makes a constraint from its description in a receipt. alone: whether no other request uses the engine.
    Otherwise, a difference is computed again with the same number of threads and without a trace, because another number of
    threads or a trace would apply to the other requests too.
    """

    def __init__(self, engine: Engine, make_constraint: MakeConstraint, alone: bool = True) -> None:
        self.engine, self._make_constraint, self._alone = engine, make_constraint, alone
        self._rows = max(1, _MOST_LOGITS // (4 * engine.program.outputs))
        free = machine.memory() or _UNKNOWN_MEMORY
        self._kv_bytes = free // 3
        self._prefixes = engine.new_prefix_cache(min(free // 6, _MOST_PREFIX_BYTES))

    def audit(
        self, receipts: Sequence[Receipt], shown: Sequence[Sequence[ShownField]] | None = None
    ) -> Iterator[CheckedTokens | Audited]:
        """Check receipts, and yield what was found. Each receipt has one Audited event.

        shown: for each receipt, the fields of a response that show the receipt's answer
        """
        # Sorting puts receipts whose prompts share a prefix next to each other, so the prefix is usually still in the cache.
        waiting = sorted(range(len(receipts)), key=lambda number: receipts[number].prompt, reverse=True)
        running: list[_Sequence] = []
        while waiting or running:
            while waiting and self._has_room(running, receipts[waiting[-1]]):
                number = waiting.pop()
                try:
                    fields = () if shown is None else shown[number]
                    running.append(self._begin(number, receipts[number], fields))
                except _DiffersError as found:
                    yield Audited(number, self._verdict(receipts[number], found, 0))
            if running:
                yield from self._pass(running)

    def _has_room(self, running: Sequence[_Sequence], receipt: Receipt) -> bool:
        sizes = [len(sequence.ids) for sequence in running] + [len(receipt.prompt) + len(receipt.answer)]
        used = sum(self.engine.cache_bytes(size, BLOCK_TOKENS) for size in sizes)
        if any(sequence.cache.position < _common_blocks(sequence.receipt, receipt) for sequence in running):
            return False  # a running audit computes the common prefix; copying the prefix later is faster
        return not running or (len(running) < _MOST_TOGETHER and used <= self._kv_bytes)

    # --- before the logits --------------------------------------------------------------------------------------------

    def _begin(self, number: int, receipt: Receipt, shown: Sequence[ShownField]) -> _Sequence:
        """Check everything that needs no logits of the answer."""
        with _stage("model", UNREADABLE):  # a file of the model that cannot be read has no digest
            self._check_model(receipt)
        with _stage("text"):
            self._check_text(receipt, shown)
        with _stage("sampling"):
            generation = self.engine.generation(self._request(receipt))
        cache = self.engine.new_cache(BLOCK_TOKENS)
        cache.prepare(len(receipt.prompt) + len(receipt.answer), CHUNK)
        self._prefixes.restore(cache, list(receipt.prompt))
        return _Sequence(number, receipt, generation, cache)

    def _check_model(self, receipt: Receipt) -> None:
        model, ours = receipt.model, self.engine.identity()
        if receipt.rules != RULES:
            message = f"the receipt was made by version {receipt.rules} of the rules, and this is version {RULES}"
            raise _DiffersError("model", message, kind=UNKNOWN)
        if model.files != ours.files:
            raise _DiffersError(
                "model", f"the receipt was made with other files than {self.engine.path}", kind=OTHER_MODEL
            )
        for name, theirs, here in (("quant", model.quant, ours.quant), ("kv", model.kv, ours.kv)):
            if theirs != here:
                message = f"the receipt was made with {name} = {theirs}, and the model is loaded with {here}"
                raise _DiffersError("model", message, kind=OTHER_MODEL)
        if model.fingerprint != ours.fingerprint:
            computed = _Computed(ours.fingerprint, self.engine.compute_fingerprint, self.engine.fingerprint_ids())
            message = f"the fingerprint of the model is {ours.fingerprint}, not {model.fingerprint}"
            raise _DiffersError("model", message, computed=computed)
        if len(receipt.kv) != len(self.engine.config.kv_owners):
            raise _DiffersError(
                "model", f"the model has {len(self.engine.config.kv_owners)} layers with KV rows, not {len(receipt.kv)}"
            )
        vocabulary = self.engine.config.vocab_size
        outside = [token for token in (*receipt.prompt, *receipt.answer) if token >= vocabulary]
        if outside:
            raise _DiffersError("model", f"token id {outside[0]} is outside the vocabulary of {vocabulary}")
        needed, most = len(receipt.prompt) + receipt.asked.max_tokens, self.engine.config.max_position_embeddings
        if needed > most:
            raise _DiffersError("model", f"prompt and max_tokens are {needed} tokens, and the model's limit is {most}")
        if needed > self.engine.context:
            message = f"prompt and max_tokens need a context of {needed} tokens, and here the context is {self.engine.context}"
            raise _DiffersError("model", message, kind=UNKNOWN)

    def _check_text(self, receipt: Receipt, shown: Sequence[ShownField]) -> None:
        asked = receipt.asked
        if self.engine.tokenizer is None and asked.stop:
            raise _DiffersError("text", "the receipt has stop strings, but the model has no tokenizer")
        stream = AnswerStream(self.engine.tokenizer, asked.stop, asked.trim, _marks(receipt), receipt.prompt)
        parts = [stream.push(token) for token in receipt.answer if token not in asked.ends]
        parts.append(stream.finish())
        text, reasoning = "".join(p.text for p in parts), "".join(p.reasoning or "" for p in parts)
        calls = [(call.name, call.arguments) for part in parts for call in part.calls]
        made = output_digests(text, reasoning, calls)
        if made != receipt.outputs:
            names = sorted(name for name in {*made, *receipt.outputs} if made.get(name) != receipt.outputs.get(name))
            raise _DiffersError("text", f"the token ids give another {names[0]} than that of the receipt")
        outputs: dict[str, Any] = {"answer": text, "reasoning": reasoning, "tool_calls": [list(call) for call in calls]}
        for field in shown:
            expected = outputs.get(field.output, "")
            if field.value != expected and not (field.echo and self._is_echo(field.value, text, receipt.prompt)):
                raise _DiffersError("text", f"the response shows another {field.path} than the token ids give")

    def _is_echo(self, value: Any, text: str, prompt: Sequence[int]) -> bool:
        """Return whether the value is the prompt's text followed by the answer's text, as a completion with `echo` gives."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not isinstance(value, str) or not value.endswith(text):
            return False
        echo = value[: len(value) - len(text)]
        if max(prompt) < tokenizer.size and tokenizer.decode(prompt) == echo:
            return True
        return tokenizer.encode(echo) == list(prompt)

    def _request(self, receipt: Receipt) -> Request:
        asked = receipt.asked
        given = asked.sampling
        options: dict[str, Any] = {name: float(given[name]) for name in FLOATS}
        bias = {int(token): float(value) for token, value in given["logit_bias"].items()}
        seed = None if given["seed"] is None else int(given["seed"])
        sampling = Sampling(**options, top_k=given["top_k"], logit_bias=bias, seed=seed)
        constraint = None if asked.constraint is None else self._make_constraint(asked.constraint)
        return Request(
            receipt.prompt, asked.max_tokens, sampling, fit=True, stop=asked.stop, ends=frozenset(asked.ends),
            trim=asked.trim, logprobs=False, constraint=constraint, marks=_marks(receipt), speculate="off",
        )  # fmt: skip

    # --- passes -------------------------------------------------------------------------------------------------------

    def _pass(self, running: list[_Sequence]) -> Iterator[CheckedTokens | Audited]:
        sequences, inputs, tokens, rows = [], [], CHUNK, self._rows
        for sequence in running:
            part = sequence.part(tokens, rows)
            if part is not None:
                sequences.append(sequence)
                inputs.append(part)
                tokens, rows = tokens - len(part.tokens), rows - part.logits
        begun = [sequence.cache.position for sequence in sequences]
        try:
            results = self.engine.run_together(inputs)
        except ComputationError as error:
            for sequence in sequences:
                running.remove(sequence)
                message = f"logits: a forward pass failed: {error}"
                yield Audited(sequence.number, Verdict(UNKNOWN, message, "logits", checked=sequence.done))
            return
        for sequence, logits, first in zip(sequences, results, begun, strict=True):
            self._prefixes.insert(sequence.cache, first)
            try:
                texts = self._check_rows(sequence, logits)
                if texts:
                    yield CheckedTokens(sequence.number, texts)
                if sequence.done < len(sequence.receipt.answer):
                    continue
                self._check_kv(sequence)
                verdict = Verdict(EQUAL, "equal", checked=sequence.done)
            except _DiffersError as found:
                verdict = self._verdict(sequence.receipt, found, sequence.done)
            running.remove(sequence)
            yield Audited(sequence.number, verdict)

    def _check_rows(self, sequence: _Sequence, logits: np.ndarray) -> tuple[str, ...]:
        """Check logits and choices of the next tokens of the answer. Return the tokens' texts.

        logits: [rows, V]
        """
        receipt, texts = sequence.receipt, []
        for row in logits:
            digest, at, expected = row_digest(row), sequence.done, receipt.answer[sequence.done]
            token, error = _next(sequence.generation, row)
            reason = receipt.finish_reason if at == len(receipt.answer) - 1 else None
            if digest != receipt.logits[at]:
                stage, message = "logits", "the logits differ"
            elif token is None:  # a constraint that allows no token, or logits with NaN
                stage, message = "choice", error
            elif token.id != expected:
                stage, message = "choice", f"the logits and the sampling choose {token.id}, not {expected}"
            elif token.finish_reason != reason:
                stage = "finish"
                message = f"the finish reason is {_word(token.finish_reason)}, not {_word(reason)}"
            else:
                sequence.done += 1
                texts.append(token.text + (token.reasoning or ""))
                continue
            result, ids = (digest, *_choice(token)), [*receipt.prompt, *receipt.answer[:at]]
            computed = _Computed(result, partial(self._answer_again, receipt, at), ids)
            raise _DiffersError(stage, message, at, computed)
        return tuple(texts)

    def _check_kv(self, sequence: _Sequence) -> None:
        made = kv_digests(sequence.cache.digest())
        pairs = zip(made, sequence.receipt.kv, strict=True)
        layer = next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if layer is not None:
            message = f"keys or values of layer {self.engine.config.kv_owners[layer]} differ"
            computed = _Computed(made, partial(self._kv_again, sequence.ids), sequence.ids)
            raise _DiffersError("kv", message, computed=computed)

    # --- the same results again ---------------------------------------------------------------------------------------

    def _kv_again(self, ids: Sequence[int], chunk: int) -> tuple[bytes, ...]:
        session = self.engine.session()
        session.prefill(ids, chunk)
        return kv_digests(session.kv_digest())

    def _answer_again(self, receipt: Receipt, at: int, chunk: int) -> tuple[object, ...]:
        """Compute the answer again, up to token `at` or up to an earlier token that differs from the receipt.

        Return the digest of the last logits, and the token and finish reason that they give.
        """
        session, generation = self.engine.session(), self.engine.generation(self._request(receipt))
        if len(receipt.prompt) > 1:
            session.prefill(receipt.prompt[:-1], chunk)
        ids, size = [receipt.prompt[-1], *receipt.answer[:at]], min(chunk, self._rows)
        for first in range(0, len(ids), size):
            logits = session.prefill(ids[first : first + size], chunk, all_logits=True)
            for index, row in enumerate(logits, first):
                token, _ = _next(generation, row)
                if index == at or token is None or token.id != receipt.answer[index]:
                    return row_digest(row), *_choice(token)
        raise AssertionError("the last token was not computed")

    # --- differences --------------------------------------------------------------------------------------------------

    def _verdict(self, receipt: Receipt, found: _DiffersError, checked: int) -> Verdict:
        position = None if found.token is None else len(receipt.prompt) + found.token
        where = "" if found.token is None else f" at token {found.token} (position {position})"
        message = f"{found.stage}{where}: {found.message}"
        kind = found.kind
        if found.computed is not None:
            fault = self._fault(found.computed)
            if fault:
                kind, message = UNKNOWN, f"{message}; but {fault}"
            else:
                message += "; this machine gave the same bits again, token by token, so the receipt is at fault"
        return Verdict(kind, message, found.stage, found.token, position, checked)

    def _fault(self, computed: _Computed) -> str:
        """Compute a result twice more, the second time with other threads and one token in a pass.

        If the results of this machine differ from each other, or a pass fails, then the machine is at fault, and the return
        value says how. Otherwise, the return value is an empty string.
        """
        before, results = self.engine.threads, {computed.result}
        try:
            for chunk, threads in ((CHUNK, before), (1, before + 1 if self._alone else before)):
                if threads != self.engine.threads:
                    self.engine.set_threads(threads)
                results.add(computed.again(chunk))
            if len(results) == 1:
                return ""
            return f"this machine disagrees with itself{self._where(computed.ids) if self._alone else ''}"
        except ComputationError as error:
            return f"a forward pass failed when it was computed again: {error}"
        finally:
            if self.engine.threads != before:
                self.engine.set_threads(before)

    def _where(self, ids: Sequence[int]) -> str:
        """Compute the tokens twice with a trace. Return the first layer and phase that differ, or an empty string."""
        poison = self.engine.instruments.poison
        try:
            runs = [compute(self.engine, ids, chunk, trace=True) for chunk in (64, 1)]
        finally:
            self.engine.instruments.poison = poison
        difference = where_traces_part(runs[0], runs[1], "passes of 64 tokens and of 1 token")
        return "" if difference is None else f": {difference}"


def _common_blocks(a: Receipt, b: Receipt) -> int:
    """Return how many tokens two prompts share at their beginning, in whole blocks of the prefix cache."""
    size = min(len(a.prompt), len(b.prompt)) - 1
    differ = np.flatnonzero(np.array(a.prompt[:size]) != np.array(b.prompt[:size]))
    return (int(differ[0]) if len(differ) else size) // BLOCK_TOKENS * BLOCK_TOKENS


def _marks(receipt: Receipt) -> Marks | None:
    given = receipt.asked.marks
    if given is None:
        return None
    channel, call = (None if given[name] is None else (given[name][0], given[name][1]) for name in ("channel", "call"))
    return Marks(channel, call, given["quote"])


def _next(generation: Generation, row: np.ndarray) -> tuple[Token | None, str]:
    """Choose the next token of an answer. If that is impossible, return None and the reason."""
    try:
        return generation.next(row), ""
    except GemmaError as error:
        return None, str(error)


def _choice(token: Token | None) -> tuple[object, ...]:
    return () if token is None else (token.id, token.finish_reason)


def _word(reason: str | None) -> str:
    return "missing" if reason is None else repr(reason)
