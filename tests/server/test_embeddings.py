import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
import safetensors.numpy
from serving import Running, serving

import gemma_py
from gemma_py.cli.main import main
from gemma_py.errors import InputError
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.weights import store


@pytest.fixture(scope="module")
def engine(each_embedding_folder: Path) -> Iterator[gemma_py.Engine]:
    with gemma_py.load(each_embedding_folder, threads=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: gemma_py.Engine) -> Iterator[Running]:
    with serving(engine, 2, 30) as server:
        yield server


def same(x: object, y: np.ndarray) -> bool:
    return bool((np.asarray(x, np.float32).view(np.uint32) == y.view(np.uint32)).all())


def test_a_text_gets_the_prompt_and_both_ends(engine: gemma_py.Engine) -> None:
    ids = engine.text_tokenizer().encode("q: a word")
    assert ids[0] == engine.config.bos_token_id
    assert same(engine.embed(["a word"], task="query"), engine.embed([[*ids, 1]]))
    assert not same(engine.embed(["a word"]), engine.embed(["a word"], task="query"))
    for task, message in (("document", "'query', 'passage', found 'document'"), ("query", "a task needs texts")):
        with pytest.raises(InputError, match=message):
            engine.embed([[1]] if task == "query" else ["a"], task=task)
    with pytest.raises(InputError, match="texts should be a list"):
        engine.embed("a word")


def test_the_openai_client_gets_the_bits_of_the_engine(engine: gemma_py.Engine, server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    texts = ["one", "another text", "one two three"]
    for form in ("float", "base64", None):
        extra = {"encoding_format": form} if form else {}
        made = client.embeddings.create(model="tiny", input=texts, dimensions=7, **extra)  # type: ignore[arg-type]
        rows = [entry.embedding for entry in made.data]
        if form == "base64":
            rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]  # type: ignore[arg-type, misc]
        assert same(rows, engine.embed(texts, dimensions=7))
    counted = sum(len(engine.text_tokenizer().encode(text)) + 1 for text in texts)
    assert made.usage.prompt_tokens == made.usage.total_tokens == counted


def test_every_form_of_input_and_a_task(engine: gemma_py.Engine, server: Running) -> None:
    for given, texts in (("word", ["word"]), ([3, 4], [[3, 4]]), ([[3, 4], [5]], [[3, 4], [5]])):
        status, made = server.post("/v1/embeddings", input=given)
        assert status == 200
        assert [entry["index"] for entry in made["data"]] == list(range(len(texts)))
        assert same([entry["embedding"] for entry in made["data"]], engine.embed(texts))
    status, made = server.post("/v1/embeddings", input="word", task="passage")
    assert same(made["data"][0]["embedding"], engine.embed(["word"], task="passage")[0])


def test_other_texts_in_a_pass_change_no_bit(engine: gemma_py.Engine, server: Running) -> None:
    engine.instruments.fault_plan = FaultPlan(seed=5)
    texts = [[f"text {number} {'word ' * (number * part % 13)}" for part in range(9)] for number in range(24)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda part: server.post("/v1/embeddings", input=part), texts))
    engine.instruments.fault_plan = None
    for part, (status, made) in zip(texts, answers, strict=True):
        assert status == 200
        assert same([entry["embedding"] for entry in made["data"]], engine.embed(part))


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({}, "input", "missing_required_parameter"),
        ({"input": "a", "dimensions": 25}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "a", "task": "x"}, "task", "invalid_value"),
        ({"input": [9999]}, "input", "invalid_value"),
        ({"input": "word " * 500}, "input", "context_length_exceeded"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "a", "colour": 1}, "colour", "unknown_parameter"),
    ],
)
def test_an_invalid_request_is_refused(server: Running, body: dict[str, object], param: str, code: str) -> None:
    status, document = server.post("/v1/embeddings", **body)
    assert (status, document["error"]["code"]) == (400, code), document
    assert document["error"]["param"].startswith(param)


def test_an_embedding_server_generates_nothing_and_counts(server: Running) -> None:
    status, document = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert status == 400
    assert "use /v1/embeddings" in document["error"]["message"]
    assert server.request("GET", "/health")[0] == 200
    (model,) = server.request("GET", "/v1/models")[1]["data"]
    assert model["embeddings"] and "/v1/embeddings" in model["note"]
    text = server.request("GET", "/metrics")[1]
    assert 'gemma_py_requests_total{path="/v1/embeddings",status="200"}' in text
    assert 'gemma_py_tokens_total{kind="prompt"}' in text


def test_a_server_that_generates_embeds_nothing(tiny_engine: gemma_py.Engine) -> None:
    with serving(tiny_engine) as server:
        status, document = server.post("/v1/embeddings", input="a")
        assert status == 400
        assert "generates text" in document["error"]["message"]


def test_the_command_writes_every_format(
    engine: gemma_py.Engine, each_embedding_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["one", "another text"]
    want = engine.embed(texts, task="query", dimensions=5)
    options = ["--task", "query", "--dimensions", "5"]
    assert main(["embed", str(each_embedding_folder), *texts, *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert same([row["embedding"] for row in rows], want)
    (tmp_path / "lines.txt").write_text("one\nanother text\n")
    (tmp_path / "rows.jsonl").write_text('"one"\n{"text": "another text"}\n')
    for source in (["--file", f"{tmp_path}/lines.txt"], ["--jsonl", f"{tmp_path}/rows.jsonl"]):
        for suffix in ("npy", "safetensors", "jsonl"):
            out = tmp_path / f"made.{suffix}"
            assert main(["embed", str(each_embedding_folder), *source, *options, "--output", str(out)]) == 0
            if suffix == "npy":
                assert same(np.load(out), want)
            elif suffix == "safetensors":
                assert same(safetensors.numpy.load_file(out)["embeddings"], want)
            else:
                assert same([json.loads(line)["embedding"] for line in out.read_text().splitlines()], want)
    (tmp_path / "rows.jsonl").write_text("[3, 4]\n3\n")
    capsys.readouterr()
    assert main(["embed", str(each_embedding_folder), "--jsonl", f"{tmp_path}/rows.jsonl"]) == 1
    assert "line 2: should be a string, a list of token ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--file", "a", "text"], ["a", "--dimensions", "0"], ["a", "--output", "made.csv"]]
)
def test_wrong_usage_is_one_line(
    each_embedding_folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["embed", str(each_embedding_folder), *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_can_keep_the_packed_weights_in_memory(
    each_embedding_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store, "_SMALLEST", 0)  # otherwise so small weights would not be stored
    assert main(["embed", str(each_embedding_folder), "one", "--no-pack"]) == 0
    assert not list(tmp_path.rglob("weights/*"))
    assert main(["embed", str(each_embedding_folder), "one"]) == 0
    assert list(tmp_path.rglob("weights/*"))
