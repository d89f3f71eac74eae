"""Conversions of floats that give equal bits on every machine, even for NaN.

IEEE 754 leaves the bits of a NaN open. infinity - infinity has the sign bit on x86 and not on ARM, and ARM's conversion of a
signalling NaN makes the NaN quiet.
"""

import numpy as np

_NAN = np.uint32(0x7FC00000).view(np.float32)


def _every_float16() -> np.ndarray:
    """Return all 65,536 float16 as float32, made by integer operations, and by one exact product for subnormal numbers."""
    words = np.arange(1 << 16, dtype=np.uint32)
    size = words & np.uint32(0x7FFF)
    # The exponent is biased by 15 in float16 and by 127 in float32. The largest exponent, of infinity and NaN, is 31 and 255.
    bias = np.where(size < 0x7C00, np.uint32((127 - 15) << 23), np.uint32((255 - 31) << 23))
    subnormal = (size.astype(np.float32) * np.float32(2.0**-24)).view(np.uint32)
    made = np.where(size < 0x400, subnormal, (size << np.uint32(13)) + bias)
    return (made | (words & np.uint32(0x8000)) << np.uint32(16)).view(np.float32)


_FLOAT32_OF_FLOAT16 = _every_float16()


def float32_of_float16(halves: np.ndarray) -> np.ndarray:
    """Return the float16 numbers as float32. A signalling NaN stays one, with its bits in the upper places."""
    made: np.ndarray = _FLOAT32_OF_FLOAT16[halves.view(np.uint16)]
    return made


def with_one_nan(values: np.ndarray) -> np.ndarray:
    """Return the values as float32 in which every NaN has the bits 0x7FC00000."""
    return np.where(np.isnan(values), _NAN, np.ascontiguousarray(values, np.float32))


def bytes_for_digest(values: np.ndarray) -> bytes:
    """Return the values as little-endian float32 in which every NaN has the bits 0x7FC00000."""
    return with_one_nan(values).astype("<f4", copy=False).tobytes()
