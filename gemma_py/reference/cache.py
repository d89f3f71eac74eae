"""The keys and values of the positions so far, by layer and position, each as one plain array."""

import hashlib

import numpy as np

from gemma_py.models.config import Config, Layer
from gemma_py.reference.operations import round_to_bfloat16


class ReferenceCache:
    """keys[l] and values[l] are float32 [capacity, G, E]. Rows at and beyond `position` mean nothing.

    A layer l whose `kv_source` is another layer stores nothing: it reads that layer's rows. G and E may differ from layer
    to layer.
    """

    def __init__(self, config: Config, bfloat16: bool = False) -> None:
        """bfloat16: rows are rounded to bfloat16 when they are stored."""
        self.config, self.bfloat16 = config, bfloat16
        self.position = 0  # of the next token
        shapes = [(0, layer.num_key_value_heads, layer.head_dim) for layer in config.layers]
        self.keys = [np.empty(shape, np.float32) for shape in shapes]
        self.values = [np.empty(shape, np.float32) for shape in shapes]

    def store(self, number: int, keys: np.ndarray, values: np.ndarray) -> None:
        """The rows of layer `number` at the current position.    keys, values: [G, E]"""
        for rows, row in ((self.keys, keys), (self.values, values)):
            if self.position == len(rows[number]):  # no room is left: twice as much
                grown = np.empty((max(16, 2 * self.position), *row.shape), np.float32)
                grown[: self.position] = rows[number]
                rows[number] = grown
            rows[number][self.position] = round_to_bfloat16(row) if self.bfloat16 else row

    def rows(self, layer: Layer) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values that the layer reads, up to and with those of the current position.    [position + 1, G, E]"""
        end = self.position + 1
        return self.keys[layer.kv_source][:end], self.values[layer.kv_source][:end]

    def first_visible(self, layer: Layer) -> int:
        """The first position that a query at the current position sees in this layer."""
        return 0 if layer.sliding_window is None else max(0, self.position - layer.sliding_window + 1)

    def digests(self) -> list[str]:
        """For each layer that has rows of its own: the sha256 of those that the next token may read, keys before values."""
        made = []
        for number, layer in enumerate(self.config.layers):
            if layer.kv_source != number:
                continue
            visible = slice(self.first_visible(layer), self.position)
            digest = hashlib.sha256()
            for rows in (self.keys[number], self.values[number]):
                digest.update(rows[visible].astype("<f4").tobytes())
            made.append(digest.hexdigest())
        return made
