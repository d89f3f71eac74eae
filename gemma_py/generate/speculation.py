"""Speculation: a pass computes the rows of guessed tokens too, if the guesses are worth the time.

A guess holds if sampling chooses the guessed token. Only then is the guess used, so speculation changes the speed, but no
token.
"""

import math
from collections.abc import Sequence

from gemma_py.generate.drafting import Draft, Drafter, DrafterOfModel
from gemma_py.kernels.matmul import BYTE_ROWS, MAX_BYTE_ROWS, MAX_FEW_ROWS

# The most guesses of a pass, for all its sequences together.
MOST_GUESSES = 15
# A guess must gain more than this multiple of its cost, because the estimates of gain and cost are inexact.
_MARGIN = 1.1
# The multiple in a pass of several answers. An answer that ends early thanks to its guesses leaves later passes with fewer rows, and
# these take more time for a token: with 1.1, eight answers at temperature 0.8 took longer together than without guesses.
_MARGIN_TOGETHER = 1.5
# The first estimate of the time that each row takes, as a share of the time of a pass of one row. The rest of a pass's time
# does not depend on the number of rows.
_ROW_SHARE = 0.17
# In the linear fit, _ROW_SHARE weighs as much as measured passes whose numbers of rows have this variance.
_ROW_WEIGHT = 0.25
_DECAY = 0.99  # each measurement multiplies the weights of all earlier measurements by this factor
# A pass counts as at most this multiple of its expected duration, because another process may delay a pass.
_LONGEST = 2.0
# The first estimate of the probability that a guess holds, by the bucket of the matched length (see `_bucket`). In edits of
# source code and in answers of a small model, guesses hold a little more often.
_PRIORS = (0.2, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9, 0.95)
# The first estimates for guesses from the request's prediction and for guesses from the draft model.
_PRIOR_PREDICTED, _PRIOR_MODEL = 0.7, 0.7
# The share by which the rate of the draft model's guesses moves back to _PRIOR_MODEL: in each pass, and at the beginning of an
# answer. So the draft model is tried again some time after it was given up.
_FORGOTTEN, _FORGOTTEN_BETWEEN = 1 / 400, 1 / 10
# WEIGHT: how many checks the first estimate of a rate counts for. MEMORY: about how many checks a rate remembers. All requests
# share the SHARED rates. The OWN rates of an answer begin with the SHARED rates, and soon follow the answer's own guesses.
_SHARED_WEIGHT, _SHARED_MEMORY = 2.0, 50.0
_OWN_WEIGHT, _OWN_MEMORY = 2.0, 20.0
# The WEIGHT of the draft model's rates, so that a good draft model is not given up after two wrong guesses.
_MODEL_WEIGHT = 4.0
_LIKELY_TOKENS = 32  # how many tokens are expected to follow at the beginning of an answer
_NO_DRAFT = Draft()


