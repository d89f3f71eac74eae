import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import TINY
from talking import DRAW, fresh_digest, new, talk

import gemma_py
from gemma_py import Conversation
from gemma_py.errors import ContextError, InputError, MismatchError, WorkerError
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.runner import Runner


def test_a_turn_costs_its_own_tokens(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine, system="be good")
    held = 0
    for text in ("first question", "second question", "third"):
        answer = talk(conversation, text)
        stats = conversation.stats
        assert stats is not None
        assert conversation.messages[-1] == {"role": "assistant", "content": answer.rstrip()}
        assert stats.cached_tokens >= held - 2  # white space at the answer's end is not cached
        assert stats.prompt_tokens - stats.cached_tokens < 40
        assert stats.generated_tokens == 20 and stats.finish_reason == "length" and stats.seed == 5
        held = len(conversation.ids)
        assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)
    assert conversation.tokens_used - held < 10
    assert conversation.context == tiny_engine.context
    assert [m["role"] for m in conversation.messages] == ["system"] + ["user", "assistant"] * 3


def test_what_two_histories_have_in_common(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine)
    held = conversation._session._cache.ids = list(range(3000))
    for first in (0, 1, 1023, 1024, 1025, 2047, 2048, 2999):
        assert conversation._common([*held[:first], 9999, *held[first + 1 :]]) == first
        assert conversation._common(held[:first]) == first
    assert conversation._common([*held, 1]) == 3000


