"""A draft model: a smaller model of the same vocabulary, which guesses the next tokens of an answer.

The draft model computes on the worker team of the main model, between the passes of the main model. A guess is drawn from
the draft model's logits with the options, the seed and the position of the main model's draw. So where the two models have
similar probabilities, they draw the same token.

If a pass of the draft model fails, the answer continues without the draft model's guesses.
"""

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gemma_py.errors import GemmaWarning, InputError
from gemma_py.generate.drafting import DrafterOfModel
from gemma_py.generate.sampling import Sampler
from gemma_py.generate.speculation import MOST_GUESSES, Pace
from gemma_py.progress import ReportProgress
from gemma_py.runtime.cache import Cache, bytes_needed
from gemma_py.runtime.program import link
from gemma_py.runtime.runner import CHUNK, Runner
from gemma_py.tokenizer import Tokenizer
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.pack import PackedArrays, matrix_bytes
from gemma_py.weights.store import packed_weights

# Target seconds of a draft-model pass over earlier tokens. The next token of the answer waits for such a pass.
_PASS_SECONDS = 0.1
_FEWEST_ROWS = 8  # a pass over earlier tokens computes at least this many, if so many are pending
_KEEP = MOST_GUESSES + 1  # the most tokens that are removed from a cache after wrong guesses
CacheOf = Callable[[], Cache | None]  # returns the main model's KV cache of a sequence, or None if there is none yet
_MOST_FAILURES = 2  # after so many failed passes in a row, no answer uses the draft model


class GuessingModel(ABC):
    """A model that guesses tokens for the main model, on the main model's worker team.

    share: the size of the model's weights, as a share of the main model's weights.
    failures: the number of passes that failed.
    """

    def __init__(self, checkpoint: Checkpoint, runner: Runner, main: Runner) -> None:
        """runner: runs this model's passes. main: runs the main model's passes."""
        self.checkpoint, self.runner = checkpoint, runner
        self.share = _weight_bytes(runner.program.model.weights) / _weight_bytes(main.program.model.weights)
        self.failures = self._failures_in_a_row = 0

    @abstractmethod
    def sequence(self, cache: CacheOf) -> "GuessedSequence":
        """Return the state that this model keeps for a new sequence of the main model."""

    @abstractmethod
    def cache_bytes(self, tokens: int) -> int:
        """Return the size of this model's KV cache for a sequence of `tokens` tokens."""

    @property
    def usable(self) -> bool:
        return self._failures_in_a_row < _MOST_FAILURES

    def note_success(self) -> None:
        self._failures_in_a_row = 0

    def note_failure(self, error: Exception) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        message = f"the draft model failed, and the answer continues without its guesses: {error}"
        warnings.warn(message, GemmaWarning, stacklevel=2)


class GuessedSequence(Protocol):
    """The state that a guessing model keeps for a sequence of the main model."""

    def drafter(self, pace: Pace, prompt: Sequence[int], sampler: Sampler) -> DrafterOfModel:
        """Return the drafter of an answer to this prompt. sampler: chooses the tokens of the answer."""


class DraftModel(GuessingModel):
    """A smaller model of the same vocabulary, with KV caches of its own."""

    def __init__(self, checkpoint: Checkpoint, main: Runner, quant: str | None, progress: ReportProgress) -> None:
        """main: the runner of the main model, whose worker team the draft model uses."""
        self.config = checkpoint.config
        program = link(checkpoint.family.program(self.config), packed_weights(checkpoint, quant, progress))
        super().__init__(checkpoint, Runner(program, self.config, main.shared, main.kv), main)
        self._vocab_size = main.config.vocab_size

    def sequence(self, cache: CacheOf) -> "DraftSequence":
        return DraftSequence(self)

    def new_cache(self) -> Cache:
        return self.runner.cache(_KEEP)

    def cache_bytes(self, tokens: int) -> int:
        return bytes_needed(self.config, self.runner.kv, min(tokens, self.config.max_position_embeddings), CHUNK, _KEEP)

    def run(self, cache: Cache, tokens: list[int]) -> np.ndarray:
        """Append tokens to a cache. Return the last token's logits [V], where V is the main model's vocabulary.

        If the draft model's output matrix has fewer rows, the missing logits are -inf.
        """
        logits = self.runner.run(cache, tokens, False)
        self.note_success()
        missing = self._vocab_size - len(logits)
        return logits[: self._vocab_size] if missing <= 0 else np.append(logits, np.full(missing, -np.inf, np.float32))


