"""Speculation: a pass computes the rows of guessed tokens too, if the guesses are worth the time.

A guess is used only if sampling chooses the same token. So speculation changes the speed, but no token.
"""

import math
from collections.abc import Sequence

from gemma_py.generate.drafting import Draft, Drafter

# The most guesses of a pass, whatever the number of its sequences: more than 16 rows would be a larger tile of a product.
MOST_GUESSES = 15
# A guess must gain this much more than it costs, because the estimates of gain and cost are inexact.
_MARGIN = 1.1
# The cost of a row before anything is measured, as a share of the time of a pass of one row.
_ROW_SHARE = 0.25
_ROW_WEIGHT = 0.5  # the weight of _ROW_SHARE against measurements, as a variance of the number of rows
_DECAY = 0.99  # of the weight of a pass with every later pass
# A pass counts as at most this multiple of its expected duration, because another process may delay a pass.
_LONGEST = 2.0
# The probability that a guess holds before any guess was checked, by the bucket of the matched length. In edits of source
# code and in answers of a small model, guesses hold a little more often.
_PRIORS = (0.2, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9, 0.95)
_PRIOR_PREDICTED = 0.7  # of a guess from the request's prediction
# Of the rates that all requests share, and of the rates of one answer: how many checks the first estimate counts for, and how
# many checks are remembered. An answer begins with the shared rates, and soon follows its own guesses.
_SHARED_WEIGHT, _SHARED_MEMORY = 2.0, 50.0
_OWN_WEIGHT, _OWN_MEMORY = 2.0, 20.0
_NO_DRAFT = Draft()


class _Rate:
    """How often guesses of one kind held. Earlier guesses count less."""

    def __init__(self, first: float, weight: float, memory: float) -> None:
        """first: an estimate before any check, which counts for `weight` checks."""
        self._held, self._checked, self._keep = first * weight, weight, 1 - 1 / memory

    @property
    def value(self) -> float:
        return self._held / self._checked

    def add(self, held: bool) -> None:
        self._held, self._checked = self._held * self._keep + held, self._checked * self._keep + 1


class Pace:
    """Learns how many seconds a row costs and how often guesses hold, and decides how many guesses a pass computes.

    The requests of an engine share a pace.
    """

    def __init__(self) -> None:
        self._rates = {
            (predicted, bucket): _Rate(_PRIOR_PREDICTED if predicted else prior, _SHARED_WEIGHT, _SHARED_MEMORY)
            for predicted in (False, True)
            for bucket, prior in enumerate(_PRIORS)
        }
        # Sums over passes, for a linear fit of seconds to rows: weights, rows, seconds, rows^2, rows * seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def chance(self, predicted: bool, matched: int) -> float:
        """Return the probability that a guess after `matched` equal tokens holds."""
        return self._rates[predicted, _bucket(matched)].value

    def check(self, predicted: bool, matched: int, held: bool) -> None:
        """Learn whether a guess held."""
        self._rates[predicted, _bucket(matched)].add(held)

    def measure(self, rows: int, seconds: float) -> None:
        """Learn the duration of a pass that only decodes."""
        if self._sums[0] > 1:
            fixed, row = self._cost()
            seconds = min(seconds, _LONGEST * (fixed + row * rows))
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = tuple(_DECAY * old + value for old, value in zip(self._sums, new, strict=True))  # type: ignore[assignment]

    def _cost(self) -> tuple[float, float]:
        """Return the estimated seconds of a pass without rows, and of a row."""
        weight, rows, seconds, squares, products = self._sums
        if weight == 0:
            return 1 - _ROW_SHARE, _ROW_SHARE
        rows, seconds = rows / weight, seconds / weight
        variance, covariance = squares / weight - rows * rows, products / weight - rows * seconds
        guessed = seconds * _ROW_SHARE / (1 - _ROW_SHARE + _ROW_SHARE * rows)
        row = (covariance + _ROW_WEIGHT * guessed) / (variance + _ROW_WEIGHT)
        row = min(max(row, 0.02 * seconds / rows), seconds / rows)
        return seconds - row * rows, row

    def allot(self, chances: Sequence[Sequence[float]], rows: int, least: float = 0.0) -> list[int]:
        """Return how many guesses to compute for each answer of a pass.

        chances: for each answer, the probabilities that the first guess holds, that the first two guesses hold, and so on.
        rows: the number of rows of the pass without guesses.
        least: the smallest probability of a guess that is computed.

        The likeliest guesses are taken as long as a guess adds more tokens a second than the pass has without the guess.
        """
        counts, expected = [0] * len(chances), float(len(chances))
        fixed, row = self._cost()
        while sum(counts) < MOST_GUESSES:
            chance, number = max(
                ((of_it[count], number) for number, (of_it, count) in enumerate(zip(chances, counts, strict=True))
                 if count < len(of_it)),
                default=(0.0, 0),
            )  # fmt: skip
            seconds = fixed + row * (rows + sum(counts))
            if chance <= least or chance * seconds <= _MARGIN * row * expected:
                break
            counts[number] += 1
            expected += chance
        return counts


