from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_py.errors import ConfigError, UnsupportedError
from gemma_py.formats.blocks import F32
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models import families
from gemma_py.models.config import Config

METADATA = {
    "context_length": 2048, "embedding_length": 768, "block_count": 24, "feed_forward_length": 1152,
    "attention.head_count": 3, "attention.head_count_kv": 1, "attention.key_length": 256, "attention.value_length": 256,
    "attention.layer_norm_rms_epsilon": 9.999999974752427e-07, "attention.sliding_window": 512,
    "rope.freq_base": 1000000.0, "pooling_type": 1, "dense_2_feat_in": 768, "dense_2_feat_out": 3072,
    "dense_3_feat_in": 3072, "dense_3_feat_out": 768,
}  # fmt: skip
DENSE: dict[str, tuple[int, ...]] = {"dense_2.weight": (3072, 768), "dense_3.weight": (768, 3072)}


def embedding_from_gguf(change: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Config:
    tensors = {name: StoredTensor(name, F32, shape, np.empty(0, np.uint8), Path("f")) for name, shape in shapes.items()}
    metadata = {f"gemma-embedding.{key}": value for key, value in (METADATA | change).items()}
    metadata |= {"general.architecture": "gemma-embedding"}
    return families.config_from_gguf(metadata, "file", 262_144, True, tensors)[1]


def test_gguf_of_an_embedding_model() -> None:
    config = embedding_from_gguf({}, DENSE)
    assert config.embedding is not None and config.embedding.dense == ((3072, 768), (768, 3072))
    assert all(layer.bidirectional for layer in config.layers)
    unsaid: dict[str, Any] = {
        "pooling_type": None,
        "attention.causal": False,
        "dense_2_feat_in": None,
        "dense_3_feat_out": None,
    }
    assert embedding_from_gguf(unsaid, DENSE) == config
    none = {f"dense_{number}_feat_{end}": None for number in (2, 3) for end in ("in", "out")}
    backbone = embedding_from_gguf(none, {})
    assert backbone.embedding is not None and backbone.embedding.dense == ()


@pytest.mark.parametrize(
    ("change", "shapes", "message"),
    [
        *(({"pooling_type": kind}, DENSE, f"pooling_type should be 1 \\(mean\\), found {kind}") for kind in (0, 2, 3, 4)),
        *(({"pooling_type": kind}, DENSE, "pooling_type should be an integer") for kind in (-1, "mean", True, 1.5)),
        ({"attention.causal": True}, DENSE, "attention.causal should be false, found true"),
        ({"attention.causal": 0}, DENSE, "causal should be true or false, found 0"),
        ({"attention.causal": "false"}, DENSE, "causal should be true or false, found 'false'"),
        ({"dense_2_feat_in": 769}, DENSE, "dense_2_feat_in should be 768, as in tensor dense_2.weight"),
        ({"dense_3_feat_out": 1 << 30}, DENSE, "dense_3_feat_out should be 768, as in tensor dense_3.weight"),
        ({"dense_3_feat_out": -768}, DENSE, "dense_3_feat_out should be an integer"),
        ({}, {"dense_2.weight": (3072, 768)}, "tensor dense_3.weight is missing, although dense_3_feat_out"),
        ({}, {"dense_3.weight": (768, 3072)}, "tensor dense_2.weight is missing, although dense_2_feat_out"),
        ({}, {}, "tensor dense_2.weight is missing, although dense_2_feat_out"),
        ({}, DENSE | {"dense_2.weight": (2_359_296,)}, r"a dense layer should be a matrix, found the shape \[2359296\]"),
        ({}, DENSE | {"dense_3.weight": (768, 3072, 1)}, "a dense layer should be a matrix"),
        ({"dense_3_feat_in": None}, DENSE | {"dense_3.weight": (768, 9)}, "dense layer 1 .* should have 3072 inputs, found 9"),
        *(({"context_length": size}, DENSE, "context_length should be an integer") for size in (0, -1, 1 << 31, "9", 2.5)),
        ({"context_length": None}, DENSE, "context_length is missing"),
        ({"attention.sliding_window": None}, DENSE, "attention.sliding_window is missing"),
        ({"attention.sliding_window": 0}, DENSE, "attention.sliding_window should be an integer from 1"),
    ],
)  # fmt: skip
def test_a_wrong_gguf_field_of_an_embedding_model_is_named(
    change: dict[str, Any], shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message) as caught:
        embedding_from_gguf(change, shapes)
    assert len(str(caught.value).splitlines()) == 1
