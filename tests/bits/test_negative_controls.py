"""Negative controls: the engine or the specification is broken on purpose, and the comparison must fail."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints as tiny
from equivalence import (
    PARTS,
    SHARED,
    TOKENS,
    WIDE,
    Expected,
    caught,
    expected,
    expected_of_several,
    opened,
    prompt,
    together,
    without_barrier,
)
from gguf_files import write_model

from gemma_py.errors import WorkerError
from gemma_py.models.program import ALL, WANTED
from gemma_py.reference import operations as spec
from gemma_py.reference.arithmetic import float32_of, fma, jit
from gemma_py.reference.elementary import exp
from gemma_py.runtime import batch as batches
from gemma_py.runtime import cache as caches
from gemma_py.runtime import runner as runners
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.runner import SequenceInput


@pytest.mark.parametrize("omitted", ["await", "order"])
def test_control_rows_read_or_published_out_of_order(checkpoints: dict[str, Path], omitted: str) -> None:
    with opened(checkpoints["gemma3"], 4) as engine:
        assert caught(
            engine, expected("gemma3", engine), (FaultPlan(seed=seed, omit=omitted) for seed in range(1, 300))
        )


@pytest.mark.parametrize("omitted", ["await", "order"])
def test_control_rows_of_one_sequence_out_of_order_in_shared_passes(checkpoints: dict[str, Path], omitted: str) -> None:
    with opened(checkpoints["gemma3"], 4) as engine:
        wants = expected_of_several("gemma3", engine)

        def seen(seed: int) -> bool:
            engine.instruments.fault_plan = FaultPlan(seed=seed, omit=omitted)
            try:
                return not together(engine, wants, seed)
            except WorkerError:
                return True

        assert any(seen(seed) for seed in range(1, 100))


@pytest.mark.parametrize("what", ["tables", "segments", "wanted"])
def test_control_caches_positions_or_logits_of_two_sequences_are_exchanged(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    honest = runners._batch

    def confused(parts: Sequence[SequenceInput], logits: np.ndarray) -> batches.Batch:
        batch = honest(parts, logits)
        if len(parts) > 1:
            if what == "tables":
                batch.tables[[0, 1]] = batch.tables[[1, 0]]
            elif what == "segments":
                batch.segments[ALL, [0, 1], batches.ORIGIN] = batch.segments[ALL, [1, 0], batches.ORIGIN]
            else:
                count = batch.counts[WANTED, batches.ROWS]
                batch.rows[WANTED, :count] = np.roll(batch.rows[WANTED, :count], 1)
        return batch

    with opened(checkpoints["gemma3"], 2) as engine:
        wants = expected_of_several("gemma3", engine)[:3]
        assert together(engine, wants, 1)
        monkeypatch.setattr(runners, "_batch", confused)
        try:
            assert not together(engine, wants, 1)
        except WorkerError:
            assert what == "segments"  # watermarks do not match the positions, so `publish` fails


BARRIERS = ("embedding", "query, key and value", "attention", "output input", "output", "middle", "gate and up",
            "down input", "down", "end")  # fmt: skip


@pytest.mark.parametrize("phase", BARRIERS, ids=lambda phase: phase.replace(" ", "-"))
def test_control_a_barrier_dropped(tmp_path: Path, phase: str) -> None:
    """The model is quantised, because only then a pass has every barrier."""
    path = write_model(tmp_path / "m.gguf", WIDE, seed=4, kinds=dict.fromkeys(PARTS, "Q8_0"))
    with opened(path, 4) as engine:
        want = Expected(engine, prompt(engine.config, TOKENS))
        assert want.same(engine, [TOKENS])
        assert caught(engine, want, without_barrier(engine, phase))


def test_control_the_barrier_after_scores_dropped(tmp_path: Path) -> None:
    tiny.write(SHARED, tmp_path, 6)
    with opened(tmp_path, 3) as engine:
        want = Expected(engine, prompt(engine.config, 100))
        assert caught(engine, want, without_barrier(engine, "scores", 100), [1])


def test_control_a_ring_one_row_too_short(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(self: caches.Cache, tokens: int, ahead: int = 0) -> None:
        needed = [
            self.position + tokens
            if y.sliding_window is None
            else min(self.position + tokens, y.sliding_window + tokens - 2)
            for y in self.config.layers
        ]
        for number, rows in enumerate(needed):
            if rows != self.layers[number].capacity:
                self._reallocate(number, max(1, rows))

    with opened(checkpoints["gemma3"], 2) as engine:
        want = expected("gemma3", engine)
        monkeypatch.setattr(caches.Cache, "reserve", reserve)
        assert not want.same(engine, [10])


# --- other orders of sums: the changed specification must differ from the engine --------------------------------------


@jit
def attend_in_tiles_of_the_chunk(q, keys, values, first, scale, cap):
    """op.attend, but tiles begin at the window's first position instead of at multiples of TILE."""
    H, E = q.shape
    last = keys.shape[0] - 1
    out, scores = np.empty((H, E), np.float32), np.empty(spec.TILE, np.float32)
    for h in range(H):
        g = h // (H // keys.shape[1])
        maximum, weight_sum = -np.float32(np.inf), np.float32(0)
        out[h, :] = np.float32(0)
        for begin in range(first, last + 1, spec.TILE):
            end = min(last + 1, begin + spec.TILE)
            before = maximum
            for t in range(begin, end):
                dot = np.float32(0)
                for e in range(E):
                    dot = fma(q[h, e], keys[t, g, e], dot)
                scores[t - begin] = spec.soft_cap(dot * scale, cap)
                maximum = max(maximum, scores[t - begin])
            shrink = exp(before - maximum)
            weight_sum = weight_sum * shrink
            for e in range(E):
                out[h, e] = out[h, e] * shrink
            for t in range(begin, end):
                weight = exp(scores[t - begin] - maximum)
                weight_sum = weight_sum + weight
                for e in range(E):
                    out[h, e] = fma(weight, values[t, g, e], out[h, e])
        for e in range(E):
            out[h, e] = out[h, e] / weight_sum
    return out


@jit
def matmul_in_two_halves(x, w):
    """op.matmul_float, but each half of k is summed separately, as two threads might do."""
    half, y = w.shape[1] // 2, np.empty(w.shape[0], np.float32)
    for n in range(w.shape[0]):
        a, b = np.float32(0), np.float32(0)
        for k in range(half):
            a = fma(x[k], float32_of(w[n, k]), a)
        for k in range(half, w.shape[1]):
            b = fma(x[k], float32_of(w[n, k]), b)
        y[n] = a + b
    return y


@pytest.mark.parametrize(
    ("name", "other"), [("attend", attend_in_tiles_of_the_chunk), ("matmul_float", matmul_in_two_halves)]
)
def test_control_another_order_of_a_sum(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, other: object
) -> None:
    with opened(checkpoints["gemma2"], 2) as engine:
        assert expected("gemma2", engine).same(engine, [TOKENS])
        monkeypatch.setattr(spec, name, other)
        changed = Expected(engine, prompt(engine.config, TOKENS))
        # The bits of the logits differ, but their values are right within rounding errors.
        np.testing.assert_allclose(changed.logits, expected("gemma2", engine).logits, atol=1e-3)
        assert not changed.same(engine, [TOKENS])
