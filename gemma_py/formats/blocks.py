"""Quantised tensor types: conversion between the bytes of blocks, codes with scales, and float32.

A quantised value is `scale * code`, `scale * code + minimum` or `scale * code - minimum`. Each group of `group`
neighbouring values has one scale and one minimum. `unpack` returns integer codes and scales. The results of `dequantise` and
`pack` are bit-identical to the `gguf` package's. No function sums an array, so numpy's order of addition does not matter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from gemma_py.formats.floats import float32_of_float16


class Minimum(Enum):
    """Whether a minimum is added or subtracted: value = scale * code + minimum, or value = scale * code - minimum.

    SUBTRACTED exists because negating a minimum, in order to add it, would change the bits of a NaN.
    """

    NONE = 0
    ADDED = 1
    SUBTRACTED = -1


class Unpacked(NamedTuple):
    """The codes and scales of the blocks of a quantised tensor.

    A group's scale is block_scale * sub_scales[group], or block_scale in formats without sub-scales. A group's minimum is
    minimum_block_scale * minimum_sub_scales[group], or minimum_block_scale.

    codes: int8 [blocks, values per block]
    block_scale, minimum_block_scale: float16 [blocks, 1]
    sub_scales, minimum_sub_scales: int8 [blocks, groups per block]
    """

    codes: np.ndarray
    block_scale: np.ndarray
    sub_scales: np.ndarray | None = None
    minimum_block_scale: np.ndarray | None = None
    minimum_sub_scales: np.ndarray | None = None

    @property
    def scales(self) -> np.ndarray:
        return scales_of(self.block_scale, self.sub_scales)

    @property
    def minimums(self) -> np.ndarray | None:
        return (
            None if self.minimum_block_scale is None else scales_of(self.minimum_block_scale, self.minimum_sub_scales)
        )


def scales_of(block_scales: np.ndarray, sub_scales: np.ndarray | None) -> np.ndarray:
    """Return the scale of each group, f32 [rows, groups]: block scale * sub-scale, which is exact in f32.

    block_scales: float16 [rows, blocks]
    sub_scales: int8 [rows, groups], or None in formats without sub-scales
    """
    wide = float32_of_float16(block_scales)
    if sub_scales is None:
        return wide
    # A malicious file can have infinite scales. Callers that need finite scales check the result.
    with np.errstate(invalid="ignore"):
        return wide.repeat(sub_scales.shape[1] // block_scales.shape[1], 1) * sub_scales.astype(np.float32)


@dataclass(frozen=True)
class BlockType:
    name: str
    block: int  # values per block
    bytes: int  # bytes per block
    group: int = 0  # values per scale; 0 for a float type
    width: int = 0  # bits of a stored code: 4, 5, 6 or 8
    offset: int = 0
    minimum: Minimum = Minimum.NONE
    unpack: Callable[[np.ndarray], Unpacked] | None = None
    widen: Callable[[np.ndarray], np.ndarray] | None = None
    # Quantises f32 [blocks, values per block], all finite, to uint8 [blocks, bytes per block].
    pack: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def quantised(self) -> bool:
        return self.group > 0

    def dequantise(self, blocks: np.ndarray) -> np.ndarray:
        if self.widen is not None:
            return self.widen(blocks)
        assert self.unpack is not None
        with np.errstate(invalid="ignore", over="ignore"):  # a malicious file can have infinite scales
            unpacked = self.unpack(blocks)
            codes, scales, minimums = unpacked.codes, unpacked.scales, unpacked.minimums
            values = scales[..., None] * codes.reshape(len(codes), -1, self.group).astype(np.float32)
            if self.minimum is Minimum.ADDED:
                assert minimums is not None
                values = values + minimums[..., None]
            elif self.minimum is Minimum.SUBTRACTED:
                assert minimums is not None
                values = values - minimums[..., None]
        return values.reshape(len(codes), self.block)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _fields(packed: np.ndarray, width: int, run: int) -> np.ndarray:
    """Split bytes into bit fields of `width` bits: uint8 [blocks, values].

    Each run of `run` bytes gives first the lowest field of every byte, then the next higher field of every byte, and so on.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return ((packed.reshape(len(packed), -1, 1, run) >> shifts) & np.uint8((1 << width) - 1)).reshape(len(packed), -1)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the fifth bit of each of 32 codes, as 0 or 16. Bit i of the four bytes at `at` belongs to code i."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _signed(codes: np.ndarray, offset: int = 0) -> np.ndarray:
    return codes.view(np.int8) - np.int8(offset)


