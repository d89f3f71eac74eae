"""Many requests, one engine: a thread of its own takes them in, computes, and tells each listener what came of it.

A request waits in a bounded queue until there is a place and room for all the keys and values that it may need. From
then on it has a part in every pass: a token of its answer, or as much of its prompt as the pass has room for. What it gets
does not depend on its company, by a bit. Cancelled ones leave, and new ones come in, before every pass.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gemma_py import machine
from gemma_py.errors import ComputationError, ContextError, GemmaError, InputError, Overloaded, WorkerError
from gemma_py.generate.core import Constraint, Continuation, Token
from gemma_py.generate.engine import Engine
from gemma_py.generate.sampling import Sampler, Sampling, likeliest
from gemma_py.generate.score import ROWS_AT_ONCE, log_probabilities
from gemma_py.generate.text_stream import TextStream, stop_strings
from gemma_py.runtime.cache import Cache, bytes_needed
from gemma_py.runtime.prefixes import TOKENS, Prefixes
from gemma_py.runtime.runner import CHUNK, Part

_MOST_TOP = 100  # alternatives of a token
# How long a pass should take: alone, prompts can be stopped that often; beside answers, these stutter no more than that.
_PASS_SECONDS, _PASS_SECONDS_BESIDE = 0.5, 0.15
_FEWEST_ROWS = 8  # of prompts in a pass; fewer would not be done sooner
_UNKNOWN_MEMORY, _MOST_PREFIX_BYTES = 4 << 30, 1 << 30
_SLOWEST_STEP = 60.0  # seconds; if no step ends for so long though there is work, something is wrong


@dataclass(frozen=True)
class Request:
    """ids: the prompt. max_tokens: 0 for the prompt alone. stop: strings that end the answer; ends: tokens that do. trim: no
    white space in front of it. logprobs: whether tokens shall tell theirs. top_logprobs: how many of the likeliest tokens to
    tell at each place. scored: the prompt's tokens tell both too, so all of them are computed, whatever is kept of them."""

    ids: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    trim: bool = False
    logprobs: bool = True
    top_logprobs: int = 0
    constraint: Constraint | None = None
    scored: bool = False


@dataclass(frozen=True)
class Usage:
    """prompt, cached, generated: tokens; cached are those of the prompt that were not computed again. Seconds from when
    the request came: until it was taken up, until its first token, until now."""

    prompt: int
    cached: int
    generated: int
    queued_seconds: float
    first_token_seconds: float
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Prompt tokens that are done, of how many, and how many of them were cached."""

    done: int
    total: int
    cached: int


Top = tuple[tuple[int, float], ...]  # the likeliest tokens at a place with their log probabilities, in order


@dataclass(frozen=True)
class Made:
    """A token of the answer."""

    token: Token
    top: Top


@dataclass(frozen=True)
class Scored:
    """A token of the prompt. logprob: given all before it; the first has none."""

    id: int
    logprob: float | None
    top: Top


@dataclass(frozen=True)
class Finished:
    """The last event. reason: "stop", "length" or "cancelled"."""

    reason: str
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """The last event of a request that got no further."""

    error: GemmaError


Event = Progress | Scored | Made | Finished | Failed
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Health:
    """why: what is wrong, if something is. lasting: whether the next pass cannot mend that. waiting: seconds since the last
    step ended while there is work, else 0."""

    ok: bool
    why: str
    lasting: bool
    waiting: float


@dataclass(frozen=True)
class Stats:
    """running, waiting: requests. kv_bytes: reserved by running ones; prefix_bytes: of kept prefixes. The others count since
    the start: requests that found a kept prefix, or none, and how many tokens of it; passes, those that failed
    and were tried again, and the tokens in them."""

    running: int
    waiting: int
    kv_bytes: int
    prefix_bytes: int
    prefix_hits: int
    prefix_misses: int
    cached_tokens: int
    passes: int
    failed_passes: int
    computed_tokens: int


class Ticket:
    """A request that was taken in."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.cancelled = False

    def cancel(self) -> None:
        """It ends within one step, with a Finished event whose reason is "cancelled", unless it has ended before."""
        self.cancelled = True
        self._scheduler._notify()


