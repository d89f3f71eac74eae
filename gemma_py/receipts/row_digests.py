"""Digests of rows of logits."""

import hashlib

import numpy as np

from gemma_py.formats.floats import with_one_nan
from gemma_py.kernels.checksum import block_checksums
from gemma_py.receipts.receipt import DIGEST_BYTES

_BLOCK = 1024  # logits


def row_digest(row: np.ndarray) -> bytes:
    """Return the first 12 bytes of the sha256 of the checksums of all blocks of 1,024 logits.

    row: [V]; every NaN counts as 0x7FC00000, and the last block is filled up with zeros

    Hashing a whole row of Gemma's vocabulary with sha256 would take as long as 6% of decoding a token. The checksum is not
    cryptographic, and need not be: an audit computes the logits itself and never takes them from anybody, so a second row
    with an equal digest is of no use.
    """
    if np.isnan(row).any():
        row = with_one_nan(row)
    rest = -len(row) % _BLOCK
    if rest:
        row = np.concatenate([row, np.zeros(rest, np.float32)])
    checksums = np.empty(len(row) // _BLOCK, "<u8")
    block_checksums(np.ascontiguousarray(row, "<f4").view("<u8"), checksums)
    return hashlib.sha256(checksums.data).digest()[:DIGEST_BYTES]
