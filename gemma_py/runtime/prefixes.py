"""Keys and values of prompts and answers, kept for whatever begins alike.

They lie in blocks of a few tokens, each known by its tokens and by the block before it, so what several texts share is
there once. A block has the rows of all layers, of sliding ones too: the window before any border of blocks is in the last
blocks before it, so one can go on from there. (Windows by themselves, one at each border, would take more room as long as
borders are closer than windows are long.) Rows are copied bit by bit, so nothing tells a hit from a miss but the time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gemma_py.model.digest import first_readable
from gemma_py.runtime.cache import Cache

TOKENS = 16  # of a block
_ROOT = 0


@dataclass(frozen=True)
class _Block:
    number: int
    rows: list[tuple[np.ndarray, np.ndarray]]  # a layer each: keys and values, [G, TOKENS, E]

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.rows)


class Prefixes:
    """At most `budget` bytes of them; what was used least of late goes first, the ends of texts before their beginnings."""

    def __init__(self, budget: int) -> None:
        self.budget, self.nbytes = budget, 0
        self.hits = self.misses = self.tokens = 0  # searches that found something or nothing, and how much they found
        self._blocks: OrderedDict[tuple[int, tuple[int, ...]], _Block] = OrderedDict()  # what is used goes to the end
        self._made = _ROOT

    def restore(self, cache: Cache, ids: Sequence[int]) -> int:
        """Put into an empty cache what is known of these ids, all but the last of them at most. How many tokens."""
        path = self._path(ids[: len(ids) - 1])
        if not path:
            self.misses += 1
            return 0
        count = len(path) * TOKENS
        cache.restore(list(ids[:count]), self._rows(cache, path))
        self._touch(ids, len(path))
        self.hits += 1
        self.tokens += count
        return count

    def keep(self, cache: Cache, since: int) -> None:
        """Whole blocks that the pass from position `since` on has completed, while its rows are all in the cache."""
        first, last = since // TOKENS, cache.position // TOKENS
        if first == last or self.budget == 0:
            return
        path = self._path(cache.ids[: last * TOKENS])
        if len(path) < first:
            return  # what comes before is gone already
        parent = path[-1].number if path else _ROOT
        for index in range(len(path), last):
            self._made += 1
            block = _Block(self._made, cache.block(index * TOKENS, (index + 1) * TOKENS))
            self._blocks[parent, _tokens(cache.ids, index)] = block
            self.nbytes += block.nbytes
            parent = block.number
        self._touch(cache.ids, last)
        while self.nbytes > self.budget:
            _, gone = self._blocks.popitem(last=False)
            self.nbytes -= gone.nbytes

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

    def _touch(self, ids: Sequence[int], count: int) -> None:
        """The first so many blocks of ids were used now; the first of all counts as the latest."""
        parents = [_ROOT, *(block.number for block in self._path(ids[: count * TOKENS]))]
        for index in range(count - 1, -1, -1):
            self._blocks.move_to_end((parents[index], _tokens(ids, index)))

    @staticmethod
    def _rows(cache: Cache, path: list[_Block]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """A layer at a time: what a token after these blocks may read, and at most a block's rows before that."""
        for number, layer in enumerate(cache.config.layers):
            needed = path[min(first_readable(layer, len(path) * TOKENS) // TOKENS, len(path) - 1) :]
            keys, values = zip(*(block.rows[number] for block in needed), strict=True)
            yield np.concatenate(keys, 1), np.concatenate(values, 1)


def _tokens(ids: Sequence[int], index: int) -> tuple[int, ...]:
    return tuple(ids[index * TOKENS : (index + 1) * TOKENS])
