"""Sessions: a sequence of tokens and its KV cache."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gemma_py.errors import InputError
from gemma_py.generate.core import Generation, whole
from gemma_py.runtime.cache import check_context

if TYPE_CHECKING:
    from gemma_py.generate.engine import Engine


class Session:
    """A sequence of tokens and its KV cache."""

    def __init__(self, engine: "Engine", keep: int = 0) -> None:
        self.engine = engine
        self._cache = engine.runner.cache(whole("keep", keep))
        self._draft = None if engine.draft is None else engine.draft.sequence(lambda: self._cache)

    @property
    def ids(self) -> list[int]:
        return self._cache.ids.copy()

    @property
    def position(self) -> int:
        return self._cache.position

    def kv_rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a layer's keys and values, each f32 [positions, G, E], for the positions that later tokens attend to.

        number: the index of the layer in `Config.kv_owners`
        """
        return self._cache.rows(number)

    def prefill(self, ids: Sequence[int], chunk: int | None = None, all_logits: bool = False) -> np.ndarray:
        """Append tokens. Return the logits of the last token, float32 [V]; with all_logits, of every token, [T, V].

        chunk: the number of tokens in a pass, which changes speed and memory, but not the logits.

        If a worker thread fails, WorkerError is raised, and the session keeps only the tokens of earlier chunks. If the
        thread stalled and is still running, every later call raises InputError.
        """
        engine, runner = self.engine, self.engine.runner
        tokens = engine.check_ids(ids)
        size = runner.chunk if chunk is None else whole("chunk", chunk, 1)
        check_context(engine.context, len(tokens), after=self.position)
        rows = []
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            ahead = len(tokens) - first - len(part)
            rows.append(runner.run(self._cache, part, all_logits, limit=engine.context, ahead=ahead))
        return np.concatenate(rows) if len(rows) > 1 and all_logits else rows[-1]

    def decode(self, token_id: int) -> np.ndarray:
        """Append one token. Return the logits of the token, float32 [V]."""
        engine = self.engine
        return engine.runner.run(self._cache, engine.check_ids([token_id]), False, limit=engine.context)

    def verify(self, token_id: int, guesses: Sequence[int]) -> np.ndarray:
        """Append one token, and compute guesses after the token in the same pass. Return the logits of the token and of each
        guess, [1 + guesses, V].

        The guesses are not appended; `accept` appends those that are equal to the tokens chosen from the logits.
        """
        tokens = self.engine.check_ids([token_id, *guesses])
        return self.engine.runner.run(
            self._cache, tokens, True, limit=self.engine.context, guesses=len(tokens) - 1
        )  # fmt: skip

    def accept(self, ids: Sequence[int]) -> None:
        """Append the first guesses of the last call of `verify`, which must be equal to these ids."""
        self.engine.runner.accept(self._cache, ids)

    def reserve(self, tokens: int) -> None:
        """Allocate KV cache for this many more tokens, so that later passes need not reallocate."""
        self.engine.runner.reserve(self._cache, min(whole("tokens", tokens), self.engine.context - self.position))

    def rewind(self, position: int) -> None:
        """Remove the tokens from this position on, as if they had never been added.

        A position can always be reached if it is at most `keep` below the largest position that the session has ever had. For
        an earlier position, the KV rows that the next token needs must still be stored. In a sliding-window layer, these rows
        may be overwritten; then InputError is raised (see `can_rewind_to`).
        """
        self.engine.runner.rewind(self._cache, whole("position", position, None))

    @property
    def usable(self) -> bool:
        """False after a worker thread stalled, because that thread may still write to the KV cache."""
        return not self._cache.abandoned

    def can_rewind_to(self, position: int) -> bool:
        return self._cache.can_rewind_to(whole("position", position, None))

    def raw_kv_rows(self, since: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Return an iterator over the keys and values of each layer, [G, positions, E] in the type of the KV cache.

        since: leave out rows that no token after this position attends to. Layers that read another layer's KV rows are
        skipped.
        """
        if not self.can_rewind_to(since):
            raise InputError(f"cannot rewind from position {self.position} to {since}: KV rows are overwritten")
        return (self._cache.raw_rows(number, since) for number in range(len(self.engine.config.kv_owners)))

    def restore(self, ids: Sequence[int], kv_rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Fill an empty session with another session's token ids and `raw_kv_rows`. If these do not fit together, raise
        InputError.
        """
        if self.position:
            raise InputError(f"restore needs an empty session, found one with {self.position} tokens")
        tokens = self.engine.check_ids(ids)
        check_context(self.engine.context, len(tokens))
        self._cache.restore(tokens, kv_rows)

    def kv_digest(self) -> list[str]:
        """Return, for each layer, the sha256 of the KV rows that later tokens attend to.

        These are the last W - 1 rows of a layer with a sliding window of W positions, and all rows of any other layer. The rows
        are hashed as little-endian float32 [positions, G, E], keys before values.
        """
        return self.engine.runner.digest(self._cache)


class Decoder:
    """Decodes the tokens of an answer in a session. A pass may also compute guesses of the next tokens. The logits of the
    guesses that turn out to be right then need no pass of their own.
    """

    def __init__(self, session: Session, generation: Generation) -> None:
        self._session, self._generation = session, generation
        if session._draft is not None:
            generation.use_draft_model(session._draft)
        self._guesses: list[int] = []  # guesses of the last pass that may follow the session's tokens
        self._logits: list[np.ndarray] = []  # the logits [V] of each of these guesses

    def decode(self, token: int) -> np.ndarray:
        """Append the token that was chosen last. Return the logits of the token, [V]."""
        speculation = self._generation.speculation
        if self._guesses and self._guesses[0] == token:
            self._session.accept([token])
            speculation.accepted += 1
            del self._guesses[0]
            return self._logits.pop(0)
        self._guesses, self._logits = [], []
        pace = self._session.engine.pace
        chances = self._generation.guess_chances()
        (count,) = pace.allot([chances], 1, drafting=[speculation.drafting])
        guesses = speculation.guesses(count)
        start = time.perf_counter()
        logits = list(self._session.verify(token, guesses)) if guesses else [self._session.decode(token)]
        pace.measure(len(logits), time.perf_counter() - start)
        speculation.computed(len(guesses))
        self._guesses, self._logits = guesses, logits[1:]
        return logits[0]
