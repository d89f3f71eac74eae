import io
import json
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from equivalence import PARTS, WIDE
from gguf_files import write_model
from repository import TINY
from tampering import changed_gain, changed_matrix, changed_number, flip_kept, repacked, tamper

import gemma_py
from gemma_py import reference
from gemma_py.checks import verify
from gemma_py.cli.progress import ProgressBar
from gemma_py.kernels.decorator import kernel
from gemma_py.runtime import trace as traces
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.runner import Runner
from gemma_py.runtime.trace import UNTRACED

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--threads", "1,2", "--chunks", "32", "--tokens", "96", "--reference", "0")


def tiny_engine(threads: int, shards: int = 1) -> gemma_py.Engine:
    return gemma_py.load(TINY, threads=threads, shards=shards)


def check(threads: tuple[int, ...] = (1, 2), chunks: tuple[int, ...] = (32,), tokens: int = 96) -> verify.VerifyReport:
    return verify.verify(tiny_engine, threads, chunks, tokens, 0)


def found(report: verify.VerifyReport) -> verify.Difference:
    assert report.difference is not None
    return report.difference


# --- no difference ----------------------------------------------------------------------------------------------------


def test_a_good_run(run: Run) -> None:
    code, out, err = run("verify", TINY, "--threads", "1,2,3", "--chunks", "1,7,64", "--tokens", 80)
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 6)
    assert lines[0].split() == ["threads", "chunks", "of", "1", "chunks", "of", "7", "chunks", "of", "64"]
    assert len({cell for line in lines[1:4] for cell in line.split()[1:]}) == 1
    assert lines[4] == (
        "9 runs of 80 tokens: all logits and all keys and values have the same bits, by single tokens and by chunks."
    )
    assert lines[5] == "The first 16 tokens have the bits of the specification."
    assert err.splitlines() == ["checking the specification, 16 tokens"] + [
        f"checking {t} thread{'s' * (t > 1)} in chunks of {c}" for t in (1, 2, 3) for c in (1, 7, 64)
    ]


def test_json(run: Run) -> None:
    code, out, err = run("verify", TINY, "--json", *SMALL[:-1], "5")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert set(report) == {"equal", "tokens", "reference_tokens", "runs", "difference"}
    assert (report["equal"], report["tokens"], report["reference_tokens"], report["difference"]) == (True, 96, 5, None)
    assert [(row["threads"], row["chunk"]) for row in report["runs"]] == [(1, 32), (2, 32)]
    with tiny_engine(3) as engine:
        session = engine.session()
        session.prefill(verify.prompt(96, engine.config.vocab_size))
        assert report["runs"][0]["kv"] == session.kv_digest()


def test_the_prompt_never_changes() -> None:
    """The first numbers that the authors of splitmix64 give for seed 0."""
    assert verify.prompt(4, 1 << 64) == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC,
    ]  # fmt: skip
    assert max(verify.prompt(10_000, 7)) == 6


def test_the_prompt_fits_the_context() -> None:
    assert verify.prompt_length(None, 100) == 100
    assert verify.prompt_length(None, 1 << 20) == verify.TOKENS
    assert verify.prompt_length(7, 100) == 7


def test_a_trace_does_not_depend_on_threads_or_chunks_and_changes_no_bit(tmp_path: Path) -> None:
    """The model is quantised, because it then has every phase. Every row of every phase has a hash and a worker."""
    path = write_model(tmp_path / "m.gguf", WIDE, seed=4, kinds=dict.fromkeys(PARTS, "Q8_0"))
    ids = verify.prompt(50, 77)
    first = None
    for threads, chunk in ((1, 50), (2, 50), (3, 7), (4, 1)):
        with gemma_py.load(path, threads=threads) as engine:
            traced = verify.compute(engine, ids, chunk, trace=True)
            assert traced.result == verify.compute(engine, ids, chunk).result
        first = first or traced
        np.testing.assert_array_equal(traced.hashes, first.hashes)
        made = traced.hashes != UNTRACED
        of_every_layer = [n for n, name in enumerate(traced.phases) if name not in ("embedding", "scores", "head")]
        assert len(of_every_layer) == 10
        assert made[:-1, of_every_layer].all()
        assert made[0, traced.phases.index("embedding")].all()
        assert made[-1, traced.phases.index("head")].all()
        assert ((traced.workers >= 0) == made).all()
        assert traced.workers.max() < threads


@kernel
def _trace_rows(trace, at, tokens, x, width, first, last):
    traces.trace_rows(trace, at, tokens, x, width, first, last)


def test_a_hash_changes_if_words_change_places_or_a_bit_flips() -> None:
    x = np.arange(1, 9, dtype=np.float32)
    others = [x.copy() for _ in range(9)]
    for number, other in enumerate(others[:8]):
        other.view(np.uint32)[number] ^= 1
    others[8][[2, 5]] = x[[5, 2]]
    seen = set()
    for row in (x, *others):
        trace = traces.Trace(np.full((1, 1), UNTRACED), np.full((1, 1), -1))
        _trace_rows(trace, 0, np.arange(1), row, 8, 0, 1)
        seen.add(int(trace.hashes[0, 0]))
    assert len(seen) == 10


# --- differences ------------------------------------------------------------------------------------------------------


