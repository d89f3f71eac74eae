import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gemma_py.errors import GemmaError
from gemma_py.weights.modules import read_modules

_TYPES = "sentence_transformers.models"
_POOLING = {"pooling_mode_mean_tokens": True, "include_prompt": True}
_DENSE = {"in_features": 4, "out_features": 6, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


def _written(
    directory: Path,
    modules: list[dict[str, Any]] | None = None,
    pooling: dict[str, Any] | None = None,
    dense: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    prompts: dict[str, Any] | None = None,
) -> Path:
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize"))
    listed = [{"idx": n, "type": f"{_TYPES}.{kind}", "path": path} for n, (kind, path) in enumerate(kinds)]
    for folder in ("1_Pooling", "2_Dense"):
        (directory / folder).mkdir()
    (directory / "modules.json").write_text(json.dumps(listed if modules is None else modules))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(_POOLING if pooling is None else pooling))
    (directory / "2_Dense" / "config.json").write_text(json.dumps(_DENSE | (dense or {})))
    given = {"linear.weight": np.zeros((6, 4), np.float32)} if tensors is None else tensors
    save_file(given, directory / "2_Dense" / "model.safetensors")
    if prompts is not None:
        (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return directory


def _modules(*kinds_and_paths: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"type": f"{_TYPES}.{kind}", "path": path} for kind, path in kinds_and_paths]


def test_the_files_are_read(tmp_path: Path) -> None:
    read = read_modules(_written(tmp_path, prompts={"prompts": {"query": "q: "}, "default_prompt_name": "query"}))
    assert [tensor.shape for tensor in read.dense] == [(6, 4)]
    assert (dict(read.prompts), read.default) == ({"query": "q: "}, "query")


def test_a_directory_without_the_files_has_no_modules(tmp_path: Path) -> None:
    assert read_modules(tmp_path).dense == ()


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "folder outside": ({"modules": _modules(("Transformer", ""), ("Pooling", "../1_Pooling"))}, "path"),
    "folder absolute": ({"modules": _modules(("Transformer", ""), ("Pooling", "/etc"))}, "path"),
    "folder nested": ({"modules": _modules(("Transformer", ""), ("Pooling", "a/b"))}, "path"),
    "folder with a zero byte": ({"modules": _modules(("Transformer", ""), ("Pooling", "a\0b"))}, "path"),
    "transformer elsewhere": ({"modules": _modules(("Transformer", "0_Model"), ("Pooling", "1_Pooling"))}, "path"),
    "unknown module": ({"modules": _modules(("Transformer", ""), ("LSTM", "1_LSTM"))}, "LSTM"),
    "another order": ({"modules": _modules(("Pooling", "1_Pooling"), ("Transformer", ""))}, "in this order"),
    "too many dense layers": (
        {"modules": _modules(("Transformer", ""), ("Pooling", "1_Pooling"), *[("Dense", "2_Dense")] * 9)}, "at most 8",
    ),
    "no list": ({"modules": {}}, "list of modules"),
    "missing folder": ({"modules": _modules(("Transformer", ""), ("Pooling", "4_Pooling"))}, "no such file"),
    "unknown pooling": ({"pooling": {"pooling_mode_cls_token": True}}, "pooling mode"),
    "two poolings": ({"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}}, "pooling mode"),
    "pooling without prompt": ({"pooling": _POOLING | {"include_prompt": False}}, "include_prompt"),
    "bias": ({"dense": {"bias": True}}, "bias"),
    "activation": ({"dense": {"activation_function": "torch.nn.modules.activation.Tanh"}}, "activation_function"),
    "wrong shape": ({"dense": {"out_features": 8}}, "shape"),
    "huge shape": ({"dense": {"out_features": 1 << 62}}, "out_features|shape"),
    "another tensor": ({"tensors": {"weight": np.zeros((6, 4), np.float32)}}, "linear.weight"),
    "prompts": ({"prompts": {"prompts": {"query": 1}}}, "prompts"),
    "default prompt": ({"prompts": {"prompts": {}, "default_prompt_name": "query"}}, "default_prompt_name"),
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSED)
def test_files_that_are_refused(tmp_path: Path, name: str) -> None:
    changes, words = _REFUSED[name]
    with pytest.raises(GemmaError) as caught:
        read_modules(_written(tmp_path, **changes))
    message = str(caught.value)
    assert re.search(words, message) and "\n" not in message
