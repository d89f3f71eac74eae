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
from gemma_py.kernels.decorator import inlined, kernel
from gemma_py.kernels.elementary import exp

_SEEDS = 1 << 63
# Numbers that mean something, by every way in; OpenAI's, where it has the option. top_p also has to be above 0.
RANGES = {
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0), "logit_bias": (-100.0, 100.0),
}  # fmt: skip
MOST_TOP_K = 1 << 31
_TINY = np.float32(1e-38)  # below every weight but 0
_BLOCK = 64  # logits that are compared at once
_STEPS = 1024  # of a sixteenth, in which logits are put where too many would have to be sorted


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


# --- kernels ----------------------------------------------------------------------------------------------------------


@inlined
def _before(a, a_id, b, b_id):  # type: ignore[no-untyped-def]
    """Whether a ranks before b."""
    return a > b or (a == b and a_id < b_id)


@inlined
def _sink(values, ids, at, size):  # type: ignore[no-untyped-def]
    """Restore the heap whose root is its last in rank, below `at`."""
    value, token = values[at], ids[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _before(values[child], ids[child], values[child + 1], ids[child + 1]):
            child += 1
        if not _before(value, token, values[child], ids[child]):
            break
        values[at], ids[at] = values[child], ids[child]
        at = child
    values[at], ids[at] = value, token


@kernel
def _largest(x, values, ids):  # type: ignore[no-untyped-def]
    """The largest of x, in order; of equal ones the smaller index first.    x: [V]   values, ids: [k], written

    A heap of the k best so far, whose root is the worst of them: nearly all of x is only compared with it, and most of it
    in blocks, which take one decision for many.
    """
    k = values.shape[0]
    for v in range(k):
        values[v], ids[v] = x[v], v
    for at in range(k // 2 - 1, -1, -1):
        _sink(values, ids, at, k)
    worst = values[0]
    for block in range(k, x.shape[0], _BLOCK):
        end, larger = block + _BLOCK, 1
        if end <= x.shape[0]:
            larger = 0
            for v in range(block, block + _BLOCK):
                larger += x[v] > worst
        if larger > 0:
            for v in range(block, min(end, x.shape[0])):
                if x[v] > worst:
                    values[0], ids[0] = x[v], v
                    _sink(values, ids, 0, k)
                    worst = values[0]
    for size in range(k - 1, 0, -1):
        values[0], values[size] = values[size], values[0]
        ids[0], ids[size] = ids[size], ids[0]
        _sink(values, ids, 0, size)


@kernel
def _weigh(x, largest, weights):  # type: ignore[no-untyped-def]
    """weights[v] = exp(x[v] - largest); their sum, v ascending, in f64.    x, weights: [V]"""
    total = 0.0
    for v in range(x.shape[0]):
        weights[v] = exp(x[v] - largest)
    for v in range(x.shape[0]):
        total += np.float64(weights[v])
    return total


@kernel
def _head(weights, limit):  # type: ignore[no-untyped-def]
    """How many of the weights, in order, until their sum reaches the limit; one more than all if it does not."""
    total = 0.0
    for count in range(weights.shape[0]):
        total += np.float64(weights[count])
        if total >= limit:
            return count + 1
    return weights.shape[0] + 1


@inlined
def _step(x, largest):  # type: ignore[no-untyped-def]
    """How many sixteenths x lies below the largest, STEPS - 1 at most."""
    below = (largest - x) * np.float32(16.0)
    return np.int64(below) if below < np.float32(_STEPS - 1) else np.int64(_STEPS - 1)


@kernel
def _edge(x, largest, weights, limit, masses):  # type: ignore[no-untyped-def]
    """The step at which the sum of the weights, from the largest down, reaches the limit, and the sum before it.

    x, weights: [V]   masses: [STEPS], all 0, written: the sum of each step's weights, v ascending
    """
    for v in range(x.shape[0]):
        masses[_step(x[v], largest)] += np.float64(weights[v])
    total = 0.0
    for step in range(_STEPS - 1):
        if total + masses[step] >= limit:
            return step, total
        total += masses[step]
    return _STEPS - 1, total


@kernel
def _keep_above(x, largest, edge, weights, members):  # type: ignore[no-untyped-def]
    """Weights below the step `edge` become 0; how many lie on it, and which.    members: [V], written from the front"""
    count = 0
    for v in range(x.shape[0]):
        step = _step(x[v], largest)
        if step > edge:
            weights[v] = np.float32(0.0)
        elif step == edge:
            members[count] = v
            count += 1
    return count


@kernel
def _draw(weights, least, u):  # type: ignore[no-untyped-def]
    """The index at which the weights of at least `least`, summed in order, pass the share u of their sum."""
    total = 0.0
    for v in range(weights.shape[0]):
        if weights[v] >= least:
            total += np.float64(weights[v])
    target, reached, chosen = u * total, 0.0, 0
    for v in range(weights.shape[0]):
        if weights[v] >= least:
            reached += np.float64(weights[v])
            chosen = v
            if reached > target:
                break
    return chosen


@kernel
def _scale(x, temperature):  # type: ignore[no-untyped-def]
    """x /= temperature, in place"""
    for v in range(x.shape[0]):
        x[v] = x[v] / temperature


def likeliest(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest logits, in order, and their tokens; of equal ones the smaller token first."""
    values, ids = np.empty(count, np.float32), np.empty(count, np.int64)
    _largest(logits, values, ids)
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
        _scale(x, np.float32(s.temperature))
        assert s.seed is not None
        weights, ids = self._candidates(x, x[likeliest])
        least = max(np.float32(s.min_p), _TINY)  # min_p is a share of the likeliest's weight, which is 1
        chosen = int(_draw(weights, least, uniform(s.seed, self._start + len(made))))
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
            total = _weigh(values, largest, weights)
            count = _head(weights, s.top_p * total) if s.top_p < 1 else len(weights)
            return weights[:count], ids
        weights = np.empty_like(x)
        total = _weigh(x, largest, weights)
        if s.top_p < 1:
            self._cut(x, largest, weights, s.top_p * total)
        return weights, None

    @staticmethod
    def _cut(x: np.ndarray, largest: np.float32, weights: np.ndarray, limit: float) -> None:
        """Weights become 0 but for the likeliest, as many as reach the limit. Only those close to the edge are sorted."""
        edge, before = _edge(x, largest, weights, limit, np.zeros(_STEPS))
        members = np.empty(len(x), np.int64)
        members = members[: _keep_above(x, largest, edge, weights, members)]
        members = members[np.lexsort((members, -x[members]))]
        weights[members[_head(weights[members], limit - before) :]] = 0
