"""Panels of 16 quantised outputs, with codes as narrow as in the model file: the layout, packing and unpacking.

    panel    blocks of 32 inputs, or of 256 inputs in formats with sub-scales (K-quants, IQ4_XS)
    block    16 block scales (f16); 16 block minimums (f16), if the format has minimums; then runs of 32 inputs
    run      16 sub-scales (int8) for each group, if the format has sub-scales;
             16 sub-minimums (int8) for each group, if it also has minimums; then codes
    group    the inputs that share a scale: half of a run (16 inputs) or a whole run (32), depending on the format
    codes    8 bits: [8 quads, 16 outputs, 4] int8
             4 bits: [4 quads, 16 outputs, 4] bytes, with quad v in the low half and quad v + 4 in the high half
             5 bits: the low 4 bits as above, then the fifth bits: [16 outputs, 4] bytes, with bit v for quad v
             6 bits: the low 4 bits as above, then the upper bits: two arrays of [16 outputs, 4] bytes, the first
                     with two bits for each of quads 0 .. 3, the second for quads 4 .. 7

A weight is scale * (code - offset) - minimum. In formats with sub-scales, a group's scale is the block scale times the
sub-scale of the group, and a group's minimum is the block minimum times the sub-minimum. These products of 11-bit and
8-bit numbers are exact in f32. Stored codes of 4, 5 and 6 bits are unsigned.

A quad is four weights of one output at neighbouring k, which VNNI multiplies in one instruction. A mask and a shift
unpack a quad to two int16 pairs: elements 0 and 2, and elements 1 and 3. Input codes are stored in the order 0, 2, 1, 3
to match.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gemma_py.kernels.decorator import force_inlined, inlined
from gemma_py.kernels.simd.codes import (
    bytes_lshr,
    bytes_sub,
    join_quads,
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
from gemma_py.kernels.simd.target import IS_ARM64, USES_I8MM
from gemma_py.kernels.simd.vectors import mul, store, zero

COLUMNS = 16  # outputs of a panel
INPUT_BLOCK = 32  # input codes that share a scale
SMALL_GROUP = 16  # weights of a group in formats with small groups; the other formats have groups of 32
_PAIRS = 2 * COLUMNS  # int16 numbers in a panel for a pair of inputs
_QUADS = 4 * COLUMNS  # bytes in a panel for a quad of inputs
BLOCK_SCALE_BYTES = 2 * COLUMNS  # bytes of 16 block scales (f16)


class CodePanels(NamedTuple):
    """A matrix of quantised weights in panels."""

    arena: np.ndarray  # int8
    start: int  # index in the arena at which the first panel begins
    N: int
    K: int
    width: int  # bits of a code: 4, 5, 6 or 8
    offset: int  # number that was added to each code to make it unsigned
    group: int  # inputs that share a scale: 32 or 16
    block: int  # inputs that share a block scale: 32 or 256
    minimums: int  # 1 in formats with minimums, else 0
    panel_bytes: int
    quads: int  # always 4; if it were a constant, LLVM would unroll a loop


class UnpackBuffer(NamedTuple):
    """A worker's scratch for `columns` unpacked panels."""

    # int16, codes without the offset: either pairs [K / 2, columns, 16, 2], or the bytes of quads [columns, K / 4, 16, 4],
    # or with ARM64's smmla the bytes of two quads [columns, K / 8, 16, 8]
    codes: np.ndarray
    scales: np.ndarray  # f32 [K / group, columns, 16]
    minimums: np.ndarray  # f32 [K / group, columns, 16]


def panel_count(N: int) -> int:
    """Return how many panels a matrix of N outputs has.

    The count is a multiple of four, because a single row is multiplied with four float panels at a time.
    """
    return (N + 4 * COLUMNS - 1) // (4 * COLUMNS) * 4


def panel_bytes(K: int, width: int, group: int, block: int, minimums: int) -> int:
    sub_scale_bytes = INPUT_BLOCK // group * COLUMNS * (1 + minimums) if block > INPUT_BLOCK else 0
    run_bytes = sub_scale_bytes + 64 * width
    return K // block * (BLOCK_SCALE_BYTES * (1 + minimums) + block // INPUT_BLOCK * run_bytes)


# --- packing ----------------------------------------------------------------------------------------------------------


