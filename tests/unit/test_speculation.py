import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from gemma_py.generate import speculation
from gemma_py.generate.drafting import Draft, Lookup, SuffixIndex, warm_up
from gemma_py.generate.speculation import MOST_GUESSES, Pace, Speculation


def longest_repeated_suffix(text: list[int]) -> tuple[int, set[int]]:
    """Return the length of the longest repeated suffix, and the positions after its earlier occurrences."""
    for length in range(len(text) - 1, 0, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if ends:
            return length, set(ends)
    return 0, set()


def test_the_index_finds_the_longest_repeated_suffix() -> None:
    rng = random.Random(1)
    for _ in range(150):
        vocabulary = rng.choice([1, 2, 3, 10])
        text = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 50))]
        index, at = SuffixIndex(), 0
        while at < len(text):
            part = text[at : at + rng.randint(1, 7)]
            index.extend(part)
            at += len(part)
            tokens, matched, first = index.continuation(5)
            length, ends = longest_repeated_suffix(text[:at])
            assert matched == length
            assert len(tokens) == (5 if length else 0)
            if length:
                assert first in ends
                assert tokens == [text[first + n % (at - first)] for n in range(5)]


def test_the_index_looks_ahead_of_its_text() -> None:
    """The suffix may end with tokens `ahead` of the text. These are not added to the text."""
    rng = random.Random(5)
    for _ in range(300):
        vocabulary = rng.choice([1, 2, 3, 10])
        text = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 40))]
        ahead = [rng.randrange(vocabulary + 1) for _ in range(rng.randint(1, 6))]
        index = SuffixIndex()
        index.extend(text)
        before = index.continuation(5)
        tokens, matched, first = index.continuation(7, ahead)
        whole = [*text, *ahead]
        ends = {
            length: {end for end in range(length, len(text) + 1) if whole[end - length : end] == whole[-length:]}
            for length in range(1, len(whole))
        }
        assert matched == max((length for length in ends if ends[length]), default=0)
        assert len(tokens) == (7 if matched else 0)
        if matched:
            assert first in ends[matched]
            assert tokens == [whole[first + n % (len(whole) - first)] for n in range(7)]
        assert index.continuation(5) == before


@pytest.mark.parametrize("vocabulary", [1, 2, 1000, 262_144])
def test_a_long_text_is_indexed_within_its_capacity(vocabulary: int) -> None:
    rng = random.Random(2)
    text = [rng.randrange(vocabulary) for _ in range(3000)]
    whole, parts = SuffixIndex(), SuffixIndex()
    whole.extend(text)
    for token in text:
        parts.extend([token])
    assert whole.continuation(9) == parts.continuation(9)
    states, edges = whole._counts[:2]
    assert states <= 2 * len(text) + 1
    assert edges <= 3 * len(text) + 1


def test_the_index_is_fast() -> None:
    """Adding a token takes at most 1 microsecond of CPU time, and a token with a proposal at most 20."""
    warm_up()
    rng = random.Random(3)
    words = [[rng.randrange(20_000) for _ in range(rng.randint(1, 6))] for _ in range(500)]
    text = [token for _ in range(6000) for token in words[min(499, int(rng.paretovariate(0.6)))]][:16_000]
    lookup, before = Lookup(text), time.thread_time()
    lookup.propose(MOST_GUESSES)
    assert time.thread_time() - before < 16_000 * 1e-6
    before = time.thread_time()
    for token in text[:1000]:
        lookup.extend([token])
        lookup.propose(MOST_GUESSES)
    assert time.thread_time() - before < 1000 * 20e-6


def test_guesses_are_the_tokens_after_the_latest_occurrence() -> None:
    lookup = Lookup([1, 2, 3, 4, 1, 2, 5, 6])
    assert lookup.propose(3) == Draft()
    lookup.extend([1, 2])
    assert lookup.propose(3) == Draft((5, 6, 1), 2)
    lookup.extend([3])
    assert lookup.propose(9) == Draft((4, 1, 2, 5, 6, 1, 2, 3, 4), 3)


def test_a_prediction_is_guessed_from_the_beginning_and_after_a_deviation() -> None:
    lookup = Lookup([9, 8, 7], prediction=[1, 2, 3, 4, 5, 6])
    assert lookup.propose(3) == Draft((1, 2, 3), 1, predicted=True)
    lookup.extend([1, 2])
    assert lookup.propose(9) == Draft((3, 4, 5, 6), 3, predicted=True)  # the proposal ends with the prediction
    lookup.extend([50, 4])
    assert lookup.propose(9) == Draft((5, 6), 1, predicted=True)
    lookup.extend([9])
    assert lookup.propose(2) == Draft((8, 7), 1)


