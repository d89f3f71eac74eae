import contextlib
import dataclasses
import io
import json
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, TINY
from terminal import ESCAPES, GREEDY, Window

import gemma_py
from gemma_py import Conversation
from gemma_py.cli.chat import Chat
from gemma_py.cli.chat_commands import COMMANDS
from gemma_py.cli.screen import PlainScreen

pytest.importorskip("rich", reason="the extra `chat` is not installed")
pytest.importorskip("prompt_toolkit", reason="the extra `chat` is not installed")

Run = Callable[..., tuple[int, str, str]]
Pipe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Callable[..., Window]]:
    with contextlib.ExitStack() as stack:

        def make(**environment: str) -> Window:
            made = Window(tmp_path, **environment)
            stack.callback(made.close)
            return made

        yield make


END = ("of 4,096", ">")  # the last words of the statistics after an answer, and the next prompt


def test_a_conversation_in_a_terminal(window: Callable[..., Window], tmp_path: Path) -> None:
    here = window()
    here.chat("--max-tokens", "12")
    assert "\x1b[Kloading the model\r" in here.text
    here.type("hello\r")
    here.expect("prompt 15 tokens", "answer 12", "first after", "of 4,096", "the answer was cut off at 12 tokens", ">")
    # The message appears once, because the typed line is erased.
    assert "> hello\r\r\n" not in ESCAPES.sub("", here.text)
    history = tmp_path / "gemma_py" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    # Messages may have several lines and any script, and may be pasted.
    here.type("one 🙂\x1b\rשלום")
    here.paste("\ntwo\nتجربة")
    here.type("\r")
    here.expect(*END)
    here.type("/export talk.json\r")
    here.expect("exported", ">")
    said = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in said if message["role"] == "user"] == [
        "hello",
        "one 🙂\nשלום\ntwo\nتجربة",
    ]
    here.type("/hepl\r")
    here.expect("unknown command /hepl; did you mean /help?")
    here.type("/set top_p 7\r")
    here.expect("top_p should be a number from 0 to 1, found 7")
    # Ctrl-C during an answer keeps the text so far, and the session continues.
    here.type("/set max_tokens 3000\r")
    here.expect("max_tokens 3000")
    here.ask_at_length("go on")
    here.type("\x03")
    here.expect("answer", *END)
    here.type("/stats\r")
    here.expect("ended", "stopped")
    # Ctrl-Z suspends the chat and returns to the shell. After `fg`, the answer continues.
    here.ask_at_length("and on")
    here.type("\x1a")
    here.expect("Stopped", "shell$ ")
    before = len(here.text)
    here.type("echo $((6*7))\r")  # the shell echoes keys again
    here.expect("echo $((6*7))", "42", "shell$ ")
    here.type("fg\r")
    here.answers()
    here.type("\x03")
    here.expect("answer", *END)
    # Erasing rows would erase the shell's output.
    assert "\x1b[J" not in here.text[before : here.text.index("prompt ", before)]
    # The text is not rendered as Markdown after a resize, because the number of its rows is unknown.
    here.ask_at_length("wide")
    before = len(here.text)
    here.resize(24, 70)
    here.answers(more=10)
    here.type("\x03")
    here.expect("answer", *END)
    assert "\x1b[J" not in here.text[before : here.text.index("prompt ", before)]
    # A narrow window during and after an answer.
    here.ask_at_length("narrow")
    here.resize(10, 20)
    here.answers()
    here.type("\x03")
    here.expect("answer", *END)
    here.type("/set max_tokens 5\r")
    here.expect("max_tokens 5")
    here.type("hi\r")
    here.expect("answer 5", *END)
    here.resize(24, 80)
    here.type("/edit\r")
    here.expect("hi")
    here.type(" there\r")
    here.expect("answer 5", *END)
    here.type("/export talk.json\r")
    here.expect("exported", ">")
    said = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in said[::2]][-2:] == ["narrow", "hi there"]
    assert all(message["content"] for message in said)
    here.type("\x04")
    here.expect("shell$ ")
    here.type("echo left $?\n")
    here.expect("left 0\r\n")


