import struct
from collections.abc import Callable

import numpy as np
import pytest

from gemma_py.formats.floats import bytes_for_digest, float32_of_float16, with_one_nan
from gemma_py.kernels.decorator import kernel
from gemma_py.runtime.cache import digest
from gemma_py.runtime.trace import new_trace, trace_rows

NAN_BITS = [0x7FC00000, 0xFFC00000, 0x7F802000, 0x7FFFFFFF]


def float32_bits(half: int) -> int:
    sign, exponent, mantissa = half >> 15, half >> 10 & 31, half & 1023
    if exponent == 31:  # infinities and NaN: Python's conversion of NaN depends on the machine
        return sign << 31 | 0x7F800000 | mantissa << 13
    (bits,) = struct.unpack("<I", struct.pack("<f", struct.unpack("<e", struct.pack("<H", half))[0]))
    return int(bits)


def test_every_float16_becomes_the_float32_with_its_value() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(all="raise"):
        made = float32_of_float16(halves).view(np.uint32)
    np.testing.assert_array_equal(made, [float32_bits(half) for half in range(1 << 16)])


def test_only_the_bits_of_nan_change() -> None:
    words = np.array([*NAN_BITS, 0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x3F800001], np.uint32)
    expected = np.array([0x7FC00000] * 4 + [int(word) for word in words[4:]], np.uint32)
    np.testing.assert_array_equal(with_one_nan(words.view(np.float32)).view(np.uint32), expected)
    assert bytes_for_digest(words.view(np.float32)[None]) == expected.astype("<u4").tobytes()


def numbers(bits: int) -> np.ndarray:
    """[2, 3, 4] ordinary numbers and, in place of one of them, the float with these bits."""
    made = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    made.view(np.uint32)[1, 2, 3] = bits
    return made


@kernel
def _hash_rows(trace, tokens, x):
    trace_rows(trace, 0, tokens, x, x.shape[0], 0, 1)


def traced(bits: int) -> int:
    trace = new_trace(1, 1)
    _hash_rows(trace, np.arange(1), numbers(bits).reshape(-1))
    return int(trace.hashes[0, 0])


def digest_of_cache(bits: int) -> str:
    return digest(numbers(0), numbers(bits))


@pytest.mark.parametrize("made", [digest_of_cache, traced])
def test_digests_and_traces_do_not_depend_on_the_bits_of_nan(made: Callable[[int], object]) -> None:
    assert len({made(bits) for bits in NAN_BITS}) == 1
    assert len({made(bits) for bits in (NAN_BITS[0], 0x7F800000, 0, 0x80000000, 1)}) == 5
