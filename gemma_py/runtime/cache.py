"""The KV cache of one sequence: a ring a sliding layer, storage that grows a full one.

Each layer has its keys and its values, [G, capacity, E]: a head's rows are neighbours, position t is row t % capacity.
A ring holds at least window + chunk - 1 rows: a chunk never overwrites a row that a query of the same chunk reads.
`keep` more of them let a session go back: what a ring still holds need not be computed again.
"""

import copy
import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from gemma_py.errors import ContextError, InputError
from gemma_py.kernels.memory import aligned
from gemma_py.models.config import Config, Layer

KEYS, VALUES, ROWS = range(3)  # columns of Cache.places
# What rows are stored as. bfloat16 takes half the memory and is rounded once, when a row is stored.
KV_TYPES: dict[str, type] = {"float32": np.float32, "bfloat16": np.uint16}
NAN: dict[type, float | int] = {np.float32: np.nan, np.uint16: 0x7FC0}
_SPARE = 512  # rows


def check_context(context: int, tokens: int, after: int | None = None, new: int = 0) -> None:
    """ContextError unless the tokens, after those that the cache holds already, and the new ones to come fit into the context."""
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
    """Rows a layer for so many tokens, computed so many a pass."""
    windows = [layer.sliding_window for layer in config.kv_layers]
    return [tokens if window is None else min(tokens, window + chunk - 1 + keep) for window in windows]


def bytes_needed(config: Config, kv: str, tokens: int, chunk: int, keep: int = 0) -> int:
    """What `Cache.prepare` takes."""
    rows = zip(config.kv_layers, rows_needed(config, tokens, chunk, keep), strict=True)
    numbers = sum(2 * layer.num_key_value_heads * layer.head_dim * count for layer, count in rows)
    return numbers * np.dtype(KV_TYPES[kv]).itemsize


def _as_f32(rows: np.ndarray) -> np.ndarray:
    return rows if rows.dtype == np.float32 else (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _runs(first: int, end: int, *rings: int) -> Iterator[tuple[int, int]]:
    """Positions as (first, count), within which places follow each other in all of these rings."""
    while first < end:
        count = min(end - first, *(ring - first % ring for ring in rings))
        yield first, count
        first += count


class Rows(NamedTuple):
    """A layer's, as they are stored: [G, capacity, E]."""

    keys: np.ndarray
    values: np.ndarray

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]


