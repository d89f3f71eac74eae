"""A conversation: what it keeps, what it computes again, and that the bits are those of a fresh start."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from repository import ROOT, TINY

import gemma_py
from gemma_py import Conversation, Sampling
from gemma_py.errors import ContextError, FormatError, GemmaError, InputError, MismatchError, WorkerError
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.runner import Runner

# Of a model of random weights, which else would write control tokens at every turn.
DRAW = Sampling(temperature=1.0, top_k=50, seed=5, logit_bias=dict.fromkeys(range(11), -100.0))


def talk(conversation: Conversation, text: str) -> str:
    return "".join(token.text for token in conversation.send(text))


def fresh_digest(engine: gemma_py.Engine, ids: list[int]) -> list[str]:
    session = engine.session()
    session.prefill(ids)
    return session.kv_digest()


def new(engine: gemma_py.Engine, **options: Any) -> Conversation:
    return Conversation(engine, **{"sampling": DRAW, "max_tokens": 20, **options})


# --- sessions that go back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma1-multi-query", "gemma2-no-caps", "gemma3", "gemma3-multi-query"])
@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
def test_a_rewound_session_matches_a_fresh_one(checkpoints: dict[str, Path], name: str, kv: str) -> None:
    """Random walks forwards and back, in test mode (whatever is not to be read is NaN): the bits of one prefill."""
    rng = random.Random(name)
    with gemma_py.load(checkpoints[name], threads=2, kv=kv) as engine:
        engine.instruments.poison = True
        for keep in (0, 7):
            session = engine.session(keep)
            ids: list[int] = []
            furthest = 0
            for _ in range(16):
                back = rng.randrange(len(ids) + 1) if rng.random() < 0.4 else len(ids)
                if session.can_rewind_to(back):
                    session.rewind(back)
                    del ids[back:]
                else:
                    with pytest.raises(InputError, match="cannot be rewound to"):
                        session.rewind(back)
                    assert furthest - back > keep
                more = [rng.randrange(96) for _ in range(rng.choice((1, 1, 2, 7, 20)))]
                if len(ids) + len(more) < 100:
                    session.prefill(more, chunk=rng.choice((1, 3, 64)))
                    ids += more
                    furthest = max(furthest, len(ids))
                assert session.ids == ids
                assert session.position == len(ids)
            assert session.kv_digest() == fresh_digest(engine, ids)


def test_rows_that_moved_are_the_same(checkpoints: dict[str, Path]) -> None:
    """From rings that have gone round to larger ones, because a larger chunk comes."""
    ids = [number % 96 for number in range(128)]
    with gemma_py.load(checkpoints["gemma3"]) as engine:
        engine.instruments.poison = True
        grown = 0
        for first, keep in itertools.product((40, 66, 70, 100), (0, 20, 40)):
            session = engine.session(keep)
            session.prefill(ids[:first], chunk=1)
            rings = [layer.capacity for layer in session._cache.layers]
            session.reserve(128 - first)
            grown += sum(now.capacity > before for now, before in zip(session._cache.layers, rings, strict=True))
            session.rewind(first - keep)
            session.prefill(ids[first - keep :])
            assert session.kv_digest() == fresh_digest(engine, ids)
        assert grown > 20


def test_keep_is_what_a_session_can_go_back(checkpoints: dict[str, Path]) -> None:
    with gemma_py.load(checkpoints["gemma3"]) as engine:
        for keep, chunk in itertools.product((0, 1, 10), (1, 5, 60)):
            session = engine.session(keep)
            session.prefill(list(range(60)), chunk=chunk)
            assert [session.can_rewind_to(60 - back) for back in (0, keep, keep + 1)] == [True, True, False]
            assert not session.can_rewind_to(61)
            assert not session.can_rewind_to(-1)


def test_a_failed_pass_leaves_what_going_back_needs(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it came, it wrote to places of the ring that hold nothing any more."""
    with gemma_py.load(checkpoints["gemma3"]) as engine:
        session = engine.session(keep=10)
        session.prefill(list(range(60)), chunk=1)
        assert session.can_rewind_to(50)

        honest = engine.runner.team.run

        def fail(*args: Any, **options: Any) -> None:
            honest(*args, **options)
            raise WorkerError(0, 1, None, None, "failed")

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.team, "run", fail)
            with pytest.raises(WorkerError):
                session.prefill(list(range(20)))
        session.rewind(50)
        session.prefill([5, 6, 7])
        assert session.kv_digest() == fresh_digest(engine, [*range(50), 5, 6, 7])


