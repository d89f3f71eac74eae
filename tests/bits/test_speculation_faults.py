import pytest
import speculation_faults

from gemma_py.runtime.cache import Cache

KINDS = ("death", "stall", "Ctrl-C", "death in shared passes", "cancel")


def test_faults_in_passes_with_guesses_change_no_answer() -> None:
    report = speculation_faults.run(16, seed=4, threads=2, deadline=1.0, kinds=KINDS)
    assert report["wrong"] == []
    assert set(report["injected"]) == set(KINDS)
    assert {"Ctrl-C: KeyboardInterrupt", "death: WorkerError", "stall: WorkerError"} <= set(report["reported"])


def test_control_guesses_that_are_committed_before_acceptance_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Cache._commit
    monkeypatch.setattr(Cache, "_commit", lambda self, tokens, guesses: honest(self, [*tokens, *guesses], []))
    assert speculation_faults.run(6, seed=4, threads=2, deadline=1.0, kinds=("death",))["wrong"]
