"""Fixtures: tiny checkpoints of every family with random weights, and a helper that runs the command line."""

import signal
from collections.abc import Callable
from pathlib import Path

import embedding_model
import pytest
import tiny_checkpoints as tiny
from repository import TINY
from tiny_models import VARIANTS

import gemma_py
from gemma_py.cli.main import main

# A shell that starts the tests in the background makes them ignore SIGINT. Processes that a test starts must not
# inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Compile once, before any test checks the output, because compiling prints progress to stderr."""
    gemma_py.load(TINY, threads=1).close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    for name, variant in VARIANTS.items():
        tiny.write(variant, base / name, seed=1)
    return {name: base / name for name in VARIANTS}


@pytest.fixture(scope="session")
def embedding_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedding")
    embedding_model.write_checkpoint(path)
    return path


@pytest.fixture(scope="session", params=embedding_model.MODELS)
def each_embedding_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("embedding")
    embedding_model.write_checkpoint(path, request.param)
    return path


@pytest.fixture(scope="session")
def tiny_engine() -> gemma_py.Engine:
    return gemma_py.load(TINY)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call
