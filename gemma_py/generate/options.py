"""The sampling options: ranges and defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py.errors import ConfigError, InputError
from gemma_py.formats.files import present, read_json

_SEEDS = 1 << 63
# The least and the greatest value of each option. Options of OpenAI's API have OpenAI's limits. top_p = 0 is refused too.
RANGES = {
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0), "logit_bias": (-100.0, 100.0),
}  # fmt: skip
MOST_TOP_K = 1 << 31
MODES = ("auto", "off")  # the values of the option `speculate`


def check_mode(mode: object) -> None:
    if mode not in MODES:
        raise InputError(f"speculate should be one of {', '.join(MODES)}, found {mode!r:.40}")


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits. The default is greedy decoding; of equal logits, the smaller token id wins.

    temperature: 0 is greedy decoding; above 0, tokens are drawn at random.
    top_k: draw from this many of the likeliest tokens; 0 means all.
    top_p: draw from the likeliest tokens that together have this probability.
    min_p: draw from tokens with at least this fraction of the likeliest token's probability.
    repetition_penalty: for each token in the prompt or in the answer so far, a positive logit is divided by this number,
    and a negative logit is multiplied by it.
    presence_penalty: a number that is subtracted from the logit of each token in the answer so far.
    frequency_penalty: a number that is subtracted from a token's logit once for each occurrence in the answer so far.
    logit_bias: numbers that are added to logits, by token id.
    seed: the seed of the random draws; None means a random seed.
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
        """Return these options with a random seed if they have none."""
        return self if self.seed is not None else replace(self, seed=int.from_bytes(os.urandom(4), "little"))


def _check_number(option: str, name: str, value: Any) -> None:
    least, most = RANGES[option]
    bad = isinstance(value, bool) or not isinstance(value, int | float)
    if bad or not least <= value <= most:
        raise InputError(f"{name} should be a number from {least:g} to {most:g}, found {value!r:.40}")


# Google recommends these options for every instruction-tuned Gemma. They are used if the checkpoint recommends none.
GEMMA = Sampling(temperature=1.0, top_k=64, top_p=0.95)
# The default of base models without a recommendation is greedy decoding. The base model gemma-3-270m answered 41% of a set of
# short questions correctly with greedy decoding, 33% with temperature 0.2 and 16% with temperature 1.
BASE_MODEL = replace(GEMMA, temperature=0.0)
_RECOMMENDABLE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}  # for GGUF keys with another name


def recommended(path: Path, metadata: Mapping[str, Any], default: Sampling = GEMMA) -> Sampling:
    """Return the sampling options that the checkpoint recommends, else `default`.

    A recommendation is in generation_config.json or in the GGUF keys general.sampling.*.
    """
    file = path / "generation_config.json"
    said: dict[str, Any] = {}
    if path.is_dir() and present(file):
        document = read_json(file)
        if not isinstance(document, dict):
            raise ConfigError(f"{file}: should be a JSON object")
        if document.get("do_sample") is False:
            return Sampling()
        said = {name: document[name] for name in _RECOMMENDABLE if document.get(name) is not None}
    for name in _RECOMMENDABLE:
        value = metadata.get(f"general.sampling.{_GGUF_NAMES.get(name, name)}")
        if value is not None:
            said[name] = value.item() if isinstance(value, np.generic) else value
    if not said:
        return default
    try:
        return Sampling(**{"temperature": 1.0, **said})
    except InputError as error:
        raise ConfigError(f"{path}: invalid sampling recommendation: {error}") from None


OPTIONS = tuple(option.name for option in fields(Sampling))
# Giving one of these options asks for random sampling, unless the temperature is 0.
_RANDOM = ("temperature", "top_k", "top_p", "min_p", "seed")


def with_options(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """Return `base`, with the given options instead of its own. None means that an option is not given.

    If `base` is BASE_MODEL, giving top_k, top_p, min_p or seed sets the temperature to 1. If a checkpoint recommends greedy
    decoding, decoding stays greedy unless a temperature is given.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if base is BASE_MODEL and any(name in chosen for name in _RANDOM):
        chosen.setdefault("temperature", GEMMA.temperature)
    return replace(base, **chosen)


def asked(given: Mapping[str, Any], base: Sampling) -> Sampling:
    """Return the sampling options for `Engine.generate`.

    Decoding is greedy by default. If temperature, top_k, top_p, min_p or seed is given, the options that are not given
    come from `base`.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("temperature") != 0 and any(name in chosen for name in _RANDOM):
        return with_options(base, chosen)
    return Sampling(**chosen)
