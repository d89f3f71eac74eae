"""Which replica should answer a request: one that has the beginning of the prompt in its prefix cache.

Like the prefix cache, the routing counts in blocks of BLOCK_TOKENS tokens. The key of a block is a hash of all tokens up to the
block's end.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

from gemma_py.runtime.prefix_cache import BLOCK_TOKENS

_KEY_BYTES = 16
_SEVERAL = b"several"  # stands for the following block if different prompts continue in different ways


def block_keys(ids: Sequence[int]) -> list[bytes]:
    """Return the keys of the whole blocks of a sequence of tokens."""
    tokens, keys, key = array("i", ids), list[bytes](), b""
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        key = blake2b(key + tokens[end - BLOCK_TOKENS : end].tobytes(), digest_size=_KEY_BYTES).digest()
        keys.append(key)
    return keys


class KnownBlocks:
    """The blocks that a replica was sent or has answered. capacity: the maximum number of blocks

    The replica's prefix cache has the same capacity and also evicts the least recently used block, so it holds about the same
    blocks. A difference costs time, because blocks are then computed again, but changes no answer.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Key of a block -> key of the following block, or _SEVERAL; an empty key if no following block was seen yet. In the
        # order of their last use.
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks at the beginning of a prompt are known.

        The result is 0 if the known blocks were followed by several different blocks. They are then the common beginning of
        many prompts, such as a system prompt, which would otherwise attract all these prompts to one replica.
        """
        count = next((number for number, key in enumerate(keys) if key not in self._blocks), len(keys))
        if 0 < count < len(keys) and self._blocks[keys[count - 1]] == _SEVERAL:
            return 0
        return count

    def add(self, keys: Sequence[bytes]) -> None:
        """Add the blocks of a sequence, or mark them as recently used. Evict the least recently used blocks.

        Like the prefix cache, evict the end of a sequence before its beginning, and of a sequence that is longer than the
        capacity keep only the beginning.
        """
        keys = keys[: self._capacity]
        for key, following in zip(keys, [*keys[1:], b""], strict=False):
            before = self._blocks.get(key, b"")
            self._blocks[key] = before if following in (b"", before) else _SEVERAL if before else following
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Destination(Protocol):
    """A replica. load: the number of its requests. known: the blocks that it was sent or has answered."""

    @property
    def load(self) -> int: ...

    @property
    def known(self) -> KnownBlocks: ...


D = TypeVar("D", bound=Destination)


def choose(replicas: Sequence[D], keys: Sequence[bytes], parallel: int) -> D:
    """Return the replica that knows the longest prefix of a prompt, without those that are too busy.

    keys: of the prompt's blocks. parallel: the number of requests that a replica runs at once

    A replica is too busy if it has at least `parallel` requests more than the least busy one. Among replicas that know equally
    much, the least busy one is chosen, then the one with the most room for prefixes.
    """
    least = min(replica.load for replica in replicas)
    allowed = [replica for replica in replicas if replica.load < least + parallel]
    return max(allowed, key=lambda replica: (replica.known.match(keys), -replica.load, -len(replica.known)))