def _weight_bytes(arrays: PackedArrays) -> int:
    return sum(matrix_bytes(arrays, number) for number in range(len(arrays.matrices)))


def check_draft(draft: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raise InputError if the draft model generates no text, or if it has another vocabulary than the main model.

    tokenizer, vocab_size: of the main model. If a tokenizer is missing, only the sizes of the vocabularies are compared.
    """
    if draft.config.embedding is not None:
        raise InputError(f"{draft.path}: a draft model should generate text, but this model computes embeddings")
    own = draft.tokenizer()
    if own is None or tokenizer is None:
        found, expected = draft.config.vocab_size, vocab_size
        same = found == expected
    else:
        found, expected = own.size, tokenizer.size
        same = own.same_pieces(tokenizer)
    if not same:
        raise InputError(
            f"{draft.path}: a draft model needs the vocabulary of the main model, which has {expected} tokens; "
            f"found {'another one with ' if found == expected else ''}{found} tokens"
        )


class DraftSequence:
    """The draft model's KV cache of one sequence. A conversation keeps the cache between answers."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.cache = model.new_cache()

    def drafter(self, pace: Pace, prompt: Sequence[int], sampler: Sampler) -> "ModelDrafter":
        return ModelDrafter(self, pace, prompt, sampler)

    def rewind(self, position: int) -> None:
        """Remove the tokens from this position on. If KV rows of earlier tokens are overwritten, remove all tokens."""
        if self.cache.abandoned or not self.cache.can_rewind_to(min(position, self.cache.position)):
            self.cache = self.model.new_cache()
        elif position < self.cache.position:
            self.model.runner.rewind(self.cache, position)


class ModelDrafter:
    def __init__(self, sequence: DraftSequence, pace: Pace, prompt: Sequence[int], sampler: Sampler) -> None:
        self._sequence, self._pace, self._sampler = sequence, pace, sampler
        self._ids, self._prompt_tokens = list(prompt), len(prompt)
        self._equal = 0  # so many tokens at the beginning of the cache are known to equal prompt and answer
        self._ended = False  # whether the draft model guesses no more tokens of this answer

    def extend(self, token: int) -> None:
        self._ids.append(token)

    @property
    def room(self) -> int:
        """The most tokens that the draft model can guess now."""
        model = self._sequence.model
        return 0 if self._ended or not model.usable else model.config.max_position_embeddings - len(self._ids) + 1

    @property
    def pending(self) -> int:
        """The number of known tokens that are not in the draft model's cache."""
        ids, known = self._sequence.cache.ids, self._ids
        end = min(len(ids), len(known))
        while self._equal < end and ids[self._equal] == known[self._equal]:
            self._equal += 1
        return len(known) - self._equal

    def guess(self, count: int) -> list[int]:
        """Guess the next `count` tokens.

        If the draft model fails, return the guesses before the failure. If many tokens are pending, compute a part of these
        tokens and return no guesses.
        """
        guesses: list[int] = []
        try:
            self._guess(guesses, min(count, self.room))
        # Whatever the error is, the answer can continue without guesses.
        except Exception as error:
            self._ended = True
            self._sequence.model.note_failure(error)
        return guesses

    def _guess(self, guesses: list[int], count: int) -> None:
        """Append guesses to the list, so that a failure leaves the earlier guesses in the list."""
        model, sequence = self._sequence.model, self._sequence
        # The last known token is computed again if it is in the cache, because its logits are needed.
        first = min(len(self._ids) - self.pending, len(self._ids) - 1)
        sequence.rewind(first)
        self._equal = sequence.cache.position
        rows = max(_FEWEST_ROWS, min(CHUNK, int(_PASS_SECONDS / self._pace.draft_row_seconds)))
        tokens, chosen = self._ids[self._equal : self._equal + rows], self._ids[self._prompt_tokens :]
        while len(guesses) < count:
            if max(tokens) >= model.config.vocab_size:
                self._ended = True
                return
            start = time.perf_counter()
            logits = model.run(sequence.cache, tokens)
            self._pace.measure_draft(len(tokens), time.perf_counter() - start)
            if sequence.cache.position < len(self._ids):
                return
            guesses.append(self._sampler.choose(logits, chosen))
            chosen.append(guesses[-1])
            tokens = guesses[-1:]
