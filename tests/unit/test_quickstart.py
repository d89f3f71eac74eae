"""What quickstart says before it installs; that it does install is seen by whoever runs it."""

import subprocess
from pathlib import Path

import pytest
import quickstart


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
