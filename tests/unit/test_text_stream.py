import random
from collections.abc import Sequence

import pytest
from repository import TINY

import gemma_py
from gemma_py.errors import InputError
from gemma_py.generate.answer import TextStream, stop_strings
from gemma_py.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with gemma_py.load(TINY, threads=1) as engine:
        return engine.text_tokenizer()


def characters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode character by character, so that every stop string spans several tokens."""
    return [token for character in text for token in tokenizer.encode(character, bos=False)]


def streamed(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = (), trim: bool = False) -> list[str]:
    stream = TextStream(tokenizer, stop, trim)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.finish()]


def before(text: str, stops: Sequence[str]) -> str:
    for end in range(len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)]
    return text


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("a b\nUser: c", ["\nUser:"]),
        ("one two three", ["three", "wo t"]),
        ("aaab", ["aab"]),
        ("ababac", ["abac"]),
        ("ends in a beginnin", ["beginning"]),
        ("xyz", ["x"]),
        ("é🙂日本", ["🙂日"]),
        ("no stop", []),
    ],
)
def test_stop_strings_may_span_tokens(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    expected = before(text, stops)
    assert "".join(streamed(tokenizer, characters(tokenizer, text), stops)) == expected
    assert "".join(streamed(tokenizer, tokenizer.encode(text, bos=False), stops)) == expected


def test_what_may_begin_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    pieces = streamed(tokenizer, characters(tokenizer, "abUs Use Userx"), ["User:"])
    assert pieces == ["a", "b", "", "", "Us ", "", "", "", "Use ", "", "", "", "", "Userx", ""]


def test_random_texts_and_stops(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choices("ab🙂 ", k=12))
        stops = ["".join(rng.choices("ab🙂 ", k=rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
        assert "".join(streamed(tokenizer, characters(tokenizer, text), stops)) == before(text, stops)


def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    for _ in range(200):
        ids = rng.choices(range(tokenizer.size), k=20)
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
    ids = characters(tokenizer, "a🙂𓀀b")[:-3]
    assert all("\ufffd" not in piece for piece in streamed(tokenizer, ids)[:-1])


def test_a_step_costs_its_own_ids(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    decode = tokenizer.decode

    def counted(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", counted)
    streamed(tokenizer, tokenizer.encode("many words " * 50, bos=False))
    assert max(lengths) == 1


def test_no_white_space_in_front(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, characters(tokenizer, " \n a b "), trim=True) == ["", "", "", "a", " ", "b", " ", ""]
    assert "".join(streamed(tokenizer, characters(tokenizer, "  "), trim=True)) == ""


def test_ids_without_text(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, [tokenizer.size, tokenizer.size + 9]) == ["", "", ""]
    assert streamed(None, [1, 2]) == ["", "", ""]  # type: ignore[arg-type]


def test_stop_strings_are_checked() -> None:
    assert stop_strings(None) == ()
    assert stop_strings("a") == ("a",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    for bad in ("", [""], [1], 5, 1.5, True, b"a"):
        with pytest.raises(InputError, match="stop"):
            stop_strings(bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="need a tokenizer"):
        TextStream(None, ["a"])


def test_a_stop_string_ends_generation(tiny_engine: gemma_py.Engine) -> None:
    free = list(tiny_engine.generate("some text", 12, seed=3))
    text = "".join(token.text for token in free)
    stop = text[len(text) // 2 :][:3]
    tokens = list(tiny_engine.generate("some text", 12, seed=3, stop=stop))
    assert "".join(token.text for token in tokens) == text[: text.find(stop)]
    assert [token.finish_reason for token in tokens] == [None] * (len(tokens) - 1) + ["stop"]
    assert [token.id for token in tokens] == [token.id for token in free][: len(tokens)]
    assert len(tokens) < len(free)
