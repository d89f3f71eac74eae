import resource
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import ARRAY, BOOL, F32, STRING, U32, assemble, field, record, small, text
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_py.errors import FormatError, GemmaError, UnsupportedError
from gemma_py.formats.gguf import GGUFFile, _find_strings, read_gguf


def read(tmp_path: Path, data: bytes, name: str = "file.gguf") -> GGUFFile:
    path = tmp_path / name
    path.write_bytes(data)
    return read_gguf(path)


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    file = read(tmp_path, small())
    assert file.metadata["general.architecture"] == "gemma3"
    assert file.metadata["a.number"] == 7
    assert file.metadata["a.flag"] is True
    assert file.metadata["a.list"] == ["x", "", "ü"]
    assert file.metadata["a.table"].tolist() == [1.5, -2.0]
    assert list(file.tensors) == ["first", "second"]
    assert file.tensors["first"].shape == (3, 8)
    assert file.tensors["first"].to_float32()[2, 7] == 23.0
    assert file.tensors["second"].type.name == "Q8_0"
    assert not file.tensors["first"].data.flags.writeable


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    data = small()
    for length in range(len(data)):
        with pytest.raises(GemmaError):
            read(tmp_path, data[:length])
    read(tmp_path, data)


HUGE = 1 << 63
WORD = struct.Struct("<Q").pack
HOSTILE = {
    "no magic": (b"GGML" + small()[4:], "begin with 'GGUF'"),
    "version 1": (assemble([], [], b"", version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + small()[8:], "big-endian"),
    "fields 2^63": (assemble([], [], b"", field_count=HUGE), "metadata of 9223372036854775808 fields"),
    "tensors 2^63": (assemble([], [], b"", tensor_count=HUGE), "9223372036854775808 tensors"),
    "tensors 2^64-1": (assemble([], [], b"", tensor_count=(1 << 64) - 1), "tensors"),
    "string 2^63": (assemble([WORD(HUGE) + b"abc" + b"\0" * 64], [], b""), "9223372036854775808"),
    "array 2^63": (assemble([field("a", ARRAY, struct.pack("<IQ", F32, HUGE))], [], b"\0" * 99), "field 'a'"),
    "strings 2^61": (assemble([field("a", ARRAY, struct.pack("<IQ", STRING, 1 << 61))], [], b"\0" * 99), "are allowed"),
    "wrapping array": (assemble([field("a", ARRAY, struct.pack("<IQ", 10, (1 << 61) + 1))], [], b"\0" * 99), "field 'a'"),
    "string in array too long": (
        assemble([field("a", ARRAY, struct.pack("<IQ", STRING, 1) + WORD(1 << 40))], [], b"\0" * 99), "element 0"),
    "array of arrays": (assemble([field("a", ARRAY, struct.pack("<IQ", ARRAY, 1))], [], b"\0" * 99), "array of arrays"),
    "unknown field type": (assemble([field("a", 99, b"\0" * 8)], [], b""), "type 99"),
    "unknown element type": (assemble([field("a", ARRAY, struct.pack("<IQ", 77, 1))], [], b"\0" * 99), "type 77"),
    "boolean 2": (assemble([field("a", BOOL, b"\2")], [], b""), "boolean of value 2"),
    "key twice": (assemble([field("a", BOOL, b"\1")] * 2, [], b""), "'a' appears twice"),
    "key not UTF-8": (assemble([field(b"\xff\xfe", BOOL, b"\1")], [], b""), "not UTF-8"),
    "text not UTF-8": (assemble([field("a", STRING, text(b"\xc3"))], [], b""), "not UTF-8"),
    "alignment 0": (assemble([field("general.alignment", U32, struct.pack("<I", 0))], [], b""), "alignment"),
    "alignment 3": (assemble([field("general.alignment", U32, struct.pack("<I", 3))], [], b""), "alignment"),
    "alignment 2^31": (assemble([field("general.alignment", U32, struct.pack("<I", 1 << 31))], [], b""), "alignment"),
    "alignment as text": (assemble([field("general.alignment", STRING, text("32"))], [], b""), "alignment"),
    "tensor twice": (assemble([], [record("t", [8], 0, 0), record("t", [8], 0, 32)], b"\0" * 64), "'t' appears twice"),
    "rank 0": (assemble([], [record("t", [], 0, 0)], b"\0" * 64), "rank 0"),
    "rank 5": (assemble([], [record("t", [1] * 5, 0, 0)], b"\0" * 64), "rank 5"),
    "rank 2^32-1": (assemble([], [text("t") + struct.pack("<I", 0xFFFFFFFF) + b"\0" * 64], b""), "rank"),
    "dimension 0": (assemble([], [record("t", [8, 0], 0, 0)], b"\0" * 64), "tensor 't'"),
    "dimensions wrap to 0": (assemble([], [record("t", [1 << 32, 1 << 32], 0, 0)], b"\0" * 64), "tensor 't'"),
    "dimensions wrap to 4": (assemble([], [record("t", [(1 << 62) + 1, 4], 0, 0)], b"\0" * 64), "tensor 't'"),
    "unknown tensor type": (assemble([], [record("t", [8], 4242, 0)], b"\0" * 64), "type 4242"),
    "unread tensor type": (assemble([], [record("t", [256], 16, 0)], b"\0" * 66), "IQ2_XXS"),
    "integer tensor": (assemble([], [record("t", [8], 26, 0)], b"\0" * 32), "I32"),
    "broken block": (assemble([], [record("t", [33, 32], 8, 0)], b"\0" * 34 * 33), "33 values"),
    "overlap": (assemble([], [record("t", [8], 0, 0), record("u", [8], 0, 0)], b"\0" * 64), "overlaps"),
    "gap": (assemble([], [record("t", [8], 0, 0), record("u", [8], 0, 64)], b"\0" * 96), "gap"),
    "first not at 0": (assemble([], [record("t", [8], 0, 32)], b"\0" * 64), "gap"),
    "offset 2^63": (assemble([], [record("t", [8], 0, HUGE)], b"\0" * 64), "'t'"),
    "unaligned offset": (assemble([], [record("t", [8], 0, 0), record("u", [4], 0, 33)], b"\0" * 64), "'u'"),
    "past the end": (assemble([], [record("t", [64], 0, 0)], b"\0" * 128), "tensor 't'"),
    "bytes left over": (small() + b"\0" * 100, "follow the last tensor"),
    "empty": (b"", "empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((FormatError, UnsupportedError), match=message) as caught:
        read(tmp_path, data)
    assert "file.gguf" in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_files_give_an_error_or_a_sound_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(small())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + 1] = data.draw(st.binary(min_size=0, max_size=9))
    try:
        file = read(tmp_path_factory.mktemp("mutated"), bytes(content))
    except GemmaError:
        return
    for tensor in file.tensors.values():  # tensors of an accepted file must be readable
        with np.errstate(all="ignore"):
            assert tensor.to_float32().shape == tensor.shape


def shard(number: int, count: int, total: int, name: str) -> bytes:
    fields = [
        field("split.no", U32, struct.pack("<I", number)),
        field("split.count", U32, struct.pack("<I", count)),
        field("split.tensors.count", U32, struct.pack("<I", total)),
    ]
    return assemble(fields, [record(name, [8], 0, 0)], np.full(8, number, "<f4").tobytes())


def test_shards_are_joined_from_any_of_them(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"m-{number + 1:05}-of-00003.gguf").write_bytes(shard(number, 3, 3, f"t{number}"))
    for start in (1, 2, 3):
        file = read_gguf(tmp_path / f"m-{start:05}-of-00003.gguf")
        assert [tensor.to_float32()[0] for tensor in file.tensors.values()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(0, 2, 2, "a")], "missing"),
        ([(0, 2, 2, "a"), (1, 2, 2, "a")], "is in "),
        ([(0, 2, 3, "a"), (1, 2, 3, "b")], "3 tensors expected"),
        ([(1, 2, 2, "a"), (0, 2, 2, "b")], "split.no"),
        ([(0, 3, 2, "a"), (1, 3, 2, "b")], "split.count"),
    ],
)
def test_wrong_shards_are_refused(tmp_path: Path, shards: list[tuple[int, int, int, str]], message: str) -> None:
    for place, content in enumerate(shards):
        (tmp_path / f"m-{place + 1:05}-of-00002.gguf").write_bytes(shard(*content))
    with pytest.raises(FormatError, match=message):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_shard_under_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="one of 2 shards"):
        read(tmp_path, shard(0, 2, 2, "a"))


