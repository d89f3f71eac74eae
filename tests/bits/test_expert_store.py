import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from gemma_py.errors import ConfigError, FormatError, GemmaWarning
from gemma_py.formats.safetensors import read_header, read_safetensors
from gemma_py.models.config import Config, Layer, Rope
from gemma_py.models.gemma import FAMILY
from gemma_py.models.program import Tensor
from gemma_py.weights import store
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.pack import AT, PackedWeights
from gemma_py.weights.tensors import StoredMatrix, gguf_source, hugging_face_source

X, N, K = 5, 40, 32
CONFIG = Config("made up", 40, K, 99, 1e-6, 1.0, None, None, True, None, (), (Layer(5, Rope(1e4), 1, 1, K, N, 0),))
SPECS = {
    "embed_tokens": Tensor((40, K), "embed_tokens", "embed_tokens"),
    "gate": Tensor((X, N, K), "gate_up", "gate", part=(0, 2), gguf_fused="gate_up"),
    "up": Tensor((X, N, K), "gate_up", "up", part=(1, 2), gguf_fused="gate_up"),
    "down": Tensor((X, K, N), "down", "down"),
    "router": Tensor((X, K), "router", "router", stays_float=True),
}


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"embed_tokens": (40, K), "gate_up": (X, 2 * N, K), "down": (X, K, N), "router": (X, K)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def checkpoint(path: Path, tables: dict[str, np.ndarray], gguf: bool = False) -> Checkpoint:
    safetensors.numpy.save_file(tables, path)
    make = gguf_source if gguf else hugging_face_source
    source = make(read_safetensors(path), SPECS, True, str(path))
    return Checkpoint(path, "safetensors", FAMILY, CONFIG, source, None, {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_SMALLEST", 0)
    monkeypatch.setattr(store, "_FRESH", -1)
    yield tmp_path / "cache" / "gemma_py" / "weights"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names, honest = [], store._checksum

    def noted(data, plan, section):
        names.append(section.name)
        return honest(data, plan, section)

    monkeypatch.setattr(store, "_checksum", noted)
    return names


def bits(weights: PackedWeights) -> list[bytes]:
    return [array.tobytes() for array in weights.arrays]


def only(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if path.is_file()]
    return found


def split() -> dict[str, np.ndarray]:
    tables = values()
    fused = tables.pop("gate_up")
    return tables | {"gate": fused[:, :N].copy(), "up": fused[:, N:].copy()}


def test_fused_and_split_tensors_give_equal_bits(tmp_path: Path) -> None:
    fused = store.packed_weights(checkpoint(tmp_path / "a", values(), gguf=True))
    assert bits(store.packed_weights(checkpoint(tmp_path / "b", split(), gguf=True))) == bits(fused)
    assert bits(store.packed_weights(checkpoint(tmp_path / "c", values()))) == bits(fused)
    part = StoredMatrix(checkpoint(tmp_path / "d", values()).tensors["gate_up"], first=3 * 2 * N + N, count=N)
    np.testing.assert_array_equal(part.data.view(np.float32).reshape(N, K), values()["gate_up"][3, N:])
    changed = values()
    changed["gate_up"][3, [0, N]] = changed["gate_up"][3, [N, 0]]
    assert bits(store.packed_weights(checkpoint(tmp_path / "e", changed))) != bits(fused)


@pytest.mark.parametrize("gguf", [False, True])
@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_experts_are_quantised_and_the_router_is_not(tmp_path: Path, gguf: bool, quant: str) -> None:
    weights = checkpoint(tmp_path / "a", values(), gguf).stored_weights(quant)
    kinds = {name: part.tensor.type.name for name, part in weights.items() if isinstance(part, StoredMatrix)}
    assert {kinds[f"{name}.{e}"] for name in ("gate", "up") for e in range(X)} == {quant.upper()}
    # The rows of these matrices are not whole blocks.
    assert kinds["router"] == "F32" and kinds["down.0"] == "F32"


def test_experts_are_not_read_at_the_next_start(tmp_path: Path, folder: Path, checked: list[str]) -> None:
    source = checkpoint(tmp_path / "a", values())
    first = bits(store.packed_weights(source))
    assert checked.count("experts.0") == 2  # to write the header, and to check the written file
    checked.clear()
    again = store.packed_weights(source)
    assert set(checked) == {"arena.0", "arena.1", "arena.2"}
    assert bits(again) == first
    entry = read_header(only(folder), only(folder).stat().st_size).entries
    dense = entry["arena.0"].last - entry["arena.0"].first
    assert entry["experts.0"].first == entry["arena.0"].last and dense % 4096 == 0
    rows = {name: int(again.arrays.matrices[number, AT]) * 4 for name, number in again.matrices.items()}
    assert all((at >= dense) == ("." in name) for name, at in rows.items())
    numbers = [again.matrices[f"down.{e}"] for e in range(X)]
    assert numbers == list(range(numbers[0], numbers[0] + X))


def test_a_changed_file_or_a_lost_record_has_the_experts_checked_again(
    tmp_path: Path, folder: Path, checked: list[str]
) -> None:
    source = checkpoint(tmp_path / "a", values())
    expected = bits(store.packed_weights(source))
    path = only(folder)
    good, entry = path.read_bytes(), read_header(path, path.stat().st_size).entries["experts.0"]
    for at in (entry.first, entry.last - 1):
        changed = bytearray(good)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.warns(GemmaWarning, match="packed again"):
            assert bits(store.packed_weights(source)) == expected
        assert path.read_bytes() == good
    for spoil in (lambda: os.utime(path, ns=(1, 1)), lambda: shutil.rmtree(folder / store.RECORDS)):
        spoil()
        checked.clear()
        assert bits(store.packed_weights(source)) == expected
        assert "experts.0" in checked
    path.unlink()
    store.drop_records()
    assert not any((folder / store.RECORDS).iterdir())


def record_of(path: Path) -> Path:
    """Of the two records in the folder, the one about the experts' check begins with the packed file's name."""
    (found,) = [record for record in (path.parent / store.RECORDS).iterdir() if b" " in record.read_bytes()]
    assert found.read_bytes().startswith(path.name[:40].encode())
    return found


def with_a_wrong_expert(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[read_header(path, len(data)).entries["experts.0"].first] ^= 1
    return bytes(data)


def test_a_changed_record_has_the_experts_checked_again(tmp_path: Path, folder: Path, checked: list[str]) -> None:
    source = checkpoint(tmp_path / "a", values())
    store.packed_weights(source)
    record = record_of(only(folder))
    good = record.read_bytes()
    for at in (0, 41, len(good) // 2, len(good) - 1):
        changed = bytearray(good)
        changed[at] ^= 1
        for content in (bytes(changed), good[:at], good + good[at:]):
            record.write_bytes(content)
            checked.clear()
            store.packed_weights(source)
            assert "experts.0" in checked
            assert record.read_bytes() == good
    checked.clear()
    store.packed_weights(source)
    assert "experts.0" not in checked


def test_a_time_of_modification_that_differs_by_a_nanosecond_has_the_experts_checked_again(
    tmp_path: Path, folder: Path, checked: list[str]
) -> None:
    source = checkpoint(tmp_path / "a", values())
    store.packed_weights(source)
    time = only(folder).stat().st_mtime_ns
    for difference in (-1, 1):
        os.utime(only(folder), ns=(time, time + difference))
        checked.clear()
        store.packed_weights(source)
        assert "experts.0" in checked


def test_a_record_does_not_count_for_another_file_of_its_name_size_and_time(tmp_path: Path, folder: Path) -> None:
    source = checkpoint(tmp_path / "a", values())
    expected = bits(store.packed_weights(source))
    path, other, time = only(folder), tmp_path / "other", only(folder).stat().st_mtime_ns
    other.write_bytes(with_a_wrong_expert(path))
    other.chmod(0o600)
    os.utime(other, ns=(time, time))
    other.replace(path)
    with pytest.warns(GemmaWarning, match="packed again"):
        assert bits(store.packed_weights(source)) == expected


def test_a_record_of_a_file_that_replaces_an_open_one_does_not_count_for_the_open_one(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process replaces a damaged file, which this process has open, by a sound one."""
    source, honest = checkpoint(tmp_path / "a", values()), store._found_checksums
    expected = bits(store.packed_weights(source))
    path, checked_file = only(folder), tmp_path / "checked"
    damaged = with_a_wrong_expert(path)
    path.rename(checked_file)
    path.write_bytes(damaged)
    path.chmod(0o600)

    def replaced(*arguments):
        if checked_file.exists():
            checked_file.rename(path)
        return honest(*arguments)

    monkeypatch.setattr(store, "_found_checksums", replaced)
    with pytest.warns(GemmaWarning, match="packed again"):
        assert bits(store.packed_weights(source)) == expected
    assert bits(store.packed_weights(source)) == expected


def test_a_changed_checksum_of_the_experts_is_found_in_spite_of_the_record(tmp_path: Path, folder: Path) -> None:
    source = checkpoint(tmp_path / "a", values())
    expected = bits(store.packed_weights(source))
    path, status = only(folder), only(folder).stat()
    data = bytearray(path.read_bytes())
    sums = read_header(path, len(data)).metadata["checksums"].encode()
    at = data.find(sums) + sums.find(b" ") + 1  # the checksum of the experts is the second one
    data[at] = ord("0") if data[at] != ord("0") else ord("1")
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert record_of(path).exists() and path.stat().st_ino == status.st_ino
    with pytest.warns(GemmaWarning, match="packed again"):
        assert bits(store.packed_weights(source)) == expected


def test_no_pack_uses_no_file(tmp_path: Path, folder: Path) -> None:
    source = checkpoint(tmp_path / "a", values())
    uncached = replace(source, cacheable=False)
    in_memory = store.packed_weights(uncached)
    assert not folder.exists()
    assert bits(store.packed_weights(source)) == bits(in_memory)
    only(folder).write_bytes(b"damaged")
    # There is no warning, which would be an error in tests.
    assert bits(store.packed_weights(uncached)) == bits(in_memory)


def test_a_large_file_is_announced_before_it_is_written(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, said = checkpoint(tmp_path / "a", values()), []

    def progress(what: str, done: int, total: int, unit: str) -> None:
        assert not what.startswith("writing") or not list(folder.glob("*.safetensors*"))
        said.append((what, total))

    store.packed_weights(source, progress=progress)
    assert not any(what.startswith("writing") for what, _ in said)
    size = only(folder).stat().st_size
    only(folder).unlink()
    monkeypatch.setattr(store, "_LARGE", size)
    store.packed_weights(source, progress=progress)
    assert (f"writing packed weights to {folder}", size) in said


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("gate_up", np.zeros((X, N, K), np.float32), r"'gate_up': the shape should be \[5, 80, 32\]"),
        ("gate_up", np.zeros((X, N, 2, K), np.float32), r"'gate_up': the shape should be \[5, 80, 32\]"),
        ("gate_up", np.zeros((X + 1, 2 * N, K), np.float32), r"'gate_up': the shape should be \[5, 80, 32\]"),
        ("down", np.zeros((X, N, K), np.float32), r"'down': the shape should be \[5, 32, 40\]"),
        ("down", np.zeros((X * K, N), np.float32), r"'down': the shape should be \[5, 32, 40\]"),
        ("gate", np.zeros((X, N, K), np.float32), "'gate' is not part of the model"),
    ],
)
def test_a_wrong_tensor_of_experts_is_one_line(tmp_path: Path, name: str, table: np.ndarray, message: str) -> None:
    for gguf in (False, True):
        with pytest.raises(ConfigError, match=message):
            store.packed_weights(checkpoint(tmp_path / "a", values() | {name: table}, gguf))


def test_nan_in_an_expert_is_found_when_packing(tmp_path: Path) -> None:
    tables = values()
    tables["down"][3, 2, 1] = np.nan
    with pytest.raises(FormatError, match="'down': holds NaN"):
        store.packed_weights(checkpoint(tmp_path / "a", tables))
