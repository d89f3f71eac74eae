"""The KV cache of one sequence: a ring for each sliding layer, and arrays that grow for each full layer.

Each layer has its keys and its values, [G, capacity, E]: a head's rows are contiguous, and position t is in row t % capacity.
A ring has at least window + chunk - 1 rows, so a chunk never overwrites a row that a query of the same chunk reads. `keep`
more rows allow a session to rewind by so many tokens without computing rows again.
"""

import copy
import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from gemma_py.errors import ContextError, InputError
from gemma_py.kernels.memory import aligned
from gemma_py.models.config import Config, Layer

KEYS, VALUES, ROWS = range(3)  # columns of Cache.addresses
# The dtypes of KV rows. bfloat16 takes half the memory; a row is rounded once, when it is stored.
KV_TYPES: dict[str, type] = {"float32": np.float32, "bfloat16": np.uint16}
NAN: dict[type, float | int] = {np.float32: np.nan, np.uint16: 0x7FC0}
_SPARE = 512  # rows


def check_context(context: int, tokens: int, after: int | None = None, new: int = 0) -> None:
    """ContextError unless these tokens, the `after` ones in the cache and the `new` ones to generate fit into the context."""
    present = (after or 0) + tokens
    if present + new <= context:
        return
    if not new:
        what = f"{tokens} tokens exceed" if after is None else f"{tokens} tokens after {after} exceed"
    elif present >= context:
        raise ContextError(
            f"the prompt of {tokens} tokens leaves no room for an answer in the context of {context} tokens"
        )
    else:
        what = f"{tokens} prompt tokens and {new} new ones exceed"
    raise ContextError(f"{what} the context of {context} tokens")


def first_readable(layer: Layer, position: int) -> int:
    """The first position whose row the token at `position` may read, when all before it are committed."""
    return 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)


def digest(keys: np.ndarray, values: np.ndarray) -> str:
    """sha256 of little-endian float32, keys before values, each [positions, G, E]."""
    made = hashlib.sha256()
    for rows in (keys, values):
        made.update(np.ascontiguousarray(rows, "<f4").tobytes())
    return made.hexdigest()


def rows_needed(config: Config, tokens: int, chunk: int, keep: int = 0) -> list[int]:
    """How many rows each layer needs for so many tokens, in passes of up to `chunk` tokens."""
    windows = [layer.sliding_window for layer in config.kv_layers]
    return [tokens if window is None else min(tokens, window + chunk - 1 + keep) for window in windows]


def bytes_needed(config: Config, kv: str, tokens: int, chunk: int, keep: int = 0) -> int:
    """The bytes that `Cache.prepare` allocates."""
    rows = zip(config.kv_layers, rows_needed(config, tokens, chunk, keep), strict=True)
    numbers = sum(2 * layer.num_key_value_heads * layer.head_dim * count for layer, count in rows)
    return numbers * np.dtype(KV_TYPES[kv]).itemsize


def _as_f32(rows: np.ndarray) -> np.ndarray:
    return rows if rows.dtype == np.float32 else (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _runs(first: int, end: int, *rings: int) -> Iterator[tuple[int, int]]:
    """Positions as runs (first, count), each of which is contiguous in all rings of these capacities."""
    while first < end:
        count = min(end - first, *(ring - first % ring for ring in rings))
        yield first, count
        first += count


class Rows(NamedTuple):
    """The KV rows of one layer: [G, capacity, E] each."""

    keys: np.ndarray
    values: np.ndarray

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]