def _q4_0(b: np.ndarray) -> Unpacked:
    return Unpacked(_signed(_fields(b[:, 2:], 4, 16), 8), _half(b, 0))


def _inverse(scales: np.ndarray) -> np.ndarray:
    """Return 1 / scale, or 0 where the scale is 0.

    The result is infinite for the smallest scales. The codes of such a block do not matter, because its scale is stored as 0.
    """
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _scaled_block(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    # A scale too large for float16 becomes infinite, and the caller rejects infinite scales.
    with np.errstate(over="ignore"):
        stored = scales.astype(np.float16).view(np.uint8)
    return np.concatenate([stored, codes], axis=1)


def _to_q4_0(values: np.ndarray) -> np.ndarray:
    """Quantise values to Q4_0. The first value of largest magnitude gets the code -8.

    A value halfway between two codes is rounded up.
    """
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    scales = largest / np.float32(-8)
    with np.errstate(invalid="ignore"):
        codes = np.trunc(values * _inverse(scales) + np.float32(8.5))
    codes = np.where(np.isfinite(codes), codes, np.float32(0)).clip(0, 15).astype(np.uint8)
    return _scaled_block(scales, codes[:, :16] | codes[:, 16:] << np.uint8(4))


def _q4_1(b: np.ndarray) -> Unpacked:
    return Unpacked(_signed(_fields(b[:, 4:], 4, 16)), _half(b, 0), minimum_block_scale=_half(b, 2))


def _q5_0(b: np.ndarray) -> Unpacked:
    return Unpacked(_signed(_fields(b[:, 6:], 4, 16) | _fifth_bits(b, 2), 16), _half(b, 0))


def _q5_1(b: np.ndarray) -> Unpacked:
    return Unpacked(_signed(_fields(b[:, 8:], 4, 16) | _fifth_bits(b, 4)), _half(b, 0), minimum_block_scale=_half(b, 2))


def _q8_0(b: np.ndarray) -> Unpacked:
    return Unpacked(b[:, 2:].view(np.int8), _half(b, 0))


def _to_q8_0(values: np.ndarray) -> np.ndarray:
    """Quantise values to Q8_0. The value of largest magnitude gets the code 127 or -127.

    A value halfway between two codes is rounded away from zero.
    """
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):
        codes = values * _inverse(scales)
    codes = np.where(np.isfinite(codes), codes, np.float32(0))
    whole = np.trunc(codes)
    codes = whole + np.trunc(np.float32(2) * (codes - whole))
    return _scaled_block(scales, codes.astype(np.int8).view(np.uint8))


def _q2_k(b: np.ndarray) -> Unpacked:
    scales, minimums = _signed(b[:, :16] & np.uint8(15)), _signed(b[:, :16] >> np.uint8(4))
    return Unpacked(_signed(_fields(b[:, 16:80], 2, 32)), _half(b, 80), scales, _half(b, 82), minimums)