def strings(values: list[bytes]) -> bytes:
    return struct.pack("<IQ", STRING, len(values)) + b"".join(WORD(len(value)) + value for value in values)


LOOKALIKES = [b"", b"\0", b"\0" * 9, b"\1\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\0x", b"x\0\0\0\0\0\0\0", "▁é🙂".encode()]


@pytest.mark.parametrize(
    "values",
    [
        [b"piece%d" % number for number in range(1500)],
        [b"a"] * 700 + LOOKALIKES + [b"b"] * 700,
        LOOKALIKES * 300,
        LOOKALIKES + [b"c"] * 1000,
        [b"x" * number for number in range(1100)],
        [b""] * 2000,
        ["▁é🙂".encode()] * 1000 + LOOKALIKES,
    ],
)
@pytest.mark.parametrize("step", [1, 7, 50, 1 << 16])
def test_many_strings_match_strings_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[bytes], step: int
) -> None:
    monkeypatch.setattr("gemma_py.formats.gguf._SEARCH_STEP", step)
    path = tmp_path / "m.gguf"
    path.write_bytes(assemble([field("a", ARRAY, strings(values)), field("b", ARRAY, strings([b"end"]))], [], b""))
    metadata = read_gguf(path).metadata
    assert list(metadata["a"]) == [value.decode() for value in values]
    assert list(metadata["a"][3:5]) == [value.decode() for value in values[3:5]]
    assert list(metadata["b"]) == ["end"]


