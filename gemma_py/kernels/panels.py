"""Panels of 16 quantised outputs, with codes as narrow as the file has them: how they are packed and how they are read.

    panel    blocks, one after the other, each of 32 inputs, or of 256 in formats with sub-scales (K-quants, IQ4_XS)
    block    16 block scales (f16), then 16 block minimums (f16) in formats with minimums, then runs of 32 inputs
    run      in formats with sub-scales first these (int8), 16 for each group, then as many for the minimums; then codes
    codes    8 bits: [8 quads, 16 outputs, 4] int8
             else the low 4 bits: [4 quads, 16 outputs, 4] bytes, quad v in the low half, quad v + 4 in the high half;
             for 5 bits then the fifth: [16 outputs, 4] bytes, bit v of a byte belongs to quad v;
             for 6 bits then the fifth and sixth: two of these, two bits a quad, for quads 0 .. 3 and quads 4 .. 7

A weight is scale * (code - offset) - minimum. A scale is the block's scale, times its group's sub-scale in formats that
have them, and a minimum likewise: a product of 11 bits and 8 bits, exact in f32. Codes of 4, 5 and 6 bits are unsigned.

A quad is four neighbours in k, which VNNI multiplies at once. Unpacked to int16 it becomes two pairs, elements 0 and 2 and
elements 1 and 3, because that takes only a mask and a shift. The codes of an input are stored in that order too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gemma_py.kernels.decorator import force_inlined, inlined
from gemma_py.kernels.simd.codes import (
    load_bytes,
    load_f16,
    load_words,
    store_words,
    words_and,
    words_ashr,
    words_lshr,
    words_or,
    words_shl,
    words_sub,
)
from gemma_py.kernels.simd.vectors import mul, store

COLUMNS = 16  # outputs of a panel
INPUT_BLOCK = 32  # codes of an input that share a scale
SMALL_GROUP = 16  # weights that share a scale: 32 of them, or so many
_PAIRS = 2 * COLUMNS  # int16 that one pair of inputs takes in a panel
_QUADS = 4 * COLUMNS  # bytes that one quad of inputs takes in a panel
_BLOCK_SCALE_BYTES = 2 * COLUMNS  # of 16 f16


class CodePanels(NamedTuple):
    """A matrix of quantised weights."""

    arena: np.ndarray  # int8
    start: int  # index of the first panel
    N: int
    K: int
    width: int  # bits of a code: 4, 5, 6 or 8
    offset: int  # a stored code is the code plus this
    group: int  # inputs that share a scale: 32 or 16
    block: int  # inputs that share a block scale: 32 or 256
    minimums: int  # 1 in formats with minimums, else 0
    panel_bytes: int
    quads: int  # always 4, but a value at run time: LLVM would unroll the unpacking loop if it knew


class UnpackBuffer(NamedTuple):
    """A worker's scratch, into which it unpacks `columns` panels side by side."""

    codes: np.ndarray  # int16 [K / 2, columns, 16, 2]: pairs, without the offset
    scales: np.ndarray  # f32 [K / group, columns, 16]
    minimums: np.ndarray  # f32 [K / group, columns, 16]


def panel_count(N: int) -> int:
    """A multiple of four, because a single row takes four panels of a float matrix at once."""
    return (N + 4 * COLUMNS - 1) // (4 * COLUMNS) * 4


def panel_bytes(K: int, width: int, group: int, block: int, minimums: int) -> int:
    """The size of a panel."""
    sub_scale_bytes = INPUT_BLOCK // group * COLUMNS * (1 + minimums) if block > INPUT_BLOCK else 0
    run_bytes = sub_scale_bytes + 64 * width
    return K // block * (_BLOCK_SCALE_BYTES * (1 + minimums) + block // INPUT_BLOCK * run_bytes)


# --- packing ----------------------------------------------------------------------------------------------------------


def pack_floats(values: np.ndarray, out: np.ndarray) -> None:
    """Lay out a matrix of floats in panels.    values: [N, K]   out: [panels * K * 16] of the same type, written"""
    N, K = values.shape
    panels = out.reshape(-1, K, COLUMNS)
    whole = N // COLUMNS
    panels[:whole] = values[: whole * COLUMNS].reshape(whole, COLUMNS, K).transpose(0, 2, 1)
    panels[whole:] = 0
    if N % COLUMNS:
        panels[whole, :, : N % COLUMNS] = values[whole * COLUMNS :].T


