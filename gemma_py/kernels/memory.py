"""Allocation of arrays that are aligned to cache lines."""

from collections.abc import Callable
from typing import Any

import numpy as np

LINE = 64  # bytes in a cache line, and in the widest vector register


def aligned(count: int, kind: Any = np.float32, make: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
    """Return an array of `count` numbers that begins at a cache line.

    Loading a vector takes twice as long if the vector lies in two cache lines.

    make: np.empty, or np.zeros, which is slower
    """
    size = count * np.dtype(kind).itemsize
    bytes_ = make(size + LINE, np.uint8)
    skipped = -bytes_.ctypes.data % LINE
    return bytes_[skipped : skipped + size].view(kind)
