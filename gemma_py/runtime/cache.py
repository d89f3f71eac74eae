"""The KV cache of one session: a ring a sliding layer, storage that grows a full one.

All layers lie in one pair of flat arenas. In layer l, position t of head g begins at table[l, AT] + (g * capacity +
t % capacity) * E: a head's rows are neighbours.
A ring holds at least window + chunk - 1 rows: a chunk never overwrites a row that a query of the same chunk reads.
"""

import numpy as np

from gemma_py.errors import InputError
from gemma_py.kernels.memory import aligned
from gemma_py.model.config import Config
from gemma_py.model.digest import digest, first_readable

AT, CAPACITY = range(2)  # columns of the table
# What rows are stored as. bfloat16 takes half the memory and is rounded once, when a row is stored.
KV_TYPES: dict[str, type] = {"float32": np.float32, "bfloat16": np.uint16}
NAN: dict[type, float | int] = {np.float32: np.nan, np.uint16: 0x7FC0}


def _as_f32(rows: np.ndarray) -> np.ndarray:
    return rows if rows.dtype == np.float32 else (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)


class Cache:
    """Rows at positions below `position` are committed; the rest mean nothing, and are NaN where `poison` is set."""

    def __init__(self, config: Config, poison: bool = False, kv: str = "float32") -> None:
        self.config, self.poison = config, poison
        self.dtype = KV_TYPES[kv]
        self.position = 0
        self.table = np.zeros((len(config.layers), 2), np.int64)
        self.keys: np.ndarray = np.empty(0, self.dtype)
        self.values: np.ndarray = self.keys
        self.abandoned = False

    def reserve(self, tokens: int) -> None:
        """Room for a chunk of so many tokens after the committed ones."""
        if self.abandoned:
            raise InputError("this session was left in an unknown state by a stalled worker; start a new one")
        needed = []
        for layer, (_, capacity) in zip(self.config.layers, self.table, strict=True):
            rows = self.position + tokens
            if layer.sliding_window is not None:
                rows = min(rows, layer.sliding_window + tokens - 1)
            # Growing by half again keeps the copying of a long decode linear.
            needed.append(int(capacity) if rows <= capacity else max(rows, int(capacity) * 3 // 2, 64))
        if needed != self.table[:, CAPACITY].tolist():
            self._move(needed)

    def _move(self, capacities: list[int]) -> None:
        """New arenas with these capacities, and the rows that a later query may read."""
        shapes = [(y.num_key_value_heads, n, y.head_dim) for y, n in zip(self.config.layers, capacities, strict=True)]
        sizes = [G * capacity * E for G, capacity, E in shapes]
        table = np.stack([np.cumsum([0, *sizes[:-1]]), capacities], 1).astype(np.int64)
        arenas: list[np.ndarray] = [aligned(sum(sizes), self.dtype) for _ in range(2)]
        for number, shape in enumerate(shapes):
            positions = self._committed(number)
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

    def abandon(self) -> None:
        """A pass failed and one of its workers may still write to these arenas: nobody may use them again."""
        self.abandoned = True

    def forget_uncommitted(self) -> None:
        """In test mode: whatever lies beyond the committed rows becomes NaN again, so that reading it shows."""
        if not self.poison:
            return
        for number in range(len(self.config.layers)):
            capacity = int(self.table[number, CAPACITY])
            stale = np.setdiff1d(np.arange(capacity), self._committed(number) % max(1, capacity))
            for arena in (self.keys, self.values):
                self._rows(arena, number)[:, stale] = NAN[self.dtype]
