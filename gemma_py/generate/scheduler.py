"""The scheduler: a thread that batches requests, computes their passes and reports events to listeners.

A request waits in a bounded queue until fewer than `parallel` requests run and the request's whole KV cache fits into the
memory. Every pass then computes one token of each answer and a part of each prompt. The other requests of a pass do not
change a request's logits. Between passes, the scheduler removes cancelled requests and admits waiting ones.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Full, Queue

import numpy as np

from gemma_py import machine
from gemma_py.errors import ContextError, GemmaError, InputError, WorkerError
from gemma_py.generate.base_scheduler import SLOWEST_STEP, BaseScheduler, ScheduledRequest, SchedulerStats, Ticket
from gemma_py.generate.core import Generation, Request
from gemma_py.generate.embedding import check_generates
from gemma_py.generate.engine import Engine
from gemma_py.generate.events import Event, Failed, Finished, Generated, Listener, PrefillProgress, Scored, Usage
from gemma_py.generate.sampling import ROWS_AT_ONCE
from gemma_py.receipts.receipt import Receipt
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS
from gemma_py.runtime.runner import SequenceInput

# Target seconds of a pass that only prefills, and of a pass that also decodes. In a pass that also decodes, every answer waits
# for its next token.
_PASS_SECONDS, _PASS_SECONDS_BESIDE = 0.5, 0.15
# In a pass with prompt tokens, guesses delay the prompts, so less probable guesses than this are not computed.
_LEAST_BESIDE = 0.5
_FEWEST_ROWS = 8  # the fewest prompt tokens of a pass, because a smaller pass would hardly be faster
_UNKNOWN_MEMORY, _MOST_PREFIX_BYTES = 4 << 30, 1 << 30
# The largest number of passes whose events wait to be sent. If a listener blocks, then the scheduler's thread soon blocks too, so
# that `health` reports it and events do not fill the memory.
_MOST_UNSENT = 64


class _Sequence(ScheduledRequest):
    def __init__(
        self, generation: Generation, listener: Listener, ticket: Ticket, kv_bytes: int, outbox: "Outbox"
    ) -> None:
        super().__init__(listener, ticket)
        self.generation, self.kv_bytes, self._outbox = generation, kv_bytes, outbox
        self.ids = list(generation.prompt)
        self.prompt = np.array(generation.prompt)
        self.cache: Cache | None = None  # None while waiting
        self.cached = 0  # the number of prompt tokens that were copied from the prefix cache
        self._withheld = False  # whether an event was not sent, because the request was cancelled
        self.scores = 0  # the number of Scored events that were sent
        self.first_token = 0.0

    def tell(self, event: Event) -> None:
        """Queue an event. `Scheduler._deliver` passes it to the thread that sends it."""
        self._outbox.append((self, event))

    def send(self, event: Event) -> None:
        """Send an event to the listener. After the request was cancelled, send only the last event. If other events were
        withheld, a last event Finished gets the reason "cancelled".
        """
        if self.ticket.cancelled and not isinstance(event, Finished | Failed):
            self._withheld = True
            return
        if self._withheld and isinstance(event, Finished):
            event = Finished("cancelled", event.usage)
        super().tell(event)

    @property
    def position(self) -> int:
        return 0 if self.cache is None else self.cache.position

    @property
    def pending(self) -> int:
        """The number of tokens, of prompt and answer, that are not in the KV cache yet."""
        return len(self.ids) - self.position

    @property
    def answering(self) -> bool:
        return bool(self.generation.generated)

    @property
    def scoring(self) -> bool:
        """Whether the request asks for the log probabilities of its next prompt tokens, for which a pass computes logits."""
        return self.generation.request.scored and not self.answering

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn from the logits of the last pass, and no grammar limits the choice."""
        request = self.generation.request
        return self.pending == 0 and request.sampling.temperature > 0 and request.constraint is None

    @property
    def prefilling(self) -> bool:
        """Whether the next tokens are prefilled, several in a pass. Otherwise, one token is decoded.

        The prompt is prefilled. If a failed pass made the KV cache unusable, the answer so far is prefilled too.
        """
        return not self.answering or self.pending > 1

    def usage(self) -> Usage:
        now = time.monotonic()
        return Usage(
            len(self.prompt), self.cached, len(self.generation.generated), (self.admitted or now) - self.arrived,
            (self.first_token or now) - self.arrived, now - self.arrived, self.generation.speculation.predicted,
        )  # fmt: skip


Outbox = list[tuple[_Sequence, Event]]


