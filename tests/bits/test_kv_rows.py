"""The kernels store keys and values with the bits of the specification, in every number type of the KV cache."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_py.kernels.decorator import kernel
from gemma_py.kernels.kv_rows import BLOCK, row_size, store_row
from gemma_py.reference import cache as reference_cache
from gemma_py.reference import operations as reference
from gemma_py.runtime.kv_types import KV_TYPES

F = np.float32


def rows_with_every_kind_of_number(seed, heads, E):
    """Random rows whose blocks are normal, tiny, subnormal, huge or zero, and now and then hold NaN or infinity."""
    rng = np.random.default_rng(seed)
    blocks = -(-E // BLOCK)
    scales = rng.choice([1, 1e-30, 1e-38, 1e-44, 5e37, 0], (heads, blocks)).repeat(BLOCK, 1)[:, :E]
    rows = (rng.standard_normal((heads, E)) * scales).astype(F)
    odd = rng.choice(4, (heads, E), p=[0.97, 0.01, 0.01, 0.01])
    return np.where(odd == 1, F(np.nan), np.where(odd == 2, F(np.inf), np.where(odd == 3, F(-0.0), rows)))


@kernel
def _store_rows(rows, E, x):
    for head in range(x.shape[0] // E):
        store_row(rows, head * row_size(rows, E), E, x, head * E)


@pytest.mark.parametrize("kv", KV_TYPES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), heads=st.integers(1, 4), E=st.integers(1, 150))
def test_stored_rows_match_the_reference(seed, heads, E, kv):
    x, form = rows_with_every_kind_of_number(seed, heads, E), KV_TYPES[kv]
    rows = np.full(heads * form.row_size(E), form.poison, form.dtype)
    _store_rows(rows, E, x.reshape(-1))
    expected = reference_cache._ROUND[kv](x)
    found = form.floats(rows.reshape(heads, -1), E)
    assert (np.isnan(found) == np.isnan(expected)).all()
    there = ~np.isnan(expected)
    assert (found[there].view(np.uint32) == expected[there].view(np.uint32)).all()


def test_q8_0_is_within_half_a_step():
    """A step is the scale: a 127th of the block's largest magnitude, rounded up to 8 significant bits."""
    x = np.random.default_rng(1).standard_normal((1, 4096)).astype(F)
    rounded = reference.round_to_q8_0(x)
    steps = abs(x.reshape(-1, BLOCK)).max(1).astype(np.float64) / 127
    error = abs(rounded.astype(np.float64) - x).reshape(-1, BLOCK).max(1)
    assert (error <= steps * (1 + 2**-7) / 2).all() and error.max() > steps.max() / 3
