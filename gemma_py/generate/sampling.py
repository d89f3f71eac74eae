"""From logits to a token: penalties, filters, and a draw that depends on the seed and the position alone.

The order is that of transformers: bias, repetition penalty (presence and frequency penalty after it), temperature, top-k,
top-p, min-p. Every sum on the way has one order, and the random number of a position is a hash of seed and position, so a
token does not depend on threads, chunks or company.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py.errors import ComputationError, ConfigError, InputError
from gemma_py.formats.files import present, read_json
from gemma_py.kernels import sampling as kernels

_SEEDS = 1 << 63
# Numbers that mean something, by every way in; OpenAI's, where it has the option. top_p also has to be above 0.
RANGES = {
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0), "logit_bias": (-100.0, 100.0),
}  # fmt: skip
MOST_TOP_K = 1 << 31
_TINY = np.float32(1e-38)  # below every weight but 0


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The default is the likeliest one; of equal logits the smaller id.

    temperature: 0 takes the likeliest, above 0 draws. top_k: only so many of the likeliest; 0: all. top_p: only the
    likeliest that together have this probability. min_p: only those at least this share of the likeliest's probability.
    repetition_penalty divides (or multiplies, below 0) the logits of all tokens so far, the prompt's too; presence_penalty
    is taken off those of tokens generated so far, frequency_penalty once for each time. logit_bias: added, by id.
    seed: of the draws; None means another one every time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in RANGES:
            if name != "logit_bias":
                _check_number(name, name, getattr(self, name))
        if self.top_p == 0:
            raise InputError("top_p should be above 0 and at most 1, found 0")
        self._whole("top_k", 0, MOST_TOP_K)
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(f"logit_bias should map token ids to numbers, found {self.logit_bias!r:.40}")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or token < 0:
                raise InputError(f"logit_bias should map token ids to numbers, found the id {token!r:.40}")
            _check_number("logit_bias", f"logit_bias of {token}", bias)
        if self.seed is not None:
            self._whole("seed", 0, _SEEDS - 1)

    def _whole(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not least <= value <= most:
            raise InputError(f"{name} should be a whole number from {least} to {most}, found {value!r:.40}")

    def seeded(self) -> "Sampling":
        """With a seed, so that the answer can be had again."""
        return self if self.seed is not None else replace(self, seed=int.from_bytes(os.urandom(4), "little"))


def _check_number(option: str, name: str, value: Any) -> None:
    least, most = RANGES[option]
    bad = isinstance(value, bool) or not isinstance(value, int | float)
    if bad or not math.isfinite(value) or not least <= value <= most:
        raise InputError(f"{name} should be a number from {least:g} to {most:g}, found {value!r:.40}")


# What Google recommends for every instruction-tuned Gemma; for checkpoints that do not say.
GEMMA = Sampling(temperature=1.0, top_k=64, top_p=0.95)
_SAID = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def recommended(path: Path, metadata: Mapping[str, Any]) -> Sampling:
    """What the checkpoint says: generation_config.json, or GGUF's general.sampling; Gemma's where it says nothing."""
    file = path / "generation_config.json"
    said: dict[str, Any] = {}
    if path.is_dir() and present(file):
        document = read_json(file)
        if not isinstance(document, dict):
            raise ConfigError(f"{file}: should be a JSON object")
        if document.get("do_sample") is False:
            return Sampling()
        said = {name: document[name] for name in _SAID if document.get(name) is not None}
    for name in _SAID:
        value = metadata.get(f"general.sampling.{_GGUF_NAMES.get(name, name)}")
        if value is not None:
            said[name] = value.item() if isinstance(value, np.generic) else value
    if not said:
        return GEMMA
    try:
        return Sampling(**{"temperature": 1.0, **said})
    except InputError as error:
        raise ConfigError(f"{path}: of what it recommends for sampling, {error}") from None


OPTIONS = tuple(option.name for option in fields(Sampling))
_RANDOM = ("temperature", "top_k", "top_p", "min_p", "seed")


def asked(given: Mapping[str, Any], base: Sampling) -> Sampling:
    """The likeliest tokens, unless anything that only means something to a draw is given: then what is not comes from `base`."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("temperature") != 0 and any(name in chosen for name in _RANDOM):
        return replace(base, **chosen)
    return Sampling(**chosen)