class Cache:
    """The KV rows of one sequence. Rows below `position` are committed; the others are undefined, or NaN where `poison` is set."""

    def __init__(self, config: Config, poison: bool = False, kv: str = "float32", keep: int = 0) -> None:
        """keep: how many tokens a rewind must be able to remove."""
        self.config, self.poison, self.keep = config, poison, keep
        self.dtype = KV_TYPES[kv]
        self.ids: list[int] = []  # of the committed tokens
        self._oldest = [0] * len(config.kv_layers)  # of each layer, the first position whose row is not overwritten
        layers = [
            Rows(*(np.empty((layer.num_key_value_heads, 0, layer.head_dim), self.dtype) for _ in range(2)))
            for layer in config.kv_layers
        ]
        # One tuple, so that an interrupt never leaves arrays with the addresses of others.
        self._allocation = layers, np.zeros((len(layers), 3), np.int64)
        self.abandoned = False

    @property
    def layers(self) -> list[Rows]:
        return self._allocation[0]

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for layer in self.layers for rows in layer)

    @property
    def position(self) -> int:
        return len(self.ids)

    def reserve(self, tokens: int, ahead: int = 0) -> None:
        """Make room for a chunk of so many tokens after the committed ones; a pass may write to their rows from now on.

        ahead: how many more tokens will follow the chunk.
        """
        if self.abandoned:
            raise InputError("this session was left in an unknown state by a stalled worker; start a new one")
        self._make_room(self.position, tokens, ahead)

    def prepare(self, tokens: int, chunk: int) -> None:
        """Make room for so many tokens in all, in passes of up to `chunk` tokens. `reserve` then never reallocates."""
        for number, rows in enumerate(rows_needed(self.config, tokens, chunk, self.keep)):
            self._reallocate(number, rows)

    def _make_room(self, position: int, tokens: int, ahead: int = 0) -> None:
        for number, rows in enumerate(rows_needed(self.config, position + tokens, tokens, self.keep)):
            capacity = self.layers[number].capacity
            spare = ahead + _SPARE if self.config.kv_layers[number].sliding_window is None else 0
            if rows > capacity:
                # Growth by half keeps the cost of copying linear in a long decode. Pages that are never written use no memory.
                self._reallocate(number, max(rows + spare, capacity * 3 // 2, 64))

    def commit(self, tokens: list[int]) -> None:
        """Add these tokens, whose rows are written in every layer."""
        position = self.position + len(tokens)
        # Every ring is long enough that a pass, even one that fails, does not overwrite these rows.
        intact = (first_readable(layer, position) - self.keep for layer in self.config.kv_layers)
        oldest = [max(pair) for pair in zip(self._oldest, intact, strict=True)]
        # No function is called between these two statements, so no interrupt can separate them.
        self._oldest = oldest
        self.ids += tokens

    def can_rewind_to(self, position: int) -> bool:
        """Whether `rewind(position)` is possible: no row that the next token would read is overwritten."""
        return 0 <= position <= self.position and all(
            first_readable(layer, position) >= oldest
            for layer, oldest in zip(self.config.kv_layers, self._oldest, strict=True)
        )

    def rewind(self, position: int) -> None:
        """Remove the tokens from this position on. The rows before it are unchanged, so later results are those of a new session."""
        if not self.can_rewind_to(position):
            raise InputError(f"position {position} cannot be rewound to from {self.position}: its rows are overwritten")
        del self.ids[position:]

    def _reallocate(self, number: int, capacity: int) -> None:
        """Move a layer's rows to new arrays. Layers move one by one, so at most one layer is in memory twice."""
        old, oldest = self.layers[number], self._oldest[number]
        G, _, E = old.keys.shape
        new = Rows(*(aligned(G * capacity * E, self.dtype).reshape(G, capacity, E) for _ in range(2)))
        for source, rows in zip(old, new, strict=True):
            if self.poison:
                rows[:] = NAN[self.dtype]
            for first, count in _runs(oldest, self.position, old.capacity, capacity):
                at = first % old.capacity
                rows[:, first % capacity :][:, :count] = source[:, at : at + count]
        layers, addresses = (
            self._allocation[0].copy(),
            self._allocation[1].copy(),
        )  # a pass may still use the former ones
        layers[number], addresses[number] = new, (new.keys.ctypes.data, new.values.ctypes.data, capacity)
        self._allocation = layers, addresses

    def copy(self) -> "Cache":
        """A copy, for another sequence with the same tokens."""
        twin = copy.copy(self)
        twin.ids, twin._oldest = list(self.ids), list(self._oldest)
        for number, layer in enumerate(self.layers):
            twin._reallocate(number, layer.capacity)
        return twin

    def _committed(self, number: int) -> np.ndarray:
        """Positions whose rows a later query may read: the last window - 1 of a sliding layer, else all."""
        first = first_readable(self.config.kv_layers[number], self.position)
        return np.arange(first, self.position)

    def _intact(self, number: int) -> np.ndarray:
        """Positions whose rows are not overwritten: the committed ones, and up to `keep` before them."""
        return np.arange(self._oldest[number], self.position)

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a layer that a later query may read, by position: f32 [positions, G, E]."""
        layer = self.layers[number]
        slots = self._committed(number) % max(1, layer.capacity)
        return _as_f32(layer.keys[:, slots].transpose(1, 0, 2)), _as_f32(layer.values[:, slots].transpose(1, 0, 2))

    def digest(self) -> list[str]:
        """The digest of each layer's `rows`."""
        return [digest(*self.rows(number)) for number in range(len(self.config.kv_layers))]

    def copy_block(self, first: int, last: int, copy: np.ndarray) -> None:
        """Copy positions first .. last - 1 into `copy`: of each layer the keys, then the values, [G, positions, E]."""
        at = 0
        for layer in self.layers:
            assert self.position - first <= layer.capacity
            slots = np.arange(first, last) % layer.capacity
            for rows in layer:
                part = rows[:, slots]
                copy[at : at + part.size].reshape(part.shape)[:] = part
                at += part.size

    def raw_rows(self, number: int, since: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a layer that a token after `since` may read, in the dtype of the cache: [G, positions, E]."""
        positions = np.arange(first_readable(self.config.kv_layers[number], since), self.position)
        layer = self.layers[number]
        slots = positions % max(1, layer.capacity)
        return layer.keys[:, slots], layer.values[:, slots]

    def restore(self, ids: list[int], kv_rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Fill an empty cache with the tokens of another cache and its `raw_rows` of each layer.

        The cache stays empty if there are fewer layers than the model has.
        """
        self._make_room(len(ids), 1)
        oldest = []
        for layer, layer_rows in zip(self.layers, kv_rows, strict=True):
            count = min(layer_rows[0].shape[1], layer.capacity)
            oldest.append(len(ids) - count)
            slots = np.arange(len(ids) - count, len(ids)) % layer.capacity
            for target, rows in zip(layer, layer_rows, strict=True):
                target[:, slots] = rows[:, rows.shape[1] - count :]
        ids = list(ids)
        self._oldest, self.ids = oldest, ids

    def addresses(self) -> np.ndarray:
        """For kernels: the addresses of each layer's keys and values, and its capacity. int64 [kv layers, 3]

        They are valid until the next `reserve`, while the caller has a reference to `layers`.
        """
        return self._allocation[1]

    def abandon(self) -> None:
        """Make the cache unusable: a pass failed and one of its workers may still write to these rows."""
        self.abandoned = True

    def poison_uncommitted(self) -> None:
        """For tests: set all other rows than the committed ones to NaN again, so that reading one shows in the results."""
        if not self.poison:
            return
        for number, layer in enumerate(self.layers):
            stale = np.setdiff1d(np.arange(layer.capacity), self._intact(number) % max(1, layer.capacity))
            for rows in layer:
                rows[:, stale] = NAN[self.dtype]