class _Sequence:
    """A request on its way."""

    def __init__(
        self,
        request: Request,
        ids: list[int],
        listener: Listener,
        ticket: Ticket,
        continuation: Continuation,
        need: int,
    ) -> None:
        self.request, self.ids, self.ticket, self.continuation = request, ids, ticket, continuation
        self.need = need  # bytes of keys and values
        self._listener = listener
        self.prompt = np.array(ids)
        self.cache: Cache | None = None  # while it runs
        self.cached = 0
        self.scores = 0  # of the prompt's tokens, told
        self.came = time.monotonic()
        self.taken_up = self.first_token = 0.0

    @property
    def position(self) -> int:
        return 0 if self.cache is None else self.cache.position

    @property
    def todo(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.ids) - self.position

    @property
    def scoring(self) -> bool:
        """Whether its next tokens are a prompt's that tell their log probabilities: then each row makes logits."""
        return self.request.scored and not self.answering

    @property
    def answering(self) -> bool:
        return bool(self.continuation.made)

    @property
    def reading(self) -> bool:
        """Whether it has more to compute than one token of an answer: a prompt, or all of it once more."""
        return not self.answering or self.todo > 1

    def tell(self, event: Event) -> None:
        """What a listener does wrong ends its own request and no other."""
        try:
            self._listener(event)
        except Exception:
            traceback.print_exc()
            self.ticket.cancelled = True

    def usage(self) -> Usage:
        now = time.monotonic()
        return Usage(
            len(self.prompt), self.cached, len(self.continuation.made), (self.taken_up or now) - self.came,
            (self.first_token or now) - self.came, now - self.came,
        )  # fmt: skip


