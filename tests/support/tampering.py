"""Changes a KV cache or weights between two passes of `verify`, which must then locate the change."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from gemma_py.runtime import program as p
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.program import LinkedProgram, ModelTables
from gemma_py.runtime.runner import Runner, SequenceInput
from gemma_py.weights import pack

Before = Callable[[Runner, Cache], None]


def tamper(monkeypatch: pytest.MonkeyPatch, before: Before | None = None, after: Before | None = None) -> None:
    honest = Runner._pass

    def run(self: Runner, inputs: Sequence[SequenceInput]) -> list[np.ndarray]:
        if before is not None and self.team.workers == 2:
            before(self, inputs[0].cache)
        made = honest(self, inputs)
        if after is not None and self.team.workers == 2:
            after(self, inputs[0].cache)
        return made

    monkeypatch.setattr(Runner, "_pass", run)


def flip_kept(layer: int, position: int, when: int) -> Before:
    """Flips one bit of a key in the cache when `when` tokens are committed."""

    def flip(runner: Runner, cache: Cache) -> None:
        if cache.position == when:
            rows = cache.layers[layer]
            rows.keys[0, position % rows.capacity].view(np.uint32)[0] ^= 1 << 22

    return flip


def repacked(change: Callable[[Runner], ModelTables]) -> Before:
    made: list[LinkedProgram] = []

    def replaced(runner: Runner, cache: Cache) -> None:
        if not made:
            made.append(replace(runner.program, model=change(runner)))
        runner.program = made[0]

    return replaced


def reading(runner: Runner, layer: int, label: str) -> np.ndarray:
    ops = runner.program.model.ops
    return ops[(ops[:, p.LAYER] == layer) & (ops[:, p.LABEL] == runner.program.label(label))]


def changed_gain(layer: int, label: str, number: int = 0) -> Callable[[Runner], ModelTables]:
    """Changes a norm's gain. number: the index of the norm in the phase."""

    def change(runner: Runner) -> ModelTables:
        m, ops = runner.program.model, reading(runner, layer, label)
        gains, at = m.weights.gains.copy(), ops[ops[:, p.GAIN] >= 0][number, p.GAIN]
        gains.view(np.uint32)[at : at + 8] ^= 1 << 18
        gains.flags.writeable = False
        return m._replace(weights=m.weights._replace(gains=gains))

    return change


def changed_matrix(layer: int, label: str, number: int = 0) -> Callable[[Runner], ModelTables]:
    """Changes a matrix. number: the index of the matrix in the phase."""

    def change(runner: Runner) -> ModelTables:
        weights = runner.program.model.weights
        row = weights.matrices[reading(runner, layer, label)[number, p.MATRIX]]
        name = {pack.FLOATS: "floats", pack.BF16_FLOATS: "bf16"}[int(row[pack.KIND])]
        arena = getattr(weights, name).copy()
        arena[row[pack.AT] : row[pack.AT] + 4 * 16] = 0
        arena.flags.writeable = False
        return runner.program.model._replace(weights=weights._replace(**{name: arena}))

    return change


def changed_number(label: str, value: float) -> Callable[[Runner], ModelTables]:
    """Changes a number, such as attention's scale, in every phase with this label."""

    def change(runner: Runner) -> ModelTables:
        m = runner.program.model
        numbers, ops = np.append(m.numbers, np.array([value, 0], np.float32)), m.ops.copy()
        ops[ops[:, p.LABEL] == runner.program.label(label), p.NUMBER] = len(m.numbers)
        numbers.flags.writeable = ops.flags.writeable = False
        return m._replace(numbers=numbers, ops=ops)

    return change
