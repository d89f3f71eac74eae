"""Typed access to the fields of a config document. A wrong value raises ConfigError with the field's name."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from gemma_py.errors import ConfigError

_MISSING: Any = object()
LARGEST = 1 << 31  # an upper limit for integers, which is far above any dimension or token id of a real model
_MOST_LAYERS = 10_000


class Fields:
    """A mapping with typed getters. A value of None counts as missing, because Hugging Face writes null for unset fields."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values = where, values

    def fail(self, name: str, expected: str) -> NoReturn:
        found = self.values.get(name)
        if isinstance(found, np.ndarray):
            found = found.tolist()  # in error messages, a list is shorter than an array
        raise ConfigError(f"{self.where}: {name} should be {expected}, found {found!r:.80}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # some GGUF files repeat one value for every layer
        if value is not None:
            return value
        if default is _MISSING:
            raise ConfigError(f"{self.where}: {name} is missing")
        return default

    def integer(self, name: str, default: Any = _MISSING, least: int = 1) -> Any:
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < LARGEST:
            self.fail(name, f"an integer from {least} to {LARGEST - 1}")
        return value

    def layer_count(self, name: str, default: Any = _MISSING) -> int:
        count: int = self.integer(name, default)
        if count > _MOST_LAYERS:
            self.fail(name, f"at most {_MOST_LAYERS}")
        return count

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """Return the field as a float. A value that is not positive and finite raises ConfigError."""
        value = self._get(name, default)
        if value is default:
            return value
        bad = isinstance(value, bool) or not isinstance(value, int | float)
        if bad or abs(value) > 1e30 or not math.isfinite(value) or value < 1e-30:
            self.fail(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.fail(name, "true or false")
        return value

    def integers(self, name: str, count: int) -> list[int]:
        """Return a positive integer for each of `count` layers. The field is a list, or one integer for all layers."""
        values = self._list(name)
        if values is None:
            return [self.integer(name)] * count
        if len(values) != count or any(type(value) is not int or not 1 <= value < LARGEST for value in values):
            self.fail(name, f"a positive integer or a list of {count} positive integers")
        return values

    def flags(self, name: str, count: int, period: int | None = None) -> list[bool]:
        """Return a flag for each of `count` layers. The field is a list of flags, or an integer n, which means that the
        flags are true except for every nth layer.

        period: the value of n if the field is missing; None if the field is required.
        """
        values = self._list(name)
        if values is None:
            every = self.integer(name) if period is None else self.integer(name, period)
            return [number % every != 0 for number in range(1, count + 1)]
        if len(values) != count or not all(type(value) in (bool, int) for value in values):
            self.fail(name, f"an integer or a list of {count} flags")
        return [bool(value) for value in values]

    def _list(self, name: str) -> list[Any] | None:
        value = self.values.get(name)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        return value if isinstance(value, list) else None

    def text(self, name: str, default: Any = _MISSING) -> Any:
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            self.fail(name, "a string")
        return value

    def table(self, name: str) -> "Fields | None":
        """Return the nested object of this name, or None if the field is missing."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(name, "an object")
        return Fields(f"{self.where}: {name}", value)

    def ids(self, name: str) -> tuple[int, ...]:
        """Return the token ids of a field, which holds one id or a list. If the field is missing, return an empty tuple."""
        value = self._get(name, None)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < LARGEST for v in values):
            self.fail(name, "a token id or a list of token ids")
        return tuple(values)
