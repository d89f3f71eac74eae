"""Digests of rows of logits, computed by a thread beside the forward passes."""

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from gemma_py.formats.floats import bytes_for_digest
from gemma_py.receipts.receipt import DIGEST_BYTES

_MOST_PENDING = 4  # the most rows in memory that wait for their digest: 4 MiB with Gemma's vocabulary


def row_digest(row: np.ndarray) -> bytes:
    """Return the beginning of the sha256 of a row of logits, as little-endian float32. Every NaN has the bits 0x7FC00000."""
    return hashlib.sha256(bytes_for_digest(row)).digest()[:DIGEST_BYTES]


class RowDigests:
    """Computes the digests of rows in a thread of its own, because hashing a row of Gemma's vocabulary takes as long as 5%
    of decoding a token. hashlib does not hold Python's lock meanwhile.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gemma_py-receipt")
        self._pending: deque[Future[bytes]] = deque()
        self._made: list[bytes] = []

    def add(self, row: np.ndarray) -> None:
        """Append a row [V]. The row must not change afterwards."""
        if len(self._pending) == _MOST_PENDING:
            self._made.append(self._pending.popleft().result())
        self._pending.append(self._thread.submit(row_digest, row))

    def finish(self) -> tuple[bytes, ...]:
        """Return the digests of all rows, and end the thread."""
        self._made += [digest.result() for digest in self._pending]
        self._pending.clear()
        self._thread.shutdown()
        return tuple(self._made)
