"""The kernels give the bits of the specification for all shapes and tiles."""

import hashlib
import subprocess
import sys
from itertools import pairwise

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import child_environment

from gemma_py.formats.blocks import TYPES, Minimum
from gemma_py.kernels import attention, elementary, matmul, pooling, rows, vector_math
from gemma_py.kernels.attention_layout import AttentionParams, Ring, scratch_size
from gemma_py.kernels.decorator import kernel
from gemma_py.kernels.matmul import CodedRows, FloatPanels
from gemma_py.kernels.panels import CodePanels, UnpackBuffer, pack_codes, pack_floats, panel_bytes, panel_count
from gemma_py.kernels.simd import target
from gemma_py.reference import operations as reference
from gemma_py.weights.tensors import CodeMatrix, FloatMatrix, Matrix

F, ALL = np.float32, 2**62
EPS = F(1e-6)
seeds = st.integers(0, 2**32 - 1)
some = settings(max_examples=20, deadline=None)


def entry(inner):
    @numba.njit
    def call(*arguments):
        inner(*arguments)

    return call


quantise_rows, rms_norm_rows, gelu_gate = entry(rows.quantise_rows), entry(rows.rms_norm_rows), entry(rows.gelu_gate)
rope_table, rope_rows = entry(rows.rope_table), entry(rows.rope_rows)
add_to, soft_cap = entry(rows.add_to), entry(rows.soft_cap)
scale_rows, copy_columns = entry(rows.scale_rows), entry(rows.copy_columns)
embed_codes, embed_floats = entry(rows.embed_codes), entry(rows.embed_floats)
matmul_codes, matmul_floats = entry(matmul.matmul_codes), entry(matmul.matmul_floats)
mean_rows, normalise_rows = entry(pooling.mean_rows), pooling.normalise_rows
attend = entry(attention.attend)


def bits(x):
    return x.view({4: np.uint32, 2: np.uint16, 1: np.uint8}[x.itemsize])


def assert_same(x, y):
    np.testing.assert_array_equal(bits(x), bits(y))


