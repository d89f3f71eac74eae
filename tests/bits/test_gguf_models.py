from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_checkpoints as tiny
from gguf_files import PARTS_OF_A_LAYER, write_model

import gemma_py
from gemma_py.errors import ConfigError, FormatError, InputError
from gemma_py.formats.gguf import read_gguf
from gemma_py.weights.checkpoint import open_checkpoint

VARIANT = tiny.VARIANTS["gemma3"]
# Rows of o_proj have H * E = 80 weights, so they are not whole blocks of 32.
UNEVEN = tiny.Variant(tiny._gemma3(head_dim=20, query_pre_attn_scalar=20))


def test_matches_the_gguf_package_s_writer(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_string("some.text", "hello")
    writer.add_array("some.numbers", [1, 2, 3])
    values = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    writer.add_tensor("floats", values)
    writer.add_tensor(
        "codes", gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    assert file.metadata["some.text"] == "hello"
    assert file.metadata["some.numbers"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(file.tensors["floats"].to_float32(), values)
    assert file.tensors["codes"].shape == (5, 64)


def test_a_quantised_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", VARIANT, seed=2, kinds={"up_proj": "Q8_0"})
    tensor = open_checkpoint(path).tensors["blk.2.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    at = data.find(tensor.data.tobytes())
    data[at + 34 : at + 36] = b"\x00\x7c"  # the scale of the second block becomes infinity
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"blk.2.ffn_up.weight"):
        gemma_py.load(path)


@pytest.mark.parametrize("part", PARTS_OF_A_LAYER)
def test_every_tensor_of_a_gguf_is_needed(tmp_path: Path, part: str) -> None:
    path = write_model(tmp_path / "m.gguf", VARIANT, seed=2)
    data = path.read_bytes()
    wanted = f"blk.3.{part}.weight".encode()
    path.write_bytes(data.replace(wanted, wanted.replace(b"blk.3.", b"blk.9.")))
    with pytest.raises(ConfigError, match=rf"blk.3.{part}.weight' is missing"):
        gemma_py.load(path)


def bits(path: Path, quant: str | None = None) -> np.ndarray:
    with gemma_py.load(path, threads=2, quant=quant) as engine:
        return engine.session().prefill(list(range(20)), all_logits=True).view(np.uint32)


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_quant_has_the_bits_of_a_gguf_with_these_codes(tmp_path: Path, quant: str, dtype: str) -> None:
    """The gguf package wrote the file. Norms and matrices that cannot be quantised are floats in the file."""
    floats = tmp_path / "hf"
    tiny.write(replace(UNEVEN, dtype=dtype), floats, seed=6)
    stored = {name: tensor.to_float32() for name, tensor in open_checkpoint(floats).tensors.items()}
    path = write_model(tmp_path / "m.gguf", UNEVEN, seed=6, values=stored, quant=quant.upper())
    np.testing.assert_array_equal(bits(floats, quant), bits(path))
    assert (bits(floats, quant) != bits(floats)).any()


def test_quant_of_codes_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", VARIANT, seed=2, kinds={"up_proj": "Q8_0"})
    with pytest.raises(InputError, match=r"blk.0.ffn_up.weight': quant 'q4_0' needs float weights, found Q8_0"):
        gemma_py.load(path, quant="q4_0")