# --- talking ----------------------------------------------------------------------------------------------------------


def test_a_turn_costs_its_own_tokens(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine, system="be good")
    held = 0
    for text in ("first question", "second question", "third"):
        answer = talk(conversation, text)
        stats = conversation.stats
        assert stats is not None
        assert conversation.messages[-1] == {"role": "assistant", "content": answer.rstrip()}
        assert stats.cached_tokens >= held - 2  # but for white space at the answer's end
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


def test_a_turn_finds_its_room_made(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move to larger arenas after an answer, never between a message and the first token."""
    conversation = new(tiny_engine, max_tokens=60)
    talk(conversation, "hello")
    moved: list[int] = []
    honest = Cache._reallocate

    def move(self: Cache, number: int, capacity: int) -> None:
        moved.append(self.position)
        honest(self, number, capacity)

    monkeypatch.setattr(Cache, "_move", move)
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
    assert second != first  # the seed goes up by one
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


def test_going_back_further_than_the_rings_hold(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is computed anew, and says so in its figures; the bits are the same."""
    monkeypatch.setattr("gemma_py.chat.conversation._KEPT_BYTES", 1 << 13)
    conversation = new(tiny_engine)
    assert conversation._keep() < 10
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
    # Not even begun: nothing has happened either.
    conversation.send("never asked for").close()
    assert conversation.messages[-2]["content"] == "short"


def test_a_worker_that_fails_costs_no_word(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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
    conversation._session._cache.abandon()  # as after a worker that never came back
    assert talk(conversation, "still there?") is not None
    assert conversation.kv_digest() == fresh_digest(tiny_engine, conversation.ids)


def test_the_context_is_a_wall_with_numbers() -> None:
    with gemma_py.load(TINY, context=60) as engine:
        conversation = new(engine, max_tokens=None)
        talk(conversation, "one")  # up to the wall: the answer ends for want of room, and says so
        assert conversation.stats is not None and conversation.stats.finish_reason == "length"
        assert conversation.tokens_used == 60  # what would stand before a next text has no room, and does not count
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
    """Control tokens that a model wrote, and a user who repeats its words."""
    tokenizer = tiny_engine.text_tokenizer()
    start = tokenizer.token_id("<start_of_turn>") or 0
    conversation = new(tiny_engine)
    bias = dataclasses.replace(DRAW, logit_bias={start: 100.0})
    conversation.sampling, conversation.max_tokens = bias, 3
    said = talk(conversation, "hello")
    assert said == "<start_of_turn>" * 3
    conversation.sampling = DRAW
    talk(conversation, said)
    assert conversation.ids.count(start) == 4  # two users', two models'
    talk(conversation, "again")  # only that one turn computed an answer anew
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
    """A scripted model that writes an answer and goes on with the user's next line."""
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
    with pytest.raises(InputError, match="none of them empty"):
        new(tiny_engine, stop="")


def test_verify(tiny_engine: gemma_py.Engine) -> None:
    conversation = new(tiny_engine)
    with pytest.raises(InputError, match="nothing to verify"):
        conversation.verify()
    talk(conversation, "hello")
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


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tiny_engine: gemma_py.Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Conversation, Path]:
    conversation = new(tiny_engine, system="be brief")
    conversation.sampling = dataclasses.replace(DRAW, logit_bias={**DRAW.logit_bias, 30: -5.0})
    talk(conversation, "hello there")
    path = tmp_path_factory.mktemp("saved") / "talk.conversation"
    conversation.save(path)
    return conversation, path


@pytest.mark.parametrize("threads", [1, 3])
def test_a_loaded_conversation_goes_on_with_the_same_bits(told: tuple[Conversation, Path], threads: int) -> None:
    conversation, path = told
    with gemma_py.load(TINY, threads=threads) as engine:
        loaded = Conversation.load(engine, path)
        assert loaded.messages == conversation.messages and loaded.sampling == conversation.sampling
        assert (loaded.ids, loaded.kv_digest()) == (conversation.ids, conversation.kv_digest())
        answer = talk(loaded, "and then?")
        assert loaded.stats is not None and loaded.stats.prompt_tokens - loaded.stats.cached_tokens < 25
        assert loaded.kv_digest() == fresh_digest(engine, loaded.ids)
        loaded = Conversation.load(engine, path)
        "".join(token.text for token in loaded.retry())
        assert loaded.stats is not None and loaded.stats.cached_tokens == loaded.stats.prompt_tokens - 1
        assert loaded.kv_digest() == fresh_digest(engine, loaded.ids)
    assert answer == talk(Conversation.load(conversation.engine, path), "and then?")


def test_what_was_taken_back_is_not_saved(tiny_engine: gemma_py.Engine, tmp_path: Path) -> None:
    """Neither its words, nor its ids, nor its keys and values."""
    path = tmp_path / "c"
    for take_back in (Conversation.undo, Conversation.clear):
        conversation = new(tiny_engine)
        talk(conversation, "hello")
        kept = None if take_back is Conversation.clear else conversation.messages.copy()
        secret = talk(conversation, "the password is a fish").strip()
        assert secret and secret in conversation._known
        take_back(conversation)
        if kept is None:
            assert conversation.ids == []
        else:
            assert conversation.messages == kept
            shared = conversation._common(conversation._prompt(kept))
            assert conversation.ids == conversation._prompt(kept)[:shared]
        conversation.save(path)
        assert secret.encode() not in path.read_bytes()
        assert Conversation.load(tiny_engine, path).ids == conversation.ids


def test_a_retried_answer_is_not_saved_with_the_words_of_the_one_before(
    tiny_engine: gemma_py.Engine, tmp_path: Path
) -> None:
    conversation = new(tiny_engine)
    first = talk(conversation, "hello").strip()
    second = "".join(token.text for token in conversation.retry()).strip()
    assert first != second and first in conversation._known
    conversation.save(tmp_path / "c")
    assert set(conversation._known) == {second}


def test_an_empty_conversation_is_saved_too(tiny_engine: gemma_py.Engine, tmp_path: Path) -> None:
    new(tiny_engine).save(tmp_path / "empty")
    loaded = Conversation.load(tiny_engine, tmp_path / "empty")
    assert loaded.messages == [] and talk(loaded, "hello") == talk(new(tiny_engine), "hello")


def test_another_model_is_refused(told: tuple[Conversation, Path], tmp_path: Path) -> None:
    """One weight differs by one bit, or rows are stored in another type: then the rows are not this model's."""
    _, path = told
    shutil.copytree(TINY, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2001] ^= 1
    file.write_bytes(data)
    with gemma_py.load(tmp_path / "model") as engine, pytest.raises(InputError, match="another model"):
        Conversation.load(engine, path)
    with gemma_py.load(TINY, kv="bfloat16") as engine, pytest.raises(InputError):
        Conversation.load(engine, path)
    with gemma_py.load(TINY, context=20) as engine, pytest.raises(ContextError):
        Conversation.load(engine, path)


def test_a_damaged_file_is_refused(told: tuple[Conversation, Path], tmp_path: Path) -> None:
    conversation, path = told
    data = path.read_bytes()
    rng = random.Random(1)
    copies: list[bytes] = [data[:size] for size in (0, 5, 24, 100, len(data) - 33, len(data) - 1)]
    copies += [data + b"x", b"gemma_py conversation 9\n" + data[24:], os.urandom(5000)]
    for _ in range(20):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        copies.append(bytes(damaged))
    target = tmp_path / "damaged"
    for copy in copies:
        target.write_bytes(copy)
        with pytest.raises(FormatError):
            Conversation.load(conversation.engine, target)
    os.mkfifo(tmp_path / "pipe")
    for missing in (tmp_path / "nothing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(GemmaError):
            Conversation.load(conversation.engine, missing)
    with pytest.raises(InputError, match="cannot be written"):
        conversation.save("/proc/nowhere/file")


def test_a_file_of_an_older_version_is_refused_with_one_line(tiny_engine: gemma_py.Engine, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(b'gemma_py conversation 2\n{"messages": []}\n' + bytes(32))
    with pytest.raises(FormatError, match=r"old: saved by an older version of gemma_py") as caught:
        Conversation.load(tiny_engine, old)
    assert len(str(caught.value).splitlines()) == 1


def test_other_safetensors_files_are_refused(tiny_engine: gemma_py.Engine) -> None:
    with pytest.raises(FormatError, match=r"model\.safetensors: not a file that gemma_py wrote"):
        Conversation.load(tiny_engine, TINY / "model.safetensors")


def test_any_reader_of_safetensors_reads_a_saved_conversation(told: tuple[Conversation, Path]) -> None:
    conversation, path = told
    arrays = safetensors.numpy.load_file(path)
    assert arrays["ids"].tolist() == conversation.ids
    assert json.loads(arrays["description"].tobytes())["messages"] == conversation.messages
    assert arrays["layers.0.keys"].dtype == np.float32 and np.isfinite(arrays["layers.0.keys"]).all()
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["version"], metadata["kv"]) == ("gemma_py conversation", "3", "float32")


# Children that save again and again, each killed at some moment; what was being written when, and what is left of it.
KILLED = """
import contextlib, os, random, signal, sys, time
from pathlib import Path
import gemma_py
model, told, folder, kills = sys.argv[1:]
target, rng = Path(folder) / "talk", random.Random(1)
with gemma_py.load(model, threads=1) as engine:
    conversation = gemma_py.Conversation.load(engine, told)
    conversation.stop = ("x" * 1_000_000,)  # so that most of the time goes into writing

    def save(kill, number):
        conversation.max_tokens = 1 + kill * 1_000_000 + number
        conversation.save(target)

    start = time.monotonic()
    save(0, 0)
    took = time.monotonic() - start
    begun, begin = os.pipe()
    ids, digest = conversation.ids, conversation.kv_digest()
    kill, before, changed = 0, 0, 0
    unfinished = lambda: len(list(Path(folder).glob("*.partial")))
    # So many, and on (within reason) until some came while a file was written, and some after.
    while kill < int(kills) or (min(changed, unfinished()) < 3 and kill < 10 * int(kills)):
        kill += 1
        child = os.fork()
        if child == 0:
            for number in range(1_000_000):
                os.write(begin, b".")
                save(kill, number)
        for _ in range(rng.randint(1, 3)):
            os.read(begun, 1)  # however slow the machine is, the child is at it
        time.sleep(rng.uniform(0, took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.set_blocking(begun, False)
        with contextlib.suppress(BlockingIOError):
            os.read(begun, 1_000_000)
        os.set_blocking(begun, True)
        loaded = gemma_py.Conversation.load(engine, target)
        found = loaded.max_tokens - 1
        assert found == before or found // 1_000_000 == kill, (found, before)
        assert loaded.stop == conversation.stop and (loaded.ids, loaded.kv_digest()) == (ids, digest)
        changed += found != before
        before = found
print(kill, "killed;", unfinished(), "while writing,", changed, "after a new file was there")
"""


def killed_while_saving(told: Path, folder: Path, kills: int) -> str:
    command = [sys.executable, "-c", KILLED, str(TINY), str(told), str(folder), str(kills)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_while_saving_leaves_the_old_file_or_the_new(told: tuple[Conversation, Path], tmp_path: Path) -> None:
    said = killed_while_saving(told[1], tmp_path, 20)
    kills, writing, changed = map(int, re.findall(r"\d+", said))
    assert kills >= 20 and writing >= 3 and changed >= 3  # else they came too early or too late to show anything


def test_export(told: tuple[Conversation, Path], tmp_path: Path) -> None:
    conversation, _ = told
    conversation.export(tmp_path / "talk.json", "json")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"] == conversation.messages
    conversation.export(tmp_path / "talk.md")
    text = (tmp_path / "talk.md").read_text()
    assert text.startswith("**System**\n\nbe brief\n\n**User**\n\nhello there\n\n**Assistant**\n\n")
    with pytest.raises(InputError, match="markdown or json"):
        conversation.export(tmp_path / "talk", "pdf")


def test_engine_chat_refuses_before_any_work(tiny_engine: gemma_py.Engine, checkpoints: dict[str, Path]) -> None:
    user = [{"role": "user", "content": "a"}]
    with pytest.raises(InputError, match="no such option"):
        tiny_engine.chat(user, tempature=1.0)
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


def test_nothing_old_is_encoded_again(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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
