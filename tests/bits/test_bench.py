import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
import tiny_families
from repository import TINY

import gemma_py
from gemma_py import machine
from gemma_py.catalog import catalogue
from gemma_py.checks import limits, measure, shapes, speculation, sweep
from gemma_py.checks.cost import BYTES, FLOP, _keys, run_cost
from gemma_py.checks.measure import GROUPS, BenchRow, BenchTest
from gemma_py.checks.verify import RunResult
from gemma_py.errors import ContextError, InputError
from gemma_py.formats.blocks import TYPES
from gemma_py.formats.tensor import StoredTensor
from gemma_py.generate.session import Session
from gemma_py.generate.speculation import Pace
from gemma_py.kernels import peak as kernels
from gemma_py.models.families import config_from_hf
from gemma_py.models.program import MATMUL
from gemma_py.runtime import program
from gemma_py.runtime.kv_types import KV_TYPES
from gemma_py.runtime.team import Team
from gemma_py.weights.tensors import CodeMatrix, StoredMatrix

Run = Callable[..., tuple[int, str, str]]
SHORT = ("-p", 40, "-n", 3, "-r", 2)


@pytest.fixture(scope="module", autouse=True)
def quick_limits() -> Iterator[None]:
    """Read less memory and run shorter loops, because these tests do not use the measured limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_MEMORY", 1 << 22)
        patch.setattr(limits, "_LEAST_SECONDS", 1e-4)
        yield


# --- what a pass costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("W", [0, 1, 5, 9])
def test_keys_that_queries_see(W: int) -> None:
    for position in range(14):
        for T in range(1, 14):
            seen = [t + 1 if W == 0 else min(t + 1, W) for t in range(position, position + T)]
            assert _keys(position, T, W) == sum(seen), (position, T)


def test_cost_by_hand(tiny_engine: gemma_py.Engine) -> None:
    """D = 64, L = 7, H = 4, G = 2, E = 32, F = 128, V = 1536; window 16, but layer 5 has full attention; bfloat16
    weights.
    """
    cost = run_cost(tiny_engine.program, KV_TYPES["float32"], 0, [3, 1]).sum(0)
    layer = 64 * 32 * (4 + 2 + 2 + 4) + 3 * 64 * 128
    assert cost[FLOP] == 4 * 7 * 2 * layer + 2 * 2 * 64 * 1536 + 7 * 4 * 4 * 32 * (1 + 2 + 3 + 4)
    assert cost[BYTES] == 2 * 2 * (7 * layer + 64 * 1536) + 7 * 2 * 2 * 32 * 4 * (3 + 4)


# --- the machine's limits ---------------------------------------------------------------------------------------------


def test_the_compiler_does_not_remove_the_loops_that_measure_limits() -> None:
    out = np.zeros(2 * kernels.LANES, np.float32)
    with Team(2) as team:
        x = np.array([0.5, 1.0], np.float32)
        for kernel, chains in zip((kernels.multiply_floats_6, kernels.multiply_floats_12), kernels.CHAINS, strict=True):
            team.run(kernel, 3, x, out)
            assert (out == chains * 1.75).all()
        rows = np.arange(kernels.CODE_ROWS * kernels.PAIRS * 2, dtype=np.int16)
        w = np.repeat(np.arange(kernels.PAIRS, dtype=np.int16) % 7, 2 * kernels.LANES * kernels.CODE_PANELS)
        team.run(kernels.multiply_pairs, 2, rows, w, out)
        pairs = rows.reshape(kernels.CODE_ROWS, kernels.PAIRS, 2).astype(np.int64)
        want = 2 * kernels.CODE_PANELS * int((pairs * (np.arange(kernels.PAIRS) % 7)[:, None]).sum())
        assert (out == np.float32(want)).all()
        values = np.arange(64 * 2 * 5, dtype=np.int32)
        team.run(kernels.read_memory, values.view(np.float32), out)
        assert [int(out[0]), int(out[kernels.LANES])] == [int(half.sum()) for half in values.reshape(2, -1)]


def test_limits_are_medians_of_samples() -> None:
    found, values = limits.Limits(1), limits.memory_to_read()
    with Team(1) as team:
        for _ in range(2):
            found.sample(team.run, values)
        assert all(0 < limit < 1e15 for limit in (found.f32, found.int16, found.memory))
        found.samples["int16"][:] = [1e30, 1e30]
        found.sample(team.run, values)
    assert found.int16 == 1e30
    assert {len(samples) for samples in found.samples.values()} == {3}


# --- bench ------------------------------------------------------------------------------------------------------------


def test_names_of_tests() -> None:
    assert [str(test) for test in (BenchTest(True, 512), BenchTest(False, 64), BenchTest(False, 64, 2048))] == [
        "pp512",
        "tg64",
        "tg64 @ d2048",
    ]
    assert BenchTest(True, 1100).passes == [512, 512, 76]
    assert BenchTest(False, 3, 9).passes == [1, 1, 1]


def test_medians_with_their_spread() -> None:
    row = BenchRow(1, BenchTest(True, 10), seconds=[1.0, 5.0, 2.0])
    assert (row.rate, row.spread) == (5.0, pytest.approx(np.std([10.0, 2.0, 5.0], ddof=1)))


def test_bench_json(run: Run) -> None:
    code, out, _ = run("bench", TINY, *SHORT, "-d", "0,20", "-t", "2,1", "--profile", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["parameters"] == 444_672
    assert [limit["threads"] for limit in report["limits"]] == [2, 1]
    names = ["pp40", "tg3", "pp40 @ d20", "tg3 @ d20"]
    assert [(test["threads"], test["test"]) for test in report["tests"]] == [
        (n, name) for n in (2, 1) for name in names
    ]
    for test in report["tests"]:
        assert len(test["rounds"]) == 2
        assert (
            min(test["tokens_per_second"], test["gflops"], test["gbytes_per_second"], test["of_f32"], test["of_memory"])
            > 0
        )
        assert sum(entry["share"] for entry in test["profile"]) == pytest.approx(1.0)
        assert all(entry["seconds"] >= 0 for entry in test["profile"])
        assert {"query, key, value", "attention", "head", "waiting"} <= {entry["phase"] for entry in test["profile"]}
        assert test["barriers"] == test["passes"] * (8 * 7 + 3)
    digests = {(test["test"], test["digest"]) for test in report["tests"]}
    assert len(digests) == 4  # every test has one digest, for any number of threads


def test_bench_tables(run: Run) -> None:
    code, out, err = run("bench", TINY, *SHORT, "--profile")
    assert code == 0
    assert err.count("measuring") >= 4
    lines = out.splitlines()
    assert lines[0].startswith("| model ")
    assert [line.split("|")[5].strip() for line in lines[2:4]] == ["pp40", "tg3"]
    assert "±" in lines[2]
    assert len({len(line) for line in lines[:4]}) == 1
    assert sum(line.startswith("| feed-forward: down") for line in lines) == 2
    code, out, err = run("bench", TINY, *SHORT, "--csv")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["test"] for row in rows] == ["pp40", "tg3"]
    assert float(rows[0]["tokens_per_second"]) > 0


def test_default_tests(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def no_run(self: measure.Benchmark, rounds: int, profile: bool, say: Any) -> None:
        asked.append((rounds, profile, [str(row.test) for row in self._all]))

    monkeypatch.setattr(measure.Benchmark, "run", no_run)
    assert run("bench", TINY)[0] == 0
    assert run("bench", TINY, "-n", "16,32", "-p", 0)[0] == 0
    assert run("bench", TINY, "-d", "7")[0] == 0
    assert asked == [
        (5, False, ["pp512", "pp2048", "tg64", "tg64 @ d2048"]),
        (5, False, ["tg16", "tg32"]),
        (5, False, ["pp512 @ d7", "pp2048 @ d7", "tg64 @ d7"]),
    ]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-p", "5000"], 1), (["-p", 10, "-d", 4090], 1), (["-p", 0, "-n", 0], 1), (["-p", "x"], 2), (["-t", "0"], 2),
        (["-r", 0], 2), (["--shape", "tiny-gemma4"], 1), (["--shape", "tiny-gemma3", "--type", "q9"], 1),
        (["--shape", "tiny-gemma3", "--type", "q4_k"], 1), (["--speculate", "-p", "5"], 1),
        (["--speculate", "-n", "5,6"], 1), (["--speculate", "--profile"], 1), (["--speculate", "-n", "0"], 1),
    ],
)  # fmt: skip
def test_bench_refuses(run: Run, arguments: list[object], code: int) -> None:
    got, out, err = run("bench", TINY, *arguments)
    assert (got, out, err.count("\n")) == (code, "", 1)


def test_bench_of_speculation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "PROMPTS", {"a": "one two one two one two", "b": "three"})
    options = ("--speculate", "-n", 12, "-r", 2, "-t", 1)
    code, out, _ = run("bench", TINY, *options, "--json")
    texts = json.loads(out)["texts"]
    assert code == 0
    assert [(row["text"], row["temperature"]) for row in texts] == [("a", 0), ("b", 0), ("a", 0.8), ("b", 0.8)]
    for row in texts:
        assert row["tokens"] == 24 and row["accepted"] <= row["guessed"]
        assert 1 <= row["tokens_a_pass"] <= 11 and row["least"] <= row["speed"]
    code, out, _ = run("bench", TINY, *options)
    assert (code, len(out.splitlines())) == (0, 6)
    assert all(f" {word} " in out for word in ("off t/s", "auto t/s", "tokens a pass", "accepted"))

    # A negative control: speculation changes an answer.
    monkeypatch.setattr(Pace, "allot", lambda self, chances, rows, least=0.0, drafting=(): [min(4, len(chances[0]))])
    monkeypatch.setattr(Session, "accept", lambda self, ids: self.prefill([(ids[0] + 1) % 1000]))
    code, _, err = run("bench", TINY, *options)
    assert code == 1 and "speculation changed an answer" in err


def test_ctrl_c_keeps_what_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = measure.Benchmark._measure, 0

    def interrupted(self: measure.Benchmark, row: BenchRow, profiled: bool) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        real(self, row, profiled)

    monkeypatch.setattr(measure.Benchmark, "_measure", interrupted)
    code, out, _ = run("bench", TINY, *SHORT, "--json")
    assert code == 130
    assert [(test["test"], len(test["rounds"])) for test in json.loads(out)["tests"]] == [("pp40", 1)]


def test_bench_compares_bits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(range(100))
    monkeypatch.setattr("gemma_py.runtime.cache.Cache.digest", lambda self: [str(next(made))])
    code, out, err = run("bench", TINY, *SHORT, "--csv")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "gave other bits" in err


def test_the_lines_of_a_profile_have_every_phase_of_every_model() -> None:
    lines = [phase for members in GROUPS.values() for phase in members]
    found = set()
    for variant in (tiny.VARIANTS | tiny_families.VARIANTS).values():
        dense = pairwise([tiny.pooled_width(variant), *variant.dense])
        family, config = config_from_hf(variant.config, "config.json", dense=tuple((N, K) for K, N in dense))
        found |= {op.phase.name for op in family.program(config).ops}
    assert sorted(lines) == sorted(found)


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_every_shape_of_the_catalogue_has_a_config() -> None:
    for entry in catalogue():
        (family, config), shape = shapes.config_of(entry.name), entry.shape
        assert config.model_type == shape["family"]
        specs = family.tensors(config)
        assert sum(math.prod(spec.shape) for name, spec in specs.items() if name != "lm_head") == entry.parameters
        windows = {layer.sliding_window for layer in config.layers}
        reach = {"gemma-embedding": lambda width: width // 2 + 1, "gemma-embedding2": lambda most: most + 1}
        window = reach[config.model_type](shape["W"]) if config.embedding else shape.get("W")
        assert windows == {None, window}, entry.name


@pytest.mark.parametrize("name", ["gemma-3n-e2b-it", "gemma-3n-e4b-it"])
def test_a_shape_of_gemma3n_can_be_measured(name: str) -> None:
    family, config = shapes.config_of(name)
    weights, rest = shapes.estimate(family, config, TYPES["Q4_0"], 512)
    gathered = sum(math.prod(spec.shape) for spec in family.tensors(config).values() if spec.gathered)
    entry = next(entry for entry in catalogue() if entry.name == name)
    assert 0.5 * (entry.parameters - gathered) < weights < 0.9 * (entry.parameters - gathered) and rest > 0


@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_are_finite_numbers(name: str) -> None:
    tensor = StoredTensor("m", TYPES[name], (16, 256), shapes._random(TYPES[name], 16 * 256), Path("m"))
    matrix = StoredMatrix(tensor).whole()
    parts = (matrix.scales, matrix.minimums) if isinstance(matrix, CodeMatrix) else (matrix.values,)
    assert all(len(np.unique(part)) > 20 for part in parts if part.size)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1"])
def test_an_estimate_is_what_the_weights_take(name: str) -> None:
    checkpoint = shapes.random_checkpoint("tiny-gemma3", name, 100)
    weights, rest = shapes.estimate(checkpoint.family, checkpoint.config, TYPES[name.upper()], 100)
    with gemma_py.Engine(checkpoint, 1) as engine:
        assert weights == sum(arena.nbytes for arena in engine.program.model.weights[:3])
        assert rest > 0
        assert np.isfinite(engine.session().prefill([1, 2, 3])).all()
        ops = engine.program.model.ops
        read = ops[ops[:, program.OP] == MATMUL][:, program.MATRIX]
        # Layers must not share a matrix, which would stay in the processor's cache and make the pass too fast.
        assert len(set(read.tolist())) == len(read)


def test_bench_of_a_shape(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("bench", "--shape", "tiny-gemma3", "--type", "q8_0", *SHORT, "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["parameters"], report["format"], len(report["tests"])) == (444_672, "random Q8_0", 2)
    monkeypatch.setattr(machine, "memory", lambda: 1 << 34)
    code, out, err = run("bench", "--shape", "gemma-3-27b", "--type", "bf16")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "GiB" in err
    with pytest.raises(InputError, match=r"16\.0 GiB are free"):
        shapes.random_checkpoint("gemma-3-27b", "q8_0", 512)


# --- sweep ------------------------------------------------------------------------------------------------------------

SWEEP = ("sweep", TINY, "--threads", "1,2", "--chunks", "8,40", "--tokens", 40, "--new", 2)


def test_sweep_json(run: Run) -> None:
    code, out, err = run(*SWEEP, "--rounds", 2, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["equal"]
    assert [(p["threads"], p["chunk"]) for p in report["points"]] == [(1, 8), (1, 40), (2, 8), (2, 40)]
    by_way = {(p["threads"], p["chunk"]): p for p in report["points"]}
    for (threads, chunk), point in by_way.items():
        assert len(point["prefill_rounds"]) == len(point["decode_rounds"]) == 2
        one = by_way[1, chunk]["prefill_tokens_per_second"]
        assert point["prefill_efficiency"] == pytest.approx(point["prefill_tokens_per_second"] / one / threads)
    best = max(report["points"], key=lambda p: p["prefill_tokens_per_second"])
    assert report["best"]["prefill"] == {"threads": best["threads"], "chunk": best["chunk"]}


def test_sweep_table_and_figure(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sweep.png"
    code, out, err = run(*SWEEP, "--rounds", 1, "--plot", file)
    assert code == 0
    assert out.splitlines()[0].count("|") == 5
    assert sum(line.count("* ") for line in out.splitlines()[2:4]) == 2
    assert "4 runs of 40 + 2 tokens have the same bits." in out
    assert file.read_bytes().startswith(b"\x89PNG")
    assert err.count("measuring") == 4


def test_sweep_names_the_first_difference(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sweep.Sweep._measure

    def wrong(self: sweep.Sweep, point: sweep.SweepPoint) -> RunResult:
        result = real(self, point)
        return result if point.setting.threads == 1 else RunResult((b"other", *result.rows[1:]), result.kv)

    monkeypatch.setattr(sweep.Sweep, "_measure", wrong)
    code, out, err = run(*SWEEP, "--rounds", 1, "--json")
    report = json.loads(out)
    assert code == 1
    assert not report["equal"]
    assert len(report["points"]) == 3
    assert "1 thread in chunks of 8 and 2 threads in chunks of 8 differ, first in" in err
    code, out, err = run(*SWEEP, "--rounds", 1)
    assert code == 1
    assert out.startswith("| threads")
    assert "same bits" not in out


def test_sweep_measures_passes_of_several_tokens(run: Run) -> None:
    arguments = (*SWEEP[:-1], 5, "--rounds", 1)
    code, out, _ = run(*arguments)
    assert code == 0
    header, _, *rows = (line for line in out.split("Milliseconds of a pass")[0].split("\n\n")[-2].splitlines())
    assert [cell.strip() for cell in header.split("|")[1:-1]] == ["threads", "1 token", "2 tokens", "4 tokens"]
    assert [row.count("x)") for row in rows] == [3, 3]
    report = json.loads(run(*arguments, "--json")[1])
    assert all(set(point["pass_seconds"]) == {"2", "4"} for point in report["points"])


def test_sweep_compares_passes_of_several_tokens_with_decoding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Session.verify

    def wrong(self: Session, token: int, guesses: list[int]) -> np.ndarray:
        logits = real(self, token, guesses)
        logits[-1, 7] = np.nextafter(logits[-1, 7], np.float32(np.inf))
        return logits

    monkeypatch.setattr(Session, "verify", wrong)
    code, out, err = run(*SWEEP, "--rounds", 1)
    assert code == 1
    assert "same bits" not in out
    assert "decoding and a pass of 2 tokens on 1 thread differ, first in" in err


def test_a_stopped_sweep_shows_what_it_has(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = sweep.Sweep._measure

    def interrupted(self: sweep.Sweep, point: sweep.SweepPoint) -> RunResult:
        if point.setting.threads == 2:
            raise KeyboardInterrupt
        return real(self, point)

    monkeypatch.setattr(sweep.Sweep, "_measure", interrupted)
    code, out, _ = run(*SWEEP, "--rounds", 1, "--plot", tmp_path / "part.svg")
    assert code == 130
    assert out.splitlines()[3].count("|") == 5
    assert "2 runs" in out
    assert (tmp_path / "part.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--plot", "/nowhere/a.png"], 1), (["--plot", "a.txt"], 1), (["--tokens", 5000], 1), (["--chunks", "0"], 2)],
)
def test_sweep_refuses(run: Run, arguments: list[object], code: int) -> None:
    got, out, err = run("sweep", TINY, *arguments)
    assert (got, out, err.count("\n")) == (code, "", 1)


def test_a_figure_without_matplotlib(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backend_bases", None)
    code, out, err = run("sweep", TINY, "--plot", "a.png")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "pip install" in err


def test_threads_of_a_sweep_end_in_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemma_py.cli.sweep import default_teams

    for cores, processors, wanted in ((2, 4, (1, 2, 4)), (1, 1, (1,)), (24, 48, (*range(1, 9), 16, 24, 48))):
        monkeypatch.setattr(machine, "threads", lambda cores=cores: cores)
        monkeypatch.setattr(machine, "affinity", lambda processors=processors: set(range(processors)))
        assert default_teams() == wanted


def test_growth(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import growth

    file = tmp_path / "growth.svg"
    monkeypatch.setattr(
        "sys.argv", ["growth", str(TINY), "--tokens", "64,8", "--decode", "2", "--rounds", "1", "--plot", str(file)]
    )
    assert growth.main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [point["tokens"] for point in report["points"]] == [8, 64]
    assert report["points"][0]["kv_bytes"] < report["points"][1]["kv_bytes"]
    assert file.stat().st_size > 0
    with pytest.raises(ContextError):
        monkeypatch.setattr("sys.argv", ["growth", str(TINY), "--tokens", "5000"])
        growth.main()
