import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import small
from repository import ROOT, TINY
from tiny_models import VARIANTS

import gemma_py
from gemma_py.catalog import catalogue, resolve
from gemma_py.generate.core import Generation, TopLogprobs
from gemma_py.runtime.kv_types import KV_TYPES

Run = Callable[..., tuple[int, str, str]]


def test_score_json(run: Run, tmp_path: Path) -> None:
    ids = [2, 30, 31, 500, 7]
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(ids))
    code, out, err = run("score", TINY, "--ids", file, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert set(report) == {"ids", "nll", "mean_nll", "perplexity"}
    assert report["ids"] == ids
    with gemma_py.load(TINY) as engine:
        assert report["nll"] == list(engine.score(ids))
    assert report["mean_nll"] == pytest.approx(sum(report["nll"]) / 4)
    assert report["perplexity"] == pytest.approx(2.718281828 ** report["mean_nll"])


def test_score_of_a_text_and_of_its_file_are_the_same(run: Run, tmp_path: Path) -> None:
    text = "some text\twith <bos> and 🙂\n"
    (tmp_path / "text").write_text(text)
    _, a, _ = run("score", TINY, "--text", text, "--json")
    _, b, _ = run("score", TINY, "--file", tmp_path / "text", "--json")
    assert json.loads(a) == json.loads(b)
    assert json.loads(a)["ids"].count(2) == 1
    code, table, _ = run("score", TINY, "--text", text)
    assert code == 0
    assert len(table.splitlines()) == len(json.loads(a)["nll"]) + 1
    assert "perplexity" in table


def test_generate(run: Run) -> None:
    code, out, err = run("generate", TINY, "--prompt", "some text", "--max-tokens", 5, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert len(report["ids"]) == len(report["logprobs"]) == 5
    assert report["finish_reason"] == "length"
    code, out, _ = run("generate", TINY, "-p", "some text", "-n", 5)
    assert (code, out) == (0, report["text"] + "\n")


def test_a_text_is_printed_without_computing_log_probabilities(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    scores: list[int] = []

    def score(self: Generation, logits: np.ndarray, token: int) -> tuple[float, TopLogprobs]:
        scores.append(token)
        return 0.0, ()

    monkeypatch.setattr(Generation, "score", score)
    assert run("generate", TINY, "--prompt", "some text", "--max-tokens", 5)[0] == 0
    assert run("chat", TINY, "--template", "gemma", "--prompt", "some text", "--max-tokens", 5)[0] == 0
    assert scores == []
    assert run("generate", TINY, "--prompt", "some text", "--max-tokens", 5, "--json")[0] == 0
    assert len(scores) == 5


def test_quant(run: Run, checkpoints: dict[str, Path]) -> None:
    """Gemma 1's down_proj has rows of 48 weights, no multiple of the block size. So down_proj stays float, and stderr
    names it.
    """
    path = checkpoints["gemma1-multi-head"]
    (path.parent / "ids.json").write_text("[2, 30, 31]")
    score = ("score", path, "--ids", path.parent / "ids.json", "--json")
    code, out, err = run(*score, "--quant", "q4_0")
    assert code == 0
    assert err.count("\n") == 1
    assert "block size of q4_0: 'model.layers.0.mlp.down_proj.weight' and 2 more" in err
    assert json.loads(out)["nll"] != json.loads(run(*score)[1])["nll"]
    assert run(*score, "--quant", "q5_0")[0] == 2
    verify = ("verify", TINY, "--threads", "1", "--chunks", "5", "--tokens", "9", "--reference", "3")
    trace = path.parent / "trace.json"
    assert run(*verify, "--quant", "q8_0", "--trace", trace)[0] == 0
    assert run(*verify, "--quant", "q8_0", "--against", trace)[0] == 0
    assert "another model, --quant or --kv" in run(*verify, "--against", trace)[2]


def test_kv(run: Run, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(list(range(3, 60))))
    score = ("score", TINY, "--ids", tmp_path / "ids.json", "--json", "--kv")
    assert len({json.loads(run(*score, kv)[1])["mean_nll"] for kv in KV_TYPES}) == 3
    code, out, err = run(*score, "q4_0")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "kv should be one of float32, bfloat16, q8_0, found 'q4_0'" in err
    verify = ("verify", TINY, "--threads", "1", "--chunks", "5", "--tokens", "9", "--reference", "9")
    trace = tmp_path / "trace.json"
    assert run(*verify, "--kv", "q8_0", "--trace", trace)[0] == 0
    assert run(*verify, "--kv", "q8_0", "--against", trace)[0] == 0
    assert "another model, --quant or --kv" in run(*verify, "--against", trace)[2]


def test_generate_draws(run: Run) -> None:
    options = ["--prompt", "some text", "--max-tokens", 12, "--temperature", "1.5", "--top-p", "0.9", "--json"]
    drawn = json.loads(run("generate", TINY, *options)[1])
    again = json.loads(run("generate", TINY, *options, "--seed", drawn["seed"], "--threads", 1)[1])
    assert (again["ids"], again["seed"]) == (drawn["ids"], drawn["seed"])
    assert "".join(drawn["texts"]) == drawn["text"]
    assert set(drawn["timings"]) == {"first_token_seconds", "decode_seconds", "decode_tokens_per_second"}
    stop = [text for text in drawn["texts"] if text][2]
    cut = json.loads(run("generate", TINY, *options, "--seed", drawn["seed"], "--stop", "never", "--stop", stop)[1])
    assert (cut["text"], cut["finish_reason"]) == (drawn["text"].partition(stop)[0], "stop")
    assert json.loads(run("generate", TINY, "--prompt", "a", "--max-tokens", 1, "--json")[1])["seed"] is None


def test_inspect(run: Run, checkpoints: dict[str, Path]) -> None:
    for name, path in checkpoints.items():
        code, out, err = run("inspect", path, "--json", "--tensors")
        assert (code, err) == (0, ""), name
        report = json.loads(out)
        assert report["bytes"] == sum(tensor["bytes"] for tensor in report["tensors"])
        assert report["model_type"] in name.replace("gemma1", "gemma")
        parts = Counter(other.removeprefix("model.").split(".")[0] for other in VARIANTS[name].extra)
        del parts["language_model"], parts["layers"]  # the text model does not use these two kinds of tensors
        assert report["left_out"] == parts
        assert bool(parts) == ("multimodal" in name or "wrapped" in name)
        assert run("inspect", path)[0] == 0
    shown = run("inspect", checkpoints["gemma4-e2b"])[1]
    for part in ("feed-forward 48 and 96, per-layer input 6", "3 read the KV rows of an earlier layer",
                 "4 query and 1 key/value heads of 12; 4 query", "1e+06 for 25% of a head (full)"):  # fmt: skip
        assert part in shown
    assert ", keys as values" in run("inspect", checkpoints["gemma4-dense"])[1]
    report = json.loads(run("inspect", TINY, "--json")[1])
    assert [layer["window"] for layer in report["layers"]] == [16] * 5 + [None, 16]
    assert report["tokenizer"]["size"] == 1536
    assert "start_of_turn" in report["chat_template"]
    assert report["parameters"] == 444_672


def test_models(run: Run) -> None:
    entries = json.loads(run("models", "--json")[1])["models"]
    assert {"gemma-3-270m", "gemma-3-27b-it", "gemma-2-9b-it", "gemma-7b", "gemma-3-4b-it-qat", "tiny-gemma3"} <= {
        entry["name"] for entry in entries
    }
    assert len({entry["name"] for entry in entries}) == len(entries)
    code, out, _ = run("models")
    assert code == 0
    assert len(out.splitlines()) == len(entries) + 1


def gemma4_parameters(s: dict[str, Any]) -> int:
    total = (s["V"] + 1) * s["D"] + s["P"] * (s["L"] * (s["V"] + s["D"]) + (s["P"] > 0))
    for number in range(1, s["L"] + 1):
        full, own = number % s["period"] == 0, number <= s["L"] - s.get("shared", 0)
        E, G = (s["EF"], s.get("GF", s["G"])) if full else (s["E"], s["G"])
        matrices_of_kv = 0 if not own else 1 if full and s.get("k_eq_v") else 2
        F = s["F"] * (2 if s.get("double") and not own else 1)
        total += s["D"] * E * (2 * s["H"] + matrices_of_kv * G) + 3 * s["D"] * F + 4 * s["D"] + 1
        total += E * (2 if own else 1) + s["D"] * (2 * s["P"] + (s["P"] > 0))
        # The router, its scale, the scale of each expert, the experts' matrices, and three norms.
        if "X" in s:
            total += s["X"] * (s["D"] + 1 + 3 * s["D"] * s["FX"]) + 4 * s["D"]
    return total


def gemma3n_parameters(s: dict[str, Any]) -> int:
    streams, rank, table = 4, 64, 262_144  # equal in all Gemma 3n models
    D, P, own = s["D"], s["P"], s["L"] - s["shared"]  # own: the number of layers that store KV rows
    altup = streams * D + streams**3 + streams**2 + 2 * D
    layer = 2 * s["H"] * s["E"] * D + s["E"] + 3 * D * s["F"] + 4 * D + altup + (2 * rank + 1) * D + (2 * P + 1) * D
    total = (s["V"] + 1) * D + s["L"] * P * (table + D) + P + 2 * (streams - 1) * D * D
    return total + s["L"] * layer + own * (2 * s["G"] * s["E"] * D + s["E"])


def test_catalogue_sizes_follow_from_the_shapes() -> None:
    for entry in catalogue():
        s = entry.shape
        if s["family"] == "gemma3n":
            assert entry.parameters == gemma3n_parameters(s), entry.name
            continue
        if s["family"] in ("gemma4", "gemma-embedding2"):
            table_left_out = s["L"] * s["P"] * s["V"] if "embedding" in s else 0
            expected = gemma4_parameters(s) - table_left_out + s.get("embedding", 0) * s["D"]
            assert entry.parameters == expected, entry.name
            continue
        norms = 2 if s["family"] == "gemma" else 4
        heads = 2 * s["E"] if s["family"] in ("gemma3", "gemma-embedding") else 0
        dense = sum(N * K for K, N in pairwise([s["D"], *s.get("dense", [])]))
        layer = s["D"] * s["E"] * 2 * (s["H"] + s["G"]) + 3 * s["D"] * s["F"] + norms * s["D"] + heads
        assert entry.parameters == s["V"] * s["D"] + s["L"] * layer + s["D"] + dense, entry.name
    assert resolve("tiny-gemma3").is_dir()


def test_help_everywhere(run: Run) -> None:
    for arguments in ([], ["chat"], ["score"], ["generate"], ["inspect"], ["verify"], ["models"]):
        code, out, _ = run(*arguments, "--help")
        assert code == 0
        assert "usage" in out
    assert run("--version")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["score", TINY],
        ["score", TINY, "--text", "a", "--file", "b"],
        ["generate", TINY],
        ["generate", TINY, "--prompt", "a", "--max-tokens", "x"],
        ["score", TINY, "--unknown"],
        ["generate", TINY, "--prompt", "a", "--max-tokens", "0"],
        ["generate", TINY, "--prompt", "a", "--context", "-1"],
    ],
)
def test_usage_errors(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def bad_files(tmp_path: Path) -> dict[str, list[object]]:
    files = {
        "broken.gguf": small()[:50],
        "no_model.gguf": small(),
        "empty.gguf": b"",
        "text.txt": b"\xff\xfe",
        "ids.json": b"{}",
        "floats.json": b"[1.5]",
        "large.json": b"[99999999999999999999999999]",
        "one.json": b"[2]",
        "outside.json": b"[2, 1536]",
        "deep.json": b"[" * 100_000,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    at = tmp_path.__truediv__
    return {
        "broken": ["inspect", at("broken.gguf")],
        "no model": ["inspect", at("no_model.gguf")],
        "empty": ["score", at("empty.gguf"), "--text", "a"],
        "nothing there": ["inspect", at("nothing")],
        "a directory": ["inspect", tmp_path],
        "unknown name": ["generate", "gemma-9-900b", "--prompt", "a"],
        "not downloaded": ["generate", "gemma-3-27b-it", "--prompt", "a"],
        "text not UTF-8": ["score", TINY, "--file", at("text.txt")],
        "no text file": ["score", TINY, "--file", at("nothing")],
        "text is a directory": ["score", TINY, "--file", tmp_path],
        "ids no list": ["score", TINY, "--ids", at("ids.json")],
        "ids of floats": ["score", TINY, "--ids", at("floats.json")],
        "ids too large": ["score", TINY, "--ids", at("large.json")],
        "one id": ["score", TINY, "--ids", at("one.json")],
        "id outside": ["score", TINY, "--ids", at("outside.json")],
        "deep": ["score", TINY, "--ids", at("deep.json")],
        "empty text": ["score", TINY, "--text", ""],
        "top-p beyond 1": ["generate", TINY, "--prompt", "a", "--top-p", "2"],
        "an empty stop": ["generate", TINY, "--prompt", "a", "--stop", ""],
        "too long": ["score", TINY, "--text", "a b c d e f", "--context", "3"],
        "too many tokens": ["generate", TINY, "--prompt", "a", "--max-tokens", "99999"],
        "no folder for the receipt": ["generate", TINY, "--prompt", "a", "--receipt", at("none/receipt.json")],
        "surrogates": ["generate", TINY, "--prompt", "\udcff"],
        "a NUL in the path": ["inspect", "a\0b"],
        "a long path": ["inspect", "x" * 5000],
    }


@pytest.mark.parametrize("case", [
    "broken", "no model", "empty", "nothing there", "a directory", "unknown name", "not downloaded", "text not UTF-8",
    "no text file", "text is a directory", "ids no list", "ids of floats", "ids too large", "one id", "id outside", "deep",
    "empty text", "top-p beyond 1", "an empty stop", "too long", "too many tokens",
    "no folder for the receipt", "surrogates", "a NUL in the path", "a long path",
])  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_one_line_and_exit_code_1(run: Run, tmp_path: Path, case: str, as_json: bool) -> None:
    code, out, err = run(*bad_files(tmp_path)[case], *(["--json"] if as_json else []))
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("gemma_py: ")
    assert not (tmp_path / "none").exists()


def test_a_context_beyond_the_limit_is_noted(run: Run) -> None:
    code, _, err = run("generate", TINY, "--prompt", "a", "--max-tokens", "2", "--context", "99999999")
    assert code == 0 and err.splitlines() == [
        "gemma_py: --context 99,999,999 is more than the model's limit, so the context is 4,096 tokens"
    ]
    assert run("generate", TINY, "--prompt", "a", "--max-tokens", "2", "--context", "4096")[2] == ""


def test_a_misspelt_model_gets_a_hint(run: Run) -> None:
    assert "a similar name: gemma-3-270m" in run("inspect", "gemma3-270m")[2]


def test_logits_that_are_no_numbers_are_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def prefill(self: object, ids: list[int], all_logits: bool) -> np.ndarray:
        return np.full((len(ids), 1536), np.nan, np.float32)

    monkeypatch.setattr("gemma_py.generate.session.Session.prefill", prefill)
    code, out, err = run("score", TINY, "--text", "some text", "--json")
    assert (code, out) == (1, "")
    assert "NaN" in err


def test_a_misspelt_option_is_named(run: Run) -> None:
    assert run("generate", "--promt", "hi")[::2] == (
        2,
        "gemma_py generate: unrecognized arguments: --promt (see --help)\n",
    )
    assert "one of the arguments -p/--prompt --file --ids is required" in run("generate")[2]


def test_a_text_in_the_place_of_the_model_is_recognised(run: Run) -> None:
    assert (
        "(this argument is the model; chat and generate take a text with --prompt)" in run("chat", "What is this?")[2]
    )


def test_missing_packages_are_one_line() -> None:
    command = [sys.executable, "-S", "-m", "gemma_py", "models"]  # -S: without the installed packages
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={}, check=False)
    assert made.returncode == 1 and made.stderr.count("\n") == 1
    assert "is not installed for this Python" in made.stderr
