import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import TINY, child_environment

from gemma_py.errors import GemmaError, InputError, TokenizerError, UnsupportedError
from gemma_py.formats.files import read_json
from gemma_py.kernels.decorator import CACHE
from gemma_py.tokenizer import Tokenizer, package, sources, tokenizer_from_gguf, tokenizer_from_json
from gemma_py.tokenizer import vocabulary as vocabularies
from gemma_py.tokenizer.vocabulary import is_control


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return tokenizer_from_json(TINY / "tokenizer.json")


@pytest.fixture(scope="module")
def theirs() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))


def gguf_metadata() -> dict[str, Any]:
    """The metadata that a converter would write: pieces, types, and scores by merge rank."""
    document = read_json(TINY / "tokenizer.json")
    vocab = document["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    rank = {left + right: number for number, (left, right) in reversed(list(enumerate(document["model"]["merges"])))}
    types, scores = [], []
    added = {token["content"]: token for token in document["added_tokens"]}
    for piece in tokens:
        plain = piece in added and not is_control(piece, added[piece]["special"])
        kind = 4 if plain else 3 if piece in added else 6 if piece.startswith("<0x") else 1
        types.append(kind)
        scores.append(-1000.0 if kind in (3, 4) else -float(rank.get(piece, 10**6)))
    stored = [piece.replace("▁", " ") if kind == 4 else piece for piece, kind in zip(tokens, types, strict=True)]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": stored, "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.scores": np.array(scores, np.float32), "tokenizer.ggml.token_type": np.array(types, np.int32),
    }  # fmt: skip


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    path.touch()
    made = tokenizer_from_gguf(path, gguf_metadata())
    assert made is not None
    return made


TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from(
        [
            " ",
            "  ",
            "\n",
            "\n\n",
            "\t",
            "▁",
            "a",
            "the ",
            "<b>",
            "<bos>",
            "<start_of_turn>",
            "<unused0>",
            "é",
            "🙂",
            "\0",
            "_",
        ]
    ),
    max_size=20,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_ids_match_the_tokenizers_package(tiny: Tokenizer, theirs: tokenizers.Tokenizer, text: str) -> None:
    expected = theirs.encode(text, add_special_tokens=False).ids
    assert tiny.encode(text, bos=False, control=True) == expected


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_gguf_metadata_alone_gives_the_same_pieces_of_white_space_and_controls(from_gguf: Tokenizer, text: str) -> None:
    """Other ids are not compared: GGUF has no merges, and not every split of a piece is a merge of this small
    tokenizer.
    """
    ids = from_gguf.encode(text, bos=False, control=True)
    assert from_gguf.decode(ids) == text.replace("▁", " ")


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_user_text_never_becomes_a_control_token(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text, bos=False)
    assert not set(ids) & tiny.control_ids
    assert tiny.decode(ids) == text.replace("▁", " ")


def test_control_tokens_do_come_where_they_are_asked_for(tiny: Tokenizer) -> None:
    assert tiny.encode("<start_of_turn>", bos=False, control=True) == [tiny.token_id("<start_of_turn>")]


def test_one_begin_token(tiny: Tokenizer) -> None:
    assert tiny.encode("a")[0] == 2
    assert tiny.encode("<bos>a", control=True) == tiny.encode("a")
    assert tiny.encode("<bos>a").count(2) == 1
    assert tiny.encode("") == [2]


def test_merges_that_build_a_control_token_from_text_are_dropped(tmp_path: Path) -> None:
    document = read_json(TINY / "tokenizer.json")
    target = "<unused1>"
    number = len(document["model"]["vocab"])
    merges = document["model"]["merges"]
    for left, right in itertools.pairwise(["", *itertools.accumulate(target)]):
        if left and right not in document["model"]["vocab"]:
            document["model"]["vocab"][right] = number
            number += 1
    steps = list(itertools.accumulate(target))
    document["model"]["merges"] = [[a, b[-1]] for a, b in itertools.pairwise(steps)] + merges
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    forged = tokenizers.Tokenizer.from_str(json.dumps(document | {"added_tokens": []}))
    # The tokenizers package builds the control token from the text.
    assert forged.encode(target, add_special_tokens=False).ids == [10]
    made = tokenizer_from_json(path)
    assert not set(made.encode(target, bos=False)) & made.control_ids
    assert made.decode(made.encode(target, bos=False)) == target


@pytest.mark.parametrize(("content", "special", "control"), [
    ("<bos>", True, True), ("<unused7>", False, True), ("<mask>", False, True), ("[multimodal]", False, True),
    ("<start_function_call>", False, True), ("\n\n", False, False), ("▁▁▁", False, False), ("\t", False, False),
    ("<table>", False, False), ("</h1>", False, False), ("<b>", True, True), ("<h9>", False, True),
])  # fmt: skip
def test_what_counts_as_control(content: str, special: bool, control: bool) -> None:
    assert is_control(content, special) is control


def test_bad_text_and_ids_are_typed_errors(tiny: Tokenizer) -> None:
    with pytest.raises(InputError):
        tiny.encode("lone \ud800 surrogate")
    for token in (-1, tiny.size, 1 << 40):
        with pytest.raises(InputError, match="outside the vocabulary"):
            tiny.decode([token])