def pack_floats(values: np.ndarray, out: np.ndarray) -> None:
    """Pack a float matrix into panels.

    values: [N, K]
    out: [panels * K * 16] of the same dtype as values, written
    """
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
    """Pack a quantised matrix, or some of its rows from a multiple of 64 on, into panels.

    codes: int8 [N, K], signed
    block_scales: f16 [N, K / block]: (scales,), or (scales, minimums) in formats with minimums
    sub_scales: int8 [N, K / group] for each array of block_scales, or () in formats without sub-scales
    out: int8 [panels * panel_bytes], written
    """
    N, K = codes.shape
    blocks = block_scales[0].shape[1]
    runs, panels = K // blocks // INPUT_BLOCK, panel_count(N)
    records = out.view(np.uint8).reshape(panels, blocks, -1)
    at = 0
    for values in block_scales:
        records[..., at : at + BLOCK_SCALE_BYTES].view(np.float16)[:] = _by_panel(values, panels)
        at += BLOCK_SCALE_BYTES
    inner = records[..., at:].reshape(panels, blocks, runs, -1)
    at = 0
    for values in sub_scales:
        size = values.shape[1] * INPUT_BLOCK // K * COLUMNS
        inner[..., at : at + size] = _by_panel(values, panels).view(np.uint8).reshape(panels, blocks, runs, size)
        at += size
    # The shape of `quads` is [panels, blocks, runs, 8 quads, 16 outputs * 4].
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
    """Transpose [N, X] to [panels, X, 16]. Rows beyond N are zeros.

    The result is contiguous, because the caller views it as bytes.
    """
    out = np.empty((panels, values.shape[1], COLUMNS), values.dtype)
    pack_floats(values, out.reshape(-1))
    return out


# --- reading ----------------------------------------------------------------------------------------------------------


@force_inlined
def _quads_8(arena, at, v):
    """Load quads v and v + 4, where v is 0 to 3. The codes begin at `at` and still include the offset."""
    return load_words(arena, at + v * _QUADS), load_words(arena, at + (v + 4) * _QUADS)


@force_inlined
def _quads_4(arena, at, v):
    both = load_words(arena, at + v * _QUADS)
    if IS_ARM64:
        return words_and(both, 0x0F0F), bytes_lshr(both, 4)
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
    """Return make(quads, width) for each width of codes in bits. `quads` is the function that loads codes of this width.

    Each width has a compiled loop of its own, because a loop for all widths would keep the constants of all widths in
    registers.
    """
    return tuple(make(quads, width) for quads, width in ((_quads_4, 4), (_quads_5, 5), (_quads_6, 6), (_quads_8, 8)))


@force_inlined
def quads_to_pairs(quads, width):
    """Return two vectors of int16: elements 0 and 2 of every quad, and elements 1 and 3 of every quad."""
    if width == 8:
        return words_ashr(words_shl(quads, 8), 8), words_ashr(quads, 8)
    return words_and(quads, 0x00FF), words_lshr(quads, 8)


@force_inlined
def load_block_scales(w, at):
    """Return (scales, minimums, index of the first run) of the block that begins at `at`.

    In formats without minimums, callers ignore the second element.
    """
    block_scales = load_f16(w.arena, at)
    if w.minimums:
        return block_scales, load_f16(w.arena, at + BLOCK_SCALE_BYTES), at + block_scale_bytes_of(w)
    return block_scales, block_scales, at + block_scale_bytes_of(w)


@force_inlined
def sub_scale_bytes_of(w):
    """Return the size of a run's sub-scales in bytes. A run's sub-minimums have an equal size.

    This function must be called before a loop, because LLVM does not move the division out of the loop.
    """
    return INPUT_BLOCK // w.group * COLUMNS if w.block > INPUT_BLOCK else 0


@force_inlined
def block_scale_bytes_of(w):
    """Return the size of a block's scales and minimums in bytes."""
    return BLOCK_SCALE_BYTES * (1 + w.minimums)


@force_inlined
def _group_scales(w, block_scales, at, group):
    """Return the scales or the minimums of a group of inputs, for the 16 outputs of a panel.

    at: index of the first sub-scale or sub-minimum of the run    group: which group of the run, 0 or 1
    """
    return mul(block_scales, load_bytes(w.arena, at + group * COLUMNS)) if w.block > INPUT_BLOCK else block_scales


@force_inlined
def load_run_scales(w, block_scales, block_minimums, at, sub_scale_bytes):
    """Return (scales, minimums) of the run that begins at `at`, each a pair with one element per group of 16 inputs.

    In formats with groups of 32, callers use only the first element of each pair.
    """
    scales = _group_scales(w, block_scales, at, 0), _group_scales(w, block_scales, at, 1)
    at += sub_scale_bytes
    return scales, (_group_scales(w, block_minimums, at, 0), _group_scales(w, block_minimums, at, 1))


