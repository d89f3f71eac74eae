"""The KV cache of one sequence. Layers with a sliding window have a ring buffer; layers with full attention have arrays
that grow.

The keys and the values of a layer are [G, capacity, row size] each (see kv_types.py). Position t is stored in row
t % capacity of every head. A ring has at least window + chunk - 1 rows, so that a chunk never overwrites a row that a query
of this chunk reads. With `keep` additional rows, a session can remove its last `keep` tokens without computing any KV rows
again.

A chunk may end with guesses, which sampling later accepts or rejects. A pass stores the KV rows of guesses too, but commits only
the tokens before the guesses. `accept` then commits the guesses that sampling chose. A rejected guess needs no rollback: its
position was never committed, and its row lies in the part of the ring that the chunk was allowed to overwrite.
"""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gemma_py.errors import ContextError, InputError
from gemma_py.formats.floats import bytes_for_digest
from gemma_py.kernels.memory import aligned
from gemma_py.models.config import Config, Layer
from gemma_py.runtime.kv_types import KV_TYPES

KEYS, VALUES, ROWS = range(3)  # columns of Cache.addresses
_SPARE = 512  # the number of spare rows when the arrays of a layer with full attention grow
_UNBOUNDED = 1 << 40  # more tokens than any context has


def check_context(context: int, tokens: int, after: int | None = None, new: int = 0) -> None:
    """Raise ContextError if a request exceeds the context.

    tokens: the number of prompt tokens
    after: the number of tokens in the KV cache, or None
    new: the number of tokens to generate
    """
    present = (after or 0) + tokens
    if present + new <= context:
        return
    if not new:
        what = f"{tokens} tokens exceed" if after is None else f"{tokens} tokens after {after} cached tokens exceed"
    elif present >= context:
        raise ContextError(
            f"the prompt of {tokens} tokens leaves no room for an answer in the context of {context} tokens"
        )
    else:
        what = f"{tokens} prompt tokens and {new} new tokens exceed"
    raise ContextError(f"{what} the context of {context} tokens")


def first_readable(layer: Layer, position: int) -> int:
    """Return the first position that the token at `position` attends to in this layer.

    In a bidirectional layer, return 0, because the rows of the whole text are kept.
    """
    if layer.sliding_window is None or layer.bidirectional:
        return 0
    return max(0, position - layer.sliding_window + 1)


def digest(keys: np.ndarray, values: np.ndarray) -> str:
    """Return the sha256 of the keys followed by the values, each as little-endian float32 [positions, G, E].

    Every NaN counts as the NaN 0x7FC00000, because the sign of a NaN differs between processors.
    """
    made = hashlib.sha256()
    for rows in (keys, values):
        made.update(bytes_for_digest(rows))
    return made.hexdigest()


def rows_needed(config: Config, tokens: int, chunk: int, keep: int = 0) -> list[int]:
    """Return the number of KV rows that each layer needs for `tokens` tokens in passes of up to `chunk` tokens."""
    windows = [None if layer.bidirectional else layer.sliding_window for layer in config.kv_layers]
    return [tokens if window is None else min(tokens, window + chunk - 1 + keep) for window in windows]


def bytes_needed(config: Config, kv: str, tokens: int, chunk: int, keep: int = 0) -> int:
    rows = zip(config.kv_layers, rows_needed(config, tokens, chunk, keep), strict=True)
    return sum(2 * layer.num_key_value_heads * KV_TYPES[kv].row_bytes(layer.head_dim) * count for layer, count in rows)


def _runs(first: int, end: int, *rings: int) -> Iterator[tuple[int, int]]:
    """Divide positions first .. end - 1 into runs (first, count), such that no ring wraps around within a run.

    rings: the capacities of the rings
    """
    while first < end:
        count = min(end - first, *(ring - first % ring for ring in rings))
        yield first, count
        first += count