def test_keys_typed_during_an_answer_are_read_by_the_next_prompt(window: Callable[..., Window], tmp_path: Path) -> None:
    """Typed keys do not appear in the answer and are not lost, after Ctrl-C as well as after Ctrl-Z and `fg`."""
    here = window()
    here.chat("--max-tokens", "3000")
    for before_it_ends in ("", "\x1a"):
        here.ask_at_length("one")
        if before_it_ends:  # the shell has switched echo on
            here.type(before_it_ends)
            here.expect("Stopped", "shell$ ")
            here.type("fg\n")
            here.answers()
        here.type("typed ahead 🙂")
        here.answers(more=200)
        here.type("\x03")
        shown = here.expect(*END, "typed ahead 🙂")
        assert "typed" not in shown.partition("answer")[0]
        here.type("\x15")
    # A typed line is sent as the next message. A paste of many lines is one message, and a long line is not cut.
    here.type("/set max_tokens 100\r")
    here.expect("max_tokens 100", ">")
    here.ask_at_length("two")
    here.type("three\r")
    paste = "\n".join(f"line {number} of many more that are pasted" for number in range(150))
    here.paste(paste)
    here.type("\r")
    here.expect("answer 100", "> three", "answer 100", "(5,", "answer 100", *END)
    here.type("/export talk.json\r")
    here.expect("exported", ">")
    said = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in said[::2]] == ["one", "one", "two", "three", paste]


def test_a_long_paste(window: Callable[..., Window], tmp_path: Path) -> None:
    paste = "function " * 2223
    assert len(paste) > 20_000
    here = window(NO_COLOR="1")
    here.chat("--max-tokens", "6")
    here.type("hello\r")
    here.expect(*END)
    here.paste(paste)
    here.type("\r")
    here.expect("reading", "tokens (Ctrl-C stops)")
    here.type("\x03")
    here.expect("stopped before the answer began")
    here.type("/tokens\r")
    here.expect("context 28 of 4,096")
    here.type("\x1b[A\x1b[A\r")
    here.expect("answer 6", *END)
    # The context has no room for the message twice. The chat says so and asks what to do.
    here.paste(paste)
    here.type("\r")
    here.expect("leaves no room", "o: forget the oldest 1 of 2 exchanges")
    here.type("\r")
    here.expect("was not sent")
    here.type("\x1b[A\r")
    here.expect("leaves no room", "exchanges")
    here.type("c\r")
    here.expect("answer 6", *END)
    here.type("/export talk.json\r")
    here.expect("exported", ">")
    said = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in said[::2]] == [paste]
    assert not re.search(r"\x1b\[[\d;]*\b(3[0-8]|4[0-8]|9[0-7])[\d;]*m", here.text)


class Scripted(PlainScreen):
    interactive = True

    def __init__(self, *choices: str) -> None:
        super().__init__(json=False)
        self.choices, self.asked = list(choices), list[str]()

    def ask(self, question: str) -> str:
        self.asked.append(question)
        return self.choices.pop(0)