def broken(change: Any) -> bytes:
    document = read_json(TINY / "tokenizer.json")
    change(document)
    return json.dumps(document).encode()


def test_a_start_with_tables_imports_no_tokenizers_package(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from gemma_py.tokenizer import tokenizer_from_json\n"
        "tokenizer_from_json(Path(sys.argv[1])).encode('a'); print('tokenizers' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(TINY / "tokenizer.json")]
    environment = child_environment(XDG_CACHE_HOME=str(tmp_path))
    if CACHE is not None:  # link the compiled kernels into the new cache
        (tmp_path / "gemma_py").mkdir()
        (tmp_path / "gemma_py" / "kernels").symlink_to(CACHE.parent)
    said = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert [run.stdout for run in said] == ["True\n", "False\n"]


@pytest.mark.parametrize("source", ["json", "gguf"])
@pytest.mark.parametrize("plant", ["a merge less", "two ranks exchanged", "an added token less", "another byte"])
def test_tables_that_differ_from_the_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, plant: str
) -> None:
    """The tables are changed after they are built and before they are compared with the tokenizers package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make = vocabularies.tables

    def planted(*arguments: Any) -> vocabularies.Tables:
        made = make(*arguments)
        if plant == "a merge less":
            first = int(made.ranks.argmin())
            starts = made.starts - (made.starts > first)
            rights, ranks, results = (np.delete(array, first) for array in (made.rights, made.ranks, made.made))
            return made._replace(starts=starts, rights=rights, ranks=ranks, made=results)
        if plant == "two ranks exchanged":
            return made._replace(ranks=made.ranks.max() - made.ranks)
        if plant == "an added token less":
            return made._replace(added=[token for token in made.added if token[1] != "\n\n"])
        return made._replace(byte_ids=np.roll(made.byte_ids, 1))

    monkeypatch.setattr(sources, "tables", planted)
    path = tmp_path / f"tokenizer.{source}"
    with pytest.raises(TokenizerError, match=r"should have the ids .* that the tokenizers package gives, found"):
        if source == "json":
            path.write_bytes((TINY / "tokenizer.json").read_bytes())
            tokenizer_from_json(path)
        else:
            path.touch()
            tokenizer_from_gguf(path, gguf_metadata())
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_every_added_token_is_certified(monkeypatch: pytest.MonkeyPatch, tiny: Tokenizer) -> None:
    added = [content for _, content, _ in tiny._tables.added]
    assert set(added) <= set(package.certification_texts(added))


def test_settings_that_abort_the_package_are_refused_before_it(tmp_path: Path) -> None:
    """These settings make the tokenizers package abort the process. So gemma_py raises an error before it calls the
    package.
    """
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BROKEN["a prefix"])
    program = "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1])"
    command = [sys.executable, "-c", f"try:\n    {program}\nexcept BaseException:\n    print('caught')", str(path)]
    alone = subprocess.run(command, capture_output=True, text=True, check=False)
    assert alone.returncode == -signal.SIGABRT and alone.stdout == ""
    with pytest.raises(UnsupportedError, match="continuing_subword_prefix is set") as caught:
        tokenizer_from_json(path)
    assert len(str(caught.value).splitlines()) == 1


BROKEN: dict[str, bytes] = {
    "no JSON": b"{",
    "not UTF-8": b'{"model": "\xff"}',
    "deep": b"[" * 200_000,
    "a list": b"[]",
    "no model": b"{}",
    "unigram": broken(lambda d: d["model"].update(type="Unigram")),
    "a gap in the ids": broken(lambda d: d["model"]["vocab"].update(new=10**6)),
    "ids of text": broken(lambda d: d["model"]["vocab"].update(new="x")),
    "no vocab": broken(lambda d: d["model"].pop("vocab")),
    "merge of unknown pieces": broken(lambda d: d["model"]["merges"].append(["no such", "piece"])),
    "merge of three": broken(lambda d: d["model"]["merges"].append(["a", "b", "c"])),
    "merge of numbers": broken(lambda d: d["model"]["merges"].append([1, 2])),
    "merge to no piece": broken(lambda d: d["model"]["merges"].append(["<", "<mask>"])),
    "added token elsewhere": broken(lambda d: d["added_tokens"][0].update(id=77)),
    "added token without content": broken(lambda d: d["added_tokens"].append({"id": 1})),
    "added token strips": broken(lambda d: d["added_tokens"][0].update(lstrip=True)),
    "unknown normalizer": broken(lambda d: d.update(normalizer={"type": "Nonsense"})),
    "normalizer of numbers": broken(lambda d: d.update(normalizer=5)),
    "bad regex": broken(lambda d: d.update(normalizer={"type": "Replace", "pattern": {"Regex": "(("}, "content": ""})),
    "bad decoder": broken(lambda d: d.update(decoder={"type": "Sequence", "decoders": [5]})),
    "added tokens no list": broken(lambda d: d.update(added_tokens=5)),
    "id of infinity": broken(lambda d: d["added_tokens"].append({"id": 1e999, "content": "x y"})).replace(
        b"Infinity", b"1e999"
    ),
    "half a surrogate": broken(lambda d: d["added_tokens"].append({"id": 9999, "content": "\ud800"})),
    "dropout": broken(lambda d: d["model"].update(dropout=0.5)),
    "merges ignored": broken(lambda d: d["model"].update(ignore_merges=True)),
    "no byte fallback": broken(lambda d: d["model"].update(byte_fallback=False)),
    "a prefix": broken(lambda d: d["model"].update(continuing_subword_prefix="##")),
    "shifted ids": broken(
        lambda d: d["added_tokens"].extend(
            [{"id": 1536, "content": "<ctl>", "special": True}, {"id": 1538, "content": "<h6>", "special": False}]
        )
    ),
    "a control token of one character": broken(
        lambda d: d["added_tokens"].append({"id": d["model"]["vocab"]["q"], "content": "q", "special": True})
    ),
    "a pattern in the decoder": broken(
        lambda d: d.update(decoder={"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""})
    ),
    "a splitter that panics": broken(lambda d: d.update(pre_tokenizer={"type": "FixedLength", "length": 0})),
    "a step behind a decoy": broken(
        lambda d: d.update(
            decoder={
                "type": "Sequence",
                "normalizers": [],
                "decoders": [{"type": "Strip", "content": "h", "start": 0, "stop": 5}],
            }
        )
    ),
    "text that grows": broken(
        lambda d: d.update(normalizer={"type": "Replace", "pattern": {"String": " "}, "content": " " * 300})
    ),
    "merges in an object": broken(lambda d: d["model"].update(merges={"a b": 1})),
    "an empty pattern": broken(
        lambda d: d.update(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "xx"})
    ),
    "UTF-16": (TINY / "tokenizer.json").read_text(encoding="utf-8").encode("utf-16"),
    "bad unk": broken(lambda d: d["model"].update(unk_token=5)),
    "bad fuse": broken(lambda d: d["model"].update(fuse_unk="x")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tokenizer_json_is_a_typed_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BROKEN[name])
    with pytest.raises(GemmaError, match=r"tokenizer\.json"):
        tokenizer_from_json(path)


@pytest.mark.parametrize("kind", [1, 4, 5])
def test_turn_markers_are_control_whatever_a_gguf_calls_them(tmp_path: Path, kind: int) -> None:
    """Official GGUF files have given turn markers the type "normal"."""
    path, metadata = tmp_path / "x.gguf", gguf_metadata()
    path.touch()
    token = metadata["tokenizer.ggml.tokens"].index("<start_of_turn>")
    metadata["tokenizer.ggml.token_type"][token] = kind
    made = tokenizer_from_gguf(path, metadata)
    assert made is not None
    assert made.encode("<start_of_turn>", bos=False, control=True) == [token]
    assert token not in made.encode("<start_of_turn>", bos=False)


@pytest.mark.parametrize(("change", "message"), [
    ({"tokenizer.ggml.model": "gpt2"}, "'gpt2'"),
    ({"tokenizer.ggml.scores": np.zeros(3, np.float32)}, "scores"),
    ({"tokenizer.ggml.scores": None}, "scores"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "token_type"),
    ({"tokenizer.ggml.tokens": "abc"}, "list of strings"),
    ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix"),
])  # fmt: skip
def test_broken_gguf_metadata_is_a_typed_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "x.gguf"
    path.touch()
    with pytest.raises((TokenizerError, UnsupportedError), match=message):
        tokenizer_from_gguf(path, gguf_metadata() | change)


def test_duplicate_pieces_and_nan_scores_are_typed_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.touch()
    twice = gguf_metadata()
    twice["tokenizer.ggml.tokens"][-1] = twice["tokenizer.ggml.tokens"][-2]
    with pytest.raises(TokenizerError, match="twice"):
        tokenizer_from_gguf(path, twice)
    nan = gguf_metadata()
    nan["tokenizer.ggml.scores"][5] = np.nan
    with pytest.raises(TokenizerError, match="NaN"):
        tokenizer_from_gguf(path, nan)


def test_the_cache_is_used_repaired_and_dispensable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "tokenizer.json"
    source.write_bytes((TINY / "tokenizer.json").read_bytes())
    expected = tokenizer_from_json(source).encode("some text, 🙂")
    (stored,) = (tmp_path / "cache" / "gemma_py" / "tokenizers").iterdir()
    assert stored.stat().st_mode & 0o077 == 0
    good = stored.read_bytes()
    monkeypatch.setattr(
        sources, "tables", lambda *_: pytest.fail("the tables were made again, although they are cached")
    )
    assert tokenizer_from_json(source).encode("some text, 🙂") == expected
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for damage in (good[:100], b"", good[:-1] + bytes([good[-1] ^ 1]), b"x" + good[1:]):
        stored.write_bytes(damage)
        assert tokenizer_from_json(source).encode("some text, 🙂") == expected
        assert stored.read_bytes() == good
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert tokenizer_from_json(source).encode("some text, 🙂") == expected