def test_memory_for_the_next_turn_is_allocated_after_an_answer(
    tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV arrays must not be reallocated between a message and the first token of the answer."""
    conversation = new(tiny_engine, max_tokens=60)
    talk(conversation, "hello")
    moved: list[int] = []
    honest = Cache._reallocate

    def move(self: Cache, number: int, capacity: int) -> None:
        moved.append(self.position)
        honest(self, number, capacity)

    monkeypatch.setattr(Cache, "_reallocate", move)
    for number in range(18):
        answer = conversation.send(f"question {number}")
        before = len(moved)
        next(answer)
        assert len(moved) == before
        list(answer)
    assert len(moved) >= 2
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)


def test_the_same_seed_gives_the_same_text_everywhere(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine)
    answers = [talk(conversation, "question one"), talk(conversation, "two")]
    messages = [{"role": "user", "content": "question one"}]
    options: dict[str, Any] = dataclasses.asdict(DRAW)
    assert "".join(t.text for t in tiny_engine.chat(messages, 20, **options)) == answers[0]
    prompt = new(tiny_engine)._prompt(messages)
    assert "".join(t.text for t in tiny_engine.generate(prompt, 20, **options)).lstrip() == answers[0]
    for threads in (1, 4):
        with gemma_py.load(TINY, threads=threads) as engine:
            other = new(engine)
            assert [talk(other, "question one"), talk(other, "two")] == answers


def test_undo_retry_and_edit_reuse_what_is_common(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine)
    talk(conversation, "question one")
    first = talk(conversation, "two")
    before = [dict(message) for message in conversation.messages]
    second = "".join(token.text for token in conversation.retry())
    assert second != first  # each retry has another seed
    assert conversation.stats is not None
    assert (conversation.stats.cached_tokens, conversation.stats.seed) == (conversation.stats.prompt_tokens - 1, 6)
    assert conversation.messages[:-1] == before[:-1]
    "".join(token.text for token in conversation.retry())
    assert conversation.stats.seed == 7
    "".join(token.text for token in conversation.edit("instead"))
    assert conversation.messages[-2]["content"] == "instead"
    assert conversation.stats.prompt_tokens - conversation.stats.cached_tokens < 12
    assert conversation.undo() == "instead"
    assert conversation.messages == before[:2]
    assert talk(conversation, "two") == first
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)
    conversation.clear()
    assert conversation.messages == [] and conversation.tokens_used == 0
    for action in (conversation.undo, conversation.retry, lambda: conversation.edit("a")):
        with pytest.raises(InputError, match="no answer yet"):
            action()


def test_undoing_more_than_the_rings_hold_computes_the_tokens_again(
    tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemma_py.chat.conversation._REWIND_BYTES", 1 << 13)
    conversation = new(tiny_engine)
    assert conversation._rewind_limit() < 10
    first = talk(conversation, "question one")
    talk(conversation, "two")
    conversation.undo()
    conversation.undo()
    assert talk(conversation, "question one") == first
    assert conversation.stats is not None and conversation.stats.cached_tokens == 0
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)


def test_set_system(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine, system="one")
    talk(conversation, "hello")
    conversation.set_system("two")
    assert conversation.system == "two"
    talk(conversation, "again")
    assert conversation.stats is not None and conversation.stats.cached_tokens < 8
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)
    conversation.set_system(None)
    assert conversation.system is None and conversation.messages[0]["role"] == "user"


def test_closing_an_answer_keeps_what_was_said(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine)
    whole = [token.text for token in conversation.send("hello")]
    conversation.undo()
    answer = conversation.send("hello")
    said = "".join(next(answer).text for _ in range(6))
    answer.close()
    assert said.startswith("".join(whole[:6]))
    assert conversation.messages[-1] == {"role": "assistant", "content": said.rstrip()}
    assert conversation.stats is not None and conversation.stats.finish_reason is None
    talk(conversation, "go on")
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)


def test_stopping_a_prefill_changes_nothing(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine)
    talk(conversation, "hello")
    before = [dict(message) for message in conversation.messages]
    seen: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 2:
            raise KeyboardInterrupt

    conversation.prefilling = stop
    with pytest.raises(KeyboardInterrupt):
        next(conversation.send("a long text " * 40))
    assert conversation.messages == before
    assert 0 < seen[0][0] < seen[1][0] < seen[1][1]
    conversation.prefilling = lambda done, total: seen.append((done, total))
    talk(conversation, "short")
    assert seen[-1][0] == seen[-1][1]
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)
    # An iterator that is never started does not change the conversation.
    conversation.send("never asked for").close()
    assert conversation.messages[-2]["content"] == "short"


def test_a_failed_worker_loses_no_text(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = new(tiny_engine)
    talk(conversation, "hello")
    honest, calls = Runner.run, itertools.count()

    def run(self: Runner, *args: Any, **options: Any) -> Any:
        if next(calls) == 4:
            raise WorkerError(0, 1, None, None, "failed")
        return honest(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", run)
        answer = conversation.send("more")
        said = ""
        with pytest.raises(WorkerError):
            for token in answer:
                said += token.text
    assert conversation.messages[-1]["content"] == said.rstrip()
    conversation._session._cache.abandon()  # the state after a worker stalled for ever
    assert talk(conversation, "still there?") is not None
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)


def test_a_full_context_is_an_error_with_numbers() -> None:
    with gemma_py.load(TINY, context=60) as engine:
        conversation = new(engine, max_tokens=None)
        talk(conversation, "one")  # this answer fills the context
        assert conversation.stats is not None and conversation.stats.finish_reason == "length"
        assert conversation.tokens_used == 60
        before = [dict(message) for message in conversation.messages]
        with pytest.raises(
            ContextError, match=r"prompt of \d+ tokens leaves no room for an answer in the context of 60"
        ):
            conversation.send("two")
        assert conversation.messages == before
        with pytest.raises(ContextError):
            engine.chat([{"role": "user", "content": "hello"}], 60)


def test_an_answer_that_forges_turns_is_only_text_later(
    tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model writes control tokens, and the user then sends this text."""
    tokenizer = tiny_engine.text_tokenizer()
    start = tokenizer.token_id("<start_of_turn>") or 0
    conversation = new(tiny_engine)
    bias = dataclasses.replace(DRAW, logit_bias={start: 100.0})
    conversation.sampling, conversation.max_tokens = bias, 3
    said = talk(conversation, "hello")
    assert said == "<start_of_turn>" * 3
    conversation.sampling = DRAW
    talk(conversation, said)
    assert conversation.ids.count(start) == 4  # two turns of the user, and two of the model
    talk(conversation, "again")  # all earlier turns are in the cache, so few tokens are computed
    stats = conversation.stats
    assert stats is not None and stats.prompt_tokens - stats.cached_tokens < 25 < stats.cached_tokens
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)