def test_a_bit_of_the_cache_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 5 has full attention and keeps all rows, so a changed row is found after the run. A ring would have
    overwritten the row.
    """
    tamper(monkeypatch, after=flip_kept(5, 60, 64))
    difference = found(check())
    assert (difference.layer, difference.phase, difference.first) == (5, "attention", 64)
    assert "position 60" in difference.note
    assert difference.workers[0] == 0
    assert difference.workers[1] in (0, 1)


def test_a_bit_of_a_ring_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, after=flip_kept(3, 60, 64))
    difference = found(check())
    assert (difference.layer, difference.phase, difference.first, difference.note) == (3, "attention", 64, "")


def test_a_bit_that_nobody_reads_any_more_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, after=flip_kept(2, 90, 96))
    difference = found(check())
    assert (difference.layer, difference.phase, difference.first) == (2, "rows kept in the cache", 90)


PLACES = {
    "embedding": (changed_gain(0, "embedding"), 0),
    "query, key and value": (changed_matrix(3, "query, key and value", 1), 3),
    "rope and kv": (changed_gain(4, "rope and kv"), 4),
    "attention": (changed_number("attention", 0.1), 0),
    "output": (changed_matrix(6, "output"), 6),
    "middle": (changed_gain(1, "middle", 1), 1),
    "gate and up": (changed_matrix(2, "gate and up"), 2),
    "down": (changed_matrix(5, "down"), 5),
    "end": (changed_gain(3, "end"), 3),
    "head": (changed_number("head", 30), 7),
}


@pytest.mark.parametrize("phase", PLACES)
def test_a_changed_weight_is_located(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    change, layer = PLACES[phase]
    tamper(monkeypatch, before=repacked(change))
    difference = found(check())
    assert (difference.layer, difference.phase) == (layer, phase)
    # Position 0 attends to one key, whose weight is always 1.
    assert difference.first == (1 if phase == "attention" else 0)


def test_equal_results_that_contain_nan_are_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of attention is NaN in every run."""
    tamper(monkeypatch, before=repacked(changed_number("attention", np.nan)))
    code, out, err = run("verify", TINY, "--threads", 2, *SMALL[2:])
    assert (code, out) == (1, "")
    assert "NaN" in err.splitlines()[-1]


def test_the_next_layers_norm_belongs_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, before=repacked(changed_gain(2, "end", 1)))
    difference = found(check())
    assert (difference.layer, difference.phase, difference.first) == (2, "end", 0)


def test_rows_read_too_early_are_located(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker waits for published rows. Not every run shows the race, so runs are repeated."""
    seeds = count(1)

    def race(runner: Runner, cache: Cache) -> None:
        runner.instruments.fault_plan = FaultPlan(seed=next(seeds), omit="await")

    tamper(monkeypatch, before=race)
    reports: Iterator[verify.VerifyReport] = (check() for _ in range(100))
    difference = found(next(report for report in reports if report.difference is not None))
    assert difference.phase == "attention" or "race" in difference.note
    assert difference.between == "1 thread in chunks of 32 and 2 threads in chunks of 32"


def test_a_difference_that_does_not_occur_again_is_called_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    times = count()

    def flip(runner: Runner, cache: Cache) -> None:
        if cache.position == 64 and next(times) == 0:
            flip_kept(5, 60, 64)(runner, cache)

    tamper(monkeypatch, after=flip)
    difference = found(check())
    assert difference.layer == 5
    assert difference.first == 64
    assert "race" in difference.note


def test_the_command_names_the_place_and_exits_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, after=flip_kept(5, 60, 64))
    code, out, err = run("verify", TINY, *SMALL)
    assert code == 1
    assert out.splitlines()[2].split()[1].startswith("*")
    assert "same bits" not in out
    assert err.splitlines()[-1].startswith(
        "gemma_py: 1 thread in chunks of 32 and 2 threads in chunks of 32 differ, first in layer 5, attention, "
        "position 64, computed by worker 0 and by worker "
    )
    code, out, err = run("verify", TINY, "--json", *SMALL)
    report = json.loads(out)
    assert (code, report["equal"], len(err.splitlines())) == (1, False, 1)
    assert (report["difference"]["layer"], report["difference"]["phase"]) == (5, "attention")
    assert report["difference"]["message"] in err


@pytest.mark.parametrize("what", ["keys", "logits"])
def test_a_difference_to_the_specification_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    honest = reference.logits_and_rows

    def changed(engine: gemma_py.Engine, ids: Any) -> Any:
        logits, cache = honest(engine, ids)
        (cache.keys[2][5] if what == "keys" else logits[3]).view(np.uint32).reshape(-1)[1] ^= 1
        return logits, cache

    monkeypatch.setattr(reference, "logits_and_rows", changed)
    code, _, err = run("verify", TINY, *SMALL[:-1], "8")
    assert code == 1
    where = "layer 2, keys and values, position 5" if what == "keys" else "logits, position 3"
    assert err.splitlines()[-1] == f"gemma_py: the specification and 1 thread in chunks of 8 differ, first in {where}"


# --- invalid arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--threads", "0"], ["--threads", "1,,2"], ["--threads", ""], ["--threads", "two"], ["--chunks", "-1"],
        ["--chunks", "1.5"], ["--tokens", "0"], ["--tokens", "x"], ["--reference", "-1"], ["--trace"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_usage_errors(run: Run, arguments: list[str]) -> None:
    code, out, err = run("verify", TINY, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


# --- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressBar("checking", wanted=True) as progress:
        progress._began -= 30
        progress("2 threads in chunks of 7", 0.25)
        assert "25% 1:30 left  2 threads in chunks of 7" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_an_unwanted_progress_bar_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressBar("checking", wanted=False) as progress:
        progress("anything", 0.5)
    assert terminal.getvalue() == ""