def computed_rows(rows: int) -> int:
    """Return how many rows a product of quantised weights computes for `rows` rows, because a tile has several rows."""
    return -(-rows // BYTE_ROWS) * BYTE_ROWS if MAX_FEW_ROWS < rows <= MAX_BYTE_ROWS else rows


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

    def forget(self, share: float, first: float) -> None:
        """Move the rate by this share towards the estimate `first`."""
        self._held += share * (first * self._checked - self._held)


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
        self.model_rate = _Rate(_PRIOR_MODEL, _MODEL_WEIGHT, _SHARED_MEMORY)
        self.draft_share = 1.0  # the estimated cost of the draft model's passes, as a share of the main model's
        # The draft model's seconds for a pass that gives a guess, and for a row of a longer pass; 0 before the first measurement.
        self._draft_pass = self._draft_row = 0.0
        # Weighted sums over passes, for a linear fit of seconds to computed rows: 1, rows, seconds, rows^2, rows * seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def chance(self, predicted: bool, matched: int) -> float:
        """Return the probability that a guess after `matched` equal tokens holds."""
        return self._rates[predicted, _bucket(matched)].value

    def check(self, predicted: bool, matched: int, held: bool) -> None:
        """Learn whether a guess held. matched: how many tokens before the guess equal those before the copied token."""
        self._rates[predicted, _bucket(matched)].add(held)

    def measure(self, rows: int, seconds: float) -> None:
        """Learn the duration of a pass that only decodes."""
        if self._sums[0] > 1:
            fixed, row = self._cost()
            seconds = min(seconds, _LONGEST * (fixed + row * computed_rows(rows)))
        rows = computed_rows(rows)
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = tuple(_DECAY * old + value for old, value in zip(self._sums, new, strict=True))  # type: ignore[assignment]

    def _cost(self) -> tuple[float, float]:
        """Return the estimated seconds of a pass without rows, and of a row.

        Both numbers come from a linear fit to the measured passes. Measured passes of equally many rows do not show how long a
        row takes, so _ROW_SHARE is a part of the fit.
        """
        weight, rows, seconds, squares, products = self._sums
        if weight == 0:
            return 1 - _ROW_SHARE, _ROW_SHARE
        rows, seconds = rows / weight, seconds / weight
        variance, covariance = squares / weight - rows * rows, products / weight - rows * seconds
        guessed = seconds * _ROW_SHARE / (1 - _ROW_SHARE + _ROW_SHARE * rows)
        row = (covariance + _ROW_WEIGHT * guessed) / (variance + _ROW_WEIGHT)
        row = min(max(row, 0.02 * seconds / rows), seconds / rows)
        return seconds - row * rows, row

    @property
    def draft_seconds(self) -> float:
        """The estimated seconds of the draft model's pass, which gives one guess."""
        return self._draft_pass or self.draft_share * sum(self._cost())

    @property
    def draft_row_seconds(self) -> float:
        """The estimated seconds of a row in the draft model's passes of many rows."""
        return self._draft_row or _ROW_SHARE * self.draft_seconds

    def measure_draft(self, rows: int, seconds: float) -> None:
        if rows <= 2:
            if self._sums[0] == 0:
                return  # `draft_seconds` is no time yet, because no pass of the main model was measured
            old = self.draft_seconds
            self._draft_pass = old + 0.1 * (min(seconds, _LONGEST * old) - old)
        else:
            self._draft_row += (0.2 if self._draft_row else 1.0) * (seconds / rows - self._draft_row)

    def tokens_a_second(self, chances: Sequence[float], seconds: float = 0.0) -> float:
        """Return the tokens per second of a single answer, with the best number of guesses in a pass.

        seconds: the seconds that it takes to draft a guess
        """
        fixed, row = self._cost()
        expected = 1.0
        best = expected / (fixed + row * computed_rows(1))
        for number, chance in enumerate(chances, 1):
            expected += chance
            best = max(best, expected / (fixed + row * computed_rows(1 + number) + number * seconds))
        return best

    def allot(
        self, chances: Sequence[Sequence[float]], rows: int, least: float = 0.0, drafting: Sequence[float] = ()
    ) -> list[int]:
        """Return how many guesses to compute for each answer of a pass.

        chances: for each answer, the probabilities that the first guess holds, that the first two guesses hold, and so on.
        rows: the number of rows of the pass without guesses.
        least: the smallest probability of a guess that is computed.
        drafting: for each answer, the seconds that it takes to draft a guess; by default 0.

        Guesses are tried in the order of gain per cost, and the number of guesses with the most tokens per second is chosen.
        One guess may not be worth its time although several are, because a matrix product computes whole tiles of rows.
        """
        counts, expected = [0] * len(chances), float(len(chances))
        fixed, row = self._cost()
        margin = _MARGIN if len(chances) == 1 else _MARGIN_TOGETHER
        drafts = list(drafting) or [0.0] * len(chances)
        costs, drafted = [row + more for more in drafts], 0.0
        chosen, chosen_expected, chosen_seconds = list(counts), expected, fixed + row * computed_rows(rows)
        for more in range(1, MOST_GUESSES + 1):
            _, number = max(
                ((own[count] / costs[number], number)
                 for number, (own, count) in enumerate(zip(chances, counts, strict=True))
                 if count < len(own) and own[count] > least),
                default=(0.0, None),
            )  # fmt: skip
            if number is None:
                break
            expected += chances[number][counts[number]]
            counts[number] += 1
            drafted += drafts[number]
            seconds = fixed + row * computed_rows(rows + more) + drafted
            gain, cost = expected / chosen_expected - 1, seconds / chosen_seconds - 1
            if gain > margin * cost:
                chosen, chosen_expected, chosen_seconds = list(counts), expected, seconds
        return chosen


def _bucket(matched: int) -> int:
    return min(len(_PRIORS) - 1, int(2 * math.log2(max(1, matched))))


class Speculation:
    """The guesses of one answer, and how many of them held.

    passes: the passes that computed tokens of the answer.
    guessed, accepted: the number of guesses that were computed, and the number of computed guesses that held.
    predicted: the tokens of the answer that the request's prediction guessed, whether the guess was computed or not.
    drafting: the seconds that it takes to draft a guess of the kind that `chances` chose.
    """

    def __init__(self, drafter: Drafter | None, pace: Pace, first: Draft = _NO_DRAFT) -> None:
        """drafter: None for no guesses. first: the guess of the first token, which is compared, but not computed."""
        self._drafter, self._pace = drafter, pace
        self._draft, self._checked = first, 0
        self._forced = 0  # how many of the draft's first guesses a grammar forces
        self._copied = 0  # the index of the draft's first guess that is copied from earlier text
        self._rates: dict[tuple[bool, int], _Rate] = {}  # this answer's rates, by (predicted, bucket)
        self._model: DrafterOfModel | None = None
        self._model_rate = pace.model_rate
        self._tokens = 0  # the length of the answer
        self.passes = self.guessed = self.accepted = self.predicted = 0
        self.drafting = 0.0

    def use_model(self, model: DrafterOfModel) -> None:
        """Let a draft model guess too, unless the request wants no guesses."""
        if self._drafter is not None:
            self._pace.model_rate.forget(_FORGOTTEN_BETWEEN, _PRIOR_MODEL)
            self._model, self._model_rate = model, _Rate(self._pace.model_rate.value, _MODEL_WEIGHT, _OWN_MEMORY)

    def chances(self, most: int, forced: Sequence[int] = ()) -> list[float]:
        """Choose the source of up to `most` guesses: earlier text, or the draft model if it is expected to give more tokens
        a second. Return the probabilities that the first guess holds, that the first two guesses hold, and so on.

        forced: the next tokens, if a grammar allows no others. Guesses copied from earlier text follow the forced tokens,
        because the draft model knows no grammar.
        """
        self._draft, self._checked, self._forced, self._copied, self.drafting = _NO_DRAFT, 0, 0, 0, 0.0
        if self._drafter is None or most < 1:
            return []
        # Propose one guess more than the pass computes. The pass also chooses the token after its last guess, and `extend`
        # learns from that token whether the additional guess held.
        limit = min(most, MOST_GUESSES)
        self._draft = self._drafter.propose(limit + 1)
        if forced:
            self._force(forced, limit + 1)
        made, chance = [], 1.0
        for number in range(min(limit, len(self._draft.tokens))):
            chance *= self._chance(number)
            made.append(chance)
        if self._model is None or forced:
            return made
        self._model_rate.forget(_FORGOTTEN, _PRIOR_MODEL)
        rate, seconds = self._model_rate.value, self._pace.draft_seconds
        by_model = [rate**number for number in range(1, min(limit, self._model.room) + 1)]
        if self._model_gains(made, by_model, most):
            self._draft, self.drafting = Draft(model=True), seconds
            return by_model
        return made

    def _force(self, forced: Sequence[int], most: int) -> None:
        """Let the draft begin with tokens that a grammar forces."""
        assert self._drafter is not None
        tokens = tuple(forced[:most])
        self._forced = len(tokens)
        if self._draft.tokens[: len(tokens)] != tokens:
            copied, self._copied = self._drafter.propose(most - len(tokens), tokens), len(tokens)
            self._draft = copied._replace(tokens=(*tokens, *copied.tokens))

    def _chance(self, number: int) -> float:
        """Return the probability that a guess of the draft holds if the guesses before it hold."""
        return 1.0 if number < self._forced else self._rate(self._matched(number)).value

    def _matched(self, number: int) -> int:
        """Return how many tokens before guess `number` equal the tokens before the text from which the guess is copied."""
        return self._draft.matched + number - self._copied

    def _model_gains(self, copied: Sequence[float], by_model: Sequence[float], most: int) -> bool:
        """Return whether the draft model's guesses are expected to save time.

        The draft model may first have to compute pending tokens, for example the prompt. These must take less time than the
        guesses will save. The rest of the answer is expected to be as long as the answer so far.
        """
        assert self._model is not None
        pace = self._pace
        before, after = pace.tokens_a_second(copied), pace.tokens_a_second(by_model, pace.draft_seconds)
        if after <= before:
            return False
        saved = (1 / before - 1 / after) * min(most, _LIKELY_TOKENS + self._tokens)
        pending = self._model.pending
        return pending <= MOST_GUESSES + 1 or pending * pace.draft_row_seconds < saved

    def _rate(self, matched: int) -> _Rate:
        """Return the rate of this answer's guesses after `matched` equal tokens, or of the draft model's guesses."""
        if self._draft.model:
            return self._model_rate
        predicted, bucket = self._draft.predicted, _bucket(matched)
        if (predicted, bucket) not in self._rates:
            self._rates[predicted, bucket] = _Rate(self._pace.chance(predicted, matched), _OWN_WEIGHT, _OWN_MEMORY)
        return self._rates[predicted, bucket]

    def guesses(self, count: int) -> list[int]:
        """Return up to `count` guesses for a pass. Only a draft model may give fewer guesses than `chances` announced."""
        if self._draft.model and self._model is not None and count:
            self._draft = Draft(tuple(self._model.guess(count)), model=True)
        return list(self._draft.tokens[:count])

    def computed(self, guesses: int) -> None:
        """Count a pass, which computed one token of the answer and `guesses` guesses."""
        self.passes += 1
        self.guessed += guesses

    def extend(self, token: int) -> None:
        """Append a token to the answer, and learn whether it was guessed."""
        if self._drafter is None:
            return
        self._tokens += 1
        self._drafter.extend([token])
        if self._model is not None:
            self._model.extend(token)
        draft, number = self._draft, self._checked
        if number < len(draft.tokens):
            held = draft.tokens[number] == token
            if number >= self._forced:
                self._rate(self._matched(number)).add(held)
                if draft.model:
                    self._pace.model_rate.add(held)
                else:
                    self._pace.check(draft.predicted, self._matched(number), held)
            self.predicted += held and draft.predicted and number >= self._copied
            self._checked = number + 1 if held else len(draft.tokens)
