"""The KV cache of the specification."""

import hashlib

import numpy as np

from gemma_py.models.config import Config, Layer
from gemma_py.reference.operations import round_to_bfloat16, round_to_q8_0

# {number type of the KV cache: the function that rounds the rows when they are stored}
_ROUND = {"float32": np.copy, "bfloat16": round_to_bfloat16, "q8_0": round_to_q8_0}


class ReferenceCache:
    """Keys and values by layer and position. keys[l] and values[l] are float32 [capacity, G, E].

    G: number of key/value heads, E: width of a head; both may differ between layers. Rows from `position` on are undefined.
    A layer whose `kv_source` is another layer stores no rows and reads the rows of that other layer.
    """

    def __init__(self, config: Config, kv: str = "float32") -> None:
        """Create an empty cache. kv: the number type to which keys and values are rounded when stored."""
        self.config, self._round = config, _ROUND[kv]
        self.position = 0  # the position of the next token
        shapes = [(0, layer.num_key_value_heads, layer.head_dim) for layer in config.layers]
        self.keys = [np.empty(shape, np.float32) for shape in shapes]
        self.values = [np.empty(shape, np.float32) for shape in shapes]

    def store(self, number: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Store the keys [G, E] and values [G, E] of layer `number` at the current position."""
        for rows, row in ((self.keys, keys), (self.values, values)):
            if self.position == len(rows[number]):  # the array is full; double its size
                grown = np.empty((max(16, 2 * self.position), *row.shape), np.float32)
                grown[: self.position] = rows[number]
                rows[number] = grown
            rows[number][self.position] = self._round(row)

    def rows(self, layer: Layer) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values that the layer reads, [position + 1, G, E], including the current position."""
        end = self.position + 1
        return self.keys[layer.kv_source][:end], self.values[layer.kv_source][:end]

    def first_visible(self, layer: Layer) -> int:
        """Return the first position that a query at the current position attends to in this layer.

        In a bidirectional layer, return 0, because queries at earlier positions attend to the rows too.
        """
        if layer.sliding_window is None or layer.bidirectional:
            return 0
        return max(0, self.position - layer.sliding_window + 1)

    def digests(self) -> list[str]:
        """Return a sha256 for each layer that stores rows, over the keys and then the values that the next token attends to."""
        made = []
        for number, layer in enumerate(self.config.layers):
            if layer.kv_source != number:
                continue
            visible = slice(self.first_visible(layer), self.position)
            digest = hashlib.sha256()
            for rows in (self.keys[number], self.values[number]):
                numbers = rows[visible]
                # The sign of a computed NaN differs between processors, so every NaN is replaced by one.
                digest.update(np.where(numbers != numbers, np.float32(np.nan), numbers).astype("<f4").tobytes())
            made.append(digest.hexdigest())
        return made
