"""Digests of rows of logits."""

import hashlib

import numpy as np

from gemma_py.formats.floats import with_one_nan
from gemma_py.kernels.checksum import block_checksums
from gemma_py.receipts.receipt import DIGEST_BYTES

_BLOCK = 1024  # logits


def row_digest(row: np.ndarray) -> bytes:
    """Return a 12-byte digest of a row of logits: each block has a checksum, and sha256 hashes the checksums.

    row: [V]; every NaN counts as 0x7FC00000, and the last block is filled up with zeros

    With sha256 alone, hashing a row would take 6% of the time of decoding a token. The checksum is not cryptographic. It
    need not be: an audit computes the logits itself, so other logits with an equal digest deceive nobody.
    """
    rest = -len(row) % _BLOCK
    if rest:
        row = np.concatenate([row, np.zeros(rest, np.float32)])
    checksums = np.empty(len(row) // _BLOCK, "<u8")
    if block_checksums(np.ascontiguousarray(row, "<f4").view("<u8"), checksums):
        block_checksums(with_one_nan(row).astype("<f4").view("<u8"), checksums)
    return hashlib.sha256(checksums.data).digest()[:DIGEST_BYTES]
