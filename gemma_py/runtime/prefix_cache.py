"""The prefix cache: keys and values of earlier requests, for those that begin with the same tokens.

They are stored in blocks of a few tokens. The key of a block is its tokens and the block before it, so a prefix that several requests
share is stored once. A block holds the rows of all layers, sliding ones too: the window before any end of a block lies in that
block and the ones before it, so a request can resume there. (Storing windows by themselves, one at each end of a block, would
take more memory as long as blocks are shorter than windows.) Rows are copied bit by bit, so a hit differs from a miss by
nothing but the time.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gemma_py.models.config import Config
from gemma_py.runtime.cache import KV_TYPES, Cache, bytes_needed, first_readable

BLOCK_TOKENS = 16  # tokens
_ROOT = 0


class _Block(NamedTuple):
    number: int  # unique: never used for another block
    slot: int  # its row of the storage


class PrefixCache:
    """Holds at most `budget` bytes. The least recently used block is evicted first; of one text, its end before its beginning."""

    def __init__(self, config: Config, kv: str, budget: int) -> None:
        self.hits = self.misses = self.hit_tokens = 0  # requests, and the tokens of the hits
        self._blocks: OrderedDict[tuple[int, bytes], _Block] = OrderedDict()  # the most recently used last
        self._last_number = _ROOT
        self._block_bytes = bytes_needed(config, kv, BLOCK_TOKENS, BLOCK_TOKENS)
        # Allocated once: memory that is never written costs none, and blocks allocated one by one would fragment it.
        self._rows: np.ndarray = np.empty((budget // self._block_bytes, self._block_bytes), np.uint8).view(KV_TYPES[kv])
        self._free = list(range(len(self._rows) - 1, -1, -1))

    @property
    def capacity(self) -> int:
        """How many tokens there is room for."""
        return len(self._rows) * BLOCK_TOKENS

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * self._block_bytes

    def restore(self, cache: Cache, ids: Sequence[int]) -> int:
        """Copy the longest cached prefix of these ids, without the last id, into an empty KV cache. Returns its number of tokens."""
        path = self._find(ids[: len(ids) - 1])
        if not path:
            self.misses += 1
            return 0
        count = len(path) * BLOCK_TOKENS
        cache.restore(list(ids[:count]), self._rows_of(cache.config, path))
        self._touch(ids, path)
        self.hits += 1
        self.hit_tokens += count
        return count

    def insert(self, cache: Cache, since: int) -> None:
        """Store the blocks that the pass from position `since` on has completed, while all its rows are in the KV cache.

        If a text is longer than the budget, only its beginning is stored.
        """
        first, last = since // BLOCK_TOKENS, min(cache.position // BLOCK_TOKENS, len(self._rows))
        if first >= last:
            return
        path = self._find(cache.ids[: last * BLOCK_TOKENS])
        if len(path) < first:
            return  # blocks before these are evicted already
        self._touch(cache.ids, path)
        for index in range(len(path), last):
            if not self._free:  # then there are blocks of other texts, which were used before this one's
                self._evict()
            slot = self._free.pop()
            try:
                cache.copy_block(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS, self._rows[slot])
            except BaseException:
                self._free.append(slot)
                raise
            self._last_number += 1
            parent = path[-1].number if path else _ROOT
            path.append(_Block(self._last_number, slot))
            self._blocks[parent, _tokens(cache.ids, index)] = path[-1]
        self._touch(cache.ids, path)

    def _evict(self) -> None:
        """Free the slot of the least recently used block."""
        self._free.append(self._blocks.popitem(last=False)[1].slot)

    def _find(self, ids: Sequence[int]) -> list[_Block]:
        """The cached blocks that these ids begin with."""
        path: list[_Block] = []
        parent = _ROOT
        for index in range(len(ids) // BLOCK_TOKENS):
            block = self._blocks.get((parent, _tokens(ids, index)))
            if block is None:
                break
            path.append(block)
            parent = block.number
        return path

    def _touch(self, ids: Sequence[int], path: Sequence[_Block]) -> None:
        """Mark these blocks of ids as used now, the first as the most recently used."""
        parents = [_ROOT, *(block.number for block in path)]
        for index in range(len(path) - 1, -1, -1):
            self._blocks.move_to_end((parents[index], _tokens(ids, index)))

    def _rows_of(self, config: Config, path: Sequence[_Block]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Layer by layer, keys and values [G, positions, E] that a token after these blocks may read, and at most a block's rows
        before those."""
        at = 0
        for layer in config.kv_layers:
            G, E = layer.num_key_value_heads, layer.head_dim
            needed = path[min(first_readable(layer, len(path) * BLOCK_TOKENS) // BLOCK_TOKENS, len(path) - 1) :]
            rows = self._rows[[block.slot for block in needed], at : at + 2 * G * BLOCK_TOKENS * E]
            keys, values = rows.reshape(-1, 2, G, BLOCK_TOKENS, E).transpose(1, 2, 0, 3, 4).reshape(2, G, -1, E)
            yield keys, values
            at += 2 * G * BLOCK_TOKENS * E


def _tokens(ids: Sequence[int], index: int) -> bytes:
    return array("i", ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]).tobytes()
