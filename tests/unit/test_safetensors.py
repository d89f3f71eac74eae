import json
import resource
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_py.errors import FormatError, GemmaError, UnsupportedError
from gemma_py.formats.safetensors import read_index, read_safetensors


def raw(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


SMALL = raw({"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32), "n": entry("I64", [1], 32, 40)},
            np.arange(6, dtype="<f4").tobytes() + b"\x80\x3f" * 4 + b"\0" * 8)  # fmt: skip


def write(tmp_path: Path, data: bytes, name: str = "model.safetensors") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    tensors = read_safetensors(write(tmp_path, SMALL))
    assert set(tensors) == {"a", "b"}
    assert tensors["a"].to_float32().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].to_float32().tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_matches_the_package_s_writer(tmp_path: Path, dtype: type) -> None:
    values: dict[str, np.ndarray] = {
        "x": np.random.default_rng(0).standard_normal((7, 5)).astype(dtype),
        "y": np.ones(3, dtype),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(values, path, metadata={"format": "pt"})
    tensors = read_safetensors(path)
    for name, value in values.items():
        np.testing.assert_array_equal(tensors[name].to_float32(), value.astype(np.float32))


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    for length in range(len(SMALL)):
        with pytest.raises(FormatError):
            read_safetensors(write(tmp_path, SMALL[:length]))


F32_8 = b"\0" * 8
BROKEN = {
    "header larger than the file": (struct.pack("<Q", 1 << 20) + b"{}", "invalid header length"),
    "header of 2^63": (struct.pack("<Q", 1 << 63) + b"{}", "header too large"),
    "no JSON": (raw(b"{"), "invalid JSON"),
    "a list": (raw([]), "invalid JSON"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "invalid UTF-8"),
    "deep": (raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "recursion limit"),
    "NaN": (raw(b'{"a": NaN}'), "expected value"),
    "key twice, in two places": (
        raw(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', F32_8),
        "invalid offset",
    ),
    "no offsets": (raw({"a": {"dtype": "F32", "shape": [2]}}, F32_8), "missing field `data_offsets`"),
    "shape negative": (raw({"a": entry("F32", [-2], 0, 8)}, F32_8), "expected usize"),
    "shape of floats": (raw({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, F32_8), "expected usize"),
    "shape true": (raw({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, F32_8), "expected usize"),
    "shape wraps": (raw({"a": entry("F32", [1 << 62, 4], 0, 8)}, F32_8), "overflow"),
    "shape of 1000 dimensions": (raw({"a": entry("F32", [1] * 1000, 0, 4)}, b"\0" * 4), "1000 dimensions; at most 16 are allowed"),
    "offsets reversed": (raw({"a": entry("F32", [2], 8, 0)}, F32_8), "invalid offset for tensor `a`"),
    "offsets of three": (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, F32_8), "expected 2 elements"),
    "dtype a list": (raw({"a": {"dtype": [1], "shape": [2], "data_offsets": [0, 8]}}, F32_8), "expected string"),
    "UTF-16": (raw("{}".encode("utf-16")), "invalid UTF-8"),
    "size wrong": (raw({"a": entry("F32", [3], 0, 8)}, F32_8), "invalid shape, data type, or offset"),
    "past the end": (raw({"a": entry("F32", [4], 0, 16)}, F32_8), "not fully covered"),
    "overlap": (raw({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, F32_8), "invalid offset for tensor `b`"),
    "gap": (raw({"a": entry("F32", [1], 4, 8)}, F32_8), "invalid offset for tensor `a`"),
    "left over": (raw({"a": entry("F32", [1], 0, 4)}, F32_8), "not fully covered"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(tmp_path: Path, name: str) -> None:
    data, message = BROKEN[name]
    with pytest.raises((FormatError, UnsupportedError), match=message) as caught:
        read_safetensors(write(tmp_path, data))
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_deviations_from_the_format_that_the_package_accepts_do_no_harm(tmp_path: Path) -> None:
    """The safetensors package ignores an unknown field, and accepts a tensor that is described twice."""
    for header in (
        json.dumps({"a": entry("F32", [2], 0, 8) | {"more": 1}}),
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    ):
        (tensor,) = read_safetensors(write(tmp_path, raw(header.encode(), F32_8))).values()
        assert tensor.to_float32().tolist() == [0, 0]


def test_arrays_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    path, size = tmp_path / "model.safetensors", 1 << 32
    header = json.dumps({"a": entry("BF16", [size // 2], 0, size)}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    tracemalloc.start()
    tensor = read_safetensors(path)["a"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tensor.data.nbytes == size and not tensor.data.flags.writeable
    assert peak < 1 << 20


def test_a_broken_header_allocates_little(tmp_path: Path) -> None:
    """A length beyond the end of the file, or an impossible shape, is refused before memory is allocated."""
    for name in ("header of 2^63", "header larger than the file", "shape wraps", "shape of 1000 dimensions"):
        path = write(tmp_path, BROKEN[name][0])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(GemmaError):
            read_safetensors(path)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10, name


@pytest.mark.parametrize(
    ("dtype", "expected"), [("F4_NEW", FormatError), ("F8_E4M3", UnsupportedError), ("F64", UnsupportedError)]
)
def test_a_type_that_cannot_be_read_is_named(tmp_path: Path, dtype: str, expected: type[GemmaError]) -> None:
    """The safetensors package does not know F4_NEW, but F8_E4M3 and F64, which gemma_py does not support."""
    count = 1 if dtype == "F64" else 8
    with pytest.raises(expected, match=dtype):
        read_safetensors(write(tmp_path, raw({"a": entry(dtype, [count], 0, 8)}, F32_8)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_files_give_an_error_or_a_sound_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + 1] = data.draw(st.binary(min_size=0, max_size=9))
    try:
        tensors = read_safetensors(write(tmp_path_factory.mktemp("mutated"), bytes(content)))
    except GemmaError:
        return
    for tensor in tensors.values():
        with np.errstate(all="ignore"):
            assert tensor.to_float32().shape == tensor.shape


def index(tmp_path: Path, weight_map: Any) -> Path:
    return write(tmp_path, json.dumps({"weight_map": weight_map}).encode(), "model.safetensors.index.json")


def test_shards(tmp_path: Path) -> None:
    write(tmp_path, raw({"a": entry("F32", [2], 0, 8)}, F32_8), "1.safetensors")
    write(tmp_path, raw({"b": entry("F32", [2], 0, 8)}, F32_8), "2.safetensors")
    assert set(read_index(index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}))) == {"a", "b"}
    for weight_map, message in (
        ({"a": "1.safetensors", "b": "3.safetensors"}, "missing"),
        ({"b": "1.safetensors"}, "not listed"),
        ({"a": "../1.safetensors"}, "beside the index"),
        ({"a": "/etc/passwd"}, "beside the index"),
        ({"a": 5}, "beside the index"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ):
        with pytest.raises(FormatError, match=message):
            read_index(index(tmp_path, weight_map))


def test_a_tensor_that_the_index_names_but_no_shard_holds(tmp_path: Path) -> None:
    write(tmp_path, raw({"a": entry("F32", [2], 0, 8)}, F32_8), "1.safetensors")
    with pytest.raises(FormatError, match="'b'"):
        read_index(index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors"}))
