"""Models of the Hugging Face hub, without network: the tests fake huggingface_hub's cache, answers and exceptions."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import ROOT, TINY

import gemma_py
from gemma_py import hub
from gemma_py.catalog import resolve
from gemma_py.cli.progress import LoadProgress
from gemma_py.errors import GemmaError, GemmaWarning, InputError, ModelNotFoundError

huggingface_hub = pytest.importorskip("huggingface_hub", reason="the extra `hf` is not installed")
constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")

SHA = "0123456789abcdef0123456789abcdef01234567"
GGUFS = ["a-Q4_K_M.gguf", "a-Q8_0.gguf", "big/b-00001-of-00002.gguf", "big/b-00002-of-00002.gguf", "mmproj-a.gguf"]


def lay_out(cache: Path, repository: str, files: dict[str, bytes], revision: str = "main") -> Path:
    folder = cache / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / SHA
    for number, (name, data) in enumerate(files.items()):
        blob = folder / "blobs" / f"{number:040x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    reference = folder / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(SHA)
    return snapshot


TINY_FILES = {file.name: file.read_bytes() for file in TINY.iterdir()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, given: BaseException | list[str]) -> None:
    def model_info(repository: str, **options: Any) -> Any:
        if isinstance(given, BaseException):
            raise given
        return SimpleNamespace(sha=SHA, siblings=[SimpleNamespace(rfilename=name, size=1 << 20) for name in given])

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)


def error(name: str, text: str = "") -> Exception:
    """An exception of huggingface_hub, made without the HTTP response that the constructor needs."""
    kind = getattr(errors, name)
    made: Exception = kind.__new__(kind)
    made.args = (text,)
    return made


# --- what a repository holds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "opened", "files"),
    [
        (
            ["README.md", "config.json", "model.safetensors", "original/model.bin", "tokenizer.json", "tokenizer.model"],
            ".",
            ["config.json", "tokenizer.json", "model.safetensors"],
        ),
        (
            ["chat_template.jinja", "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
             "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer_config.json"],
            ".",
            ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja",
             "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (
            ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin",
             "config.json", "config_sentence_transformers.json", "model.safetensors", "modules.json", "onnx/config.json"],
            ".",
            ["config.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
             "config_sentence_transformers.json", "modules.json", "model.safetensors"],
        ),
        (["config.json", "a.gguf", "mmproj-a.gguf"], "a.gguf", ["a.gguf"]),
        (["gemma-4-E2B_q4_0-it.gguf", "gemma-4-E2B-it-mmproj.gguf"], "gemma-4-E2B_q4_0-it.gguf", ["gemma-4-E2B_q4_0-it.gguf"]),
        (["big/b-00001-of-00002.gguf", "big/b-00002-of-00002.gguf"], "big/b-00001-of-00002.gguf", GGUFS[2:4]),
    ],
)  # fmt: skip
def test_what_a_model_needs(names: list[str], opened: str, files: list[str]) -> None:
    assert hub._choose("hf:a/b", names, None) == (opened, files)


def test_one_of_several() -> None:
    assert hub._choose("hf:a/b", GGUFS, "a-Q8_0.gguf") == ("a-Q8_0.gguf", ["a-Q8_0.gguf"])
    assert hub._choose("hf:a/b", GGUFS, GGUFS[2]) == (GGUFS[2], GGUFS[2:4])
    choices = "the repository has a-Q4_K_M.gguf, a-Q8_0.gguf, big/b-00001-of-00002.gguf$"
    with pytest.raises(ModelNotFoundError, match=f"hf:a/b@v1: name the GGUF file, as in hf:a/b/FILE; {choices}"):
        hub._choose("hf:a/b@v1", GGUFS, None)
    with pytest.raises(ModelNotFoundError, match=f"this GGUF file does not exist; {choices}"):
        hub._choose("hf:a/b/c.gguf", GGUFS, "c.gguf")
    with pytest.raises(ModelNotFoundError, match="the repository has no GGUF file"):
        hub._choose("hf:a/b/c.gguf", ["config.json"], "c.gguf")
    with pytest.raises(ModelNotFoundError, match=r"neither config.json with model.safetensors"):
        hub._choose("hf:a/b", ["pytorch_model.bin", "config.json"], None)


@pytest.mark.parametrize("reference", ["hf:", "hf:a", "hf:/a", "hf:a/", "hf:a/b@", "hf:a/b/", "hf:a b/c", "hf:a/b/@x"])
def test_invalid_references_are_refused(reference: str) -> None:
    with pytest.raises(InputError, match="should have the form hf:owner/name"):
        resolve(reference)


# --- from the cache ---------------------------------------------------------------------------------------------------


def test_a_directory_from_the_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = lay_out(cache, "owner/tiny", TINY_FILES)
    assert hub.available_locally("hf:owner/tiny") and not hub.available_locally("hf:owner/other")
    with gemma_py.load("hf:owner/tiny") as engine, gemma_py.load(TINY) as same:
        assert engine.path == snapshot
        assert engine.name == "owner/tiny"
        assert engine.fingerprint() == same.fingerprint()
    assert resolve(f"hf:owner/tiny@{SHA}") == snapshot
    assert capsys.readouterr().err == ""
    for missing in ("hf:owner/tiny@v2", "hf:owner/other", "gemma-3-270m-it"):
        with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids"):
            resolve(missing)
    lay_out(cache, "google/gemma-3-270m-it", TINY_FILES)
    assert resolve("gemma-3-270m-it").parts[-3:] == ("models--google--gemma-3-270m-it", "snapshots", SHA)


def test_files_from_the_cache(cache: Path) -> None:
    snapshot = lay_out(cache, "owner/ggufs", dict.fromkeys(GGUFS, b""), "refs/pr/1")
    assert resolve("hf:owner/ggufs/big/b-00001-of-00002.gguf@refs/pr/1") == snapshot / GGUFS[2]
    assert resolve("hf:owner/ggufs/a-Q8_0.gguf@refs/pr/1") == snapshot / "a-Q8_0.gguf"
    assert hub.repository_of(snapshot / "a-Q8_0.gguf") is None
    with pytest.raises(ModelNotFoundError):
        resolve("hf:owner/ggufs@refs/pr/1")
    (snapshot / "big" / "b-00001-of-00002.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids"):
        resolve("hf:owner/ggufs/big/b-00001-of-00002.gguf@refs/pr/1")


def test_variables_of_the_library(tmp_path: Path) -> None:
    """Commands run as child processes. HF_HOME names the cache, and HF_HUB_OFFLINE forbids network access."""
    lay_out(tmp_path / "hub", "owner/tiny", TINY_FILES)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)

    def call(model: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gemma_py", "inspect", model]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    good, bad = call("hf:owner/tiny"), call("hf:owner/other")
    assert (good.returncode, good.stderr) == (0, "")
    assert f"models--owner--tiny/snapshots/{SHA}" in good.stdout
    assert (bad.returncode, bad.stdout) == (1, "")
    assert (
        bad.stderr.startswith("gemma_py: hf:owner/other: files of the model are missing")
        and bad.stderr.count("\n") == 1
    )


# --- with a hub that answers ------------------------------------------------------------------------------------------


def test_what_is_in_the_cache_is_not_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = lay_out(cache, "owner/model", {**TINY_FILES, **dict.fromkeys(GGUFS, b"")})
    answer(monkeypatch, [*TINY_FILES, *GGUFS])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert resolve("hf:owner/model") == snapshot
    assert resolve(f"hf:owner/model/{GGUFS[2]}") == snapshot / GGUFS[2]
    assert capsys.readouterr().err == ""


def test_only_what_is_needed_is_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_out(cache, "owner/model", {GGUFS[2]: b""})
    answer(monkeypatch, [*GGUFS, "odd[1].gguf", "config.json"])
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        return "/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve(f"hf:owner/model/{GGUFS[2]}@v1", LoadProgress()) == Path("/snapshot") / GGUFS[2]
    assert resolve("hf:owner/model/odd[1].gguf") == Path("/snapshot/odd[1].gguf")
    assert asked == [("owner/model", "v1", GGUFS[2:4]), ("owner/model", None, ["odd[[]1].gguf"])]
    assert capsys.readouterr().err.splitlines()[0].startswith("downloading owner/model, 2 MiB")


NO_NETWORK = OSError("Name or service not known\nand much more")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: error("GatedRepoError"), "the repository is gated: accept the terms on the model's page"),
        (lambda: error("RepositoryNotFoundError"), "no such repository on the hub, or a private repository"),
        (lambda: error("RevisionNotFoundError"), "no such revision"),
        (lambda: error("OfflineModeIsEnabled"), "HF_HUB_OFFLINE forbids"),
        (lambda: error("HfHubHTTPError", "502 Bad Gateway\nx"), r"the hub did not answer \(HfHubHTTPError: 502 Bad Gateway\)$"),
        (lambda: NO_NETWORK, r"the hub did not answer \(OSError: Name or service not known\)$"),
        (lambda: RuntimeError(), r"the hub did not answer \(RuntimeError\)$"),
    ],
)  # fmt: skip
def test_errors_are_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Exception], said: str
) -> None:
    answer(monkeypatch, make())
    with pytest.raises(ModelNotFoundError, match=said) as caught:
        resolve("hf:owner/model")
    assert str(caught.value).startswith("hf:owner/model: ") and "\n" not in str(caught.value)

    # A repository may be listed although its files may not be read. The error of the download must then be the same as
    # that of a failed listing.
    def download(*_: object, **options: Any) -> str:
        raise make()

    answer(monkeypatch, ["a.gguf"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(GemmaError, match=said):
        resolve("hf:owner/model")


def test_without_a_network_the_copy_is_used_and_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = lay_out(cache, "owner/tiny", TINY_FILES)
    answer(monkeypatch, NO_NETWORK)
    with pytest.warns(GemmaWarning, match=r"Name or service not known.*the copy in the cache is used$"):
        assert resolve("hf:owner/tiny") == snapshot


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFoundError, match=r"needs the package huggingface_hub: pip install 'gemma_py\[hf\]'"):
        resolve("hf:owner/name")
    assert not hub.available_locally("hf:owner/name")
