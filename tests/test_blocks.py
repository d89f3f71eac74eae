"""Dequantisation against the gguf package's numpy code, bit for bit."""

import warnings

import gguf
import gguf.quants
import numpy as np
import pytest

from gemma_py.formats.blocks import TYPES, Minimum

NAMES = sorted(TYPES)


def expected(name: str, blocks: np.ndarray) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[name]
    if name in ("F32", "F16"):  # there the package takes values, not bytes
        blocks = blocks.view(np.float32 if name == "F32" else np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflow in scales of random bytes
        return np.ascontiguousarray(gguf.quants.dequantize(blocks, kind))


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint32)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_ggml_s(name: str) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (TYPES[name].block, TYPES[name].bytes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_dequantise_matches_gguf_on_random_bytes(name: str, seed: int) -> None:
    """Random bytes hold every scale there is: subnormal, huge, infinite, NaN."""
    blocks = np.random.default_rng(seed).integers(0, 256, (3000, TYPES[name].bytes), dtype=np.uint8)
    np.testing.assert_array_equal(bits(TYPES[name].dequantise(blocks)), bits(expected(name, blocks)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("byte", [0x00, 0x7B, 0x7C, 0x7F, 0x80, 0xFC, 0xFF])
def test_dequantise_matches_gguf_on_extreme_bytes(name: str, byte: int) -> None:
    """7B FF.. is the largest f16, 7C 00 infinity, 80 negative zero."""
    rng = np.random.default_rng(byte)
    blocks = rng.choice(np.array([byte, 0, 0xFF], np.uint8), (500, TYPES[name].bytes))
    np.testing.assert_array_equal(bits(TYPES[name].dequantise(blocks)), bits(expected(name, blocks)))


@pytest.mark.parametrize("name", [name for name in NAMES if TYPES[name].quantised])
def test_codes_fit_the_exact_dot_product(name: str) -> None:
    """|code| <= 128, so that 32 of them times 16-bit activations stay within int32; and minimums exist as declared."""
    kind = TYPES[name]
    assert kind.unpack is not None
    blocks = np.random.default_rng(5).integers(0, 256, (2000, kind.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        unpacked = kind.unpack(blocks)
    assert unpacked.codes.dtype == np.int8
    assert unpacked.scales.shape == (2000, kind.block // kind.group)
    assert (unpacked.minimums is None) == (kind.minimum is Minimum.NONE)


def test_a_wrong_nibble_order_is_caught() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (10, 18), dtype=np.uint8)
    swapped = blocks.copy()
    swapped[:, 2:] = blocks[:, 2:] << 4 | blocks[:, 2:] >> 4
    assert (bits(TYPES["Q4_0"].dequantise(swapped)) != bits(expected("Q4_0", blocks))).any()
