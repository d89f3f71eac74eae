import hashlib
import subprocess
import sys
import types
from pathlib import Path

import pytest
from repository import ROOT

from gemma_py import demo
from gemma_py.catalog import models_dir, resolve
from gemma_py.cli.progress import LoadProgress
from gemma_py.errors import FormatError, ModelNotFoundError
from gemma_py.progress import ReportProgress, no_report

DATA = b"0123456789" * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    parts = [tmp_path / "part0", tmp_path / "part1"]
    parts[0].write_bytes(DATA[:6000])
    parts[1].write_bytes(DATA[6000:])
    module = types.ModuleType("some_package")
    module.chunk_paths = lambda: parts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_package", module)
    return parts


def assembled(progress: ReportProgress = no_report) -> Path:
    return demo.assembled("some-package", "model.gguf", SHA256, len(DATA), progress)


def test_assembled_once(package: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    reports: list[tuple[str, int, int, str]] = []
    path = assembled(lambda *report: reports.append(report))
    assert path.read_bytes() == DATA
    assert reports[0] == ("assembling model.gguf", 0, len(DATA), "bytes")
    assert reports[-1] == ("assembling model.gguf", len(DATA), len(DATA), "bytes")
    package[0].write_bytes(DATA[:6000])
    path.unlink()
    assembled(LoadProgress())
    assert capsys.readouterr().err == "assembling model.gguf, 0 MiB, once\n"
    assert path.stat().st_mode & 0o077 == 0
    stamp = path.stat().st_mtime_ns
    package[0].unlink()  # the first call has assembled the file, so the parts are not needed any more
    assert assembled() == path
    assert path.stat().st_mtime_ns == stamp
    assert capsys.readouterr().err == ""


def test_damaged_parts_leave_nothing_behind(package: list[Path]) -> None:
    package[1].write_bytes(b"x" + DATA[6001:])
    with pytest.raises(FormatError, match="sha256"):
        assembled()
    assert list(demo.cache_dir().rglob("*.*")) == []


def test_a_missing_part_leaves_nothing_behind(package: list[Path]) -> None:
    package[1].unlink()
    with pytest.raises(FormatError, match="part1"):
        assembled()
    assert list(demo.cache_dir().rglob("*.*")) == []


def test_a_file_of_another_size_is_made_anew(package: list[Path]) -> None:
    path = assembled()
    path.write_bytes(DATA[:77])
    assert assembled().read_bytes() == DATA


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="pip install no-such-package"):
        demo.assembled("no-such-package", "model.gguf", SHA256, 5)


def test_a_cache_that_cannot_be_written(package: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(FormatError, match="cannot be written"):
        assembled()


def test_committed_models_are_small() -> None:
    listed = subprocess.run(["git", "ls-files", "models"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [ROOT / name for name in listed.stdout.split()] or list(models_dir().rglob("*"))
    assert sum(file.stat().st_size for file in files if file.is_file()) < 2_000_000


def test_the_tiny_model_is_named() -> None:
    assert resolve("tiny-gemma3").name == "tiny-gemma3"
