"""Keys and values of prompts and answers, kept for whatever begins alike.

They lie in blocks of a few tokens, each known by its tokens and by the block before it, so what several texts share is
there once. A block has the rows of all layers, of sliding ones too: the window before any border of blocks is in the last
blocks before it, so one can go on from there. (Windows by themselves, one at each border, would take more room as long as
borders are closer than windows are long.) Rows are copied bit by bit, so nothing tells a hit from a miss but the time.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gemma_py.models.config import Config
from gemma_py.models.digest import first_readable
from gemma_py.runtime.cache import KV_TYPES, Cache, bytes_needed

TOKENS = 16  # of a block
_ROOT = 0


class _Block(NamedTuple):
    number: int  # never given again
    place: int


class Prefixes:
    """At most `budget` bytes of them; what was used least of late goes first, the ends of texts before their beginnings."""

    def __init__(self, config: Config, kv: str, budget: int) -> None:
        self.hits = self.misses = self.tokens = 0  # searches that found something or nothing, and how much they found
        self._blocks: OrderedDict[tuple[int, bytes], _Block] = OrderedDict()  # what is used goes to the end
        self._made = _ROOT
        self._block_bytes = bytes_needed(config, kv, TOKENS, TOKENS)
        # Once and for all: memory that is never written costs none, and pieces that come and go would leave holes.
        self._rows: np.ndarray = np.empty((budget // self._block_bytes, self._block_bytes), np.uint8).view(KV_TYPES[kv])
        self._free = list(range(len(self._rows) - 1, -1, -1))

    @property
    def capacity(self) -> int:
        """Tokens."""
        return len(self._rows) * TOKENS

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * self._block_bytes

    def restore(self, cache: Cache, ids: Sequence[int]) -> int:
        """Put into an empty cache what is known of these ids, all but the last of them at most. How many tokens."""
        path = self._path(ids[: len(ids) - 1])
        if not path:
            self.misses += 1
            return 0
        count = len(path) * TOKENS
        cache.restore(list(ids[:count]), self._stored(cache.config, path))
        self._touch(ids, path)
        self.hits += 1
        self.tokens += count
        return count

    def keep(self, cache: Cache, since: int) -> None:
        """Whole blocks that the pass from position `since` on has completed, while its rows are all in the cache.

        Of a text that is longer than the budget, the beginning.
        """
        first, last = since // TOKENS, min(cache.position // TOKENS, len(self._rows))
        if first >= last:
            return
        path = self._path(cache.ids[: last * TOKENS])
        if len(path) < first:
            return  # what comes before is gone already
        self._touch(cache.ids, path)
        for index in range(len(path), last):
            if not self._free:  # then there are more than those of this text, and others were used before it
                self._free.append(self._blocks.popitem(last=False)[1].place)
            place = self._free.pop()
            try:
                cache.block(index * TOKENS, (index + 1) * TOKENS, self._rows[place])
            except BaseException:
                self._free.append(place)
                raise
            self._made += 1
            parent = path[-1].number if path else _ROOT
            path.append(_Block(self._made, place))
            self._blocks[parent, _tokens(cache.ids, index)] = path[-1]
        self._touch(cache.ids, path)

    def _path(self, ids: Sequence[int]) -> list[_Block]:
        """The blocks with which these ids begin."""
        path: list[_Block] = []
        parent = _ROOT
        for index in range(len(ids) // TOKENS):
            block = self._blocks.get((parent, _tokens(ids, index)))
            if block is None:
                break
            path.append(block)
            parent = block.number
        return path

    def _touch(self, ids: Sequence[int], path: Sequence[_Block]) -> None:
        """These blocks of ids were used now; the first of all counts as the latest."""
        parents = [_ROOT, *(block.number for block in path)]
        for index in range(len(path) - 1, -1, -1):
            self._blocks.move_to_end((parents[index], _tokens(ids, index)))

    def _stored(self, config: Config, path: Sequence[_Block]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """A layer at a time, keys and values [G, positions, E]: what a token after these blocks may read, and at
        most a block's rows before that."""
        at = 0
        for layer in config.kv_layers:
            G, E = layer.num_key_value_heads, layer.head_dim
            needed = path[min(first_readable(layer, len(path) * TOKENS) // TOKENS, len(path) - 1) :]
            rows = self._rows[[block.place for block in needed], at : at + 2 * G * TOKENS * E]
            keys, values = rows.reshape(-1, 2, G, TOKENS, E).transpose(1, 2, 0, 3, 4).reshape(2, G, -1, E)
            yield keys, values
            at += 2 * G * TOKENS * E


def _tokens(ids: Sequence[int], index: int) -> bytes:
    return array("i", ids[index * TOKENS : (index + 1) * TOKENS]).tobytes()
