import itertools
from collections.abc import Sequence
from pathlib import Path

import check_speculation
import numpy as np
import pytest
from repository import TINY

from gemma_py.generate.sampling import Sampler
from gemma_py.generate.speculation import Speculation
from gemma_py.runtime.kv_types import KV_TYPES


def test_random_cases_match(checkpoints: dict[str, Path]) -> None:
    report = check_speculation.check({"tiny-gemma3": TINY, "gemma3": checkpoints["gemma3"]}, tokens=600, seed=1)
    assert report["tokens"] >= 600
    assert min(report["alone"], report["shared passes"], report["guessed"], report["accepted"]) > 0


def test_engines_have_every_kv_cache_and_draft_model() -> None:
    made = check_speculation.engines({"tiny-gemma3": TINY}, {"tiny-gemma3": Path("assistant")}, 0)
    found = {(options["kv"], options.get("draft")) for _, options in itertools.islice(made, 12)}
    assert found == set(itertools.product(KV_TYPES, (None, TINY, Path("assistant"))))


def test_control_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's penalties wrongly see the guesses of a pass."""
    latest: list[int] = []
    honest_guesses, honest_choose = Speculation.guesses, Sampler.choose

    def guesses(self: Speculation, count: int) -> list[int]:
        latest[:] = honest_guesses(self, count)
        return list(latest)

    def choose(self: Sampler, logits: np.ndarray, made: Sequence[int]) -> int:
        return honest_choose(self, logits, [*made, *latest[:1]])

    monkeypatch.setattr(Speculation, "guesses", guesses)
    monkeypatch.setattr(Sampler, "choose", choose)
    with pytest.raises(SystemExit, match="--seed 1 --case 'tiny-gemma3:bfloat16:0:"):
        check_speculation.check({"tiny-gemma3": TINY}, tokens=600, seed=1)