def normal(rng, *shape):
    """Floats of many magnitudes, with some zeros of either sign."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    return np.where(rng.random(shape) < 0.05, x * 0.0, x).astype(F)


SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x00000001, 0x80000001, 0x007FFFFF,
     0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x42B00000, 0x42B00001, 0xC2AE0000, 0xC2AE0001, 0x3F200000, 0x3F1FFFFF],
    np.uint32,
).view(F)  # fmt: skip


# --- elementary functions ---------------------------------------------------------------------------------------------


@kernel
def exp_and_tanh(x, y, z):
    for i in range(0, x.shape[0], 16):
        vector_math.store_up_to(y, i, x.shape[0], vector_math.exp(vector_math.load_up_to(x, i, x.shape[0])))
        vector_math.store_up_to(z, i, x.shape[0], vector_math.tanh(vector_math.load_up_to(x, i, x.shape[0])))


@kernel
def scalar_exp_and_tanh(x, y, z):
    for i in range(x.shape[0]):
        y[i] = elementary.exp(x[i])
        z[i] = elementary.tanh(x[i])


def test_exp_and_tanh_of_lanes_match_the_scalar_ones():
    near = (np.random.default_rng(1).standard_normal(200_003) * 30).astype(F)
    x = np.concatenate([SPECIAL, near, np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32).view(F)])
    fast, slow = np.full((2, x.size), 7, F), np.empty((2, x.size), F)
    exp_and_tanh(x, fast[0], fast[1])
    scalar_exp_and_tanh(x, slow[0], slow[1])
    assert_same(fast, slow)


# --- matrices ---------------------------------------------------------------------------------------------------------


def float_panels(w, at=0):
    N, K = w.shape
    arena = np.zeros(at + panel_count(N) * K * 16, w.dtype)
    pack_floats(w, arena[at:])
    return FloatPanels(arena, at, N, K)


def some_codes(rng, N, K, kind):
    """A random quantised matrix, with extreme codes and with scales of either sign."""
    codes = rng.integers(0, 2**kind.width, (N, K)) - (kind.offset or (128 if kind.width == 8 else 0))
    parts = 1 if kind.minimum is Minimum.NONE else 2

    def numbers(width, made):
        return tuple(made(N, K // width) for _ in range(parts))

    block_scales = numbers(kind.block, lambda *shape: normal(rng, *shape).astype(np.float16))
    sub_scales = numbers(kind.group, lambda *shape: rng.integers(-128, 128, shape).astype(np.int8))
    return CodeMatrix(
        codes.astype(np.int8), block_scales, sub_scales if kind.block > 32 else (), kind.width, kind.offset
    )


def code_panels(matrix, at=0):
    (N, K), minimums = matrix.shape, len(matrix.block_scales) - 1
    size = panel_bytes(K, matrix.width, matrix.group, matrix.block, minimums)
    arena = np.zeros(at + panel_count(N) * size, np.int8)
    pack_codes(matrix.codes, matrix.block_scales, matrix.sub_scales, matrix.width, matrix.offset, arena[at:])
    return CodePanels(arena, at, N, K, matrix.width, matrix.offset, matrix.group, matrix.block, minimums, size, 4)


def unpack_buffer_for(K):
    codes, scales = matmul.unpack_buffer_sizes(K)
    return UnpackBuffer(np.empty(codes, np.int16), np.empty(scales, F), np.empty(scales, F))


def coded(x):
    T, K = x.shape
    scales, sums, flip_sums, sums_of_16 = (np.full(T * K // width, np.nan, F) for width in (32, 32, 16, 16))
    made = CodedRows(
        np.full(T * K, -(2**15), np.int16), np.zeros(2 * T * K, np.int8), scales, sums, flip_sums, sums_of_16
    )
    quantise_rows(x.reshape(-1), K, made, 0, T, 0)
    return made


def in_parts(rng, T, N, multiply):
    """Call `multiply` for ranges of rows and panels that cover each output once, in random order."""

    def cut(count, step):
        inner = rng.integers(0, count // step + 1, rng.integers(0, 3)) * step
        borders = sorted({0, count, *inner.tolist()})
        return list(pairwise(borders))

    parts = [(*r, *p) for r in cut(T, 1) for p in cut(panel_count(N), 4)]
    for part in rng.permutation(parts).tolist():
        multiply(*part)


@some
@given(seeds, st.integers(1, 30), st.integers(1, 70), st.integers(1, 150), st.booleans())
def test_matmul_floats_matches_the_reference(seed, T, K, N, bfloat16):
    rng = np.random.default_rng(seed)
    x, w = normal(rng, T, K), normal(rng, N, K)
    if bfloat16:
        w = (bits(w) >> 16).astype(np.uint16)
    panels = float_panels(w, at=int(rng.integers(0, 9)))
    y, expected = np.full(T * N + 16, np.nan, F), np.empty((T, N), F)
    in_parts(rng, T, N, lambda *part: matmul_floats(x.reshape(-1), panels, y, *part))
    for t in range(T):
        expected[t] = reference.matmul_float(x[t], w)
    assert_same(y[: T * N], expected.reshape(-1))
    assert np.isnan(y[T * N :]).all()


KINDS = [kind for kind in TYPES.values() if kind.quantised]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@settings(max_examples=6, deadline=None)
@given(seeds, st.integers(1, 20), st.integers(1, 4), st.integers(1, 150))
def test_matmul_codes_matches_the_reference(kind, seed, T, blocks, N):
    rng = np.random.default_rng(seed)
    K = kind.block * blocks
    values, matrix = normal(rng, T, K), some_codes(rng, N, K, kind)
    x, panels, unpacked = coded(values), code_panels(matrix, at=int(rng.integers(0, 9))), unpack_buffer_for(K)
    y, expected = np.full(T * N + 16, np.nan, F), np.empty((T, N), F)
    in_parts(rng, T, N, lambda *part: matmul_codes(x, panels, y, *part, 0, unpacked))
    for t in range(T):
        codes, scales = reference.quantise(values[t])
        w = matrix.codes.reshape(N, -1, kind.group)
        grouped = codes.reshape(-1, kind.group)
        expected[t] = reference.matmul_codes(grouped, scales, w, matrix.scales, matrix.minimums)
    assert_same(y[: T * N], expected.reshape(-1))
    assert np.isnan(y[T * N :]).all()


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "Q5_0", "Q4_0", "Q3_K"])
@pytest.mark.parametrize("T", [1, 2, 3])
def test_the_largest_codes_do_not_overflow(name, T):
    K, group, least = TYPES[name].block, TYPES[name].group, -TYPES[name].offset or -128
    x, ones = coded(np.full((T, K), -1, F)), np.ones((1, K // group), np.int8)
    scales = (ones[:, :1].astype(np.float16),), (ones,) if group < K else ()
    w = code_panels(CodeMatrix(np.full((1, K), least, np.int8), *scales, TYPES[name].width, TYPES[name].offset))
    y, expected = np.empty(T, F), F(0)
    matmul_codes(x, w, y, 0, T, 0, 4, 0, unpack_buffer_for(K))
    for _ in range(K // group):  # in float64, product and sum are exact
        expected = F(float(F(1) / F(32767)) * group * -least * 32767 + float(expected))
    assert (y == expected).all()


def test_embedding_rows_match_the_reference():
    rng, V = np.random.default_rng(2), 37
    values = (bits(normal(rng, V, 64)) >> 16).astype(np.uint16)
    for kind in (None, *KINDS):
        D = kind.block if kind else 64
        matrix: Matrix = some_codes(rng, V, D, kind) if kind else FloatMatrix(values)
        for token in (0, 16, 36):
            y = np.full(D + 2, 7, F)
            if isinstance(matrix, CodeMatrix):
                embed_codes(code_panels(matrix, 3), token, F(np.sqrt(D)), y, 1, unpack_buffer_for(D))
            else:
                embed_floats(float_panels(values, at=3), token, F(np.sqrt(D)), y, 1)
            assert_same(y[1:-1], reference.embed(matrix, token))


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_with_trouble(rng, T, D):
    x = normal(rng, T, D)
    for value in (*SPECIAL, F(1e-44), F(-1e38)):
        x[rng.integers(T), rng.integers(D)] = value
    x[0] *= F(1e-40)
    x[T // 2, : D // 2] = 0
    return x


@some
@given(seeds, st.integers(1, 20), st.integers(1, 5))
def test_quantise_rows_matches_the_reference(seed, T, blocks):
    x = rows_with_trouble(np.random.default_rng(seed), T, 32 * blocks)
    made = coded(x)
    codes, scales = np.empty(x.shape, np.int16), np.empty((T, blocks), F)
    for t in range(T):
        codes[t], scales[t] = reference.quantise(x[t])
    by_fours = codes.reshape(T, -1, 4)
    assert_same(made.codes.reshape(T, -1, 4), by_fours[..., [0, 2, 1, 3]])
    byte_planes = np.stack([by_fours >> 8, by_fours & 255], 2).astype(np.uint8).view(np.int8)
    assert_same(made.byte_planes.reshape(byte_planes.shape), byte_planes)
    assert_same(made.scales.reshape(T, -1), scales)
    flipped = codes.astype(np.int64) & 255 if target.FLIPS_LOW else codes.astype(np.int64) >> 8
    for found, numbers, width in (
        (made.sums, codes, 32),
        (made.flip_sums, -128 * flipped, 16),
        (made.sums_of_16, codes, 16),
    ):
        sums = numbers.reshape(T, -1, width).astype(np.int64).sum(axis=2)
        np.testing.assert_array_equal(found.reshape(T, -1), sums)


def test_a_row_may_lie_elsewhere_in_the_input():
    x = normal(np.random.default_rng(3), 9, 64)
    alone, made = coded(x[-1:]), coded(x[:1])
    quantise_rows(x.reshape(-1), 64, made, 8, 9, 8)
    for one, other in zip(alone, made, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5])
def test_quantise_rows_writes_its_rows_alone(blocks):
    """Neighbouring rows must not change, because other workers write them at the same time."""
    K, x = 32 * blocks, normal(np.random.default_rng(4), 3, 32 * blocks)
    made = coded(x)
    before = [array.copy() for array in made]
    quantise_rows((2 * x).reshape(-1), K, made, 1, 2, 0)
    for old, new in zip(before, made, strict=True):
        assert_same(new.reshape(3, -1)[[0, 2]], old.reshape(3, -1)[[0, 2]])
    assert (made.scales.reshape(3, -1)[1] == 2 * before[2].reshape(3, -1)[1]).all()


@some
@given(seeds, st.integers(1, 20), st.integers(1, 70), st.booleans())
def test_rms_norm_rows_matches_the_reference(seed, T, D, in_place):
    rng = np.random.default_rng(seed)
    x, gain, expected = normal(rng, T, D), normal(rng, D), np.empty((T, D), F)
    for t in range(T):
        expected[t] = reference.rms_norm(x[t], EPS, gain)
    y = x.reshape(-1) if in_place else np.empty(T * D, F)
    rms_norm_rows(x.reshape(-1), gain, D, EPS, y, 0, T)
    assert_same(y, expected.reshape(-1))


@some
@given(seeds, st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.integers(0, 100_000))
def test_rope_rows_matches_the_reference(seed, T, heads, half, position):
    x = normal(np.random.default_rng(seed), T, heads, 2 * half)
    frequencies = reference.rope_frequencies(2 * half, 10000.0, F(1))
    expected = np.stack([reference.rope(x[t], position + t, frequencies) for t in range(T)])
    cosines, sines = np.empty((2, T * half), F)
    rope_table(frequencies, position, cosines, sines, 0, T)
    rope_rows(x.reshape(-1), heads, 2 * half, cosines, sines, 0, T)
    assert_same(x, expected)


@some
@given(seeds, st.integers(1, 100))
def test_single_numbers_match_the_reference(seed, count):
    rng = np.random.default_rng(seed)
    x, y = normal(rng, count), normal(rng, count)
    x[rng.integers(count)] = SPECIAL[rng.integers(len(SPECIAL))]
    pairs = (
        (lambda a: gelu_gate(a, y, 0, count), lambda a: reference.gelu_gate(a, y)),
        (lambda a: add_to(a, y, 0, count), lambda a: reference.add(a, y)),
        (lambda a: scale_rows(a, F(0.3), 0, count), lambda a: reference.scale_row(a, F(0.3))),
        (lambda a: soft_cap(a, F(30), 0, count), lambda a: reference.soft_cap_row(a, F(30))),
    )
    for fast, slow in pairs:
        a = np.concatenate([x, [F(7)]])
        fast(a)
        assert_same(a[:-1], slow(x))
        assert a[-1] == 7


@some
@given(seeds, st.integers(1, 5), st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_columns_of_rows_match_the_reference(seed, T, width, before, after):
    stride = before + width + after
    x, y = normal(np.random.default_rng(seed), T, stride), np.full(T * width + 1, 7, F)
    copy_columns(x.reshape(-1), stride, before, y, width, 0, T)
    assert_same(y[:-1], np.concatenate([reference.columns(row, before, width) for row in x]))
    assert y[-1] == 7


@some
@given(seeds, st.integers(1, 40), st.integers(1, 70), st.integers(0, 5))
def test_the_mean_of_rows_matches_the_reference(seed, T, D, before):
    x, y = normal(np.random.default_rng(seed), before + T + 1, D), np.full(D + 2, 7, F)
    mean_rows(x.reshape(-1), D, before, before + T, y, 1)
    assert_same(y[1:-1], reference.mean_rows(x[before : before + T]))
    assert y[0] == y[-1] == 7


@some
@given(seeds, st.integers(1, 40), st.integers(1, 70))
def test_normalised_rows_match_the_reference(seed, cut, width):
    x = normal(np.random.default_rng(seed), 3, width + cut)
    x[1] = 0
    x[2] = F(1e30) - x[2]  # the sum of squares overflows float32
    y = np.empty((3, width), F)
    normalise_rows(x, width, y)
    assert_same(y, np.stack([reference.normalise(row[:width]) for row in x]))
    assert abs(np.linalg.norm(y[2].astype(np.float64)) - 1) < 1e-6


# --- attention --------------------------------------------------------------------------------------------------------


def ring_of(keys, values, first, capacity, by_head, at=3):
    """A ring with the rows from position `first` on. Every unused row is NaN."""
    _, G, E = keys.shape
    arenas = []
    for written in (keys, values):
        rows_of_ring = np.full((capacity, G, E), np.nan, F)
        for t in range(first, len(written)):
            rows_of_ring[t % capacity] = written[t]
        if by_head:
            rows_of_ring = rows_of_ring.transpose(1, 0, 2)
        arenas.append(np.concatenate([np.full(at, np.nan, F), rows_of_ring.reshape(-1)]))
    stride, head = (E, capacity * E) if by_head else (G * E, E)
    return Ring(arenas[0], arenas[1], at, capacity, stride, head, G, E)


def check_attention(seed, T, before, G, group, E, window, cap, cuts=(), ahead=0):
    """Compare attention for T positions after `before` earlier ones, in blocks of queries. Rows that no query sees are
    NaN.
    """
    rng, H, last = np.random.default_rng(seed), G * group, before + T
    keys, values = normal(rng, last, G, E), normal(rng, last, G, E)
    q, scale = normal(rng, T, H, E), F(E**-0.5)
    first = max(0, before - window + 1)
    capacity = last - first + int(rng.integers(0, 40))
    ring = ring_of(keys, values, first, capacity, bool(rng.integers(2)))
    out, scratch = np.full((T, H, E), np.nan, F), np.full(scratch_size(E), np.nan, F)
    params = AttentionParams(H, window, ahead, last, scale, cap)
    borders = sorted({0, T, *(cut for cut in cuts if cut < T)})
    for begin, end in pairwise(borders):
        for g in range(G):
            positions = before + begin, before + end
            attend(q.reshape(-1), ring, params, g, before, *positions, scratch, out.reshape(-1))
    expected = np.empty((T, H, E), F)
    for t in range(T):
        end = min(last, before + t + 1 + ahead)
        first = max(0, before + t + 1 - window)
        expected[t] = reference.attend(q[t], keys[:end], values[:end], first, scale, cap)
    assert not np.isnan(expected).any()
    assert_same(out, expected)


@settings(max_examples=60, deadline=None)
@given(
    seeds,
    st.integers(1, 40),
    st.integers(0, 150),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 40).map(lambda half: 2 * half),
    st.one_of(st.just(ALL), st.integers(1, 100)),
    st.sampled_from([F(0), F(2), F(50)]),
    st.lists(st.integers(1, 39), max_size=3),
)
def test_attend_matches_the_reference(seed, T, before, G, group, E, window, cap, cuts):
    check_attention(seed, T, before, G, group, E, window, cap, cuts)


@settings(max_examples=40, deadline=None)
@given(
    seeds, st.integers(1, 150), st.integers(1, 2), st.integers(1, 9), st.integers(1, 40).map(lambda half: 2 * half),
    st.one_of(st.just(ALL), st.integers(1, 100)), st.lists(st.integers(1, 149), max_size=3),
)  # fmt: skip
def test_bidirectional_attention_matches_the_reference(seed, T, G, group, E, window, cuts):
    check_attention(seed, T, 0, G, group, E, window, F(0), cuts, ahead=window - 1)


@pytest.mark.parametrize(("T", "G", "group"), [(1, 1, 4), (1, 4, 2), (1, 1, 8), (9, 1, 4), (20, 2, 1), (70, 1, 1)])
def test_attend_matches_the_reference_at_real_widths(T, G, group):
    check_attention(5, T, 600, G, group, 256, 512, F(0))


@pytest.mark.parametrize(("group", "E", "window"), [(1, 32, 40), (3, 34, 33), (4, 48, 97), (70, 20, 31)])
def test_attend_matches_the_reference_for_full_and_partial_blocks(group, E, window):
    """The queries of a block see different keys, and windows begin and end within tiles."""
    for before in (0, 31, 64, 95):
        check_attention(before, 67, before, 1, group, E, window, F(0), cuts=(16, 33))


def test_nan_after_a_position_does_not_change_its_output():
    """Several positions share a loop over keys, so rows after a position are read and must not count."""
    rng, (T, E) = np.random.default_rng(6), (8, 32)
    keys, values, q = normal(rng, T, 1, E), normal(rng, T, 1, E), normal(rng, T, 2, E)
    keys[5:] = values[5:] = np.nan
    ring, scratch, out = ring_of(keys, values, 0, T, False), np.full(scratch_size(E), np.nan, F), np.empty((T, 2, E), F)
    attend(q.reshape(-1), ring, AttentionParams(2, ALL, 0, T, F(1), F(0)), 0, 0, 0, T, scratch, out.reshape(-1))
    for t in range(5):
        assert_same(out[t], reference.attend(q[t], keys[: t + 1], values[: t + 1], 0, F(1), F(0)))
    assert np.isnan(out[5:]).all()


# --- machines ---------------------------------------------------------------------------------------------------------


def digest():
    rng, found = np.random.default_rng(7), hashlib.sha256()
    T, K, N = 7, 256, 40
    x = normal(rng, T, K)
    unpacked, y = unpack_buffer_for(K), np.empty(T * N, F)
    for kind in KINDS:
        matrix = code_panels(some_codes(rng, N, K, kind))
        for part in (x, x[:1]):
            matmul_codes(coded(part), matrix, y, 0, len(part), 0, 4, 0, unpacked)
            found.update(y.tobytes())
    floats = float_panels((bits(normal(rng, N, K)) >> 16).astype(np.uint16))
    for part in (x[:1], x):
        matmul_floats(part.reshape(-1), floats, y, 0, len(part), 0, 4)
        found.update(y.tobytes())
    gelu_gate(y, y.copy(), 0, y.size)
    rms_norm_rows(y, y[:N].copy(), N, EPS, y, 0, T)
    found.update(y.tobytes())
    keys, values, q = normal(rng, 75, 1, 16), normal(rng, 75, 1, 16), normal(rng, 5, 4, 16)
    ring, scratch, out = ring_of(keys, values, 0, 75, False), np.empty(scratch_size(16), F), np.empty(q.size, F)
    params = AttentionParams(4, 40, 0, 75, F(0.25), F(20))
    attend(q.reshape(-1), ring, params, 0, 70, 70, 74, scratch, out)
    attend(q.reshape(-1), ring, params, 0, 70, 74, 75, scratch, out)
    found.update(out.tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    ("cpu", "needed", "instructions"),
    [
        ("generic", "sse2", "None False"),
        ("haswell", "avx2", "('llvm.x86.avx2.pmadd.wd', 8) False"),
        ("skylake-avx512", "avx512bw", "('llvm.x86.avx512.pmaddw.d.512', 16) False"),
    ],
)
def test_another_machine_gives_the_same_bits(cpu, needed, instructions):
    if not llvm.get_default_triple().startswith("x86_64"):
        pytest.skip("the names are of x86 machines")
    if not llvm.get_host_cpu_features().get(needed):
        pytest.skip(f"this machine has no {needed}")
    environment = child_environment()
    environment |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": "-prefer-256-bit" if cpu == "skylake-avx512" else ""}
    made = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines() == [digest(), instructions]


if __name__ == "__main__":
    from numba.core.registry import cpu_target

    print(digest())
    print(target.pair_instruction(*cpu_target.target_context.codegen().magic_tuple()), target.USES_VNNI)
