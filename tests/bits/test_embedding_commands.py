import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import tiny_families
from tampering import changed_gain, repacked, tamper

import gemma_py
from gemma_py import reference
from gemma_py.checks import verify
from gemma_py.checks.measure import BenchTest, for_embeddings
from gemma_py.errors import MismatchError
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.runner import Runner

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("chat", "--prompt", "a"), "generates no text; use embed"),
        (("generate", "--prompt", "a"), "generates no text; use embed"),
        (("score", "--text", "a word"), "generates no text; use embed"),
        (("sweep", "--tokens", 8), "there is nothing to sweep; use bench"),
        (("bench", "-p", 8, "-n", 4), "tg4: an embedding model takes a text whole"),
        (("bench", "-p", 8, "-d", 4), "pp8 @ d4: an embedding model takes a text whole"),
        (("bench", "-p", 200), "200 tokens exceed the context of 128 tokens"),
        (("verify", "--tokens", 200), "200 tokens exceed the context of 128 tokens"),
    ],
)
def test_commands_that_need_another_kind_of_model_say_so(
    run: Run, embedding_folder: Path, arguments: tuple[object, ...], said: str
) -> None:
    code, out, err = run(arguments[0], embedding_folder, *arguments[1:])
    assert (code, out) == (1, "") and said in err and err.count("\n") == 1


def test_inspect_describes_the_embedding(run: Run, embedding_folder: Path) -> None:
    shown = run("inspect", embedding_folder)[1]
    assert "with 4 tokens in each direction" in shown and "tasks      query, passage" in shown
    assert "a dense layer from 40 to 24: 24 dimensions; token 1 is appended to a text" in shown
    report = json.loads(run("inspect", embedding_folder, "--json")[1])
    assert report["embedding"] == {
        "dimensions": 24, "pooling": "mean", "projection": None, "dense": [[40, 32], [24, 40]],
        "prompts": {"query": "q: ", "passage": "p: "}, "default_prompt": None, "text_end": 1,
    }  # fmt: skip
    assert all(layer["bidirectional"] for layer in report["layers"])


def test_inspect_describes_the_projection(run: Run, tmp_path: Path) -> None:
    variant = tiny_families.VARIANTS["embeddinggemma2-large-epsilon"]
    tiny.write(variant, tmp_path, seed=1)
    shown = run("inspect", tmp_path)[1]
    assert "the mean of the tokens, a projection to 20, a dense layer from 20 to 40: 40 dimensions" in shown
    assert "SearchQuery" in shown
    tiny.write(replace(variant, dense=()), tmp_path / "without", seed=1)
    assert "a projection to 20: 20 dimensions" in run("inspect", tmp_path / "without")[1]


def test_bench_measures_whole_texts(run: Run, embedding_folder: Path) -> None:
    code, out, _ = run("bench", embedding_folder, "-p", "8,100", "-r", 1, "-t", "1,2", "--profile", "--json")
    report = json.loads(out)
    assert [test.passes for test in for_embeddings([BenchTest(True, 1000)])] == [[1000]]
    assert code == 0 and [(test["test"], test["passes"]) for test in report["tests"]] == [("pp8", 1), ("pp100", 1)] * 2


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
def test_the_texts_are_the_prompt(tokens: int) -> None:
    ids = list(range(tokens))
    texts = verify.texts_of(ids)
    assert [token for text in texts for token in text] == ids and len(texts[0]) == (tokens + 1) // 2
    assert [len(text) for text in texts[1:-1]] == list(range(1, len(texts) - 1))


def test_a_good_run(run: Run, each_embedding_folder: Path, tmp_path: Path) -> None:
    command = ("verify", each_embedding_folder, "--threads", "1,2,3", "--chunks", "1,3,64", "--tokens", 80)
    code, out, _ = run(*command, "--trace", tmp_path / "trace")
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["threads", "1", "a", "pass", "3", "a", "pass", "64", "a", "pass"]
    assert len({cell for line in lines[1:4] for cell in line.split()[1:]}) == 1
    assert lines[4] == (
        "9 runs of 10 texts with 80 tokens: all embeddings and all keys and values have the same bits, each text alone as "
        "together."
    )
    assert lines[5] == "The first 16 tokens have the bits of the specification."
    code, out, _ = run(*command, "--against", tmp_path / "trace", "--json")
    report = json.loads(out)
    assert code == 0 and report["equal"] and report["against"]["equal"]
    assert {row["embeddings"] for row in report["runs"]} == {report["runs"][0]["embeddings"]}
    assert [row["texts_in_a_pass"] for row in report["runs"][:3]] == [1, 3, 64]


@pytest.fixture
def check(embedding_folder: Path) -> Callable[..., verify.VerifyReport]:
    def opened(threads: int, shards: int) -> gemma_py.Engine:
        return gemma_py.load(embedding_folder, threads=threads, shards=shards)

    return lambda threads, reference_tokens: verify.verify(opened, threads, (3,), 60, reference_tokens)


def test_a_changed_weight_is_located(
    check: Callable[..., verify.VerifyReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper(monkeypatch, before=repacked(changed_gain(1, "middle", 1)))
    difference = check((1, 2), 0).difference
    assert difference is not None and (difference.layer, difference.phase, difference.first) == (1, "middle", 0)
    assert "1 thread with 3 texts in a pass and 2 threads with 3 texts in a pass" in difference.between


def test_another_text_than_the_specification_is_named(
    check: Callable[..., verify.VerifyReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The specification gets a wrong last id for the third text."""
    right, calls = reference.embedding_and_rows, count()

    def wrong(engine: gemma_py.Engine, ids: list[int]) -> object:
        return right(engine, [*ids[:-1], ids[-1] ^ 1] if next(calls) == 2 else ids)

    monkeypatch.setattr(reference, "embedding_and_rows", wrong)
    report = check((1,), 16)
    assert report.difference is not None and "embeddings from text 2" in str(report.difference)
    with pytest.raises(MismatchError):
        report.raise_on_mismatch()


def test_rows_read_too_early_are_found(
    check: Callable[..., verify.VerifyReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker waits for published rows. Not every run shows the race, so runs are repeated."""
    seeds = count(1)

    def race(runner: Runner, cache: Cache) -> None:
        runner.instruments.fault_plan = FaultPlan(seed=next(seeds), omit="await")

    tamper(monkeypatch, before=race)
    reports: Iterator[verify.VerifyReport] = (check((1, 2), 0) for _ in range(100))
    assert any(report.difference is not None for report in reports)
