"""The KV cache of one sequence: a ring a sliding layer, storage that grows a full one.

All layers lie in one pair of flat arenas. In layer l, position t of head g begins at table[l, AT] + (g * capacity +
t % capacity) * E: a head's rows are neighbours.
A ring holds at least window + chunk - 1 rows: a chunk never overwrites a row that a query of the same chunk reads.
`keep` more of them let a session go back: what a ring still holds need not be computed again.
"""

from collections.abc import Iterable

import numpy as np

from gemma_py.errors import InputError
from gemma_py.kernels.memory import aligned
from gemma_py.model.config import Config
from gemma_py.model.digest import digest, first_readable

AT, CAPACITY = range(2)  # columns of the table
KEYS, VALUES, ROWS = range(3)  # columns of Cache.places
# What rows are stored as. bfloat16 takes half the memory and is rounded once, when a row is stored.
KV_TYPES: dict[str, type] = {"float32": np.float32, "bfloat16": np.uint16}
NAN: dict[type, float | int] = {np.float32: np.nan, np.uint16: 0x7FC0}
_SPARE = 512  # rows


def rows_needed(config: Config, tokens: int, chunk: int, keep: int = 0) -> list[int]:
    """Rows a layer for so many tokens, computed so many a pass."""
    windows = [layer.sliding_window for layer in config.layers]
    return [tokens if window is None else min(tokens, window + chunk - 1 + keep) for window in windows]


def bytes_needed(config: Config, kv: str, tokens: int, chunk: int, keep: int = 0) -> int:
    """What `Cache.prepare` takes."""
    rows = zip(config.layers, rows_needed(config, tokens, chunk, keep), strict=True)
    numbers = sum(2 * layer.num_key_value_heads * layer.head_dim * count for layer, count in rows)
    return numbers * np.dtype(KV_TYPES[kv]).itemsize


def _as_f32(rows: np.ndarray) -> np.ndarray:
    return rows if rows.dtype == np.float32 else (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)