def shares(needs: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of each prompt to compute in a pass. room: the most prompt tokens of the pass.

    needs: for each prompt, the number of tokens that are not computed yet, in order of arrival.

    The oldest prompt gets half of the room, so that every prompt makes progress. The shortest prompts get the rest.
    """
    given = [0] * len(needs)
    order = sorted(range(len(needs)), key=lambda number: needs[number])
    for number, part in ((0, (room + 1) // 2), *((number, room) for number in order)):
        more = min(part, needs[number] - given[number], room - sum(given))
        given[number] += more
    return given


class Scheduler(BaseScheduler[Request, _Sequence]):
    def __init__(
        self,
        engine: Engine,
        parallel: int = 8,
        queue: int = 64,
        kv_bytes: int | None = None,
        prefix_bytes: int | None = None,
        sharing: int = 1,
    ) -> None:
        """Start the scheduler's thread.

        parallel: the most requests that run at once.
        queue: the most requests that wait.
        kv_bytes: the memory for the KV caches of running requests; by default, a third of the free memory.
        prefix_bytes: the memory for the prefix cache, 0 for none; by default, a sixth of the free memory and at most 1
        GiB.
        sharing: how many schedulers on this machine share the free memory.
        """
        check_generates(engine)
        free = (machine.memory() or _UNKNOWN_MEMORY) // sharing
        self.kv_bytes = free // 3 if kv_bytes is None else kv_bytes
        prefix_bytes = min(free // 6, _MOST_PREFIX_BYTES) if prefix_bytes is None else prefix_bytes
        if self.kv_bytes < 1 or prefix_bytes < 0:
            raise InputError(
                f"kv_bytes should be at least 1 and prefix_bytes at least 0, found {self.kv_bytes} and {prefix_bytes}"
            )
        super().__init__(engine, parallel, queue)
        # Only the scheduler's thread writes the fields below.
        self._prefixes = engine.new_prefix_cache(prefix_bytes)
        self._guessed = self._accepted = 0
        self._samplers = ThreadPoolExecutor(thread_name_prefix="gemma_py-sampler")
        self._outbox: Outbox = []
        self._unsent: Queue[Outbox | None] = Queue(_MOST_UNSENT)
        self._sender = threading.Thread(target=_send, args=(self._unsent,), name="gemma_py-sender", daemon=True)
        self._sender.start()
        self._row_seconds = 1 / 64  # running average of seconds per token in passes with prompts
        self._thread.start()

    def close(self) -> None:
        super().close()
        self._samplers.shutdown()
        with contextlib.suppress(Full):  # a listener blocks
            self._unsent.put(None, timeout=SLOWEST_STEP)
            self._sender.join(SLOWEST_STEP)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def _scheduled(self, request: Request, listener: Listener, ticket: Ticket) -> _Sequence:
        generation = self.engine.generation(request, least_tokens=0)
        sequence = _Sequence(generation, listener, ticket, self._kv_bytes(generation), self._outbox)
        if self.engine.draft is not None:
            generation.use_draft_model(self.engine.draft.sequence(lambda: sequence.cache))
        return sequence

    def _kv_bytes(self, generation: Generation) -> int:
        """Return the size of the KV cache for the prompt and the longest possible answer."""
        prompt, new = len(generation.prompt), generation.max_tokens
        size = self.engine.cache_bytes(prompt + new, BLOCK_TOKENS)
        if self.engine.draft is not None:
            size += self.engine.draft.cache_bytes(prompt + new)
        if size > self.kv_bytes:
            raise ContextError(
                f"{prompt} prompt tokens and {new} new tokens need {size / 2**20:.1f} MiB of KV cache, but the scheduler has "
                f"only {self.kv_bytes / 2**20:.1f} MiB"
            )
        return size

    @property
    def prefix_tokens(self) -> int:
        """The maximum number of tokens in the prefix cache."""
        return self._prefixes.capacity

    def stats(self) -> SchedulerStats:
        with self._changed:
            prefixes, used = self._prefixes, sum(sequence.kv_bytes for sequence in self._running)
            return SchedulerStats(
                len(self._running), len(self._waiting), used, prefixes.nbytes, prefixes.hits, prefixes.misses,
                prefixes.hit_tokens, self._passes, self._failed, self._computed, self._guessed, self._accepted,
            )  # fmt: skip

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._remove_cancelled()
        self._admit()
        if self.engine.draft is not None:
            self._deliver()  # before `_plan`, which runs the draft model
        sequences, inputs = self._plan()
        self._deliver()
        if not inputs:
            return
        start = time.monotonic()
        try:
            results = self.engine.run_together(inputs)
        except WorkerError as error:
            self._note_failed_pass(error)
            if not error.settled:  # a stalled worker may still write to the old caches
                for sequence in sequences:
                    self._allocate(sequence)
            return  # the failed pass is repeated by the next step
        self._trouble = None
        self._count_pass(inputs)
        sampled = self._sample(sequences, inputs, results)
        for sequence, part, logits, token in zip(sequences, inputs, results, sampled, strict=True):
            begun = sequence.position - (len(part.tokens) - part.guesses)
            last = self._take(sequence, part, logits, token)
            # Blocks are inserted after `_take`, because `_take` decides which guesses of the pass belong to the sequence.
            self._prefixes.insert(part.cache, begun)
            if last is not None:
                self._finish(sequence, last)
        self._measure_pass(inputs, time.monotonic() - start)
        if self._idle():
            self._deliver()

    def _deliver(self) -> None:
        """Send the events of the last pass to their listeners, in another thread, while the workers compute the next pass.

        A listener and the code that it wakes need Python's global lock, which workers do not need. If each event were sent at
        once, this thread would have to wait for the lock before it chooses the token of the next answer.
        """
        if self._outbox:
            events = self._outbox.copy()
            self._outbox.clear()
            self._unsent.put(events)

    def _fail(self, error: GemmaError) -> None:
        super()._fail(error)
        self._deliver()

    def _sample(
        self, sequences: Sequence[_Sequence], inputs: Sequence[SequenceInput], results: Sequence[np.ndarray]
    ) -> list[list[int]]:
        """Sample the next tokens of each request that draws, with several threads. Other requests get an empty list.

        A draw takes about 4% of the time of a pass, and a greedy choice so little that other threads would not help.
        """
        sampled: list[list[int]] = [[] for _ in sequences]
        drawing = [number for number, sequence in enumerate(sequences) if sequence.draws]
        count = min(self.engine.threads, len(drawing))

        def sample(share: int) -> None:
            for number in drawing[share::count]:
                logits, guesses = _answer_rows(inputs[number], results[number])
                with contextlib.suppress(GemmaError):  # `_choose` samples again, and reports the error to the request
                    sampled[number] = sequences[number].generation.sample(logits, guesses)

        if count > 1:
            others = [self._samplers.submit(sample, share) for share in range(1, count)]
            sample(0)
            for other in others:
                other.result()
        return sampled

    def _take(
        self, sequence: _Sequence, part: SequenceInput, logits: np.ndarray, sampled: list[int]
    ) -> Finished | Failed | None:
        """Send a request the events of a pass: progress, scores, chosen tokens. Return the last event if the request has ended.

        logits: [part.logits, V]
        """
        if not sequence.answering:
            sequence.tell(PrefillProgress(sequence.position, len(sequence.prompt), sequence.cached))
        try:
            if sequence.scoring:
                self._score(sequence, logits)
            return self._choose(sequence, part, logits, sampled) if sequence.pending == 0 else None
        except GemmaError as error:
            return Failed(error)

    def _finish(self, request: _Sequence, last: Finished | Failed) -> None:
        request.cache = None
        super()._finish(request, last)

    def _admit(self) -> None:
        """Start waiting requests, in order of arrival, as long as fewer than `parallel` run and KV memory is free."""
        for sequence in list(self._waiting):
            used = sum(running.kv_bytes for running in self._running)
            if len(self._running) == self.parallel or used + sequence.kv_bytes > self.kv_bytes:
                return
            if self._being_computed(sequence):
                continue
            sequence.cached, sequence.admitted = self._allocate(sequence), time.monotonic()
            with self._changed:
                self._waiting.remove(sequence)
                self._running.append(sequence)

    def _allocate(self, sequence: _Sequence) -> int:
        """Allocate a KV cache, and copy the request's longest cached prefix to it. Return the number of copied tokens."""
        cache = self.engine.new_cache(BLOCK_TOKENS)
        cache.prepare(len(sequence.prompt) + sequence.generation.max_tokens, self.engine.runner.chunk)
        hit = 0 if sequence.scoring else self._prefixes.restore(cache, sequence.ids)
        sequence.cache = cache
        return hit

    def _being_computed(self, sequence: _Sequence) -> bool:
        """Whether a running request is computing a prefix of this request's prompt.

        Waiting for that prefix and copying it from the prefix cache is faster than computing it a second time.
        """
        if self._prefixes.capacity == 0:
            return False
        for other in self._running:
            size = min(len(sequence.prompt) - 1, len(other.prompt))
            differ = np.flatnonzero(sequence.prompt[:size] != other.prompt[:size])
            common = (int(differ[0]) if len(differ) else size) // BLOCK_TOKENS * BLOCK_TOKENS
            if not other.answering and max(other.position, BLOCK_TOKENS) < common:
                return True
        return False

    def _plan(self) -> tuple[list[_Sequence], list[SequenceInput]]:
        """Choose the tokens of the next pass: one token of every answer, and as many prompt tokens as the duration allows."""
        answers = [s for s in self._running if not s.prefilling]
        prompts = [s for s in self._running if s.prefilling]
        seconds = _PASS_SECONDS_BESIDE if answers else _PASS_SECONDS
        room = max(_FEWEST_ROWS, min(self.engine.runner.chunk, int(seconds / self._row_seconds)) - len(answers))
        counts = [1] * len(answers) + (shares([s.pending for s in prompts], room) if prompts else [])
        chances = [s.generation.guess_chances() for s in answers]
        drafting = [s.generation.speculation.drafting for s in answers]
        least = _LEAST_BESIDE if prompts else 0.0
        guessed = self.engine.pace.allot(chances, sum(counts), least, drafting) + [0] * len(prompts)
        sequences, inputs, scored = [], [], 0
        for sequence, count, guesses in zip((*answers, *prompts), counts, guessed, strict=True):
            if sequence.scoring:
                count = min(count, ROWS_AT_ONCE - scored)
                scored += count
            if count and sequence.cache is not None:
                tokens = sequence.ids[sequence.position : sequence.position + count]
                drafted = sequence.generation.speculation.guesses(guesses)
                logits = count if sequence.scoring else 1 + len(drafted) if count == sequence.pending else 0
                sequences.append(sequence)
                inputs.append(SequenceInput(sequence.cache, tokens + drafted, logits, len(drafted)))
        return sequences, inputs

    def _count_pass(self, inputs: Sequence[SequenceInput]) -> None:
        guesses = sum(part.guesses for part in inputs)
        self._passes += 1
        self._computed += sum(len(part.tokens) for part in inputs) - guesses
        self._guessed += guesses

    def _measure_pass(self, inputs: Sequence[SequenceInput], seconds: float) -> None:
        """Learn how long passes take, sampling included."""
        rows, guesses = sum(len(part.tokens) for part in inputs), sum(part.guesses for part in inputs)
        # A pass that only decodes mostly reads weights, so the pass does not show how long a prompt token takes.
        if rows - guesses > len(inputs):
            self._row_seconds += 0.8 * (seconds / rows - self._row_seconds)
        else:
            self.engine.pace.measure(rows, seconds)

    def _score(self, sequence: _Sequence, logits: np.ndarray) -> None:
        """Send a Scored event for each prompt token whose probability follows from the logits of this pass.

        logits: [tokens, V]
        """
        if sequence.scores == 0:
            sequence.tell(Scored(sequence.ids[0], None, ()))
            sequence.scores = 1
        # Scores that were sent before a failed pass are computed again when the pass is repeated. Do not send them twice.
        for at in range(sequence.scores, min(sequence.position + 1, len(sequence.ids))):
            row, token = logits[at - 1 - sequence.position], sequence.ids[at]
            sequence.tell(Scored(token, *sequence.generation.score(row, token)))
            sequence.scores += 1

    def _choose(
        self, sequence: _Sequence, part: SequenceInput, logits: np.ndarray, sampled: list[int]
    ) -> Finished | None:
        """Choose the next tokens of an answer, and send a Generated event for each. Return the last event if the answer has
        ended.

        One token is always chosen. If the first guess is equal to this token, the logits of the guess give the second token,
        and so on.

        logits: [part.logits, V], of the last known token and of the guesses after this token
        """
        generation = sequence.generation
        if generation.max_tokens == 0:
            return Finished("length", sequence.usage())
        generation.speculation.computed(part.guesses)
        rows, guesses = _answer_rows(part, logits)
        for number, (row, guess) in enumerate(zip(rows, [*guesses, None], strict=True)):
            token = generation.next(row, sampled[number] if number < len(sampled) else None)
            sequence.ids.append(token.id)
            sequence.first_token = sequence.first_token or time.monotonic()
            sequence.tell(Generated(token, generation.top))
            if token.finish_reason is not None:
                return Finished(token.finish_reason, sequence.usage(), _receipt(generation, part.cache))
            if token.id != guess or sequence.ticket.cancelled:
                return None
            self.engine.accept(part.cache, [token.id])
            generation.speculation.accepted += 1
            self._accepted += 1
            self._computed += 1
        raise AssertionError


def _send(unsent: "Queue[Outbox | None]") -> None:
    while (events := unsent.get()) is not None:
        for sequence, event in events:
            sequence.send(event)
        del events, sequence, event  # references would keep memory of ended requests


def _answer_rows(part: SequenceInput, logits: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return the logits that the next tokens of an answer are chosen from, [1 + guesses, V], and the guesses."""
    return logits[len(logits) - 1 - part.guesses :], part.tokens[len(part.tokens) - part.guesses :]


def _receipt(generation: Generation, cache: Cache) -> Callable[[], Receipt] | None:
    """Return a function that makes the receipt of a complete answer, and keeps the KV cache in memory until then."""
    return (lambda: generation.receipt(cache.digest())) if generation.request.receipt else None