def test_a_search_for_strings_needs_little_memory() -> None:
    data = np.frombuffer(b"".join(WORD(9) + b"piece%04d" % (number % 10_000) for number in range(200_000)), np.uint8)
    tracemalloc.start()
    try:
        assert _find_strings(data, 200_000) is not None
        # A search of all bytes at once takes twice the memory of the data; the positions of the strings take 1.5 times as much.
        assert tracemalloc.get_traced_memory()[1] < 1.75 * len(data)
    finally:
        tracemalloc.stop()


def test_a_vocabulary_is_not_read_string_by_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The parts that are searched are so short that lengths lie at every place of a part, and also across its end.
    monkeypatch.setattr("gemma_py.formats.gguf._SEARCH_STEP", 50)
    path = tmp_path / "m.gguf"
    values = [b"piece%d" % number for number in range(3000)] + LOOKALIKES
    path.write_bytes(assemble([field("a", ARRAY, strings(values))], [], b""))
    monkeypatch.setattr(
        "gemma_py.formats.gguf._Cursor._texts_one_by_one", lambda *_: pytest.fail("strings were read one by one")
    )
    assert list(read_gguf(path).metadata["a"]) == [value.decode() for value in values]


@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x96", b"\xed\xa0\x80"])
def test_a_string_among_many_that_is_not_utf_8_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "m.gguf"
    values = [b"piece%d" % number for number in range(1200)]
    values[777] = bad
    path.write_bytes(assemble([field("a", ARRAY, strings(values))], [], b""))
    with pytest.raises(FormatError, match="element 777: not UTF-8"):
        read_gguf(path)


def test_a_string_that_the_next_length_would_complete_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = [b"piece%d" % number for number in range(1200)]
    values[777:779] = [b"\xc3", b"y" * 0x82]  # C3 82 is a character
    path.write_bytes(assemble([field("a", ARRAY, strings(values))], [], b""))
    with pytest.raises(FormatError, match="element 777: not UTF-8"):
        read_gguf(path)


def test_many_strings_that_end_with_the_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = assemble([field("a", ARRAY, strings([b"piece%d" % number for number in range(1200)]))], [], b"")
    for left in (32, 37, 41, 4000):  # bytes to cut, more than the file's padding
        path.write_bytes(data[:-left])
        with pytest.raises(FormatError, match=r"m\.gguf"):
            read_gguf(path)
