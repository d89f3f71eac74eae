import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_py.kernels import rows
from gemma_py.reference import gemma3n as reference3n
from gemma_py.reference import operations as reference

F = np.float32
seeds = st.integers(0, 2**32 - 1)
some = settings(max_examples=20, deadline=None)


def entry(inner):
    @numba.njit
    def call(*arguments):
        inner(*arguments)

    return call


tanh_rows, multiply_by_gain, put_columns = entry(rows.tanh_rows), entry(rows.multiply_by_gain), entry(rows.put_columns)
sparsify_rows, match_magnitude = entry(rows.sparsify_rows), entry(rows.match_magnitude)
predict_streams, correct_streams = entry(rows.predict_streams), entry(rows.correct_streams)
add_to_streams = entry(rows.add_to_streams)


def assert_same(x, y):
    np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))


def normal(rng, *shape):
    """Floats of many magnitudes, with some zeros of either sign."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    return np.where(rng.random(shape) < 0.05, x * 0.0, x).astype(F)


@some
@given(seeds, st.integers(1, 5), st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_put_columns_writes_its_columns_alone(seed, T, width, before, after):
    stride = before + width + after
    x, y = normal(np.random.default_rng(seed), T, width), np.full((T, stride), 7, F)
    put_columns(x.reshape(-1), width, y.reshape(-1), stride, before, 0, T)
    assert_same(y[:, before : before + width], x)
    assert (y[:, :before] == 7).all() and (y[:, before + width :] == 7).all()


@some
@given(seeds, st.integers(1, 12), st.integers(1, 70))
def test_rows_of_the_feed_forward_s_gate_match_the_reference(seed, T, D):
    """One row is NaN, as unwritten scratch memory may be, and must stay NaN."""
    rng = np.random.default_rng(seed)
    x, gain = normal(rng, T, D), normal(rng, D)
    x[rng.integers(T), rng.integers(D)] = rng.choice([np.nan, np.inf, 3e38, 1e-44])
    x[0] = rng.choice([0.0, -0.0, 1.5])
    pairs = (
        (lambda a: sparsify_rows(a, D, F(1.6448536), 1, T), lambda row: reference3n.sparsify(row, F(1.6448536))),
        (lambda a: sparsify_rows(a, D, F(-0.3), 1, T), lambda row: reference3n.sparsify(row, F(-0.3))),
        (lambda a: multiply_by_gain(a, gain, D, 1, T), lambda row: reference.multiply_row(row, gain)),
        (lambda a: tanh_rows(a, D, T * D), reference.tanh_row),
    )
    for fast, slow in pairs:
        a = x.reshape(-1).copy()
        fast(a)
        assert_same(a[:D], x[0])
        assert_same(a[D:], np.concatenate([slow(row) for row in x[1:]] or [x[:0].reshape(-1)]))
    assert np.isnan(reference3n.sparsify(np.full(5, np.nan, F), F(1))).all()


@some
@given(seeds, st.integers(1, 5), st.integers(2, 6), st.integers(1, 40))
def test_streams_match_the_reference(seed, T, n, D):
    rng = np.random.default_rng(seed)
    x, own, active, least = normal(rng, T, n, D), normal(rng, T, D), int(rng.integers(n)), F(1e-5)
    mixing, coefficients = normal(rng, T, n, n), normal(rng, T, n)
    x[0, 1] *= F(1e-6)
    y, matched, corrected, added = np.full(T * n * D + 1, 7, F), x[:, 1].copy(), x.copy(), x.copy()
    predict_streams(x.reshape(-1), mixing.reshape(-1), n, D, y, 0, T)
    match_magnitude(matched.reshape(-1), own.reshape(-1), D, least, 0, T)
    correct_streams(corrected.reshape(-1), own.reshape(-1), coefficients.reshape(-1), n, D, active, 0, T)
    add_to_streams(added.reshape(-1), own.reshape(-1), n, D, 1, 0, T)
    assert y[-1] == 7
    for t in range(T):
        assert_same(y[:-1].reshape(x.shape)[t], reference3n.predict(x[t], mixing[t]))
        assert_same(matched[t], reference3n.match_magnitude(x[t, 1], own[t], least))
        assert_same(corrected[t], reference3n.correct(x[t], own[t], active, coefficients[t]))
        assert_same(added[t, 0], x[t, 0])
        assert_same(added[t, 1:], np.stack([reference.add(stream, own[t]) for stream in x[t, 1:]]))
