import platform
import warnings

import gguf
import gguf.quants
import numpy as np
import pytest

from gemma_py.formats.blocks import TYPES, Minimum
from gemma_py.formats.floats import with_one_nan

NAMES = sorted(TYPES)


def expected(name: str, blocks: np.ndarray) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[name]
    if name in ("F32", "F16"):  # the gguf package takes values of these types, not bytes
        blocks = blocks.view(np.float32 if name == "F32" else np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scales in random bytes may overflow
        return np.ascontiguousarray(gguf.quants.dequantize(blocks, kind))


def bits(values: np.ndarray) -> np.ndarray:
    """The bits. Except on x86, every NaN is replaced by one NaN, because numpy makes signalling NaN of float16 quiet."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return (flat if platform.machine() in ("x86_64", "AMD64") else with_one_nan(flat)).view(np.uint32)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_ggml_s(name: str) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (TYPES[name].block, TYPES[name].bytes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_dequantise_matches_gguf_on_random_bytes(name: str, seed: int) -> None:
    """Random bytes contain all kinds of scales: subnormal, huge, infinite and NaN."""
    blocks = np.random.default_rng(seed).integers(0, 256, (3000, TYPES[name].bytes), dtype=np.uint8)
    np.testing.assert_array_equal(bits(TYPES[name].dequantise(blocks)), bits(expected(name, blocks)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("byte", [0x00, 0x7B, 0x7C, 0x7F, 0x80, 0xFC, 0xFF])
def test_dequantise_matches_gguf_on_extreme_bytes(name: str, byte: int) -> None:
    """As float16, 7B FF is the largest number, 7C 00 is infinity, and 80 00 is negative zero."""
    rng = np.random.default_rng(byte)
    blocks = rng.choice(np.array([byte, 0, 0xFF], np.uint8), (500, TYPES[name].bytes))
    np.testing.assert_array_equal(bits(TYPES[name].dequantise(blocks)), bits(expected(name, blocks)))


@pytest.mark.parametrize("name", [name for name in NAMES if TYPES[name].quantised])
def test_codes_fit_the_exact_dot_product(name: str) -> None:
    """A code has a magnitude of at most 128, so the dot product of 32 codes with 16-bit inputs fits into int32."""
    kind = TYPES[name]
    assert kind.unpack is not None
    blocks = np.random.default_rng(5).integers(0, 256, (2000, kind.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        unpacked = kind.unpack(blocks)
    assert unpacked.codes.dtype == np.int8
    assert unpacked.scales.shape == (2000, kind.block // kind.group)
    assert (unpacked.minimums is None) == (kind.minimum is Minimum.NONE)


PACKED = sorted(name for name in NAMES if TYPES[name].pack is not None)


def blocks_of_many_kinds() -> np.ndarray:
    """f32 [blocks, 32]: ordinary values, all magnitudes, ties, zeros of both signs, and extreme values."""
    rng = np.random.default_rng(9)
    ordinary = rng.standard_normal((20_000, 32), np.float32)
    scaled = ordinary[:2000] * np.exp2(rng.integers(-149, 126, (2000, 1))).astype(np.float32)
    words = rng.integers(0, 1 << 32, (20_000, 32), dtype=np.uint32).view(np.float32)
    words = np.where(np.isfinite(words), words, np.float32(0))
    ties = [
        np.concatenate(
            [np.full((1, 1), top, np.float32), rng.integers(-2 * n, 2 * n, (1, 31)) * np.float32(top / n / 2)], 1
        )
        for top in (127.0, -127.0, 8.0, -8.0, 1.0, -3.0, 2.0**-130, 2.0**100)
        for n in (127, 8)
    ]
    both = np.tile(np.array([[1, -1], [-1, 1], [-2, 2]], np.float32), 16)
    zero = np.array([[0.0] * 32, [-0.0] * 32, [-0.0] + [0.0] * 31], np.float32)
    limit, least = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    edge = np.array(
        [[limit] * 32, [-limit] + [1] * 31, [65504 * 127] * 32, [-65520 * 8] * 32, [2**-24 * 127] * 32], np.float32
    )
    tiny = np.array([[least] + [0] * 31, [-least * 5] * 32, [2**-126] * 32, [-(2**-120), 2**-125] * 16], np.float32)
    return np.concatenate([ordinary, scaled, words, *ties, both, zero, edge, tiny]).astype(np.float32)


@pytest.mark.parametrize("name", PACKED)
def test_pack_matches_gguf(name: str) -> None:
    values, kind = blocks_of_many_kinds(), TYPES[name]
    assert kind.pack is not None
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
        scales = np.abs(values).max(axis=1) / np.float32({"Q8_0": 127, "Q4_0": 8}[name])
        defined = np.isfinite(1 / scales) | (scales == 0)
    packed = kind.pack(values)
    # If 1 / scale overflows, the gguf package casts infinity to an integer, whose value depends on the machine. The
    # stored scale is then 0, so these codes have no effect.
    assert 50 < (~defined).sum() < len(values) / 20
    np.testing.assert_array_equal(packed[defined], theirs[defined])
    np.testing.assert_array_equal(packed[:, :2], theirs[:, :2])
    assert not packed[~defined, 2:].any()
    assert not kind.dequantise(packed[~defined]).any()


def test_pack_is_there_for_what_can_be_asked_for() -> None:
    assert PACKED == ["Q4_0", "Q8_0"]


def test_a_wrong_nibble_order_is_caught() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (10, 18), dtype=np.uint8)
    swapped = blocks.copy()
    swapped[:, 2:] = blocks[:, 2:] << 4 | blocks[:, 2:] >> 4
    assert (bits(TYPES["Q4_0"].dequantise(swapped)) != bits(expected("Q4_0", blocks))).any()