class Cache:
    """Rows at positions below `position` are committed; the rest mean nothing, and are NaN where `poison` is set."""

    def __init__(self, config: Config, poison: bool = False, kv: str = "float32", keep: int = 0) -> None:
        """keep: tokens that a rewind may take back."""
        self.config, self.poison, self.keep = config, poison, keep
        self.dtype = KV_TYPES[kv]
        self.ids: list[int] = []  # of the committed tokens
        self._oldest = [0] * len(config.kv_layers)  # a layer's rows from here to `position` are whole
        layers = [
            Rows(*(np.empty((layer.num_key_value_heads, 0, layer.head_dim), self.dtype) for _ in range(2)))
            for layer in config.kv_layers
        ]
        # One value, so that no interrupt finds arrays with the addresses of others.
        self._room = layers, np.zeros((len(layers), 3), np.int64)
        self.abandoned = False

    @property
    def layers(self) -> list[Rows]:
        return self._room[0]

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for layer in self.layers for rows in layer)

    @property
    def position(self) -> int:
        return len(self.ids)

    def reserve(self, tokens: int, ahead: int = 0) -> None:
        """Room for a chunk of so many tokens after the committed ones, over whose places a pass may write from now on.

        ahead: tokens that are known to follow it.
        """
        if self.abandoned:
            raise InputError("this session was left in an unknown state by a stalled worker; start a new one")
        self._make_room(self.position, tokens, ahead)

    def prepare(self, tokens: int, chunk: int) -> None:
        """Room for so many tokens in all, computed at most so many a pass: `reserve` then never moves a row."""
        for number, rows in enumerate(rows_needed(self.config, tokens, chunk, self.keep)):
            self._move(number, rows)

    def _make_room(self, position: int, tokens: int, ahead: int = 0) -> None:
        for number, rows in enumerate(rows_needed(self.config, position + tokens, tokens, self.keep)):
            capacity = self.layers[number].capacity
            spare = ahead + _SPARE if self.config.kv_layers[number].sliding_window is None else 0
            if rows > capacity:
                # Growing by half again keeps the copying of a long decode linear; memory that is never written costs none.
                self._move(number, max(rows + spare, capacity * 3 // 2, 64))

    def commit(self, tokens: list[int]) -> None:
        """The rows of these tokens are written, in every layer."""
        position = self.position + len(tokens)
        # No ring is so short that a pass, even one that fails, writes over what is counted on here.
        kept = (first_readable(layer, position) - self.keep for layer in self.config.kv_layers)
        oldest = [max(pair) for pair in zip(self._oldest, kept, strict=True)]
        # Nothing is called between these two, so no interrupt comes between them.
        self._oldest = oldest
        self.ids += tokens

    def reachable(self, position: int) -> bool:
        """Whether a rewind can go there: every row is left that the next token would read."""
        return 0 <= position <= self.position and all(
            first_readable(layer, position) >= oldest
            for layer, oldest in zip(self.config.kv_layers, self._oldest, strict=True)
        )

    def rewind(self, position: int) -> None:
        """Forget the tokens from here on. The rows before are as they were, so nothing tells it from a fresh start."""
        if not self.reachable(position):
            raise InputError(f"position {position} cannot be rewound to from {self.position}: its rows are overwritten")
        del self.ids[position:]

    def _move(self, number: int, capacity: int) -> None:
        """Another room for a layer, and all its rows that are whole. Layers move one by one: two of one are enough."""
        old, oldest = self.layers[number], self._oldest[number]
        G, _, E = old.keys.shape
        new = Rows(*(aligned(G * capacity * E, self.dtype).reshape(G, capacity, E) for _ in range(2)))
        for source, rows in zip(old, new, strict=True):
            if self.poison:
                rows[:] = NAN[self.dtype]
            for first, count in _runs(oldest, self.position, old.capacity, capacity):
                place = first % old.capacity
                rows[:, first % capacity :][:, :count] = source[:, place : place + count]
        layers, places = self._room[0].copy(), self._room[1].copy()  # a pass may hold the former ones
        layers[number], places[number] = new, (new.keys.ctypes.data, new.values.ctypes.data, capacity)
        self._room = layers, places

    def copy(self) -> "Cache":
        """Another sequence that has come as far."""
        twin = copy.copy(self)
        twin.ids, twin._oldest = list(self.ids), list(self._oldest)
        for number, layer in enumerate(self.layers):
            twin._move(number, layer.capacity)
        return twin

    def _committed(self, number: int) -> np.ndarray:
        """Positions whose rows a later query may read: the last window - 1 of a sliding layer, else all."""
        first = first_readable(self.config.kv_layers[number], self.position)
        return np.arange(first, self.position)

    def _whole(self, number: int) -> np.ndarray:
        """Positions whose rows are as they were written: those, and up to `keep` before them."""
        return np.arange(self._oldest[number], self.position)

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a layer that a later query may read, by position: f32 [positions, G, E]."""
        layer = self.layers[number]
        places = self._committed(number) % max(1, layer.capacity)
        return _as_f32(layer.keys[:, places].transpose(1, 0, 2)), _as_f32(layer.values[:, places].transpose(1, 0, 2))

    def digest(self) -> list[str]:
        """One a layer, of those rows."""
        return [digest(*self.rows(number)) for number in range(len(self.config.kv_layers))]

    def block(self, first: int, last: int, copy: np.ndarray) -> None:
        """Into the copy: of each layer the keys, then the values of positions first .. last - 1, [G, positions, E]."""
        at = 0
        for layer in self.layers:
            assert self.position - first <= layer.capacity
            places = np.arange(first, last) % layer.capacity
            for rows in layer:
                part = rows[:, places]
                copy[at : at + part.size].reshape(part.shape)[:] = part
                at += part.size

    def stored(self, number: int, since: int) -> tuple[np.ndarray, np.ndarray]:
        """A layer's rows as they are stored, that a token after `since` may read: keys and values, [G, positions, E]."""
        positions = np.arange(first_readable(self.config.kv_layers[number], since), self.position)
        layer = self.layers[number]
        places = positions % max(1, layer.capacity)
        return layer.keys[:, places], layer.values[:, places]

    def restore(self, ids: list[int], stored: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Into an empty cache: the tokens that another had committed, and what it `stored` of each layer.

        If there is less of that than there should be, the cache stays empty.
        """
        self._make_room(len(ids), 1)
        oldest = []
        for layer, layer_rows in zip(self.layers, stored, strict=True):
            count = min(layer_rows[0].shape[1], layer.capacity)
            oldest.append(len(ids) - count)
            places = np.arange(len(ids) - count, len(ids)) % layer.capacity
            for kept, rows in zip(layer, layer_rows, strict=True):
                kept[:, places] = rows[:, rows.shape[1] - count :]
        ids = list(ids)
        self._oldest, self.ids = oldest, ids

    def places(self) -> np.ndarray:
        """For kernels: the addresses of each layer's keys and values, and how many rows a head has there. int64 [L, 3]

        Good until the next `reserve`; whoever uses them keeps the layers' arrays alive.
        """
        return self._room[1]

    def abandon(self) -> None:
        """A pass failed and one of its workers may still write to these rows: nobody may use them again."""
        self.abandoned = True

    def forget_uncommitted(self) -> None:
        """In test mode: whatever lies beyond the committed rows becomes NaN again, so that reading it shows."""
        if not self.poison:
            return
        for number, layer in enumerate(self.layers):
            stale = np.setdiff1d(np.arange(layer.capacity), self._whole(number) % max(1, layer.capacity))
            for rows in layer:
                rows[:, stale] = NAN[self.dtype]
