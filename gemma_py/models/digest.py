"""Digests of keys and values: what two caches are compared by, whoever made them."""

import hashlib

import numpy as np

from gemma_py.models.config import Layer


def first_readable(layer: Layer, position: int) -> int:
    """The first position whose row the token at `position` may read, when all before are committed."""
    return 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)


def digest(keys: np.ndarray, values: np.ndarray) -> str:
    """sha256 of little-endian float32, keys before values, each [positions, G, E]."""
    made = hashlib.sha256()
    for rows in (keys, values):
        made.update(np.ascontiguousarray(rows, "<f4").tobytes())
    return made.hexdigest()