class Rows(NamedTuple):
    keys: np.ndarray
    values: np.ndarray

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]


class HiddenStates(NamedTuple):
    """Hidden states after the final norm, from which logits are computed. first: the position of the token of rows[0]."""

    first: int
    rows: np.ndarray  # f32 [positions, D]


class Cache:
    """The KV cache of one sequence.

    Rows of positions below `position` are committed. Other rows are undefined, or NaN if `poison` is set.
    """

    def __init__(self, config: Config, poison: bool = False, kv: str = "float32", keep: int = 0) -> None:
        """Create an empty cache. keep: the most tokens that `rewind` must be able to remove."""
        self.config, self.poison, self.keep = config, poison, keep
        self.kv = KV_TYPES[kv]
        self.ids: list[int] = []
        self._guesses: list[int] = []  # tokens after `ids` whose rows are stored, but not committed
        self._first = [0] * len(config.kv_layers)  # for each layer, the first position whose row `restore` stored
        # The largest position that the cache has had. After a rewind, rows that only lower positions need may be missing.
        self._highest = 0
        self._room = 0, 0  # (tokens, chunk): there are KV rows for this many tokens, in passes of up to `chunk` tokens
        layers = [
            Rows(
                *(
                    np.empty((layer.num_key_value_heads, 0, self.kv.row_size(layer.head_dim)), self.dtype)
                    for _ in range(2)
                )
            )
            for layer in config.kv_layers
        ]
        # The arrays and the table of their addresses are one attribute. If they were two, Ctrl-C between the assignments
        # could leave addresses of arrays that no longer exist.
        self._allocation = layers, np.zeros((len(layers), 3), np.int64)
        self.abandoned = False
        self.hidden: HiddenStates | None = None  # of the last pass, if the runner keeps them

    @property
    def dtype(self) -> type:
        return self.kv.dtype

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
        """Make room for the KV rows of a chunk of `tokens` tokens.

        ahead: the number of tokens that will follow the chunk.
        """
        if self.abandoned:
            raise InputError(
                "this session is unusable after a failed pass, because a stalled worker may still write to it"
            )
        most, chunk = self._room
        if self.position + tokens > most or tokens > chunk:
            self._make_room(self.position, tokens, ahead)

    def prepare(self, tokens: int, chunk: int) -> None:
        """Make room for `tokens` tokens in total, in passes of up to `chunk` tokens. `reserve` then never reallocates."""
        for number, rows in enumerate(rows_needed(self.config, tokens, chunk, self.keep)):
            self._reallocate(number, rows)

    def _make_room(self, position: int, tokens: int, ahead: int = 0) -> None:
        for number, rows in enumerate(rows_needed(self.config, position + tokens, tokens, self.keep)):
            capacity = self.layers[number].capacity
            spare = ahead + _SPARE if self.config.kv_layers[number].sliding_window is None else 0
            if rows > capacity:
                # Growing by half keeps the total cost of copying proportional to the number of tokens. Rows that are
                # never written take no physical memory.
                self._reallocate(number, max(rows + spare, capacity * 3 // 2, 64))
        needed = rows_needed(self.config, _UNBOUNDED, tokens, self.keep)
        short = [layer.capacity for layer, rows in zip(self.layers, needed, strict=True) if layer.capacity < rows]
        self._room = min(short, default=_UNBOUNDED), tokens

    def commit(self, tokens: list[int], guesses: Sequence[int] = ()) -> None:
        """Append tokens to the sequence, after a pass has written their KV rows in every layer.

        guesses: the next tokens of the pass. They are not appended now, but `accept` may append the first of them later.
        """
        self._commit(tokens, list(guesses))

    def accept(self, tokens: Sequence[int]) -> None:
        """Commit the first guesses of the last pass, which must be equal to these tokens."""
        if list(tokens) != self._guesses[: len(tokens)]:
            raise InputError(
                f"accept expects the first guesses of the last pass, {self._guesses!r:.40}, found {tokens!r:.40}"
            )
        self._commit(tokens, self._guesses[len(tokens) :])

    def reject_guesses(self) -> None:
        """Forget the guesses that are not accepted. The next pass overwrites their KV rows."""
        self._guesses = []

    def _commit(self, tokens: Sequence[int], guesses: list[int]) -> None:
        highest = max(self._highest, self.position + len(tokens))
        # `_highest`, `_guesses` and `ids` must match. Python raises KeyboardInterrupt only at function calls and jumps, so never
        # between the next three statements.
        self._highest = highest
        self._guesses = guesses
        self.ids += tokens

    def _oldest(self, number: int) -> int:
        """Return the first position whose row is stored in a layer.

        A ring has room for the window, a chunk and `keep` more rows. So the pass after the largest position overwrites only
        rows that are more than `keep` positions before the window.
        """
        return max(self._first[number], first_readable(self.config.kv_layers[number], self._highest) - self.keep)

    def can_rewind_to(self, position: int) -> bool:
        """Return whether the KV rows that a token at this position attends to are still stored."""
        return 0 <= position <= self.position and all(
            first_readable(layer, position) >= self._oldest(number)
            for number, layer in enumerate(self.config.kv_layers)
        )

    def rewind(self, position: int) -> None:
        """Remove the tokens from this position on. Logits of tokens that follow have the same bits as without the removed tokens."""
        if not self.can_rewind_to(position):
            raise InputError(
                f"cannot rewind from position {self.position} to position {position}: "
                f"the KV rows that a token at position {position} attends to are not stored"
            )
        self.reject_guesses()
        del self.ids[position:]

    def _reallocate(self, number: int, capacity: int) -> None:
        """Copy a layer's rows to new arrays of this capacity, and free the layer's old arrays."""
        old, oldest = self.layers[number], self._oldest(number)
        G, _, size = old.keys.shape
        new = Rows(*(aligned(G * capacity * size, self.dtype).reshape(G, capacity, size) for _ in range(2)))
        for source, rows in zip(old, new, strict=True):
            if self.poison:
                rows[:] = self.kv.poison
            for first, count in _runs(oldest, self.position + len(self._guesses), old.capacity, capacity):
                at = first % old.capacity
                rows[:, first % capacity :][:, :count] = source[:, at : at + count]
        # The list and the table are copied before they change, because a running pass may still use the old ones.
        layers, addresses = self._allocation[0].copy(), self._allocation[1].copy()
        layers[number], addresses[number] = new, (new.keys.ctypes.data, new.values.ctypes.data, capacity)
        self._allocation = layers, addresses

    def copy(self) -> "Cache":
        """Return a copy of the cache, for a second sequence with the same first tokens."""
        twin = copy.copy(self)
        twin.ids = list(self.ids)
        for number, layer in enumerate(self.layers):
            twin._reallocate(number, layer.capacity)
        return twin

    def _committed(self, number: int) -> np.ndarray:
        """Return the positions that later queries attend to: the last `window - 1` ones, or with full attention all of them."""
        first = first_readable(self.config.kv_layers[number], self.position)
        return np.arange(first, self.position)

    def _intact(self, number: int) -> np.ndarray:
        """Return the positions whose rows are stored, with up to `keep` positions before the window."""
        return np.arange(self._oldest(number), self.position)

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values of a layer that later queries attend to, as f32 [positions, G, E] each."""
        layer, E = self.layers[number], self.config.kv_layers[number].head_dim
        slots = self._committed(number) % max(1, layer.capacity)
        keys, values = (self.kv.floats(rows[:, slots].transpose(1, 0, 2), E) for rows in layer)
        return keys, values

    def digest(self) -> list[str]:
        return [digest(*self.rows(number)) for number in range(len(self.config.kv_layers))]

    def copy_block(self, first: int, last: int, copy: np.ndarray) -> None:
        """Copy the rows of positions first .. last - 1 to `copy`, layer by layer: keys, then values, [G, positions, row size]."""
        at = 0
        for layer in self.layers:
            assert self.position - first <= layer.capacity
            slots = np.arange(first, last) % layer.capacity
            for rows in layer:
                part = rows[:, slots]
                copy[at : at + part.size].reshape(part.shape)[:] = part
                at += part.size

    def raw_rows(self, number: int, since: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a layer's stored keys and values for the positions to which tokens at `since` and later attend.

        The two arrays are [G, positions, row size], in the dtype of the cache.
        """
        positions = np.arange(first_readable(self.config.kv_layers[number], since), self.position)
        layer = self.layers[number]
        slots = positions % max(1, layer.capacity)
        return layer.keys[:, slots], layer.values[:, slots]

    def restore(self, ids: list[int], kv_rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Fill an empty cache with another cache's tokens and that cache's `raw_rows` of each layer.

        If layers or rows are missing, or if rows have another shape or dtype than the rows of this cache, InputError is
        raised, and the cache stays empty.
        """
        self._make_room(len(ids), 1)
        stored: list[int] = []
        for number, layer_rows in enumerate(kv_rows):
            self._check_restorable(number, len(ids), layer_rows)
            layer = self.layers[number]
            count = min(layer_rows[0].shape[1], layer.capacity)
            stored.append(len(ids) - count)
            slots = np.arange(len(ids) - count, len(ids)) % layer.capacity
            for target, rows in zip(layer, layer_rows, strict=True):
                target[:, slots] = rows[:, rows.shape[1] - count :]
        if len(stored) < len(self.layers):
            raise InputError(f"the KV rows should have {len(self.layers)} layers, found {len(stored)}")
        ids = list(ids)
        self._first, self._highest, self.ids = stored, 0, ids

    def _check_restorable(self, number: int, position: int, layer_rows: Sequence[np.ndarray]) -> None:
        if number >= len(self.layers):
            raise InputError(f"the KV rows should have {len(self.layers)} layers, found more")
        G, _, size = self.layers[number].keys.shape
        least = position - first_readable(self.config.kv_layers[number], position)
        found = [(getattr(rows, "dtype", None), np.shape(rows)) for rows in layer_rows]
        dtype, shape = found[0]
        fits = dtype == self.dtype and len(shape) == 3 and shape[::2] == (G, size) and least <= shape[1] <= position
        if not fits or found[1:] != found[:1]:
            raise InputError(
                f"the keys and values of layer {number} should be {np.dtype(self.dtype)} [{G}, {least} to {position}, {size}], "
                f"found {' and '.join(f'{dtype} {list(shape)}' for dtype, shape in found)}"
            )

    def last_hidden(self) -> np.ndarray | None:
        """Return the hidden state [D] of the last token, or None if the last pass did not compute that token's logits."""
        at = -1 if self.hidden is None else self.position - 1 - self.hidden.first
        return self.hidden.rows[at] if self.hidden is not None and 0 <= at < len(self.hidden.rows) else None

    def addresses(self) -> np.ndarray:
        """Return int64 [kv layers, 3]: for each layer, the address of the keys, the address of the values, and the
        capacity.

        The caller must hold a reference to `layers` while it uses the addresses.
        """
        return self._allocation[1]

    def abandon(self) -> None:
        """Mark the cache as unusable, because a stalled worker of a failed pass may still write to it."""
        self.abandoned = True

    def poison_uncommitted(self) -> None:
        """If `poison` is set, fill uncommitted rows with NaN, so that tests notice when such rows are read."""
        if not self.poison:
            return
        for number, layer in enumerate(self.layers):
            stale = np.setdiff1d(np.arange(layer.capacity), self._intact(number) % max(1, layer.capacity))
            for rows in layer:
                rows[:, stale] = self.kv.poison
