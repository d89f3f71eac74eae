"""Arrays for kernels."""

from typing import Any

import numpy as np

LINE = 64  # bytes of a cache line, and of the widest vector


def aligned(count: int, kind: Any = np.float32) -> np.ndarray:
    """`count` zeros that begin with a cache line: a vector across two lines takes twice the time to load."""
    size = count * np.dtype(kind).itemsize
    bytes_ = np.zeros(size + LINE, np.uint8)
    skipped = -bytes_.ctypes.data % LINE
    return bytes_[skipped : skipped + size].view(kind)