# --- random numbers ---------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def _mixed(z: int) -> int:
    """splitmix64's finaliser: every bit of z moves every bit of the result."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), a multiple of 2^-53: the random number of the token at this position."""
    key = _mixed(seed + 0x9E3779B97F4A7C15 & _MASK)
    return (_mixed(key + (position + 1) * 0x9E3779B97F4A7C15 & _MASK) >> 11) * 2.0**-53


def likeliest(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest logits, in order, and their tokens; of equal ones the smaller token first."""
    values, ids = np.empty(count, np.float32), np.empty(count, np.int64)
    kernels.top_k(logits, values, ids)
    return values, ids


def rehearse() -> None:
    """Every kernel once, so that the first token that is drawn does not wait for a compiler."""
    logits = np.arange(8, dtype=np.float32)
    for top_k in (4, 0):
        Sampler(Sampling(temperature=1.0, top_k=top_k, top_p=0.5, seed=0), len(logits), [0]).choose(logits, [])


# --- choosing ---------------------------------------------------------------------------------------------------------


class Sampler:
    """Chooses the tokens that follow a prompt."""

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Sequence[int]) -> None:
        outside = [token for token in sampling.logit_bias if token >= vocab_size]
        if outside:
            raise InputError(f"logit_bias: token id {outside[0]} is outside the vocabulary of {vocab_size}")
        self.sampling = sampling.seeded()
        self._start, self._prompt = len(prompt), np.array([], np.int64)
        if sampling.repetition_penalty != 1:
            self._prompt = np.unique(np.array(prompt, np.int64))

    def choose(self, logits: np.ndarray, made: Sequence[int]) -> int:
        """The token after the prompt and those made since.    logits: [V], not written"""
        x = self._penalised(logits, made)
        likeliest = int(np.argmax(x))
        if not np.isfinite(x[likeliest]):
            raise ComputationError("the logits hold NaN: the weights lead to values beyond float32")
        s = self.sampling
        if s.temperature == 0:
            return likeliest
        if x is logits:
            x = logits.copy()
        kernels.divide(x, np.float32(s.temperature))
        assert s.seed is not None
        weights, ids = self._candidates(x, x[likeliest])
        least = max(np.float32(s.min_p), _TINY)  # min_p is a share of the likeliest's weight, which is 1
        chosen = int(kernels.draw(weights, least, uniform(s.seed, self._start + len(made))))
        return chosen if ids is None else int(ids[chosen])

    def _penalised(self, logits: np.ndarray, made: Sequence[int]) -> np.ndarray:
        """A copy where anything is to be changed."""
        s, x = self.sampling, logits
        if s.logit_bias or s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
            x = logits.copy()
        if s.logit_bias:
            x[list(s.logit_bias)] += np.array(list(s.logit_bias.values()), np.float32)
        if s.repetition_penalty != 1:
            seen = np.union1d(self._prompt, np.array(made, np.int64))
            penalty = np.float32(s.repetition_penalty)
            x[seen] = np.where(x[seen] < 0, x[seen] * penalty, x[seen] / penalty)
        if made and (s.presence_penalty or s.frequency_penalty):
            seen, counts = np.unique(np.array(made, np.int64), return_counts=True)
            x[seen] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * counts.astype(np.float32)
        return x

    def _candidates(self, x: np.ndarray, largest: np.float32) -> tuple[np.ndarray, np.ndarray | None]:
        """Weights and ids of what top-k and top-p leave, likeliest first; or all weights by id, and None."""
        s = self.sampling
        if 0 < s.top_k < len(x):
            values, ids = likeliest(x, s.top_k)
            weights = np.empty_like(values)
            total = kernels.softmax_weights(values, largest, weights)
            count = kernels.count_until(weights, s.top_p * total) if s.top_p < 1 else len(weights)
            return weights[:count], ids
        weights = np.empty_like(x)
        total = kernels.softmax_weights(x, largest, weights)
        if s.top_p < 1:
            self._cut(x, largest, weights, s.top_p * total)
        return weights, None

    @staticmethod
    def _cut(x: np.ndarray, largest: np.float32, weights: np.ndarray, limit: float) -> None:
        """Weights become 0 but for the likeliest, as many as reach the limit. Only those close to the edge are sorted."""
        edge, before = kernels.find_edge_bin(x, largest, weights, limit, np.zeros(kernels.BINS))
        members = np.empty(len(x), np.int64)
        members = members[: kernels.zero_below_bin(x, largest, edge, weights, members)]
        members = members[np.lexsort((members, -x[members]))]
        weights[members[kernels.count_until(weights[members], limit - before) :]] = 0
