"""Arrays for kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np

LINE = 64  # bytes of a cache line, and of the widest vector


def aligned(count: int, kind: Any = np.float32, make: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
    """`count` numbers that begin with a cache line: a vector across two lines takes twice the time to load.

    make: np.zeros, where they are to be set: that takes time, of memory that was in use before.
    """
    size = count * np.dtype(kind).itemsize
    bytes_ = make(size + LINE, np.uint8)
    skipped = -bytes_.ctypes.data % LINE
    return bytes_[skipped : skipped + size].view(kind)
