"""Arrays for kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np

LINE = 64  # bytes of a cache line, and of the widest vector


def aligned(count: int, kind: Any = np.float32, make: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
    """An array of `count` numbers that begins at a cache line: loading a vector across two lines takes twice as long.

    make: np.zeros, to get zeros; that takes time where memory has been in use before.
    """
    size = count * np.dtype(kind).itemsize
    bytes_ = make(size + LINE, np.uint8)
    skipped = -bytes_.ctypes.data % LINE
    return bytes_[skipped : skipped + size].view(kind)
