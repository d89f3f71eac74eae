import numpy as np
import pytest
import tiny_checkpoints as tiny
import tiny_families
from golden_bits import GOLDEN
from repository import DATA

RESULTS = np.load(DATA / "tiny_logits.npz")


@pytest.mark.parametrize("name", tiny_families.VARIANTS)
def test_a_golden_fits_its_variant(name: str) -> None:
    variant = tiny_families.VARIANTS[name]
    config, ids = tiny.text_config(variant), GOLDEN["ids"][name]
    width = config["vocab_size"]
    if tiny.is_embedding(variant):
        width = variant.dense[-1] if variant.dense else config.get("embedding_dim", config["hidden_size"])
    assert RESULTS[name].shape == (len(ids), width)
    assert np.isfinite(RESULTS[name]).all()


@pytest.mark.parametrize("name", tiny_families.VARIANTS)
def test_no_tensor_is_left_at_zero_or_one(name: str) -> None:
    """With gains of 1 and biases of 0, a comparison would not notice that a tensor is ignored."""
    for tensor, values in tiny.tensors(tiny_families.VARIANTS[name], seed=1).items():
        if values.ndim:
            assert (values != 0).all() or np.unique(values).size > 2, tensor
            assert (values != 1).any(), tensor
