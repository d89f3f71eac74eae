"""Conversions of floats that give equal bits on every machine, even for NaN.

IEEE 754 leaves the bits of a NaN open. For example, infinity - infinity gives a NaN with the sign bit on x86, and without the
sign bit on ARM. Converting a signalling NaN on ARM gives a quiet NaN.
"""

import numpy as np

_NAN = np.uint32(0x7FC00000).view(np.float32)


def _every_float16() -> np.ndarray:
    """Return all 65,536 float16 numbers as float32. Integer operations preserve the bits of NaNs."""
    words = np.arange(1 << 16, dtype=np.uint32)
    size = words & np.uint32(0x7FFF)
    # The exponent is biased by 15 in float16 and by 127 in float32. For infinity and NaN, the exponent is 31 in float16 and
    # 255 in float32.
    bias = np.where(size < 0x7C00, np.uint32((127 - 15) << 23), np.uint32((255 - 31) << 23))
    subnormal = (size.astype(np.float32) * np.float32(2.0**-24)).view(np.uint32)
    made = np.where(size < 0x400, subnormal, (size << np.uint32(13)) + bias)
    return (made | (words & np.uint32(0x8000)) << np.uint32(16)).view(np.float32)


_FLOAT32_OF_FLOAT16 = _every_float16()


def float32_of_float16(halves: np.ndarray) -> np.ndarray:
    """Convert float16 to float32. A signalling NaN stays signalling."""
    made: np.ndarray = _FLOAT32_OF_FLOAT16[halves.view(np.uint16)]
    return made


def with_one_nan(values: np.ndarray) -> np.ndarray:
    """Return the values as float32 in which every NaN has the bits 0x7FC00000."""
    return np.where(np.isnan(values), _NAN, np.ascontiguousarray(values, np.float32))


def bytes_for_digest(values: np.ndarray) -> bytes:
    return with_one_nan(values).astype("<f4", copy=False).tobytes()