@force_inlined
def reads_quads_in_place(w):
    """Return whether the codes of all runs are signed bytes at equal distances, so that they need not be unpacked."""
    return w.width == 8 and w.block == INPUT_BLOCK and not USES_I8MM


@force_inlined
def _unpack_run_scales(w, at, block_scales, block_minimums, sub_scale_bytes, unpacked, g, columns):
    """Store the scales and minimums of the run that begins at `at` as vectors g, g + columns, ... of the unpack buffer.

    Return the index of the next vector.
    """
    for group in range(INPUT_BLOCK // w.group):
        store(unpacked.scales, g * COLUMNS, _group_scales(w, block_scales, at, group))
        if w.minimums:
            store(unpacked.minimums, g * COLUMNS, _group_scales(w, block_minimums, at + sub_scale_bytes, group))
        g += columns
    return g


@inlined
def unpack_scales(w, panel, unpacked, column, columns):
    """Unpack the scales and minimums of a panel into column `column` of an unpack buffer of `columns` panels."""
    at, g, sub_scale_bytes = w.start + panel * w.panel_bytes, column, sub_scale_bytes_of(w)
    for _ in range(w.K // w.block):
        block_scales, block_minimums, at = load_block_scales(w, at)
        for _ in range(w.block // INPUT_BLOCK):
            g = _unpack_run_scales(w, at, block_scales, block_minimums, sub_scale_bytes, unpacked, g, columns)
            at += sub_scale_bytes * (1 + w.minimums) + 64 * w.width


def _make_unpack(as_quads: bool) -> Any:
    """Return (unpack_4, unpack_5, unpack_6, unpack_8), which unpack codes of these widths to quads or to pairs."""

    def of_width(quads: Any, width: int) -> Any:
        @inlined
        def unpack(w, panel, unpacked, column, columns):
            at, stride, g = w.start + panel * w.panel_bytes, columns * _PAIRS, column
            sub_scale_bytes, in_block = sub_scale_bytes_of(w), w.block - 1
            block_scales, block_minimums = zero(), zero()
            for k in range(0, w.K, INPUT_BLOCK):
                if k & in_block == 0:
                    block_scales, block_minimums, at = load_block_scales(w, at)
                g = _unpack_run_scales(w, at, block_scales, block_minimums, sub_scale_bytes, unpacked, g, columns)
                at += sub_scale_bytes * (1 + w.minimums)
                if as_quads:
                    out_at = (column * w.K + k) // 4 * _PAIRS
                    if USES_I8MM:
                        for v in range(0, w.quads, 2):
                            low, high = quads(w.arena, at, v)
                            next_low, next_high = quads(w.arena, at, v + 1)
                            low, next_low = join_quads(bytes_sub(low, w.offset), bytes_sub(next_low, w.offset))
                            high, next_high = join_quads(bytes_sub(high, w.offset), bytes_sub(next_high, w.offset))
                            store_words(unpacked.codes, out_at + v * _PAIRS, low)
                            store_words(unpacked.codes, out_at + (v + 1) * _PAIRS, next_low)
                            store_words(unpacked.codes, out_at + (v + 4) * _PAIRS, high)
                            store_words(unpacked.codes, out_at + (v + 5) * _PAIRS, next_high)
                    else:
                        for v in range(w.quads):
                            low, high = quads(w.arena, at, v)
                            store_words(unpacked.codes, out_at + v * _PAIRS, bytes_sub(low, w.offset))
                            store_words(unpacked.codes, out_at + (v + 4) * _PAIRS, bytes_sub(high, w.offset))
                else:
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

    return for_each_width(of_width)


def _make_unpack_panel(as_quads: bool) -> Any:
    unpack_4, unpack_5, unpack_6, unpack_8 = _make_unpack(as_quads)

    @inlined
    def unpack_panel(w, panel, unpacked, column, columns):
        if w.width == 4:
            unpack_4(w, panel, unpacked, column, columns)
        elif w.width == 5:
            unpack_5(w, panel, unpacked, column, columns)
        elif w.width == 6:
            unpack_6(w, panel, unpacked, column, columns)
        else:
            unpack_8(w, panel, unpacked, column, columns)

    return unpack_panel


# Each function unpacks a panel into column `column` of an unpack buffer of `columns` panels.
unpack_panel, unpack_quads = _make_unpack_panel(as_quads=False), _make_unpack_panel(as_quads=True)
