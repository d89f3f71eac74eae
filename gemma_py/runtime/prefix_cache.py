"""The prefix cache, which keeps KV rows of earlier requests for later requests that begin with the same tokens.

Rows are stored in blocks of BLOCK_TOKENS tokens. The key of a block is the number of the preceding block together with the
block's tokens, so requests with a common prefix share the blocks of the prefix.

A block holds the rows of every layer. A request can resume at the end of any block. The window of a sliding layer is longer
than a block, so the rows of a window are in several blocks. Storing a whole window in each block would take more memory.

Rows are copied bit by bit, so the logits after a hit are bit-identical to the logits after a miss.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gemma_py.models.config import Config
from gemma_py.runtime.cache import Cache, bytes_needed, first_readable
from gemma_py.runtime.kv_types import KV_TYPES

BLOCK_TOKENS = 16
_ROOT = 0


class _Block(NamedTuple):
    number: int  # part of the keys of the blocks that follow this block; never used for another block
    slot: int


class PrefixCache:
    """A prefix cache of at most `budget` bytes.

    The least recently used block is evicted first. The blocks of one request are evicted from the last to the first.
    """

    def __init__(self, config: Config, kv: str, budget: int) -> None:
        self.hits = self.misses = self.hit_tokens = 0  # hits and misses count requests
        # blocks in the order of their last use
        self._blocks: OrderedDict[tuple[int, bytes], _Block] = OrderedDict()
        self._last_number, self._kv = _ROOT, KV_TYPES[kv]
        self._block_bytes = bytes_needed(config, kv, BLOCK_TOKENS, BLOCK_TOKENS)
        # The whole budget is one allocation, because many small ones would fragment memory. Slots that are never
        # written take no physical memory.
        self._rows: np.ndarray = np.empty((budget // self._block_bytes, self._block_bytes), np.uint8).view(
            self._kv.dtype
        )
        self._free = list(range(len(self._rows) - 1, -1, -1))

    @property
    def capacity(self) -> int:
        """The maximum number of tokens in the cache."""
        return len(self._rows) * BLOCK_TOKENS

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        return self.blocks * self._block_bytes

    def restore(self, cache: Cache, ids: Sequence[int]) -> int:
        """Copy the longest cached prefix of `ids` into an empty KV cache. Return the number of copied tokens.

        The row of the last id is never copied. The last id has to be computed, because its logits are needed.
        """
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
        """Store the blocks that the last pass of a sequence completed. since: the position at which the pass began.

        Call this before the next pass, which may overwrite rows of sliding layers. Of a sequence that is longer than
        the budget, only the first blocks are stored.
        """
        first, last = since // BLOCK_TOKENS, min(cache.position // BLOCK_TOKENS, len(self._rows))
        if first >= last:
            return
        path = self._find(cache.ids[: last * BLOCK_TOKENS])
        if len(path) < first:
            return  # an earlier block of the sequence was evicted, and without it, later blocks cannot be found
        self._touch(cache.ids, path)
        for index in range(len(path), last):
            # The blocks of this sequence are marked as recently used, so a block of another sequence is evicted.
            if not self._free:
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
        self._free.append(self._blocks.popitem(last=False)[1].slot)

    def _find(self, ids: Sequence[int]) -> list[_Block]:
        """Return the longest chain of cached blocks with which `ids` begins."""
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
        """Mark the blocks of a chain as recently used, from the chain's end to its beginning.

        So the end is evicted before the beginning, because a block is useless without the blocks before it.
        """
        parents = [_ROOT, *(block.number for block in path)]
        for index in range(len(path) - 1, -1, -1):
            self._blocks.move_to_end((parents[index], _tokens(ids, index)))

    def _rows_of(self, config: Config, path: Sequence[_Block]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each layer's keys and values, [G, positions, row size], for a token that follows the chain of blocks `path`.

        The rows begin at the beginning of a block, at or before the first position to which the token attends.
        """
        at = 0
        for layer in config.kv_layers:
            G, size = layer.num_key_value_heads, self._kv.row_size(layer.head_dim)
            needed = path[min(first_readable(layer, len(path) * BLOCK_TOKENS) // BLOCK_TOKENS, len(path) - 1) :]
            rows = self._rows[[block.slot for block in needed], at : at + 2 * G * BLOCK_TOKENS * size]
            keys, values = rows.reshape(-1, 2, G, BLOCK_TOKENS, size).transpose(1, 2, 0, 3, 4).reshape(2, G, -1, size)
            yield keys, values
            at += 2 * G * BLOCK_TOKENS * size


def _tokens(ids: Sequence[int], index: int) -> bytes:
    return array("i", ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]).tobytes()