def shares(needs: Sequence[int], room: int) -> list[int]:
    """Rows of a pass for prompts, which have come in this order and have so many tokens left.

    Half of the room is for whoever came first, so nobody waits for ever; the rest is for the shortest.
    """
    given = [0] * len(needs)
    order = sorted(range(len(needs)), key=lambda number: needs[number])
    for number, part in ((0, (room + 1) // 2), *((number, room) for number in order)):
        more = min(part, needs[number] - given[number], room - sum(given))
        given[number] += more
    return given


class Scheduler:
    """Owns the engine's time from a thread of its own. Close it before the engine."""

    def __init__(
        self,
        engine: Engine,
        parallel: int = 8,
        queue: int = 64,
        kv_bytes: int | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        """parallel: requests that share passes. queue: those that may wait beside them. kv_bytes: for keys and values of
        running requests; a third of the free memory if left out. prefix_bytes: for prefixes that others may begin with, 0
        for none; a sixth, and a gigabyte at most, if left out."""
        free = machine.memory() or _UNKNOWN_MEMORY
        self.kv_bytes = free // 3 if kv_bytes is None else kv_bytes
        prefix_bytes = min(free // 6, _MOST_PREFIX_BYTES) if prefix_bytes is None else prefix_bytes
        if parallel < 1 or queue < 0 or self.kv_bytes < 1 or prefix_bytes < 0:
            raise InputError(
                f"a scheduler needs parallel and kv_bytes from 1, queue and prefix_bytes from 0, found {parallel}, "
                f"{self.kv_bytes}, {queue} and {prefix_bytes}"
            )
        self.engine, self.parallel, self.queue = engine, parallel, queue
        self._changed = threading.Condition()  # guards what follows
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._open, self._closed = True, False
        self._error: GemmaError | None = None
        self._trouble: WorkerError | None = None  # why the last pass failed, until one succeeds
        self._stepped = time.monotonic()  # when the last step ended, or work came after none
        self._request_seconds = 1.0  # of late
        # Of the thread alone:
        self._prefixes = Prefixes(engine.config, engine.runner.kv, prefix_bytes)
        self._passes = self._failed = self._computed = 0
        self._row_seconds = 1 / 64  # of late, in passes with prompts; a guess at first
        self._thread = threading.Thread(target=self._work, name="gemma_py-scheduler", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Take a request in. What is wrong with it is raised at once; Overloaded if there is no room for it now.

        The listener is called from the scheduler's thread and must not block. Its last event is Finished or Failed.
        """
        sequence = self._checked(request, listener)
        with self._changed:
            if self._error is not None:
                raise ComputationError(f"the engine is out of order: {self._error}")
            if not self._open:
                raise Overloaded("no more requests are taken: the server is ending", 10.0)
            if len(self._waiting) >= self.queue + max(0, self.parallel - len(self._running)):
                raise Overloaded(f"{len(self._waiting)} requests wait already", self._retry_after())
            if self._idle():
                self._stepped = time.monotonic()
            self._waiting.append(sequence)
            self._changed.notify_all()
        return sequence.ticket

    def _checked(self, request: Request, listener: Listener) -> _Sequence:
        engine = self.engine
        ids = engine.check_ids(request.ids)
        if not isinstance(request.max_tokens, int) or request.max_tokens < 0:
            raise InputError(f"max_tokens should be at least 0, found {request.max_tokens!r:.40}")
        if not 0 <= request.top_logprobs <= min(_MOST_TOP, engine.config.vocab_size):
            raise InputError(f"top_logprobs should be 0 to {_MOST_TOP}, found {request.top_logprobs!r:.40}")
        total = len(ids) + request.max_tokens
        if total > engine.context:
            raise ContextError(
                f"{len(ids)} prompt tokens and {request.max_tokens} new ones exceed the context of {engine.context} tokens"
            )
        need = bytes_needed(engine.config, engine.runner.kv, total, CHUNK, TOKENS)
        if need > self.kv_bytes:
            raise ContextError(
                f"{len(ids)} prompt tokens and {request.max_tokens} new ones need {need / 2**20:.1f} MiB for keys and "
                f"values; there are {self.kv_bytes / 2**20:.1f}"
            )
        sampler = Sampler(request.sampling, engine.config.vocab_size, ids)
        stream = TextStream(engine.tokenizer, stop_strings(request.stop), request.trim)
        continuation = Continuation(
            sampler, stream, request.ends, request.max_tokens, request.constraint, request.logprobs
        )
        return _Sequence(request, ids, listener, Ticket(self), continuation, need)

    def _retry_after(self) -> float:
        """Until a place in the queue is likely to be free."""
        return min(60.0, max(1.0, self._request_seconds / self.parallel))

    def health(self) -> Health:
        with self._changed:
            waiting = 0.0 if self._idle() else time.monotonic() - self._stepped
            if self._error is not None:
                return Health(False, str(self._error), True, waiting)
            if not self._thread.is_alive() and not self._closed:
                return Health(False, "the scheduler's thread has ended", True, waiting)
            if self._trouble is not None and not self._idle():
                return Health(False, str(self._trouble), False, waiting)
            if waiting > _SLOWEST_STEP:
                return Health(False, f"no step for {waiting:.0f} s", True, waiting)
            return Health(True, "", False, waiting)

    def stats(self) -> Stats:
        with self._changed:
            prefixes, used = self._prefixes, sum(sequence.need for sequence in self._running)
            return Stats(
                len(self._running), len(self._waiting), used, prefixes.nbytes, prefixes.hits, prefixes.misses,
                prefixes.tokens, self._passes, self._failed, self._computed,
            )  # fmt: skip

    def drain(self, deadline: float) -> int:
        """Take no more requests, and return when all have ended; what runs after so many seconds is cancelled, and counted."""
        with self._changed:
            self._open = False
            self._changed.wait_for(self._idle, max(0.0, deadline))
            left = (*self._waiting, *self._running)
            for sequence in left:
                sequence.ticket.cancelled = True
            self._changed.notify_all()
            # One step more, or the engine's own deadline for a pass that hangs.
            self._changed.wait_for(self._idle, _SLOWEST_STEP)
            return len(left)

    def close(self) -> None:
        """Cancel whatever there is and end the thread. Twice is once."""
        self.drain(0.0)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_SLOWEST_STEP)

    def _idle(self) -> bool:
        return not self._waiting and not self._running

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or not self._idle())
                    if self._closed:
                        return
                self._step()
                with self._changed:
                    self._stepped = time.monotonic()
                    self._changed.notify_all()
        except WorkerError as error:
            self._give_up(error)
        except Exception as error:
            traceback.print_exc()
            self._give_up(ComputationError(f"the scheduler failed: {type(error).__name__}: {error}"))

    def _step(self) -> None:
        """Let go, take up, compute, choose."""
        self._retire_cancelled()
        self._take_up()
        sequences, parts = self._plan()
        if not parts:
            return
        try:
            results = self._pass(parts)
        except WorkerError as error:
            again, self._trouble = self._trouble is not None, error
            if again:
                raise
            self._failed += 1
            if not error.settled:  # the stalled worker may still write to these caches, and keeps them as long
                for sequence in sequences:
                    self._begin(sequence)  # again: what is computed twice has the same bits
            return  # the next step tries again
        self._trouble = None
        for sequence, part, logits in zip(sequences, parts, results, strict=True):
            self._prefixes.keep(part.cache, part.cache.position - len(part.tokens))
            if not sequence.answering:
                sequence.tell(Progress(sequence.position, len(sequence.prompt), sequence.cached))
            try:
                if sequence.scoring:
                    self._score(sequence, logits)
                if sequence.todo == 0:
                    self._choose(sequence, logits[-1])
            except GemmaError as error:
                self._retire(sequence, Failed(error))

    def _retire_cancelled(self) -> None:
        with self._changed:
            cancelled = [s for s in (*self._waiting, *self._running) if s.ticket.cancelled]
        for sequence in cancelled:
            self._retire(sequence, Finished("cancelled", sequence.usage()))

    def _retire(self, sequence: _Sequence, last: Finished | Failed) -> None:
        """Its place is free before anybody hears of its end."""
        sequence.cache = None
        with self._changed:
            if sequence in self._running:
                self._running.remove(sequence)
                self._request_seconds += 0.2 * (time.monotonic() - sequence.came - self._request_seconds)
            else:
                self._waiting.remove(sequence)
        sequence.tell(last)

    def _take_up(self) -> None:
        """Those who wait, in their order, as long as there are places and bytes."""
        for sequence in list(self._waiting):
            used = sum(running.need for running in self._running)
            if len(self._running) == self.parallel or used + sequence.need > self.kv_bytes:
                return
            if self._being_computed(sequence):
                continue
            sequence.cached, sequence.taken_up = self._begin(sequence), time.monotonic()
            with self._changed:
                self._waiting.remove(sequence)
                self._running.append(sequence)

    def _begin(self, sequence: _Sequence) -> int:
        """Give it room for all that it may come to, and what is known of its beginning. How many tokens of that."""
        cache = self.engine.runner.cache(TOKENS)
        cache.prepare(len(sequence.prompt) + sequence.request.max_tokens, CHUNK)
        known = 0 if sequence.scoring else self._prefixes.restore(cache, sequence.ids)
        sequence.cache = cache
        return known

    def _being_computed(self, sequence: _Sequence) -> bool:
        """Whether a running prompt is about to compute what this one begins with too: then it is worth waiting for."""
        if self._prefixes.capacity == 0:
            return False
        for other in self._running:
            size = min(len(sequence.prompt) - 1, len(other.prompt))
            differ = np.flatnonzero(sequence.prompt[:size] != other.prompt[:size])
            common = (int(differ[0]) if len(differ) else size) // TOKENS * TOKENS
            if not other.answering and max(other.position, TOKENS) < common:
                return True
        return False

    def _plan(self) -> tuple[list[_Sequence], list[Part]]:
        """A pass: a token of every answer, and of prompts what there is time for."""
        answers = [s for s in self._running if not s.reading]
        prompts = [s for s in self._running if s.reading]
        seconds = _PASS_SECONDS_BESIDE if answers else _PASS_SECONDS
        room = max(_FEWEST_ROWS, min(CHUNK, int(seconds / self._row_seconds)) - len(answers))
        counts = [1] * len(answers) + (shares([s.todo for s in prompts], room) if prompts else [])
        sequences, parts, scored = [], [], 0
        for sequence, count in zip((*answers, *prompts), counts, strict=True):
            if sequence.scoring:
                count = min(count, ROWS_AT_ONCE - scored)
                scored += count
            if count and sequence.cache is not None:
                tokens = sequence.ids[sequence.position : sequence.position + count]
                logits = count if sequence.scoring else 1 if count == sequence.todo else 0
                sequences.append(sequence)
                parts.append(Part(sequence.cache, tokens, logits))
        return sequences, parts

    def _pass(self, parts: list[Part]) -> list[np.ndarray]:
        """The logits of each part."""
        start = time.monotonic()
        results = self.engine.runner.run_together(parts)
        rows = sum(len(part.tokens) for part in parts)
        if rows > len(parts):  # else it says nothing of prompts: weights are read for few rows as for many
            self._row_seconds += 0.8 * ((time.monotonic() - start) / rows - self._row_seconds)
        self._passes += 1
        self._computed += rows
        return results

    def _score(self, sequence: _Sequence, logits: np.ndarray) -> None:
        """Tell of the prompt's tokens that follow those of the pass, and of its first.    logits: [tokens, V]"""
        if sequence.scores == 0:
            sequence.tell(Scored(sequence.ids[0], None, ()))
            sequence.scores = 1
        count = sequence.request.top_logprobs
        # What was told before it had to begin again is not told twice; the prompt's last token is followed by none.
        for at in range(sequence.scores, min(sequence.position + 1, len(sequence.ids))):
            row, token = logits[at - 1 - sequence.position], sequence.ids[at]
            ids = likeliest(row, count)[1].tolist() if count else []
            logprob, *of_ids = log_probabilities(row, [token, *ids])
            sequence.tell(Scored(token, logprob, tuple(zip(ids, of_ids, strict=True))))
            sequence.scores += 1

    def _choose(self, sequence: _Sequence, logits: np.ndarray) -> None:
        """The next token of an answer."""
        if sequence.request.max_tokens == 0:
            self._retire(sequence, Finished("length", sequence.usage()))
            return
        token = sequence.continuation.next(logits)
        sequence.ids.append(token.id)
        sequence.first_token = sequence.first_token or time.monotonic()
        top: Top = ()
        if sequence.request.top_logprobs:
            ids = likeliest(logits, sequence.request.top_logprobs)[1].tolist()
            top = tuple(zip(ids, log_probabilities(logits, ids), strict=True))
        sequence.tell(Made(token, top))
        if token.finish_reason is not None:
            self._retire(sequence, Finished(token.finish_reason, sequence.usage()))

    def _give_up(self, error: GemmaError) -> None:
        """Nothing can be computed any more: everybody is told, and who comes later too."""
        with self._changed:
            self._error = error
            left = [*self._running, *self._waiting]
        for sequence in left:
            self._retire(sequence, Failed(error))