def pack_codes(
    codes: np.ndarray,
    block_scales: tuple[np.ndarray, ...],
    sub_scales: tuple[np.ndarray, ...],
    width: int,
    offset: int,
    out: np.ndarray,
) -> None:
    """Lay out a quantised matrix in panels, or rows of it that begin at a multiple of 64.

    codes: int8 [N, K], signed   block_scales: f16 [N, K / block], then those of the minimums in formats that have them
    sub_scales: int8 [N, K / group] of each, or ()   out: int8 [panels * panel_bytes], written
    """
    N, K = codes.shape
    blocks = block_scales[0].shape[1]
    runs, panels = K // blocks // INPUT_BLOCK, panel_count(N)
    records = out.view(np.uint8).reshape(panels, blocks, -1)
    at = 0
    for values in block_scales:
        records[..., at : at + _BLOCK_SCALE_BYTES].view(np.float16)[:] = _by_panel(values, panels)
        at += _BLOCK_SCALE_BYTES
    inner = records[..., at:].reshape(panels, blocks, runs, -1)
    at = 0
    for values in sub_scales:
        size = values.shape[1] * INPUT_BLOCK // K * COLUMNS
        inner[..., at : at + size] = _by_panel(values, panels).view(np.uint8).reshape(panels, blocks, runs, size)
        at += size
    # [panels, blocks, runs, 8 quads, 16 outputs * 4]
    quads = _by_panel((codes + np.int8(offset)).view(np.uint32), panels).view(np.uint8)
    quads = quads.reshape(panels, blocks, runs, INPUT_BLOCK // 4, _QUADS)
    place = inner[..., at:]
    if width == 8:
        place[:] = quads.reshape(place.shape)
        return
    low, high = quads[..., :4, :], quads[..., 4:, :]
    place[..., : 4 * _QUADS] = (low & 15 | high << 4).reshape(panels, blocks, runs, -1)
    if width > 4:
        bits = width - 4
        planes = (quads >> 4).reshape(panels, blocks, runs, bits, INPUT_BLOCK // 4 // bits, _QUADS)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        upper = np.bitwise_or.reduce(planes << shifts, axis=-2)
        place[..., 4 * _QUADS :] = upper.reshape(panels, blocks, runs, -1)


def _by_panel(values: np.ndarray, panels: int) -> np.ndarray:
    """[N, X] transposed to [panels, X, 16], with zeros where there is no row; contiguous, so that it can be viewed as bytes."""
    out = np.empty((panels, values.shape[1], COLUMNS), values.dtype)
    pack_floats(values, out.reshape(-1))
    return out


# --- reading ----------------------------------------------------------------------------------------------------------


@force_inlined
def _quads_8(arena, at, v):
    """Quads v and v + 4 of the codes at `at`, with their offset, for v = 0 .. 3."""
    return load_words(arena, at + v * _QUADS), load_words(arena, at + (v + 4) * _QUADS)


@force_inlined
def _quads_4(arena, at, v):
    both = load_words(arena, at + v * _QUADS)
    return words_and(both, 0x0F0F), words_and(words_lshr(both, 4), 0x0F0F)


@force_inlined
def _quads_5(arena, at, v):
    (low, high), fifth = _quads_4(arena, at, v), load_words(arena, at + 4 * _QUADS)
    return (
        words_or(low, words_shl(words_and(words_lshr(fifth, v), 0x0101), 4)),
        words_or(high, words_and(words_lshr(fifth, v), 0x1010)),
    )


@force_inlined
def _quads_6(arena, at, v):
    low, high = _quads_4(arena, at, v)
    upper_of_low = words_and(words_lshr(load_words(arena, at + 4 * _QUADS), 2 * v), 0x0303)
    upper_of_high = words_and(words_lshr(load_words(arena, at + 5 * _QUADS), 2 * v), 0x0303)
    return words_or(low, words_shl(upper_of_low, 4)), words_or(high, words_shl(upper_of_high, 4))


def for_each_width(make: Callable[..., Any]) -> tuple[Any, ...]:
    """make(quads, width) once for each width of codes. One loop that chose among the widths would keep the constants of all of
    them in registers."""
    return tuple(make(quads, width) for quads, width in ((_quads_4, 4), (_quads_5, 5), (_quads_6, 6), (_quads_8, 8)))


@force_inlined
def quads_to_pairs(quads, width):
    """Elements 0 and 2 of every quad as int16, and elements 1 and 3."""
    if width == 8:
        return words_ashr(words_shl(quads, 8), 8), words_ashr(quads, 8)
    return words_and(quads, 0x00FF), words_lshr(quads, 8)


@force_inlined
def load_block_scales(w, at):
    """(scales, minimums, where the runs begin) of the block at `at`. Without minimums, the scales stand in for them."""
    block_scales = load_f16(w.arena, at)
    if w.minimums:
        return block_scales, load_f16(w.arena, at + _BLOCK_SCALE_BYTES), at + 2 * _BLOCK_SCALE_BYTES
    return block_scales, block_scales, at + _BLOCK_SCALE_BYTES


@force_inlined
def sub_scale_bytes_of(w):
    """Bytes of a run's sub-scales; those of the minimums take as many. To be computed once: LLVM does not hoist a division."""
    return INPUT_BLOCK // w.group * COLUMNS if w.block > INPUT_BLOCK else 0


@force_inlined
def _group_scales(w, block_scales, at, group):
    """The scales (or minimums) of a group of a run, whose sub-scales begin at `at`."""
    return mul(block_scales, load_bytes(w.arena, at + group * COLUMNS)) if w.block > INPUT_BLOCK else block_scales


@force_inlined
def load_run_scales(w, block_scales, block_minimums, at, sub_scale_bytes):
    """The scales of the run at `at`, for both of its groups of 16, and the minimums. Groups of 32 use the first alone."""
    scales = _group_scales(w, block_scales, at, 0), _group_scales(w, block_scales, at, 1)
    at += sub_scale_bytes
    return scales, (_group_scales(w, block_minimums, at, 0), _group_scales(w, block_minimums, at, 1))


def _make_unpack(quads: Any, width: int) -> Any:
    """The unpack function for one width of codes, whose quads `quads` loads."""

    @inlined
    def unpack(w, panel, unpacked, column, columns):
        at, stride, g = w.start + panel * w.panel_bytes, columns * _PAIRS, column
        sub_scale_bytes = sub_scale_bytes_of(w)
        for first in range(0, w.K, w.block):
            block_scales, block_minimums, at = load_block_scales(w, at)
            for k in range(first, first + w.block, INPUT_BLOCK):
                for group in range(INPUT_BLOCK // w.group):
                    store(unpacked.scales, g * COLUMNS, _group_scales(w, block_scales, at, group))
                    if w.minimums:
                        minimums_at = at + sub_scale_bytes
                        store(unpacked.minimums, g * COLUMNS, _group_scales(w, block_minimums, minimums_at, group))
                    g += columns
                at += sub_scale_bytes * (1 + w.minimums)
                out_at = (k // 2 * columns + column) * _PAIRS
                for v in range(w.quads):
                    low, high = quads(w.arena, at, v)
                    even, odd = quads_to_pairs(low, width)
                    store_words(unpacked.codes, out_at + 2 * v * stride, words_sub(even, w.offset))
                    store_words(unpacked.codes, out_at + (2 * v + 1) * stride, words_sub(odd, w.offset))
                    even, odd = quads_to_pairs(high, width)
                    store_words(unpacked.codes, out_at + (2 * v + 8) * stride, words_sub(even, w.offset))
                    store_words(unpacked.codes, out_at + (2 * v + 9) * stride, words_sub(odd, w.offset))
                at += 64 * width

    return unpack


_unpack_4, _unpack_5, _unpack_6, _unpack_8 = for_each_width(_make_unpack)


@inlined
def unpack_panel(w, panel, unpacked, column, columns):
    """Unpack a panel's codes, scales and minimums into the unpack buffer, as one of `columns` panels side by side."""
    if w.width == 4:
        _unpack_4(w, panel, unpacked, column, columns)
    elif w.width == 5:
        _unpack_5(w, panel, unpacked, column, columns)
    elif w.width == 6:
        _unpack_6(w, panel, unpacked, column, columns)
    else:
        _unpack_8(w, panel, unpacked, column, columns)
