import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from repository import ROOT, TINY
from talking import DRAW, fresh_digest, new, talk

import gemma_py
from gemma_py import Conversation
from gemma_py.errors import ContextError, FormatError, GemmaError, InputError


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


def test_undone_messages_are_not_saved(tiny_engine: gemma_py.Engine, tmp_path: Path) -> None:
    """The file contains neither the text, nor the ids, nor the KV rows of undone messages."""
    path = tmp_path / "c"
    for take_back in (Conversation.undo, Conversation.clear):
        conversation = new(tiny_engine)
        talk(conversation, "hello")
        kept = None if take_back is Conversation.clear else conversation.messages.copy()
        secret = talk(conversation, "the password is a fish").strip()
        assert secret and secret in conversation._answer_ids
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
    assert first != second and first in conversation._answer_ids
    conversation.save(tmp_path / "c")
    assert set(conversation._answer_ids) == {second}


def test_an_empty_conversation_is_saved_too(tiny_engine: gemma_py.Engine, tmp_path: Path) -> None:
    new(tiny_engine).save(tmp_path / "empty")
    loaded = Conversation.load(tiny_engine, tmp_path / "empty")
    assert loaded.messages == [] and talk(loaded, "hello") == talk(new(tiny_engine), "hello")


def test_another_model_is_refused(told: tuple[Conversation, Path], tmp_path: Path) -> None:
    """A model counts as different if one bit of a weight differs, and so does a model with another type of KV cache."""
    _, path = told
    shutil.copytree(TINY, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2001] ^= 1
    file.write_bytes(data)
    with gemma_py.load(tmp_path / "model") as engine, pytest.raises(InputError, match="weights that differ"):
        Conversation.load(engine, path)
    with (
        gemma_py.load(TINY, kv="bfloat16") as engine,
        pytest.raises(InputError, match="saved with --kv float32, but this engine has --kv bfloat16"),
    ):
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
    for unwritable in ("/proc/nowhere/file", f"{tmp_path}/a\0b", f"{tmp_path}/\ud800"):
        with pytest.raises(InputError, match="cannot be written"):
            conversation.save(unwritable)
        with pytest.raises(InputError, match="cannot be written"):
            conversation.export(unwritable)


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


# A child process saves again and again until it is killed at a random moment. Then the file must be readable.
KILLED = """
import contextlib, os, random, signal, sys, time
from pathlib import Path
import gemma_py
model, told, folder, kills = sys.argv[1:]
target, rng = Path(folder) / "talk", random.Random(1)
with gemma_py.load(model, threads=1) as engine:
    conversation = gemma_py.Conversation.load(engine, told)
    conversation.stop = ("x" * 1_000_000,)  # so long that writing takes most of the time

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
    # Kill `kills` children, and then more until 3 kills came while a file was written and 3 after a new file was there.
    while kill < int(kills) or (min(changed, unfinished()) < 3 and kill < 10 * int(kills)):
        kill += 1
        child = os.fork()
        if child == 0:
            for number in range(1_000_000):
                os.write(begin, b".")
                save(kill, number)
        for _ in range(rng.randint(1, 3)):
            os.read(begun, 1)  # the child has begun to save
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
    # Some kills must come while a file is written, and some after a new file is there. Otherwise the test proves
    # nothing.
    assert kills >= 20 and writing >= 3 and changed >= 3


def test_export(told: tuple[Conversation, Path], tmp_path: Path) -> None:
    conversation, _ = told
    conversation.export(tmp_path / "talk.json", "json")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"] == conversation.messages
    conversation.export(tmp_path / "talk.md")
    text = (tmp_path / "talk.md").read_text()
    assert text.startswith("**System**\n\nbe brief\n\n**User**\n\nhello there\n\n**Assistant**\n\n")
    with pytest.raises(InputError, match="markdown or json"):
        conversation.export(tmp_path / "talk", "pdf")
