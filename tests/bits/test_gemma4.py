from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_families
from equivalence import TOKENS, Expected, bits, caught, differs, expected, opened, prompt, without_barrier
from random_model import random_engine

import gemma_py
from gemma_py import reference
from gemma_py.kernels.attention_layout import LANES
from gemma_py.models import gemma4
from gemma_py.models.families import config_from_hf
from gemma_py.models.program import STORE, WANTED, Program
from gemma_py.runtime import batch as batches
from gemma_py.runtime import program as linking
from gemma_py.runtime import runner as runners
from gemma_py.runtime.runner import SequenceInput
from gemma_py.weights.tensors import GatheredTable

# Rows are whole blocks of Q4_K, which has the widest blocks, even in the table of per-layer inputs.
_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 70}
CONFIG = tiny_families.gemma4(
    wide=128, hidden_size_per_layer_input=256, vocab_size_per_layer_input=50, num_kv_shared_layers=3,
    use_double_wide_mlp=True, num_key_value_heads=1, **_WIDE)  # fmt: skip


def engine_of(kind: str, write: Callable[[Program], None] = gemma4.write) -> gemma_py.Engine:
    family, config = config_from_hf(CONFIG, "here")
    engine = random_engine(replace(family, write=write), config, kind)
    engine.instruments.poison = True
    return engine


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_tokens_without_a_row_of_the_table_match_the_reference(kind: str) -> None:
    """The table has rows for only 50 of the 70 tokens."""
    with engine_of(kind) as engine:
        want = Expected(engine, prompt(engine.config, 40))
        assert max(want.ids) >= 50
        for threads in (1, 3):
            engine.set_threads(threads)
            for sizes in ([40], [1], [7, 12]):
                assert want.same(engine, sizes) and want.same(engine, sizes, all_logits=False)


def test_after_the_last_kv_layer_only_wanted_rows_are_computed() -> None:
    """Only layers 0 to 3 of the seven layers store KV rows."""
    with engine_of("F32") as engine:
        ops = engine.program.model.ops
        rows = {layer: set(ops[ops[:, linking.LAYER] == layer, linking.ROWS_OF].tolist()) for layer in range(8)}
        assert [len(rows[layer]) for layer in range(8)] == [1, 1, 1, 2, 1, 1, 1, 1]
        assert [WANTED in rows[layer] for layer in range(8)] == [False] * 3 + [True] * 5


# --- negative controls ------------------------------------------------------------------------------------------------


def test_control_a_sharing_layer_that_stores_kv_rows(checkpoints: dict[str, Path]) -> None:
    """A layer that should only read KV rows stores the last KV layer's rows again."""

    def write(p: Program) -> None:
        gemma4.write(p)
        at = next(n for n, op in enumerate(p.ops) if op.kind == STORE and op.phase.layer == 3)
        phase = replace(p.ops[at].phase, layer=5)
        after = max(n for n, op in enumerate(p.ops) if op.phase.layer == 4) + 1
        p.ops.insert(after, replace(p.ops[at], phase=phase, source="v", second="k"))

    with engine_of("F32") as honest:
        want = Expected(honest, prompt(honest.config, 40))
        assert want.same(honest, [40])
    with engine_of("F32", write) as engine:
        assert differs(engine, want, [40])


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma3n"])
def test_control_wanted_rows_with_positions_shifted_by_one(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, shift: int
) -> None:
    """Every row but the last then attends to one KV row too few or too many."""
    honest = runners._batch

    def shifted(parts: list[SequenceInput], logits: np.ndarray) -> batches.Batch:
        batch = honest(parts, logits)
        batch.segments[WANTED, :, batches.ORIGIN] += shift
        return batch

    with opened(checkpoints[name], 2) as engine:
        want = expected(name, engine)
        session = engine.session()
        session.prefill(want.ids[:30])
        assert (bits(session.prefill(want.ids[30:])) == bits(want.logits[-1])).all()
        engine.runner.team.deadline = 0.5
        monkeypatch.setattr(runners, "_batch", shifted)
        assert differs(engine, want, [30], all_logits=False)


@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma3n"])
def test_control_a_row_of_another_token(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    honest = GatheredTable.gather
    with opened(checkpoints[name], 2) as engine:
        want = expected(name, engine)
        assert want.same(engine, [TOKENS])
        monkeypatch.setattr(GatheredTable, "gather", lambda table, ids, rows: honest(table, ids ^ 1, rows))
        assert not want.same(engine, [TOKENS])


def test_control_a_layer_that_reads_the_kv_rows_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of("F32") as engine:
        ids = prompt(engine.config, 20)
        want, rows = Expected(engine, ids), reference.ReferenceCache.rows
        first = replace(engine.config.layers[4], kv_source=0)
        monkeypatch.setattr(
            reference.ReferenceCache, "rows",
            lambda cache, layer: rows(cache, first if layer == engine.config.layers[4] else layer),
        )  # fmt: skip
        changed = Expected(engine, ids)
        assert want.same(engine, [20]) and not changed.same(engine, [20])


NEW_PHASES = ("per-layer inputs", "query, key and value", "per-layer gate", "per-layer projection",
              "wanted rows", "end")  # fmt: skip


@pytest.mark.parametrize("phase", NEW_PHASES, ids=lambda phase: phase.replace(" ", "-"))
def test_control_a_barrier_dropped(phase: str) -> None:
    with engine_of("Q8_0") as engine:
        engine.set_threads(4)
        want = Expected(engine, prompt(engine.config, TOKENS))
        assert want.same(engine, [TOKENS])
        # If all logits are wanted, the codes that the phase "wanted rows" writes are in place already, so a missing
        # barrier has no effect.
        assert caught(engine, want, without_barrier(engine, phase), all_logits=phase != "wanted rows")


def test_workers_that_share_the_only_wanted_row_have_room_for_the_scores_of_all_keys() -> None:
    with engine_of("F32") as engine:
        engine.set_threads(4)
        want = Expected(engine, prompt(engine.config, TOKENS))
        assert want.same(engine, [TOKENS], all_logits=False)
        scratch = engine.runner._scratch
        assert scratch is not None and len(scratch.scores) >= 3 * TOKENS * LANES
