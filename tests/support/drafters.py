"""Drafters that guess right, wrong or at random, and a `Pace` that computes every guess."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from gemma_py.generate import core
from gemma_py.generate.drafting import Draft, Drafter, DrafterOfModel, Lookup
from gemma_py.generate.sampling import Sampler
from gemma_py.generate.speculation import MOST_GUESSES, Pace, Speculation

Answers = dict[tuple[int, ...], list[int]]  # prompt ids -> answer ids


class Eager(Pace):
    """Computes every guess, but at most `most` guesses for one answer.

    In every pass whose number is a multiple of `model_every`, the draft model guesses, if there is one. In other
    passes, guesses are copied from earlier text.
    """

    def __init__(self, most: int = MOST_GUESSES, model_every: int = 1) -> None:
        super().__init__()
        self.most, self._model_every, self._passes = most, model_every, 0

    def tokens_a_second(self, chances: Sequence[float], seconds: float = 0.0) -> float:
        if not seconds:
            return 1.0
        self._passes += 1
        return 1.0 if self._passes % self._model_every else 2.0

    @property
    def draft_row_seconds(self) -> float:
        return 1e-9

    def allot(
        self, chances: Sequence[Sequence[float]], rows: int, least: float = 0.0, drafting: Sequence[float] = ()
    ) -> list[int]:
        return [min(self.most, len(each)) for each in chances]


class Nothing:
    def extend(self, tokens: Sequence[int]) -> None: ...

    def propose(self, k: int, ahead: Sequence[int] = ()) -> Draft:
        return Draft()


class Known:
    """Knows the answer. A guess is the answer's token at a position, changed by `change`."""

    def __init__(self, answer: Sequence[int], change: Callable[[int, int], int]) -> None:
        self._answer, self._change, self._at = answer, change, 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._at < len(self._answer):
                assert token == self._answer[self._at], "the drafter received a token that is not in the answer"
            self._at += 1

    def propose(self, k: int, ahead: Sequence[int] = ()) -> Draft:
        at = self._at + len(ahead)
        return Draft(tuple(self._change(at + n, token) for n, token in enumerate(self._answer[at : at + k])), 1)


def changes(vocabulary: int) -> dict[str, Callable[[int, int], int]]:
    rng = random.Random(3)
    return {
        "oracle": lambda position, token: token,
        "wrong": lambda position, token: (token + 1) % vocabulary,
        "half": lambda position, token: token if position % 5 else (token + 1) % vocabulary,
        "random": lambda position, token: rng.choice([token, rng.randrange(vocabulary)]),
    }


KINDS = ("lookup", "oracle", "wrong", "half", "random")


@contextmanager
def drafting(kind: str, answers: Answers, vocabulary: int) -> Iterator[None]:
    def made(prompt: Sequence[int], prediction: Sequence[int] = ()) -> Drafter:
        if kind == "none":
            return Nothing()
        if kind == "lookup":
            return Lookup(prompt, prediction)
        return Known(answers[tuple(prompt)], changes(vocabulary)[kind])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "Lookup", made)
        yield


class _PartlyRightSampler:
    """Acts as the sampler of a draft model: the choice takes as long, but it is right with a given probability."""

    def __init__(
        self, original: Sampler, answer: Sequence[int], probability: float, vocabulary: int, seed: int
    ) -> None:
        self._original, self._answer, self._probability, self._vocabulary = original, answer, probability, vocabulary
        self._rng = random.Random(seed)

    def choose(self, logits: np.ndarray, made: Sequence[int]) -> int:
        guess = self._original.choose(logits, made)
        if len(made) >= len(self._answer):
            return guess
        token = self._answer[len(made)]
        return token if self._rng.random() < self._probability else (token + 1) % self._vocabulary


@contextmanager
def draft_model_right(probability: float, answers: Answers, vocabulary: int, seed: int = 0) -> Iterator[None]:
    """Let the draft model compute its guesses, but replace each guess by one that is right with this probability.

    No guesses are copied from earlier text.
    """
    honest = Speculation.use_model

    def use_model(self: Speculation, model: DrafterOfModel) -> None:
        (answer,) = answers.values()
        model._sampler = _PartlyRightSampler(model._sampler, answer, probability, vocabulary, seed)  # type: ignore[attr-defined]
        honest(self, model)

    with drafting("none", answers, vocabulary), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "use_model", use_model)
        yield