def _bucket(matched: int) -> int:
    return min(len(_PRIORS) - 1, int(2 * math.log2(max(1, matched))))


class Speculation:
    """The guesses of one answer, and what became of them.

    passes: the passes that computed tokens of the answer.
    guessed, accepted: the guesses that were computed, and those of them that sampling chose too.
    predicted: the tokens of the answer that the request's prediction guessed, whether the guess was computed or not.
    """

    def __init__(self, drafter: Drafter | None, pace: Pace, first: Draft = _NO_DRAFT) -> None:
        """drafter: None for no guesses. first: the guess of the first token, which the prompt's pass predicts."""
        self._drafter, self._pace = drafter, pace
        self._draft, self._checked = first, 0
        self._rates: dict[tuple[bool, int], _Rate] = {}  # of the guesses of this answer
        self.passes = self.guessed = self.accepted = self.predicted = 0

    def chances(self, most: int) -> list[float]:
        """Draft up to `most` guesses. Return the probabilities that the first holds, that the first two hold, and so on."""
        if self._drafter is None or most < 1:
            self._draft, self._checked = _NO_DRAFT, 0
            return []
        # One guess more than the pass can compute, because the pass chooses one token more than it has guesses.
        most = min(most, MOST_GUESSES)
        self._draft, self._checked = self._drafter.propose(most + 1), 0
        made, chance = [], 1.0
        for number in range(min(most, len(self._draft.tokens))):
            chance *= self._rate(self._draft.matched + number).value
            made.append(chance)
        return made

    def _rate(self, matched: int) -> _Rate:
        """Return the rate of this answer's guesses after `matched` equal tokens."""
        predicted, bucket = self._draft.predicted, _bucket(matched)
        if (predicted, bucket) not in self._rates:
            self._rates[predicted, bucket] = _Rate(self._pace.chance(predicted, matched), _OWN_WEIGHT, _OWN_MEMORY)
        return self._rates[predicted, bucket]

    def guesses(self, count: int) -> list[int]:
        """Return the first guesses of the draft, for a pass."""
        return list(self._draft.tokens[:count])

    def computed(self, guesses: int) -> None:
        """Count a pass that computed a token of the answer and so many guesses."""
        self.passes += 1
        self.guessed += guesses

    def extend(self, token: int) -> None:
        """Append a token to the answer, and learn whether it was guessed."""
        if self._drafter is None:
            return
        self._drafter.extend([token])
        draft = self._draft
        if self._checked < len(draft.tokens):
            held = draft.tokens[self._checked] == token
            self._rate(draft.matched + self._checked).add(held)
            self._pace.check(draft.predicted, draft.matched + self._checked, held)
            self.predicted += held and draft.predicted
            self._checked = self._checked + 1 if held else len(draft.tokens)
