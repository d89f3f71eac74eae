"""A 64-bit checksum, computed as fast as memory can be read. It detects accidental damage, not tampering."""

import numpy as np

from gemma_py.kernels.decorator import inlined, kernel

_PRIME = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
# For the two float32 in a word: _MAGNITUDE selects the bits without the sign, and _SIGN the sign bit. The magnitude plus _CARRY
# has the sign bit set if the float is NaN, and only then.
_MAGNITUDE, _CARRY, _SIGN = (np.uint64(bits << 32 | bits) for bits in (0x7FFFFFFF, 0x007FFFFF, 0x80000000))


@inlined
def _mixed(digest, word):
    """Return the digest after mixing in one word.

    The multiplication, and the xor with the shifted digest, are bijections, so different words give different digests. The
    multiplication spreads a bit only to higher bits, so the shift is needed to spread high bits to lower ones.
    """
    digest = (digest ^ word) * _PRIME
    return digest ^ (digest >> _HALF)


@inlined
def _checksum(words):
    """Return the checksum of the words. Eight independent chains hide the latency of the multiplication."""
    a, b, c, d = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    e, f, g, h = np.uint64(5), np.uint64(6), np.uint64(7), np.uint64(8)
    rows = words.reshape(-1, 8)
    for i in range(rows.shape[0]):
        a, b, c, d = _mixed(a, rows[i, 0]), _mixed(b, rows[i, 1]), _mixed(c, rows[i, 2]), _mixed(d, rows[i, 3])
        e, f, g, h = _mixed(e, rows[i, 4]), _mixed(f, rows[i, 5]), _mixed(g, rows[i, 6]), _mixed(h, rows[i, 7])
    digest = np.uint64(words.shape[0])
    for lane in (a, b, c, d, e, f, g, h):
        digest = _mixed(digest, lane)
    return digest


@kernel
def checksum(words):
    """words: uint64, read; the number of words is a multiple of 8"""
    return _checksum(words)


@inlined
def _has_nan(words):
    """Return whether the words, as pairs of float32, contain a NaN."""
    found = np.uint64(0)
    for i in range(words.shape[0]):
        found |= (words[i] & _MAGNITUDE) + _CARRY
    return (found & _SIGN) != 0


@kernel
def block_checksums(words, checksums):
    """Compute the checksum of each block of the words. Return whether the words, as pairs of float32, contain a NaN.

    All blocks have equal lengths.

    words: uint64, read; the number of words is a multiple of 8 times the number of blocks
    checksums: [blocks] uint64, written
    """
    size, nan = words.shape[0] // checksums.shape[0], False
    for block in range(checksums.shape[0]):
        part = words[block * size : (block + 1) * size]
        checksums[block] = _checksum(part)
        nan |= _has_nan(part)
    return nan