class Cache:
    """Rows at positions below `position` are committed; the rest mean nothing, and are NaN where `poison` is set."""

    def __init__(self, config: Config, poison: bool = False, kv: str = "float32", keep: int = 0) -> None:
        """keep: tokens that a rewind may take back."""
        self.config, self.poison, self.keep = config, poison, keep
        self.dtype = KV_TYPES[kv]
        self.ids: list[int] = []  # of the committed tokens
        self._oldest = [0] * len(config.layers)  # a layer's rows from here to `position` are whole
        self.table = np.zeros((len(config.layers), 2), np.int64)
        self.keys: np.ndarray = np.empty(0, self.dtype)
        self.values: np.ndarray = self.keys
        self.abandoned = False

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
        self._move(rows_needed(self.config, tokens, chunk, self.keep))

    def _make_room(self, position: int, tokens: int, ahead: int = 0) -> None:
        needed = []
        for layer, rows, (_, capacity) in zip(
            self.config.layers, rows_needed(self.config, position + tokens, tokens, self.keep), self.table, strict=True
        ):
            spare = ahead + _SPARE if layer.sliding_window is None else 0
            # Growing by half again keeps the copying of a long decode linear. Memory that is never written costs none,
            # but while rows move to a larger arena there are two of each.
            needed.append(int(capacity) if rows <= capacity else max(rows + spare, int(capacity) * 3 // 2, 64))
        if needed != self.table[:, CAPACITY].tolist():
            self._move(needed)

    def commit(self, tokens: list[int]) -> None:
        """The rows of these tokens are written, in every layer."""
        self.ids += tokens
        # No ring is so short that a pass, even one that fails, writes over what is counted on here.
        kept = (first_readable(layer, self.position) - self.keep for layer in self.config.layers)
        self._oldest = [max(pair) for pair in zip(self._oldest, kept, strict=True)]

    def reachable(self, position: int) -> bool:
        """Whether a rewind can go there: every row is left that the next token would read."""
        return 0 <= position <= self.position and all(
            first_readable(layer, position) >= oldest
            for layer, oldest in zip(self.config.layers, self._oldest, strict=True)
        )

    def rewind(self, position: int) -> None:
        """Forget the tokens from here on. The rows before are as they were, so nothing tells it from a fresh start."""
        if not self.reachable(position):
            raise InputError(
                f"position {position} cannot be gone back to from {self.position}: its rows are overwritten"
            )
        del self.ids[position:]

    def _move(self, capacities: list[int]) -> None:
        """New arenas with these capacities, and all rows that are whole."""
        shapes = [(y.num_key_value_heads, n, y.head_dim) for y, n in zip(self.config.layers, capacities, strict=True)]
        sizes = [G * capacity * E for G, capacity, E in shapes]
        table = np.stack([np.cumsum([0, *sizes[:-1]]), capacities], 1).astype(np.int64)
        arenas: list[np.ndarray] = [aligned(sum(sizes), self.dtype) for _ in range(2)]
        for number, shape in enumerate(shapes):
            positions = self._whole(number)
            at = table[number, AT]
            for old, new in zip((self.keys, self.values), arenas, strict=True):
                rows = new[at : at + sizes[number]].reshape(shape)
                if self.poison:
                    rows[:] = NAN[self.dtype]
                if len(positions):
                    places = positions % self.table[number, CAPACITY]
                    rows[:, positions % shape[1]] = self._rows(old, number)[:, places]
        self.table = table
        self.keys, self.values = arenas

    def _committed(self, number: int) -> np.ndarray:
        """Positions whose rows a later query may read: the last window - 1 of a sliding layer, else all."""
        first = first_readable(self.config.layers[number], self.position)
        return np.arange(first, self.position)

    def _whole(self, number: int) -> np.ndarray:
        """Positions whose rows are as they were written: those, and up to `keep` before them."""
        return np.arange(self._oldest[number], self.position)

    def _rows(self, arena: np.ndarray, number: int) -> np.ndarray:
        """[G, capacity, E] of a layer, in the ring's order."""
        (at, capacity), layer = self.table[number], self.config.layers[number]
        G, E = layer.num_key_value_heads, layer.head_dim
        return arena[at : at + G * capacity * E].reshape(G, capacity, E)

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a layer that a later query may read, by position: f32 [positions, G, E]."""
        places = self._committed(number) % max(1, self.table[number, CAPACITY])
        keys, values = (self._rows(arena, number)[:, places] for arena in (self.keys, self.values))
        return _as_f32(keys.transpose(1, 0, 2)), _as_f32(values.transpose(1, 0, 2))

    def digest(self) -> list[str]:
        """One a layer, of those rows."""
        return [digest(*self.rows(number)) for number in range(len(self.config.layers))]

    def block(self, first: int, last: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """A layer each: keys and values of positions first .. last - 1, copied as they are stored, [G, positions, E]."""
        copies = []
        for number, (_, capacity) in enumerate(self.table):
            assert self.position - first <= capacity
            places = np.arange(first, last) % capacity
            copies.append((self._rows(self.keys, number)[:, places], self._rows(self.values, number)[:, places]))
        return copies

    def stored(self, number: int, since: int) -> tuple[np.ndarray, np.ndarray]:
        """A layer's rows as they are stored, that a token after `since` may read: keys and values, [G, positions, E]."""
        positions = np.arange(first_readable(self.config.layers[number], since), self.position)
        places = positions % max(1, self.table[number, CAPACITY])
        return self._rows(self.keys, number)[:, places], self._rows(self.values, number)[:, places]

    def restore(self, ids: list[int], stored: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Into an empty cache: the tokens that another had committed, and what it `stored` of each layer."""
        self._make_room(len(ids), 1)
        self.ids = list(ids)
        for number, layer_rows in enumerate(stored):
            capacity = int(self.table[number, CAPACITY])
            count = min(layer_rows[0].shape[1], capacity)
            self._oldest[number] = self.position - count
            places = np.arange(self.position - count, self.position) % capacity
            for arena, rows in zip((self.keys, self.values), layer_rows, strict=True):
                self._rows(arena, number)[:, places] = rows[:, rows.shape[1] - count :]

    def places(self) -> np.ndarray:
        """For kernels: the addresses of each layer's keys and values, and how many rows a head has there. int64 [L, 3]

        Good until the next `reserve`; whoever uses them keeps the arenas alive.
        """
        at, itemsize = self.table[:, AT], self.keys.itemsize
        bases = [arena.ctypes.data + at * itemsize for arena in (self.keys, self.values)]
        return np.stack([*bases, self.table[:, CAPACITY]], 1)

    def abandon(self) -> None:
        """A pass failed and one of its workers may still write to these arenas: nobody may use them again."""
        self.abandoned = True

    def forget_uncommitted(self) -> None:
        """In test mode: whatever lies beyond the committed rows becomes NaN again, so that reading it shows."""
        if not self.poison:
            return
        for number in range(len(self.config.layers)):
            capacity = int(self.table[number, CAPACITY])
            stale = np.setdiff1d(np.arange(capacity), self._whole(number) % max(1, capacity))
            for arena in (self.keys, self.values):
                self._rows(arena, number)[:, stale] = NAN[self.dtype]