def of_tiles(rows: int) -> int:
    return -(-rows // 4) * 4


@pytest.fixture
def single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "computed_rows", lambda rows: rows)


def learned(held: float, rows: float = 0.25, checks: int = 60) -> Pace:
    """A pace that has measured passes and checked guesses.

    held: the share of right guesses. rows: the cost of a further row, divided by the cost of a pass of one row.
    """
    pace, rng = Pace(), random.Random(4)
    for number in range(checks):
        count = 1 + number % 5
        pace.measure(count, 0.01 * (1 + rows * (speculation.computed_rows(count) - 1)))
        for matched in (1, 3, 30):
            pace.check(False, matched, rng.random() < held)
    return pace


def chances(pace: Pace, matched: int = 30) -> list[float]:
    one = pace.chance(False, matched)
    return [one**n for n in range(1, MOST_GUESSES + 1)]


@pytest.mark.usefixtures("single_rows")
def test_the_number_of_guesses_follows_from_gain_and_cost() -> None:
    assert learned(1.0).allot([chances(learned(1.0))], 1) == [MOST_GUESSES]
    assert learned(0.0).allot([chances(learned(0.0))], 1) == [0]
    (some,) = learned(0.7).allot([chances(learned(0.7))], 1)
    assert 1 <= some <= 5
    # A further row costs nearly as much as a further pass.
    assert learned(0.7, rows=0.9).allot([chances(learned(0.7))], 1) == [0]
    assert learned(0.7, rows=0.02).allot([chances(learned(0.7))], 1) > [some]


