"""Panels of 16 quantised outputs, kept at the width that the file has them: how they are packed, and how they are read.

    panel        blocks, one after the other: of 32 inputs, or of 256 where the format is one of sub_scales
    block        16 block_scales (f16), then 16 block_scales of minimums where the format has any, then runs of 32 inputs
    run          sub_scales (int8) of its groups, sub_scales of minimums, each 16 a group, in formats of sub_scales; then codes
    codes        8 bits: [8 quads, 16 outputs, 4] int8
                 else 4 bits: [4 quads, 16 outputs, 4] bytes: quad v in the lower half, quad v + 4 in the upper one
                 and the fifth bits: [16 outputs, 4] bytes, bit v of quad v
                 or the fifth and sixth: two of these, two bits a quad, of quads 0 .. 3 and of quads 4 .. 7

A weight is scale * (code - offset) - minimum; a scale is a factor, times its step where there are sub_scales, and so is a
minimum: products of 11 bits and 8, exact in f32. A quad is four neighbours in k, which some machines multiply at once.
Spread out to int16 it becomes two pairs, of its numbers 0 and 2 and of 1 and 3: a mask and a shift. Inputs in codes have
that order too. Codes of 4, 5 and 6 bits have no sign here.
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

COLUMNS = 16
INPUT_BLOCK = 32  # codes of an input that share a scale
SMALL_GROUP = 16  # the smaller group of weights
_PAIRS = 2 * COLUMNS  # int16 of one pair of inputs
_QUADS = 4 * COLUMNS  # bytes of one quad of inputs
_BLOCK_SCALE_BYTES = 2 * COLUMNS  # bytes of 16 block_scales


class CodePanels(NamedTuple):
    """A matrix of quantised weights."""

    arena: np.ndarray  # int8
    at: int
    N: int
    K: int
    width: int  # bits of a code: 4, 5, 6 or 8
    offset: int  # what a stored code has too much
    group: int  # inputs of a scale: 32 or 16
    block: int  # inputs of a factor: 32 or 256
    minimums: int  # 1 where the format has minimums
    bytes: int  # of a panel
    quads: int  # always 4. LLVM must not know it where codes are spread: it would write out the loop


class UnpackBuffer(NamedTuple):
    """Where a worker puts panels that it has spread out, `columns` of them beside one another."""

    codes: np.ndarray  # int16 [K / 2, columns, 16, 2], pairs without the offset
    scales: np.ndarray  # f32 [K / group, columns, 16]
    minimums: np.ndarray  # the same


def panel_count(N: int) -> int:
    """Panels come in fours: what a single row takes at once of a float matrix."""
    return (N + 4 * COLUMNS - 1) // (4 * COLUMNS) * 4


def panel_bytes(K: int, width: int, group: int, span: int, minimums: int) -> int:
    sub_scales = INPUT_BLOCK // group * COLUMNS * (1 + minimums) if span > INPUT_BLOCK else 0
    return K // span * (_BLOCK_SCALE_BYTES * (1 + minimums) + span // INPUT_BLOCK * (sub_scales + 64 * width))


# --- packing ----------------------------------------------------------------------------------------------------------


def pack_floats(values: np.ndarray, out: np.ndarray) -> None:
    """values: [N, K]   out: [panels * K * 16], written, in the same type"""
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
    """Of a matrix, or of rows of it up to a multiple of 64.

    codes: int8 [N, K], with their signs   block_scales: f16 [N, K / span], of scales and, in some formats, of minimums
    sub_scales: int8 [N, K / group] of each, or none   out: int8 [panels * panel_bytes], written
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
    """[N, X] as [panels, X, 16], zeros where there is no row; contiguous, so that it can be seen as bytes."""
    out = np.empty((panels, values.shape[1], COLUMNS), values.dtype)
    pack_floats(values, out.reshape(-1))
    return out


# --- reading ----------------------------------------------------------------------------------------------------------


@force_inlined
def _quads_8(arena, at, v):
    """Quads v and v + 4 of the codes at `at`, with their offset, for v below 4."""
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
    """What `make` makes of a way to read quads and its width. A loop that chose among them would keep all in registers."""
    return tuple(make(quads, width) for quads, width in ((_quads_4, 4), (_quads_5, 5), (_quads_6, 6), (_quads_8, 8)))


@force_inlined
def pairs_of(quads, width):
    """Numbers 0 and 2 of every quad, and 1 and 3, as int16."""
    if width == 8:
        return words_ashr(words_shl(quads, 8), 8), words_ashr(quads, 8)
    return words_and(quads, 0x00FF), words_lshr(quads, 8)


@force_inlined
def load_block_scales(w, at):
    """Of a block, of scales and of minimums, which are the same where there are none; and where its runs begin."""
    block_scales = load_f16(w.arena, at)
    if w.minimums:
        return block_scales, load_f16(w.arena, at + _BLOCK_SCALE_BYTES), at + 2 * _BLOCK_SCALE_BYTES
    return block_scales, block_scales, at + _BLOCK_SCALE_BYTES


@force_inlined
def sub_scale_groups(w):
    """Groups of a run that have sub_scales."""
    return INPUT_BLOCK // w.group if w.block > INPUT_BLOCK else 0


@force_inlined
def group_scales(w, block_scales, at, group):
    """The scales of a group, or its minimums, whose sub_scales for a run are at `at`."""
    return mul(block_scales, load_bytes(w.arena, at + group * COLUMNS)) if w.block > INPUT_BLOCK else block_scales


def _unpack_with(quads: Any, width: int) -> Any:
    @inlined
    def unpack(w, panel, unpacked, column, columns):
        at, stride, g = w.at + panel * w.bytes, columns * _PAIRS, column
        sub_scales = sub_scale_groups(w) * COLUMNS
        for first in range(0, w.K, w.block):
            block_scales, block_minimums, at = load_block_scales(w, at)
            for k in range(first, first + w.block, INPUT_BLOCK):
                for group in range(INPUT_BLOCK // w.group):
                    store(unpacked.scales, g * COLUMNS, group_scales(w, block_scales, at, group))
                    if w.minimums:
                        store(unpacked.minimums, g * COLUMNS, group_scales(w, block_minimums, at + sub_scales, group))
                    g += columns
                at += sub_scales * (1 + w.minimums)
                out_at = (k // 2 * columns + column) * _PAIRS
                for v in range(w.quads):
                    low, high = quads(w.arena, at, v)
                    even, odd = pairs_of(low, width)
                    store_words(unpacked.codes, out_at + 2 * v * stride, words_sub(even, w.offset))
                    store_words(unpacked.codes, out_at + (2 * v + 1) * stride, words_sub(odd, w.offset))
                    even, odd = pairs_of(high, width)
                    store_words(unpacked.codes, out_at + (2 * v + 8) * stride, words_sub(even, w.offset))
                    store_words(unpacked.codes, out_at + (2 * v + 9) * stride, words_sub(odd, w.offset))
                at += 64 * width

    return unpack


_unpack_4, _unpack_5, _unpack_6, _unpack_8 = for_each_width(_unpack_with)


@inlined
def unpack_panel(w, panel, unpacked, column, columns):
    """A panel's codes, scales and minimums into the unpack buffer, as one of `columns` columns."""
    if w.width == 4:
        _unpack_4(w, panel, unpacked, column, columns)
    elif w.width == 5:
        _unpack_5(w, panel, unpacked, column, columns)
    elif w.width == 6:
        _unpack_6(w, panel, unpacked, column, columns)
    else:
        _unpack_8(w, panel, unpacked, column, columns)
