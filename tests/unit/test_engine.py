import itertools
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from repository import TINY
from tiny_models import VARIANTS

import gemma_py
from gemma_py.errors import ContextError, InputError
from gemma_py.runtime import cache
from gemma_py.runtime.cache import KV_TYPES
from gemma_py.runtime.forward import forward

IDS = [2, *range(20, 60)]


def bits(logits: np.ndarray) -> np.ndarray:
    return logits.view(np.uint32)


@pytest.mark.parametrize("name", VARIANTS)
def test_decode_matches_prefill(checkpoints: dict[str, Path], name: str) -> None:
    with gemma_py.load(checkpoints[name]) as engine:
        whole, cut, single = engine.session(), engine.session(), engine.session()
        every = whole.prefill(IDS, all_logits=True)
        assert every.shape == (len(IDS), engine.config.vocab_size)
        assert every.dtype == np.float32
        pieces = [cut.prefill(IDS[:7]), cut.prefill(IDS[7:8]), cut.prefill(IDS[8:], chunk=3)]
        for at, logits in zip((6, 7, len(IDS) - 1), pieces, strict=True):
            np.testing.assert_array_equal(bits(every[at]), bits(logits))
        for at, token in enumerate(IDS):
            np.testing.assert_array_equal(bits(every[at]), bits(single.decode(token)))
        assert whole.kv_digest() == cut.kv_digest() == single.kv_digest()
        assert len(set(whole.kv_digest())) == len(engine.config.kv_layers)


def test_reference_logits_match_the_session(tiny_engine: gemma_py.Engine) -> None:
    expected = gemma_py.reference.logits(tiny_engine, IDS)
    np.testing.assert_array_equal(bits(expected), bits(tiny_engine.session().prefill(IDS, all_logits=True)))


def test_sessions_interleave(tiny_engine: gemma_py.Engine) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(1536) for _ in range(25)] for _ in range(3)]
    alone = []
    for prompt in prompts:
        session = tiny_engine.session()
        alone.append((session.prefill(prompt), session.kv_digest()))
    sessions, left = [tiny_engine.session() for _ in prompts], [list(prompt) for prompt in prompts]
    logits = [np.empty(0, np.float32)] * len(prompts)
    while any(left):
        turn = rng.choice([number for number, rest in enumerate(left) if rest])
        logits[turn] = sessions[turn].decode(left[turn].pop(0))
    for number, (expected, digest) in enumerate(alone):
        np.testing.assert_array_equal(bits(logits[number]), bits(expected))
        assert sessions[number].kv_digest() == digest


def test_a_digest_sees_one_bit(tiny_engine: gemma_py.Engine) -> None:
    session = tiny_engine.session()
    session.prefill(IDS)
    before = session.kv_digest()
    rows = list(session.raw_kv_rows(session.position))
    rows[2][1][1, -1].view(np.uint32)[3] ^= 1
    changed = tiny_engine.session()
    changed.restore(IDS, rows)
    after = changed.kv_digest()
    assert [a == b for a, b in zip(before, after, strict=True)] == [layer != 2 for layer in range(len(before))]


def test_a_digest_covers_what_a_later_token_may_read(tiny_engine: gemma_py.Engine) -> None:
    session = tiny_engine.session()
    session.prefill(IDS)
    before = session.kv_digest()
    window, capacity = tiny_engine.config.layers[0].sliding_window, session._cache.layers[0].capacity
    assert window == 16
    rows = session._cache.layers[0].keys
    rows[:, (len(IDS) - window) % capacity] += 1  # a row that the next token does not attend to
    assert session.kv_digest() == before
    rows[:, (len(IDS) - window + 1) % capacity] += 1
    assert session.kv_digest() != before


def test_an_empty_session_has_digests(tiny_engine: gemma_py.Engine) -> None:
    assert len(tiny_engine.session().kv_digest()) == len(tiny_engine.config.layers)


@pytest.mark.parametrize(
    "ids", [[], [-1], [1536], [1.5], ["a"], None, [None], [True], [np.True_], b"ab", [[1]], [2**70], 5]
)
def test_bad_ids_are_refused_before_any_work(tiny_engine: gemma_py.Engine, ids: object) -> None:
    session = tiny_engine.session()
    session.prefill(IDS[:3])
    with pytest.raises(InputError):
        session.prefill(ids)  # type: ignore[arg-type]
    assert session.position == 3


NO_COUNTS = [1.0, 1.5, float("nan"), True, np.True_, "5", None, [], 1j, np.array(3), np.array([1, 2])]


