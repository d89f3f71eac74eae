"""Gemma 4's assistants, which guess tokens from the hidden state and the KV rows of the main model."""

import threading
import time
from collections.abc import Sequence

import numpy as np

from gemma_py.generate.draft_model import CacheOf, GuessingModel
from gemma_py.generate.sampling import Sampler
from gemma_py.generate.speculation import MOST_GUESSES, Pace
from gemma_py.models import gemma4_assistant
from gemma_py.models.gemma4_assistant import BACKBONE_EMBEDDING, HIDDEN_STATE, NEXT_HIDDEN
from gemma_py.progress import ReportProgress
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.program import link
from gemma_py.runtime.runner import Runner, SequenceInput
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.store import packed_weights
from gemma_py.weights.tensors import EMBEDDING, GatheredTable, RowTable


class _HiddenState:
    """The hidden state that the next step reads, as a table with one row."""

    def __init__(self) -> None:
        self.row = np.empty(0, np.float32)

    def gather(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Write the hidden state to every row, and ignore the ids. rows: f32 [T, B]"""
        rows[:] = self.row


class Assistant(GuessingModel):
    """An assistant of the main model. It needs no KV cache, because it reads the KV rows of the main model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        main_checkpoint: Checkpoint,
        main: Runner,
        quant: str | None,
        progress: ReportProgress,
    ) -> None:
        program = gemma4_assistant.program(checkpoint.config, main.config, str(checkpoint.path))
        packed = packed_weights(checkpoint, quant, progress)
        embedding = main_checkpoint.tensors[main_checkpoint.source.names[EMBEDDING]]
        self._hidden, self._lock = _HiddenState(), threading.Lock()
        tables: dict[str, RowTable] = {BACKBONE_EMBEDDING: GatheredTable.of(embedding), HIDDEN_STATE: self._hidden}
        linked = link(program, packed.with_tables(tables))
        super().__init__(checkpoint, Runner(linked, program.config, main.shared, main.kv), main)
        self.runner.kept, main.kept = NEXT_HIDDEN, main.program.hidden

    def sequence(self, cache: CacheOf) -> "AssistedSequence":
        return AssistedSequence(self, cache)

    def cache_bytes(self, tokens: int) -> int:
        return 0

    def step(self, cache: Cache, token: int, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits [V] after a token, and the hidden state [B] for the next step.

        cache: the main model's KV cache, which does not change. hidden: the hidden state [B] of the previous token.
        """
        with self._lock:
            self._hidden.row = hidden
            (logits,) = self.runner.run_together([SequenceInput(cache, [token])])
            following = self.runner.kept_rows[0]
        self.note_success()
        return logits[0], following


class AssistedSequence:
    """A sequence of the main model. cache: a function that returns the sequence's KV cache."""

    def __init__(self, assistant: Assistant, cache: CacheOf) -> None:
        self.assistant, self.cache = assistant, cache

    def drafter(self, pace: Pace, prompt: Sequence[int], sampler: Sampler) -> "AssistantDrafter":
        return AssistantDrafter(self, pace, len(prompt), sampler)


class AssistantDrafter:
    pending = 0

    def __init__(self, sequence: AssistedSequence, pace: Pace, prompt_tokens: int, sampler: Sampler) -> None:
        self._sequence, self._pace, self._sampler = sequence, pace, sampler
        self._prompt_tokens = prompt_tokens
        self._answer: list[int] = []
        self._failed = False

    def extend(self, token: int) -> None:
        self._answer.append(token)

    @property
    def room(self) -> int:
        """The most tokens that the assistant can guess now: 0 unless the main model's cache has the KV rows of all tokens but
        the last, and a hidden state.
        """
        cache = self._sequence.cache()
        if self._failed or not self._sequence.assistant.usable or cache is None or cache.abandoned or not self._answer:
            return 0
        current = cache.position == self._prompt_tokens + len(self._answer) - 1
        return MOST_GUESSES if current and cache.last_hidden() is not None else 0

    def guess(self, count: int) -> list[int]:
        """Guess the next `count` tokens. If the assistant fails, return the guesses before the failure."""
        guesses: list[int] = []
        try:
            self._guess(guesses, min(count, self.room))
        # Whatever the error is, the answer can continue without guesses.
        except Exception as error:
            self._failed = True
            self._sequence.assistant.note_failure(error)
        return guesses

    def _guess(self, guesses: list[int], count: int) -> None:
        """Append guesses to the list, so that a failure leaves the earlier guesses in the list."""
        cache, chosen = self._sequence.cache(), list(self._answer)
        hidden = None if cache is None else cache.last_hidden()
        if cache is None or hidden is None:
            return
        while len(guesses) < count:
            start = time.perf_counter()
            logits, hidden = self._sequence.assistant.step(cache, chosen[-1], hidden)
            self._pace.measure_draft(1, time.perf_counter() - start)
            guesses.append(self._sampler.choose(logits, chosen))
            chosen.append(guesses[-1])