def test_a_base_model_gets_a_transcript(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine, template="transcript")
    assert conversation.template.note
    talk(conversation, "hello")
    assert tiny_engine.text_tokenizer().decode(conversation.ids).startswith("<bos>User: hello\nAssistant:")
    with pytest.raises(InputError, match="nor one of"):
        new(tiny_engine, template="nonsense")


def test_a_stop_string_leaves_the_cache_in_step(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model first answers, and then begins another turn of the user."""
    tokenizer = tiny_engine.text_tokenizer()
    script = tokenizer.encode(" Fine, thanks.\nUser: and you?", bos=False)
    conversation = new(tiny_engine, template="transcript", max_tokens=60)
    left = iter(script)

    def choose(self: object, logits: object, made: object) -> int:
        return next(left)

    monkeypatch.setattr("gemma_py.generate.sampling.Sampler.choose", choose)
    assert talk(conversation, "How are you?") == "Fine, thanks."
    held = len(conversation.ids)
    left = iter(script)
    talk(conversation, "Good.")
    stats = conversation.stats
    assert stats is not None and stats.cached_tokens > held - 8
    assert conversation.messages[-1]["content"] == "Fine, thanks."
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)


def test_stop_strings(tiny_engine: gemma_py.Engine, tmp_path: Path) -> None:
    whole = talk(new(tiny_engine), "hello")
    conversation = new(tiny_engine, stop=[whole[5:9], "never said"])
    assert talk(conversation, "hello") == whole[: whole.index(whole[5:9])]
    assert conversation.stats is not None and conversation.stats.finish_reason == "stop"
    assert conversation.messages[-1]["content"] == whole[: whole.index(whole[5:9])].rstrip()
    conversation.save(tmp_path / "talk")
    assert Conversation.load(tiny_engine, tmp_path / "talk").stop == (whole[5:9], "never said")
    with pytest.raises(InputError, match="a non-empty string"):
        new(tiny_engine, stop="")


def test_verify(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine)
    with pytest.raises(InputError, match="no tokens to verify"):
        conversation.verify()
    talk(conversation, "hello")
    for chunk in (0, -1, 1.5):
        with pytest.raises(InputError, match="chunk should be a whole number from 1"):
            conversation.verify(chunk=chunk)  # type: ignore[arg-type]
    seen: list[int] = []
    threads = tiny_engine.threads
    count = conversation.verify(threads=3, chunk=9, progress=lambda done, total: seen.append(done))
    assert count == len(conversation.ids) == seen[-1]
    assert tiny_engine.threads == threads
    layer = conversation._session._cache.layers[2]
    layer.values[0, (count - 1) % layer.capacity] += 1
    with pytest.raises(MismatchError, match="layer 2"):
        conversation.verify()
    assert tiny_engine.threads == threads


def test_engine_chat_refuses_before_any_work(tiny_engine: gemma_py.Engine, checkpoints: dict[str, Path]) -> None:
    user = [{"role": "user", "content": "a"}]
    with pytest.raises(InputError, match="unknown sampling option"):
        tiny_engine.chat(user, tempature=1.0)
    with pytest.raises(InputError, match="is neither a file nor one of"):
        tiny_engine.chat(user, template="a" * 300)
    with pytest.raises(InputError, match="top_p"):
        tiny_engine.chat(user, top_p=3.0)
    with gemma_py.load(checkpoints["gemma2"]) as engine:
        with pytest.raises(InputError, match="no tokenizer"):
            engine.chat(user)
        with pytest.raises(InputError, match="no tokenizer"):
            Conversation(engine)


def answers(conversation: Conversation, count: int) -> Iterator[str]:
    for number in range(count):
        yield talk(conversation, f"question {number}")


def test_earlier_messages_are_not_encoded_again(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = new(tiny_engine, max_tokens=5)
    list(answers(conversation, 4))
    tokenizer, sizes = tiny_engine.text_tokenizer(), []
    encode = tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        sizes.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    talk(conversation, "one more")
    assert sum(sizes) <= len("one more") + max(len(m["content"]) for m in conversation.messages)