@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
def test_a_count_that_is_no_whole_number_is_refused(tiny_engine: gemma_py.Engine, value: Any) -> None:
    session = tiny_engine.session(keep=5)
    session.prefill(IDS)
    rows = session.kv_digest()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("keep", lambda: tiny_engine.session(value)), ("position", lambda: session.rewind(value)),
        ("position", lambda: session.can_rewind_to(value)), ("position", lambda: list(session.raw_kv_rows(value))),
        ("tokens", lambda: session.reserve(value)),
    ]  # fmt: skip
    if value is not None:
        calls.append(("chunk", lambda: session.prefill([5], chunk=value)))
    for name, call in calls:
        with pytest.raises(InputError, match=f"^{name} should be a whole number( from [01])?, found [^\n]*$"):
            call()
    assert session.ids == IDS
    assert session.kv_digest() == rows


@pytest.mark.parametrize("value", [-1, -60, -(2**40)])
def test_a_negative_count_is_refused(tiny_engine: gemma_py.Engine, value: int) -> None:
    session = tiny_engine.session()
    with pytest.raises(InputError, match=f"keep should be a whole number from 0, found {value}$"):
        tiny_engine.session(keep=value)
    with pytest.raises(InputError, match="tokens should be a whole number from 0"):
        session.reserve(value)
    with pytest.raises(InputError, match="chunk should be a whole number from 1"):
        session.prefill(IDS, chunk=value)


def test_counts_may_be_numpy_integers(tiny_engine: gemma_py.Engine) -> None:
    session = tiny_engine.session(np.int64(5))  # type: ignore[arg-type]
    session.prefill(IDS, chunk=np.uint8(7))  # type: ignore[arg-type]
    session.rewind(np.int32(len(IDS) - 5))  # type: ignore[arg-type]
    assert session.ids == IDS[:-5]


def test_numpy_ids_are_ids(tiny_engine: gemma_py.Engine) -> None:
    a, b = tiny_engine.session(), tiny_engine.session()
    np.testing.assert_array_equal(a.prefill(np.array(IDS)), b.prefill(IDS))  # type: ignore[arg-type]


def test_the_context_is_kept_before_any_work() -> None:
    with gemma_py.load(TINY, context=10) as engine:
        session = engine.session()
        session.prefill(IDS[:8])
        with pytest.raises(ContextError, match="3 tokens after 8 cached tokens exceed the context of 10"):
            session.prefill(IDS[:3])
        assert session.position == 8
        session.prefill(IDS[:2])
        with pytest.raises(ContextError):
            session.decode(1)
        with pytest.raises(ContextError, match="context of 10"):
            engine.generate(IDS[:8], max_tokens=3)
        with pytest.raises(ContextError):
            engine.score(IDS[:11])


def test_the_models_own_context_is_the_limit() -> None:
    with gemma_py.load(TINY, context=10**9) as engine:
        assert engine.context == 4096
    with pytest.raises(InputError):
        gemma_py.load(TINY, context=0)


def test_a_closed_engine_says_so() -> None:
    engine = gemma_py.load(TINY)
    session = engine.session()
    engine.close()
    with pytest.raises(InputError, match="closed"):
        session.prefill(IDS)
    engine.close()


def test_generate_is_greedy_and_streams_whole_characters(tiny_engine: gemma_py.Engine) -> None:
    assert tiny_engine.tokenizer is not None
    tokens = list(tiny_engine.generate("some text", max_tokens=12))
    ids = tiny_engine.encode("some text")
    session = tiny_engine.session()
    logits = session.prefill(ids)
    for token in tokens:
        assert token.id == int(np.argmax(logits))
        exact = logits.astype(np.float64) - logits.max()
        assert token.logprob == pytest.approx(float(exact[token.id] - np.log(np.exp(exact).sum())), abs=1e-12)
        logits = session.decode(token.id)
    assert [token.finish_reason for token in tokens] == [None] * 11 + ["length"]
    assert "".join(token.text for token in tokens) == tiny_engine.tokenizer.decode([token.id for token in tokens])
    assert list(tiny_engine.generate(ids, max_tokens=12)) == tokens
    unscored = list(tiny_engine.generate(ids, max_tokens=12, logprobs=False))
    assert [token.id for token in unscored] == [token.id for token in tokens]
    assert all(math.isnan(token.logprob) for token in unscored)


def test_generate_stops_at_an_end_token() -> None:
    with gemma_py.load(TINY) as engine:
        first = next(iter(engine.generate(IDS, max_tokens=5)))
        object.__setattr__(engine.config, "eos_token_ids", (first.id,))
        (only,) = engine.generate(IDS, max_tokens=5)
        assert (only.finish_reason, only.text) == ("stop", "")


