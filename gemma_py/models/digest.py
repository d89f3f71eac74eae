"""Digests of KV rows, by which the caches of the runtime and of the specification are compared."""

import hashlib

import numpy as np

from gemma_py.models.config import Layer


def first_readable(layer: Layer, position: int) -> int:
    """The first position whose row the token at `position` may read when all positions before it are committed."""
    return 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)


def digest(keys: np.ndarray, values: np.ndarray) -> str:
    """sha256 of little-endian float32, keys before values, each [positions, G, E]."""
    sha = hashlib.sha256()
    for rows in (keys, values):
        sha.update(np.ascontiguousarray(rows, "<f4").tobytes())
    return sha.hexdigest()
