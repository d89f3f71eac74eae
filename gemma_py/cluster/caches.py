"""The KV caches and the prefix cache of a model in shards, as the engine sees them. The KV rows are in the shards."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gemma_py.cluster.shard import Accept, Insert, Order, Prepare, Rewind
from gemma_py.errors import InputError
from gemma_py.runtime.cache import Cache, bytes_needed
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS, PrefixCache

if TYPE_CHECKING:
    from gemma_py.cluster.shards import Shards


class ShardedCache(Cache):
    """The tokens of a sequence whose KV rows are in the shards.

    number: the number by which the shards find their caches of the sequence.
    epoch: the value of `Shards.epoch` when the shards created these caches. If `Shards.epoch` has changed since, the shards
    have dropped these caches.
    """

    def __init__(self, shards: "Shards", keep: int) -> None:
        super().__init__(replace(shards.config, layers=()), shards.instruments.poison, shards.kv, keep)
        self.number, self.epoch = -1, -1
        self.prepared: tuple[int, int] | None = None
        self._shards = shards

    @property
    def current(self) -> bool:
        return self.epoch == self._shards.epoch

    def prepare(self, tokens: int, chunk: int) -> None:
        self.prepared = tokens, chunk
        self._order(lambda number: Prepare(number, tokens, chunk))

    def accept(self, tokens: Sequence[int]) -> None:
        super().accept(tokens)
        self._order(lambda number: Accept(number, list(tokens)))

    def rewind(self, position: int) -> None:
        super().rewind(position)
        self._order(lambda number: Rewind(number, position))

    def _order(self, make: Callable[[int], Order]) -> None:
        with self._shards.locked():
            if self.current:
                self._shards.order(make(self.number))

    def can_rewind_to(self, position: int) -> bool:
        with self._shards.locked():
            if not 0 <= position <= self.position or not self.current:
                return 0 <= position <= self.position
            return all(self._shards.read_all(self, "can_rewind_to", position))

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        made: tuple[np.ndarray, np.ndarray] = self._shards.read_layer(self, "rows", number)
        return made

    def raw_rows(self, number: int, since: int) -> tuple[np.ndarray, np.ndarray]:
        made: tuple[np.ndarray, np.ndarray] = self._shards.read_layer(self, "raw_rows", number, since)
        return made

    def digest(self) -> list[str]:
        return [digest for digests in self._shards.read_all(self, "digest") for digest in digests]

    def restore(self, ids: list[int], kv_rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        self._shards.restore(self, list(ids), list(kv_rows))
        self.ids = list(ids)

    def copy(self) -> "Cache":
        raise InputError("a cache in shards cannot be copied")


class ShardedPrefixCache(PrefixCache):
    """The prefix caches of all shards, which store and evict the same blocks. See `PrefixCache`."""

    def __init__(self, shards: "Shards", budget: int) -> None:
        self.hits = self.misses = self.hit_tokens = 0
        self._shards = shards
        self._block_bytes = bytes_needed(shards.config, shards.kv, BLOCK_TOKENS, BLOCK_TOKENS)
        self._count = budget // self._block_bytes
        shards.keep_prefixes(self._count)

    @property
    def capacity(self) -> int:
        return self._count * BLOCK_TOKENS

    @property
    def nbytes(self) -> int:
        return self._shards.local.prefixes.blocks * self._block_bytes

    def restore(self, cache: Cache, ids: Sequence[int]) -> int:
        assert isinstance(cache, ShardedCache)
        count = self._shards.find_prefix(cache, list(ids))
        if count:
            cache.ids = list(ids[:count])
            self.hits += 1
            self.hit_tokens += count
        else:
            self.misses += 1
        return count

    def insert(self, cache: Cache, since: int) -> None:
        assert isinstance(cache, ShardedCache)
        with self._shards.locked():
            if cache.current:
                self._shards.order(Insert(cache.number, since))