@pytest.mark.parametrize("text", ["☃", "日本語", "𓀀𓀁 𓀀", "ꙮꙮ ꙮ", "a☃b", "🙂🙂x\n"])
def test_streamed_pieces_join_to_the_decoded_text(
    tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The generated ids are characters made of byte tokens, and then an incomplete character."""
    assert tiny_engine.tokenizer is not None
    ids = tiny_engine.tokenizer.encode(text + "🙂", bos=False)[:-1]
    left = iter(ids)

    def answer(self: object, *_: object) -> np.ndarray:
        logits = np.zeros(1536, np.float32)
        logits[next(left)] = 9
        return logits

    monkeypatch.setattr(gemma_py.Session, "prefill", answer)
    monkeypatch.setattr(gemma_py.Session, "decode", answer)
    pieces = [token.text for token in tiny_engine.generate([2], max_tokens=len(ids), speculate="off")]
    assert "".join(pieces) == tiny_engine.tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces[:-1])


@pytest.mark.parametrize("count", [0, -5])
def test_max_tokens_must_be_positive(tiny_engine: gemma_py.Engine, count: int) -> None:
    with pytest.raises(InputError, match="max_tokens"):
        tiny_engine.generate(IDS, max_tokens=count)


def test_without_a_tokenizer_ids_still_work(checkpoints: dict[str, Path]) -> None:
    with gemma_py.load(checkpoints["gemma2"]) as engine:
        assert engine.tokenizer is None
        assert len(list(engine.generate(IDS, max_tokens=2))) <= 2
        with pytest.raises(InputError, match="no tokenizer"):
            engine.generate("text")


def test_score_is_the_negative_log_softmax(tiny_engine: gemma_py.Engine) -> None:
    logits = tiny_engine.session().prefill(IDS, all_logits=True).astype(np.float64)[:-1]
    logits -= logits.max(1, keepdims=True)
    expected = np.log(np.exp(logits).sum(1)) - logits[range(len(IDS) - 1), IDS[1:]]
    np.testing.assert_allclose(list(tiny_engine.score(IDS)), expected, rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="at least 2"):
        tiny_engine.score([2])


def test_one_machine_code_serves_every_model(checkpoints: dict[str, Path]) -> None:
    """Only the type of the KV rows makes numba compile again. Shapes, weight types, threads and chunks are runtime
    values.
    """
    for name in ("gemma1-multi-query", "gemma2", "gemma3-scaled-untied"):
        for threads in (1, 2):
            with gemma_py.load(checkpoints[name], threads=threads) as engine:
                session = engine.session()
                session.prefill(IDS, chunk=9, all_logits=True)
                session.decode(3)
    assert len(forward.signatures) <= len(KV_TYPES)


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt at the `line`-th line of cache.py that runs. Return whether so many lines ran."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != cache.__file__:
            return None if event == "call" else trace
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_anywhere_while_rows_move_leaves_a_sound_session(tiny_engine: gemma_py.Engine) -> None:
    ids = [number % 96 for number in range(140)]
    alone = tiny_engine.session()
    want = alone.prefill(ids)
    for line in itertools.count(1):
        session = tiny_engine.session()
        session.prefill(ids[:70], chunk=35)
        ended = interrupted_at(line, lambda session=session: session.prefill(ids[70:], chunk=70))  # type: ignore[misc]
        assert session.usable
        if session.position < len(ids):
            np.testing.assert_array_equal(bits(session.prefill(ids[session.position :], chunk=9)), bits(want))
        assert session.kv_digest() == alone.kv_digest()
        if not ended:
            break
    assert line > 100


def test_a_failed_restore_leaves_an_empty_session(tiny_engine: gemma_py.Engine) -> None:
    session = tiny_engine.session()
    want = session.prefill(IDS)
    rows = list(session.raw_kv_rows(session.position))
    twin = tiny_engine.session()
    for part in (rows[:-1], rows[:1], [*rows, rows[0]]):
        with pytest.raises(InputError, match="layers"):
            twin.restore(IDS, part)
        assert twin.position == 0
    keys, values = rows[1]
    for pair in (
        (keys[:, 1:], values[:, 1:]), (keys, values[:, :, :1]), (keys.astype(np.float64), values), (keys, values[:, 1:]), (keys,),
        (keys.view(np.uint32), values), (np.repeat(keys, 2, axis=1), values), (keys[0], values[0]), (None, None),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"keys and values of layer 1 should be float32 \["):
            twin.restore(IDS, [rows[0], pair, *rows[2:]])  # type: ignore[list-item]
        assert twin.position == 0
    np.testing.assert_array_equal(bits(twin.prefill(IDS)), bits(want))
    assert twin.kv_digest() == session.kv_digest()
