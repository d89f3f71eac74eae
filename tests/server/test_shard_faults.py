from typing import Any

import pytest
import shard_faults
from repository import TINY

from gemma_py.cluster.shards import Shards


def test_faults_of_shards_change_no_answer() -> None:
    report = shard_faults.run(str(TINY), shards=2, streams=8, tokens=400, every=60, deadline=2.0, seed=4)
    assert report["faults"] and report["wrong"] == [] and report["failed"] == {} and report["left"] == []


def test_control_a_replay_without_the_last_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Shards._make_current

    def short(self: Shards, cache: Any) -> None:
        ids = cache.ids
        cache.ids = ids[:-1]
        try:
            honest(self, cache)
        finally:
            cache.ids = ids

    monkeypatch.setattr(Shards, "_make_current", short)
    assert shard_faults.run(str(TINY), shards=2, streams=8, tokens=400, every=60, deadline=2.0, seed=4)["wrong"]