def test_guesses_fill_tiles_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 1 row takes as long as a product of 4 rows, and 9 rows take as long as 12. So a single answer gets
    three guesses for free. Beside eight answers, one guess costs as much as four.
    """
    monkeypatch.setattr(speculation, "computed_rows", of_tiles)
    pace, none = learned(0.9, rows=0.15), list[float]()
    assert pace.allot([[0.3, 0.2, 0.1, 0.05]], 1) == [3]
    assert pace.allot([[0.9, 0.4], *[none] * 7], 8) == [0] * 8
    assert pace.allot([[0.99, 0.98, 0.97, 0.96, 0.1], *[none] * 7], 8)[0] == 4
    assert pace.tokens_a_second([0.5]) == pytest.approx(1.5 * pace.tokens_a_second([]))


@pytest.mark.usefixtures("single_rows")
def test_beside_other_answers_only_likely_guesses_are_computed() -> None:
    pace = learned(0.9, rows=0.15)
    none: list[float] = []
    assert pace.allot([[0.6, 0.5], *[none] * 7], 8) == [0] * 8
    assert pace.allot([[0.6, 0.5]], 1) > [0]
    assert pace.allot([[0.99, 0.98], [0.3], *[none] * 6], 8)[:2] == [2, 0]
    assert sum(learned(0.9, rows=0.03).allot([[1.0] * 15] * 8, 8)) == MOST_GUESSES
    assert pace.allot([[0.6, 0.4]], 1, least=0.5) == [1]
    assert pace.allot([], 5) == []


# The time of a pass by its rows, as multiples of a pass of one row, measured with the demo model (docs/performance.md).
ZEN_4 = {1: 1.0, 2: 1.06, 4: 1.17, 8: 1.78, 16: 3.4}
XEON = {1: 1.0, 2: 1.13, 4: 1.12, 8: 1.54, 16: 2.45}


def computed_together(answers: int, costs: dict[int, float], held: float, seed: int) -> float:
    """Return the time until answers of 128 tokens are complete, as a multiple of the time without guesses.

    In most passes, an answer has guesses; those of the first answers hold with the given probability, those of the others rarely.
    """
    generator = np.random.default_rng(seed)
    pace, left, seconds = Pace(), [128] * answers, 0.0
    while any(left):
        running = [number for number in range(answers) if left[number]]
        rates = [held if number < answers // 2 else 0.3 for number in running]
        chances = [[rate**n for n in range(1, min(8, left[k]))] for rate, k in zip(rates, running, strict=True)]
        counts = pace.allot(chances, len(running))
        for number, rate, count in zip(running, rates, counts, strict=True):
            wrong = np.flatnonzero(generator.random(count) >= rate)
            left[number] -= 1 + (int(wrong[0]) if len(wrong) else count)
        rows = len(running) + sum(counts)
        taken = float(np.interp(speculation.computed_rows(rows), [*costs, 32], [*costs.values(), 2 * costs[16]]))
        pace.measure(rows, taken)
        seconds += taken
    return seconds / (128 * np.interp(answers, [*costs], [*costs.values()]))


@pytest.mark.parametrize("costs", [ZEN_4, XEON], ids=["zen4", "xeon"])
@pytest.mark.parametrize("held", [0.5, 0.7, 0.8, 0.9])
def test_guesses_do_not_delay_the_last_of_several_answers(costs: dict[int, float], held: float) -> None:
    ratios = [computed_together(8, costs, held, seed) for seed in range(8)]
    assert np.median(ratios) < 1.02, ratios


def test_a_pass_that_was_delayed_hardly_changes_the_cost() -> None:
    pace, delayed = learned(0.7), learned(0.7)
    delayed.measure(5, 100.0)
    assert delayed._cost()[1] < 1.6 * pace._cost()[1]


def test_wrong_guesses_are_given_up_and_right_ones_resumed() -> None:
    """The pace also learns from guesses that no pass computes, so right guesses are noticed again at no cost."""
    pace, computed = Pace(), 0

    class Drafts:
        right = False

        def extend(self, tokens: list[int]) -> None: ...

        def propose(self, k: int, ahead: Sequence[int] = ()) -> Draft:
            return Draft((1 if self.right else 2,) * k, 30)

    drafter = Drafts()
    answer = Speculation(drafter, pace)  # type: ignore[arg-type]
    for number in range(300):
        drafter.right = number >= 200
        (count,) = pace.allot([answer.chances(MOST_GUESSES)], 1)
        computed += count
        answer.extend(1)
        if number == 199:
            assert computed < 20
            assert count == 0
    assert count > 2


def test_forced_tokens_come_first_and_are_certain() -> None:
    pace = Pace()
    answer = Speculation(Lookup([1, 2, 3, 4, 5, 6, 7, 1, 2]), pace)
    rate = pace.chance(False, 2)
    assert answer.chances(4, [3, 4]) == [1.0, 1.0, pace.chance(False, 4), pace.chance(False, 4) * pace.chance(False, 5)]
    assert answer.guesses(4) == [3, 4, 5, 6]  # after the forced tokens 3, 4 come the tokens that followed 3, 4 earlier
    answer.extend(3)
    answer.extend(4)
    assert pace.chance(False, 2) == rate  # a forced token teaches nothing about guesses
    answer.extend(9)
    assert pace.chance(False, 4) < Pace().chance(False, 4)
    chances = answer.chances(4, [2, 3])
    assert answer.guesses(4) == [2, 3, 4, 9]  # after the forced tokens 2, 3 come the tokens that followed 2, 3 earlier
    assert chances[:2] == [1.0, 1.0] and chances[2] == pytest.approx(pace.chance(False, 2))
    assert answer.chances(2, [11, 12, 13]) == [1.0, 1.0]
    assert answer.guesses(9) == [11, 12, 13]


def test_forced_tokens_count_as_predicted_if_the_prediction_has_them() -> None:
    for forced, predicted in (([2, 3], 3), ([2, 9], 1)):
        answer = Speculation(Lookup([7, 8], [1, 2, 3, 4]), Pace())
        answer.chances(9, [1])
        answer.extend(1)
        answer.chances(9, forced)
        for token in forced:
            answer.extend(token)
        assert answer.predicted == predicted


def test_a_request_without_a_drafter_has_no_guesses() -> None:
    answer = Speculation(None, Pace())
    assert answer.chances(5) == [] and answer.guesses(5) == []
    answer.extend(1)
    assert (answer.guessed, answer.predicted) == (0, 0)


def test_no_guess_follows_the_last_token() -> None:
    lookup = Lookup([1, 2] * 20)
    answer = Speculation(lookup, Pace())
    assert len(answer.chances(3)) == 3
    assert answer.chances(0) == [] and answer.guesses(9) == []
    assert len(answer.chances(1000)) == speculation.MOST_GUESSES


# --- a draft model ----------------------------------------------------------------------------------------------------


class Model:
    """A draft model for the answer 1000, 1001, 1002, ..., which never repeats. The guesses are right while `right` is
    set.
    """

    def __init__(self, right: bool = True, pending: int = 1) -> None:
        self.right, self.room, self.pending, self.guessed, self._next = right, 100, pending, 0, 1000

    def extend(self, token: int) -> None:
        self._next = token + 1

    def guess(self, count: int) -> list[int]:
        self.guessed += count
        return [self._next + number if self.right else 2 for number in range(count)]


def answered(answer: Speculation, pace: Pace, tokens: int, first: int = 1000) -> list[int]:
    """Extend the answer by the tokens first, first + 1, ... Return the number of guesses in each pass."""
    counts, token = [], first
    while token < first + tokens:
        chances = answer.chances(first + tokens - token)
        (count,) = pace.allot([chances], 1, drafting=[answer.drafting])
        guesses = answer.guesses(count)
        counts.append(len(guesses))
        for guess in [*guesses, None]:
            answer.extend(token)
            token += 1
            if guess != token - 1:
                break
    return counts


def paced(draft_seconds: float) -> Pace:
    """A pass of the main model takes 10 ms, and a pass of the draft model takes `draft_seconds`."""
    pace = learned(0.0)
    for _ in range(50):
        pace.measure_draft(1, draft_seconds)
    return pace


def test_a_draft_model_that_is_fast_and_right_makes_the_guesses() -> None:
    pace, model = paced(0.0005), Model()
    answer = Speculation(Lookup([5]), pace)
    answer.use_model(model)
    counts = answered(answer, pace, 200)
    assert sum(counts) > 100
    assert max(counts) > 8


def test_a_draft_model_as_slow_as_the_main_model_is_not_used() -> None:
    pace, model = paced(0.01), Model()
    answer = Speculation(Lookup([5]), pace)
    answer.use_model(model)
    assert sum(answered(answer, pace, 200)) == model.guessed == 0
    unknown = learned(0.0)
    unknown.draft_share = 0.9  # the draft model's size relative to the main model's, for a first estimate of its time
    answer = Speculation(Lookup([5]), unknown)
    answer.use_model(model)
    assert sum(answered(answer, unknown, 200)) == model.guessed == 0


def test_wrong_guesses_of_a_draft_model_are_given_up_and_tried_again() -> None:
    pace, model = paced(0.001), Model(right=False)
    answer = Speculation(Lookup([5]), pace)
    answer.use_model(model)
    assert sum(answered(answer, pace, 300)) < 25
    again = sum(answered(answer, pace, 3000, 1300))
    assert 0 < again < 150  # tries of 1 ms, in 30 s
    later = [Speculation(Lookup([5]), pace) for _ in range(20)]
    model.right, model.guessed = True, 0
    for answer in later:
        answer.use_model(model)
        answered(answer, pace, 100)
    assert model.guessed > 20


def test_a_slow_first_pass_and_two_wrong_guesses_do_not_end_the_use_of_a_draft_model() -> None:
    pace, model = learned(0.1), Model()
    pace.draft_share = 0.1
    pace.measure_draft(1, 0.5)  # for example, because the weights were read from disk
    pace.model_rate.add(False)
    pace.model_rate.add(False)
    answer = Speculation(Lookup([5]), pace)
    answer.use_model(model)
    assert sum(answered(answer, pace, 200)) > 100


def test_a_draft_pass_before_the_first_measured_pass_does_not_end_the_use_of_a_draft_model() -> None:
    pace, model = Pace(), Model()
    pace.draft_share = 0.1
    pace.measure_draft(1, 0.001)
    for count in (1, 2, 4, 8):
        pace.measure(count, 0.01)
    assert pace.draft_seconds < 0.002
    answer = Speculation(Lookup([5]), pace)
    answer.use_model(model)
    assert sum(answered(answer, pace, 200)) > 100


def test_long_matches_go_before_the_draft_model() -> None:
    pace = paced(0.001)
    for _ in range(400):
        pace.check(False, 30, True)
        pace.model_rate.add(True)
    answer, model = Speculation(Lookup(range(900, 1200)), pace), Model()
    answer.use_model(model)
    for token in range(950, 1000):
        answer.extend(token)
    assert sum(answered(answer, pace, 100)) > 50
    assert model.guessed == 0


def test_many_pending_tokens_are_computed_only_for_a_long_answer() -> None:
    pace = paced(0.0005)
    pace.measure_draft(100, 100 * 0.0002)
    answer, model = Speculation(Lookup([5]), pace), Model(pending=3000)
    answer.use_model(model)
    counts = answered(answer, pace, 1000)
    assert counts[:20] == [0] * 20
    assert sum(counts) > 100
    answer = Speculation(Lookup([5]), pace)
    answer.use_model(Model(pending=30))
    assert answered(answer, pace, 100)[0] > 0


def test_an_answer_without_guesses_does_not_use_the_draft_model() -> None:
    answer, model = Speculation(None, paced(0.0005)), Model()
    answer.use_model(model)
    assert answer.chances(9) == []
    assert model.guessed == 0