@pytest.mark.parametrize(("choices", "forgotten"), [("o", 2), ("oo", 3), ("c", 4), ("oc", 4), ("", None), ("o", None)])
def test_the_choice_at_the_limit(choices: str, forgotten: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """o: remove the older half of the exchanges. c: remove all. Anything else: do not send the message."""
    with gemma_py.load(TINY) as engine:
        conversation = Conversation(engine, "be brief", engine.chat_sampling({"temperature": 0.0}), max_tokens=1)
        for number in range(4):
            list(conversation.send(f"question number {number}"))
        system, *exchanges = conversation.messages
        user = {"role": "user", "content": "one more"}
        left = exchanges[2 * (2 if choices == "o" and forgotten is None else forgotten or 0) :]
        least = len(conversation._prompt([system, *left, user]))
        monkeypatch.setattr(engine, "context", least + 1 if forgotten is not None else least - 1)
        screen = Scripted(*choices, "")
        Chat(conversation, screen).take("one more", edited=False)
        assert screen.asked[0].startswith("o: forget the oldest 2 of 4 exchanges, c: forget all")
        assert len(screen.asked) == max(1, len(choices)) + (choices == "o" and forgotten is None)
        if forgotten is None:
            assert conversation.messages == [system, *exchanges]
        else:
            assert conversation.messages[:-1] == [system, *left, user]


def test_a_dumb_terminal(window: Callable[..., Window]) -> None:
    here = window(TERM="dumb")
    here.chat("--max-tokens", "3")
    here.type("hello\r")
    here.expect("answer 3", *END)
    here.type("/exit\r")
    here.expect("shell$ ")
    assert "\x1b" not in here.text


# --- without a terminal -----------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    def call(text: str | bytes, *options: object) -> tuple[int, str, str]:
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return run("chat", TINY, *options)

    return call


def answers(engine: gemma_py.Engine, *texts: str, **options: object) -> list[str]:
    conversation = Conversation(engine, sampling=engine.chat_sampling(options), max_tokens=12)
    return ["".join(token.text for token in conversation.send(text)) for text in texts]


def test_lines_are_messages(pipe: Pipe, tiny_engine: gemma_py.Engine) -> None:
    code, out, err = pipe("hello\n\nyou 🙂\n", "--max-tokens", 12, "--temperature", 0)
    assert code == 0
    assert out == "".join(f"{text}\n" for text in answers(tiny_engine, "hello", "you 🙂", temperature=0.0))
    assert err.count("first after") == 2
    assert "the answer was cut off at 12 tokens: raise the limit with --max-tokens N" in err and "/retry" not in err


def test_stop(pipe: Pipe, tiny_engine: gemma_py.Engine) -> None:
    (text,) = answers(tiny_engine, "hello", temperature=0.0)
    options = ("--prompt", "hello", "--temperature", 0, "--max-tokens", 12, "--stop", "never said", "--stop", text[4:8])
    assert pipe("", *options)[:2] == (0, text[: text.index(text[4:8])] + "\n")


def test_prompt(pipe: Pipe, tiny_engine: gemma_py.Engine) -> None:
    options = ("--max-tokens", 12, "--temperature", 0)
    (text,) = answers(tiny_engine, "two\nlines", temperature=0.0)
    assert pipe("", "--prompt", "two\nlines", *options)[:2] == (0, text + "\n")
    assert pipe("two\nlines", "--prompt", "-", *options)[:2] == (0, text + "\n")
    report = json.loads(pipe("", "--prompt", "two\nlines", "--json", *options)[1])
    assert (report["text"], report["generated_tokens"], report["finish_reason"]) == (text, 12, "length")


def test_same_seed_same_text(pipe: Pipe, run: Run, tmp_path: Path) -> None:
    """The text is equal for 1, 2 and 4 threads, from `chat`, from `generate`, and in three ways from Python.

    The text of the second turn is equal in one process, after loading a file with the KV cache, and after loading a
    file without it.
    """
    seeds: dict[str, Any] = {"seed": 4, "temperature": 1.5, "top_k": 0}
    options = ("--seed", 4, "--temperature", 1.5, "--top-k", 0, "--max-tokens", 30)
    ids, saved, message = tmp_path / "ids", tmp_path / "saved", [{"role": "user", "content": "hello"}]
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    for threads in (1, 2, 4):
        with gemma_py.load(TINY, threads=threads) as engine:
            conversation = Conversation(engine, sampling=engine.chat_sampling(seeds), max_tokens=30)
            first[f"conversation {threads}"] = "".join(token.text for token in conversation.send("hello"))
            assert conversation.stats is not None
            prompt = conversation.ids[: conversation.stats.prompt_tokens]
            if threads == 1:
                ids.write_text(json.dumps(prompt))
                conversation.save(saved)
            first[f"engine.chat {threads}"] = "".join(t.text for t in engine.chat(message, 30, **seeds))
            sampling = dataclasses.asdict(engine.chat_sampling(seeds))
            first[f"engine.generate {threads}"] = "".join(
                t.text for t in engine.generate(prompt, 30, **sampling)
            ).lstrip()
            loaded, anew = Conversation.load(engine, saved), Conversation.load(engine, saved)
            anew._session = engine.session()
            for name, one in (("went on", conversation), ("loaded", loaded), ("anew", anew)):
                second[f"{name} {threads}"] = "".join(token.text for token in one.send("and more?"))
            assert loaded.stats is not None and anew.stats is not None
            assert loaded.stats.cached_tokens > 30 and anew.stats.cached_tokens == 0
        first[f"chat {threads}"] = pipe("", "--prompt", "hello", "--threads", threads, *options)[1].removesuffix("\n")
        continued = run("generate", TINY, "--ids", ids, "--threads", threads, *options)
        first[f"generate {threads}"] = continued[1].removesuffix("\n").lstrip()
    assert len(first) == 15 and len(set(first.values())) == 1, first
    assert len(second) == 9 and len(set(second.values())) == 1, second


def test_every_command(pipe: Pipe, tmp_path: Path) -> None:
    script = {
        "/help": "/verify",
        "/system Be brief.": "system: Be brief.",
        "/set": "repeat 1, presence 0, frequency 0, max_tokens 9, seed none",
        "/set seed 5": "seed 5",
        "/set max_tokens none": "max_tokens none",
        "/set max_tokens=9": "max_tokens 9",
        "/tokens hi there": '3 tokens: 348:"h"',
        "hello": "answer",
        "/retry": "answer",
        "/edit something else": "answer",
        "/tokens": "of 4,096; in the KV cache",
        "/stats": "first token",
        "/threads 3": "threads 3",
        "/think off": "thoughts: off",
        "/verify": "tokens computed again with 4 threads",
        f"/save {tmp_path / 'talk'}": "saved",
        f"/export {tmp_path / 'talk.md'}": "as markdown",
        f"/export {tmp_path / 'other'} json": "as json",
        f"/receipt {tmp_path / 'receipt.json'}": "wrote",
        "/undo": "removed: something else",
        f"/load {tmp_path / 'talk'}": "3 messages",
        "more": "cached",
        "/clear": "empty again",
        "/system none": "system: none",
        "/exit": "",
        "/nonsense": "",
    }
    assert {line.split()[0][1:] for line in script if line[0] == "/"} - {"nonsense"} == set(COMMANDS) - {"quit"}
    assert COMMANDS["quit"].run is COMMANDS["exit"].run
    code, out, err = pipe("\n".join(script), "--max-tokens", 9, "--temperature", 0)
    assert code == 0, err
    at = 0
    for line, said in script.items():
        assert said in err[at:], line
        at = err.index(said, at) + len(said)
    assert len(out.splitlines()) >= 4
    assert (tmp_path / "talk.md").read_text().startswith("**System**\n\nBe brief.")
    assert json.loads((tmp_path / "other").read_text())["messages"][1]["content"] == "something else"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/frob", "unknown command /frob; /help lists all commands"),
        ("/undo 3", "/undo takes no argument, found '3'"),
        ("/undo", "there is no answer yet"),
        ("/retry", "there is no answer yet"),
        ("/edit", "/edit needs the new text of the message: /edit TEXT"),
        ("/set heat 3", "unknown setting 'heat'"),
        ("/set top_k many", "top_k should be a whole number, found 'many'"),
        ("/set max_tokens 0", "max_tokens should be at least 1"),
        ("/set temperature 9999", "temperature should be a number from 0 to 2, found 9999.0"),
        ("/threads none", "threads should be a whole number"),
        ("/threads 0", "threads should be 1 to"),
        ("/save", "/save needs a file name: /save FILE"),
        ("/load /nowhere/file", "/nowhere/file"),
        ("/export /proc/none/file", "cannot be written"),
        ("/export /proc/none/file xml", "form should be markdown or json, found 'xml'"),
        ("/stats", "/stats needs an answer, and this chat has none yet"),
        ("/verify", "no tokens to verify"),
        ("function " * 4200, "leaves no room for an answer"),
        (b"\xff\n", "not UTF-8"),
    ],
)
def test_what_cannot_be_is_one_line(pipe: Pipe, line: str | bytes, said: str) -> None:
    code, out, err = pipe(line)
    assert (code, out) == (1, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_more_threads_than_cores_are_advised_against(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemma_py.machine.threads", lambda: 2)
    code, _, err = pipe("/threads 2\n/threads 3", "--threads", 1)
    advice = "3 threads are more than the 2 cores that this process may use, which makes the computation slower"
    assert (code, err.splitlines()[-3:]) == (
        0,
        [
            "threads 2; answers have the same bits with any number of threads",
            advice,
            "threads 3; answers have the same bits with any number of threads",
        ],
    )


def test_a_reader_that_closes_the_pipe_ends_the_chat_without_a_traceback() -> None:
    command = [
        sys.executable,
        "-m",
        "gemma_py",
        "chat",
        str(TINY),
        "--prompt",
        "hello",
        *GREEDY,
        "--max-tokens",
        "3000",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.read(10)
        child.stdout.close()
        assert b"Traceback" not in child.stderr.read()
        assert child.wait(timeout=120) == 1


def test_a_terminal_without_the_extra(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, Typed())
    monkeypatch.delitem(sys.modules, "gemma_py.cli.terminal", raising=False)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    code, _, err = run("chat", TINY)
    assert code == 1
    assert "pip install 'gemma_py[chat]'" in err
    assert len(err.splitlines()) == 1