def _q3_k(b: np.ndarray) -> Unpacked:
    # Q3_K subtracts 4 from a code if the code's mask bit is 0. Here the mask bit, times 4, is added to the code, and 4 is
    # subtracted from every code, which gives equal codes.
    codes = _fields(b[:, 32:96], 2, 32) | (_fields(b[:, :32], 1, 32) << np.uint8(2))
    scales = _fields(b[:, 96:104], 4, 8) | (_fields(b[:, 104:108], 2, 4) << np.uint8(4))
    return Unpacked(_signed(codes, 4), _half(b, 108), _signed(scales, 32))


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack twelve bytes of every block to eight 6-bit scales and eight 6-bit minimums, [blocks, 8] each."""
    scales, minimums, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    top = np.uint8(0x30)
    scales = np.concatenate([scales & np.uint8(63), rest & np.uint8(15) | scales >> np.uint8(2) & top], axis=1)
    minimums = np.concatenate([minimums & np.uint8(63), rest >> np.uint8(4) | minimums >> np.uint8(2) & top], axis=1)
    return _signed(scales), _signed(minimums)


def _q4_k(b: np.ndarray) -> Unpacked:
    scales, minimums = _six_bit_pairs(b[:, 4:16])
    return Unpacked(_signed(_fields(b[:, 16:], 4, 32)), _half(b, 0), scales, _half(b, 2), minimums)


def _q5_k(b: np.ndarray) -> Unpacked:
    scales, minimums = _six_bit_pairs(b[:, 4:16])
    codes = _fields(b[:, 48:], 4, 32) | (_fields(b[:, 16:48], 1, 32) << np.uint8(4))
    return Unpacked(_signed(codes), _half(b, 0), scales, _half(b, 2), minimums)


def _q6_k(b: np.ndarray) -> Unpacked:
    codes = _fields(b[:, :128], 4, 64) | (_fields(b[:, 128:192], 2, 32) << np.uint8(4))
    return Unpacked(_signed(codes, 32), _half(b, 208), b[:, 192:208].view(np.int8))


_NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(b: np.ndarray) -> Unpacked:
    return Unpacked(_NON_LINEAR[_fields(b[:, 2:], 4, 16)], _half(b, 0))


def _iq4_xs(b: np.ndarray) -> Unpacked:
    low = _fields(b[:, 4:8], 4, 1)
    high = _fields(b[:, 2:4], 2, 1) << np.uint8(4)
    return Unpacked(_NON_LINEAR[_fields(b[:, 8:], 4, 16)], _half(b, 0), _signed(low | high, 32))


def _f32(b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(b).view(np.float32)


def _f16(b: np.ndarray) -> np.ndarray:
    return float32_of_float16(np.ascontiguousarray(b).view(np.float16))


def _bf16(b: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(b).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


F32 = BlockType("F32", 1, 4, widen=_f32)
F16 = BlockType("F16", 1, 2, widen=_f16)
BF16 = BlockType("BF16", 1, 2, widen=_bf16)
_QUANTISED = (
    BlockType("Q4_0", 32, 18, 32, 4, 8, unpack=_q4_0, pack=_to_q4_0),
    BlockType("Q4_1", 32, 20, 32, 4, 0, Minimum.ADDED, _q4_1),
    BlockType("Q5_0", 32, 22, 32, 5, 16, unpack=_q5_0),
    BlockType("Q5_1", 32, 24, 32, 5, 0, Minimum.ADDED, _q5_1),
    BlockType("Q8_0", 32, 34, 32, 8, 0, unpack=_q8_0, pack=_to_q8_0),
    BlockType("Q2_K", 256, 84, 16, 4, 0, Minimum.SUBTRACTED, _q2_k),
    BlockType("Q3_K", 256, 110, 16, 4, 4, unpack=_q3_k),
    BlockType("Q4_K", 256, 144, 32, 4, 0, Minimum.SUBTRACTED, _q4_k),
    BlockType("Q5_K", 256, 176, 32, 5, 0, Minimum.SUBTRACTED, _q5_k),
    BlockType("Q6_K", 256, 210, 16, 6, 32, unpack=_q6_k),
    BlockType("IQ4_NL", 32, 18, 32, 8, 0, unpack=_iq4_nl),
    BlockType("IQ4_XS", 256, 136, 32, 8, 0, unpack=_iq4_xs),
)
TYPES = {kind.name: kind for kind in (F32, F16, BF16, *_QUANTISED)}
QUANTS = {kind.name.lower(): kind for kind in TYPES.values() if kind.pack is not None}
