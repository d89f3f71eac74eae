"""quickstart's messages and its table of extras. The installation itself is not tested here."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import quickstart
from repository import ROOT

from gemma_py.catalog import INSTALLED


def test_it_says_what_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(quickstart, "works", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0))

    def said(task: str) -> str:
        quickstart.prepare(task)
        return capsys.readouterr().err

    assert "(downloads at most 350 MB, the demo model among it)" in said("chat")
    assert "installing" not in said("chat")
    assert "(downloads only what is not there yet)" in said("serve")
    for stamp in tmp_path.iterdir():
        stamp.unlink()
    assert "(downloads at most 450 MB, the demo model among it)" in said("test")
    assert "installing" in said("run")
    assert "installing" not in said("chat") + said("serve"), "run installs all packages of chat and serve"


def test_an_unknown_task_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["quickstart.py", "verify"])
    assert quickstart.main() == 2
    assert capsys.readouterr().err.endswith(
        "quickstart: unknown task 'verify'; for a command of gemma_py, use: run verify\n"
    )


def test_a_command_has_the_packages_that_its_options_need() -> None:
    """`chat` and `serve` need the extra `sign`. `run` starts any command, so it needs the extras of `chat` and `serve`."""
    extras = {task: set(names.split(",")) for task, names in quickstart.EXTRAS.items()}
    assert all("sign" in extras[task] for task in ("chat", "serve", "run"))
    assert extras["chat"] | extras["serve"] == extras["run"]


def test_a_tier_is_a_folder_of_tests() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert set(quickstart.TIERS) == folders
    assert quickstart.checks(["unit", "-x"]) == [("pytest", "tests/unit", "-x")]
    assert [check[0] for check in quickstart.checks(["-x"])] == ["ruff", "ruff", "mypy", "pytest"]
    assert quickstart.checks(["-x"])[-1] == ("pytest", *quickstart.IN_TWO_PROCESSES, "-x")


def test_tests_import_nothing_from_each_other() -> None:
    lines = [line for path in (ROOT / "tests").rglob("*.py") for line in path.read_text().splitlines()]
    assert [line for line in lines if line.strip().startswith(("from test_", "import test_", "from conftest"))] == []


def test_an_installed_package_finds_the_catalogue() -> None:
    """A wheel stores the folder `models` under another name, because gemma_py/models is a Python package."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["force-include"] == {"models": f"gemma_py/{INSTALLED}"}
    assert (ROOT / "models" / "catalog.toml").is_file()
    assert not (ROOT / "gemma_py" / INSTALLED).exists()
