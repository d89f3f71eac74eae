import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tiny
from gguf_files import write_model

from gemma_py import paths
from gemma_py.kernels import decorator
from gemma_py.weights import store
from gemma_py.weights.checkpoint import open_checkpoint

Run = Callable[..., tuple[int, str, str]]
OLD_CODE, VOCABULARY = "kernels/" + "1a" * 12, "tokenizers/" + "2b" * 32 + ".safetensors"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_SMALLEST", 0)
    monkeypatch.setattr(store, "_FRESH", -1)
    monkeypatch.setattr(paths, "_YOUNG", -1.0)
    made = tmp_path / "cache" / "gemma_py"
    store.packed_weights(open_checkpoint(write_model(tmp_path / "m.gguf", tiny.VARIANTS["gemma3"], seed=2)))
    for name in ("models/some-model.gguf", f"{OLD_CODE}/compiled", f"{OLD_CODE}/kernels_1/a.nbc", VOCABULARY):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(b"12345")
    current = made / "kernels" / ("3c" * 12)
    current.mkdir()
    monkeypatch.setattr(decorator, "CACHE", current)
    for name in ("models/notes.txt", "weights/notes.txt", "kernels/mine", "notes.txt"):
        (made / name).write_bytes(b"not ours")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    (made / "kernels" / ("4d" * 12)).symlink_to(tmp_path / "outside")
    (made / "models" / "linked.gguf").symlink_to(tmp_path / "m.gguf")
    (current / "linked").symlink_to(tmp_path / "outside")
    return made


def listed(run: Run) -> dict[str, dict[str, Any]]:
    code, out, err = run("cache", "--json")
    assert (code, err) == (0, "")
    return {entry["name"]: entry for entry in json.loads(out)["kept"]}


def weights_file(root: Path) -> Path:
    (found,) = (root / "weights").glob("*.safetensors")
    return found


def test_cached_files_are_listed(run: Run, root: Path) -> None:
    weights = weights_file(root)
    found = listed(run)
    current = "kernels/" + "3c" * 12
    assert set(found) == {"models/some-model.gguf", f"weights/{weights.name}", VOCABULARY, OLD_CODE, current}
    assert {name for name, entry in found.items() if entry["stale"]} == {OLD_CODE}
    assert found[OLD_CODE]["bytes"] == 10
    entry = found[f"weights/{weights.name}"]
    assert entry["source"] == str(root.parent.parent / "m.gguf")
    assert entry["bytes"] == weights.stat().st_size
    code, out, _ = run("cache")
    assert code == 0
    assert len(out.splitlines()) == len(found) + 1


def test_using_a_file_is_noted(run: Run, root: Path) -> None:
    weights = weights_file(root)
    os.utime(weights, (10**9, 10**9))
    assert listed(run)[f"weights/{weights.name}"]["last_use"] == 10**9
    store.packed_weights(open_checkpoint(root.parent.parent / "m.gguf"))
    assert listed(run)[f"weights/{weights.name}"]["last_use"] > 1.5e9


@pytest.mark.parametrize("by", ["name", "file", "kind", "source"])
def test_removal_by_name(run: Run, root: Path, by: str) -> None:
    weights = weights_file(root)
    name = {"name": f"weights/{weights.name}", "file": weights.name, "kind": "weights",
            "source": root.parent.parent / "m.gguf"}[by]  # fmt: skip
    before = listed(run)
    code, out, _ = run("cache", "--remove", name, "--json")
    assert code == 0
    assert [entry["path"] for entry in json.loads(out)["removed"]] == [str(weights)]
    assert set(before) - set(listed(run)) == {f"weights/{weights.name}"}
    assert list((root / "weights" / store.RECORDS).iterdir()) == []


def test_removal_of_what_is_stale(run: Run, root: Path) -> None:
    left = root / "weights" / (weights_file(root).name + ".abc.partial")
    left.touch()
    old = [
        root / "weights" / ("5e" * 20 + "-0.safetensors"),
        root / "weights" / (weights_file(root).stem + ".packed"),
        root / "tokenizers" / ("6f" * 32 + ".vocab"),
    ]
    for path in old:
        path.write_bytes(b"of another layout or format")
    stale = {OLD_CODE, f"weights/{left.name}", *(f"{path.parent.name}/{path.name}" for path in old)}
    before = listed(run)
    assert {name for name, entry in before.items() if entry["stale"]} == stale
    assert run("cache", "--remove", "stale")[0] == 0
    assert set(before) - set(listed(run)) == stale


def test_removal_of_all_leaves_foreign_files(run: Run, root: Path) -> None:
    code, out, _ = run("cache", "--remove", "all")
    assert (code, listed(run)) == (0, {})
    assert "entries removed: 5" in out
    for name in ("models/notes.txt", "weights/notes.txt", "kernels/mine", "notes.txt"):
        assert (root / name).read_bytes() == b"not ours"
    assert (root / "models" / "linked.gguf").is_symlink()
    assert (root.parent.parent / "outside" / "precious").exists()
    assert (root.parent.parent / "m.gguf").exists()


def test_a_file_being_written_is_not_removed(run: Run, root: Path) -> None:
    with paths.atomic_write(root / "models" / "new.gguf") as file:
        file.write(b"half")
        assert run("cache", "--remove", "all")[0] == 0
    assert (root / "models" / "new.gguf").read_bytes() == b"half"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/", "../outside", "weights/../models", "models/notes.txt", "notes.txt", "linked.gguf", "*"]
)
def test_other_names_are_refused(run: Run, root: Path, name: str) -> None:
    before = sorted(root.parent.parent.rglob("*"))
    code, out, err = run("cache", "--remove", name)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert sorted(root.parent.parent.rglob("*")) == before


def test_an_empty_cache(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    assert listed(run) == {}
    assert run("cache", "--remove", "all")[0] == 0
    assert run("cache", "--remove", "weights")[0] == 0
    assert not (tmp_path / "nothing").exists()
