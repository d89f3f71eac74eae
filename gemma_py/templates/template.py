"""Chat templates: from messages to token ids, by the checkpoint's template, Gemma's turns or a plain transcript.

No message can forge a turn: the template's text may contain control tokens, and a message's text may not, so the two are
encoded separately. The rendered text does not show which is which. Therefore the template gets messages in which each
character that is not white space is replaced by one of Unicode's private planes, which no other text uses; such a character in
the output belongs to a message. A template may trim, cut, count and join these messages. It is also rendered with the plain
messages. If the two outputs differ, the template depends on the messages' letters, and it is refused, because its own text
could not be told from theirs.

A space between the two is encoded with the text after it, because Gemma's pieces begin with their space. So the ids are those of
the whole text encoded at once, except where a template puts letters directly next to those of a message.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gemma_py.errors import InputError, TemplateError, UnsupportedError
from gemma_py.formats.files import parse_json, read_text
from gemma_py.tokenizer import Tokenizer

Message = dict[str, Any]  # role and content; where there are tools, also tool_calls and name
Tools = Sequence[Mapping[str, Any]]  # in OpenAI's format
ROLES = ("system", "user", "assistant")
_SECONDS = 5.0  # the time limit of rendering, without the start of the process
_STARTING = 30.0
_LARGEST_ANSWER = 1 << 30  # bytes; sandbox.py has its own limit on characters


class Piece(NamedTuple):
    """A piece of a prompt. control: it is text of the template, which may contain control tokens. answer: the model wrote it."""

    text: str
    control: bool
    answer: bool = False


def checked_messages(messages: Any, roles: Sequence[str] = ROLES) -> list[Message]:
    """Validate messages in OpenAI's format and reduce them to role and text. Only the first may be the system message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError("messages should be a list of at least one {role, content}")
    made = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"message {number} should be an object with role and content, found {message!r:.60}")
        role, content = message.get("role"), message.get("content")
        if role not in roles:
            raise InputError(f"message {number}: role should be one of {', '.join(roles)}, found {role!r:.40}")
        if role == "system" and number:
            raise InputError(f"message {number}: a system message should be the first")
        made.append({"role": str(role), "content": _text(content, number)})
    return made


def _text(content: Any, number: int) -> str:
    """The text of a content, which is a string or a list of text parts."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UnsupportedError(
                    f"message {number}: content has the part {part!r:.60}; only text parts are supported"
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise InputError(f"message {number}: content should be text, found {content!r:.60}")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"message {number}: content has half a surrogate pair, which is not a character") from None
    return content


@dataclass(frozen=True)
class Template:
    """name, note: for display; the note is a line that the user should see. stop, ends: strings and control tokens that end an answer."""

    name: str
    note: str | None = None
    stop: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def pieces(self, messages: Sequence[Message], tools: Tools = ()) -> list[Piece]:
        """The pieces of the prompt for checked messages, up to the beginning of the answer."""
        raise NotImplementedError

    @property
    def knows_tools(self) -> bool:
        return False


@dataclass(frozen=True)
class GemmaTurns(Template):
    """The turns of Gemma 1 to 3. There is no system role: a system message becomes the beginning of the first user message."""

    def pieces(self, messages: Sequence[Message], tools: Tools = ()) -> list[Piece]:
        pieces = []
        for message in _system_in_user(messages):
            answer = message["role"] == "assistant"
            pieces += [Piece(f"<start_of_turn>{'model' if answer else 'user'}\n", True)]
            pieces += [Piece(message["content"].strip(), False, answer)]
            pieces += [Piece("<end_of_turn>\n", True)]
        return [*pieces, Piece("<start_of_turn>model\n", True)]


def _system_in_user(messages: Sequence[Message]) -> list[Message]:
    """Put the system message in front of the first user message; without one, it becomes a user message."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": system["content"]}, *rest]
    first = {"role": "user", "content": f"{system['content'].strip()}\n\n{rest[0]['content'].strip()}"}
    return [first, *rest[1:]]


_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_TURN_IN_TEXT = re.compile(rf"([{_BREAKS}])(?=[^\S{_BREAKS}]*(?:User|Assistant)\s*:)")


@dataclass(frozen=True)
class Transcript(Template):
    """A plain transcript, for a base model, which does not know turn markers.

    A line of a message that would look like a turn gets a quotation mark in front.
    """

    def pieces(self, messages: Sequence[Message], tools: Tools = ()) -> list[Piece]:
        pieces = []
        for message in messages:
            answer = message["role"] == "assistant"
            content = _TURN_IN_TEXT.sub(r"\1> ", "\n" + message["content"].strip())[1:]
            if message["role"] == "system":
                pieces += [Piece(content, False), Piece("\n\n", True)]
            else:
                pieces += [Piece("Assistant:" if answer else "User:", True)]
                pieces += [Piece(f" {content}" if content else "", False, answer), Piece("\n", True)]
        return [*pieces, Piece("Assistant:", True)]


GEMMA = GemmaTurns("Gemma's turns", ends=("<end_of_turn>",))
TRANSCRIPT = Transcript(
    "a transcript",
    note="this is a base model: it continues a transcript and was never taught to answer",
    stop=("\nUser:", "\nAssistant:"),
)
BUILT_IN: dict[str, Template] = {"gemma": GEMMA, "transcript": TRANSCRIPT}


def choose(
    tokenizer: Tokenizer, own: str | None, eos_token_ids: Sequence[int], wanted: str | Path | None = None
) -> Template:
    """The template that was asked for (`gemma`, `transcript` or a file), else the checkpoint's own, else Gemma's turns if
    <end_of_turn> ends an answer, else a transcript, for a base model."""
    if isinstance(wanted, str) and wanted in BUILT_IN:
        return BUILT_IN[wanted]
    if wanted is not None:
        path = Path(wanted)
        if not path.exists():
            raise InputError(f"template {str(wanted)!r}: neither a file nor one of {', '.join(BUILT_IN)}")
        return _from_source(read_text(path), str(path), tokenizer, eos_token_ids)
    if own is not None:
        return _from_source(own, "the checkpoint's chat template", tokenizer, eos_token_ids)
    end = tokenizer.token_id("<end_of_turn>")
    return GEMMA if end is not None and end in eos_token_ids else TRANSCRIPT


def encode(
    pieces: Sequence[Piece], tokenizer: Tokenizer, known: Mapping[str, list[int]], encoded: dict[Piece, list[int]]
) -> list[int]:
    """The ids of the pieces, with one bos token in front.

    known: answers as the model wrote them, by their text without white space around. Encoding that text again may give
    other ids, and all that was computed after them would be lost. encoded: what earlier calls found, so that a long
    conversation is not encoded again at every turn.
    """
    ids: list[int] = []
    for piece in pieces:
        if piece not in encoded:
            encoded[piece] = tokenizer.encode(piece.text, bos=False, control=piece.control)
        ids += (known.get(piece.text.strip()) if piece.answer else None) or encoded[piece]
    bos = tokenizer.bos_id
    if bos is None:
        return ids
    first = next((at for at, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[first:]]


# --- templates in jinja2 ----------------------------------------------------------------------------------------------

_ENDS = ("<end_of_turn>", "<turn|>", "<start_function_response>")  # tokens that end the model's turn
# The private planes: 15 for others' messages, 16 for answers.
_OTHERS, _ANSWERS, _PLANES_END = 0xF0000, 0x100000, 0x110000
_ROOM = 0xFFFE  # code points in one plane
_MASKED = f"[{chr(_OTHERS)}-{chr(_PLANES_END - 1)}]"
_MESSAGE = re.compile(rf"( ?{_MASKED}(?:[\s{_MASKED[1:-1]}]*{_MASKED})?)")
_OF_OTHERS = re.compile(f"[{chr(_OTHERS)}-{chr(_ANSWERS - 1)}]")


@dataclass(frozen=True)
class Jinja(Template):
    source: str = ""
    globals: tuple[tuple[str, Any], ...] = ()

    def pieces(self, messages: Sequence[Message], tools: Tools = ()) -> list[Piece]:
        try:
            return self._rendered(messages, tools)
        except TemplateError:
            # Many templates refuse a system message. It belongs to the first user's turn then, as Gemma has it.
            if messages[0]["role"] != "system":
                raise
            return self._rendered(_system_in_user(messages), tools)

    @property
    def knows_tools(self) -> bool:
        return re.search(r"\btools\b", self.source) is not None

    def _rendered(self, messages: Sequence[Message], tools: Tools) -> list[Piece]:
        masked, originals = _masked(messages)
        given = {**dict(self.globals), "tools": list(tools) or None}
        text, plain = RENDERER.render(self.name, self.source, given, [masked, list(messages)])
        codes = _codes(text)
        unmasked = np.where(codes < _OTHERS, codes, originals[np.maximum(codes, _OTHERS) - _OTHERS])
        if not np.array_equal(unmasked, _codes(plain)):
            raise TemplateError(
                f"{self.name}: it changes the words of messages, so its control tokens cannot be told from theirs; "
                f"choose another, or one of {', '.join(BUILT_IN)}"
            )
        pieces, at = [], 0
        for number, part in enumerate(_MESSAGE.split(text)):
            control = number % 2 == 0
            if part:
                answer = not control and _OF_OTHERS.search(part) is None
                pieces.append(Piece(plain[at : at + len(part)], control, answer))
            at += len(part)
        return pieces


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _masked(messages: Sequence[Message]) -> tuple[list[Message], np.ndarray]:
    """The messages with a private character for each one that is not white space, and what the private ones mean:
    [those of both planes], themselves where nothing else. All of a plane at once: a history is long, and a turn is not to wait.
    """
    masked = [dict(message) for message in messages]
    originals = np.arange(_OTHERS, _PLANES_END, dtype="<u4")
    for plane in (_OTHERS, _ANSWERS):
        mine = [message for message in masked if (message["role"] == "assistant") == (plane == _ANSWERS)]
        codes = _codes("".join(message["content"] for message in mine))
        distinct = np.unique(codes)
        letters = ~np.array([chr(code).isspace() for code in distinct], bool)
        count = np.count_nonzero(letters)
        if count > _ROOM:
            raise InputError("the messages hold more different characters than can be told apart")
        originals[plane - _OTHERS :][:count] = distinct[letters]
        mask = distinct.copy()
        mask[letters] = np.arange(plane, plane + count)
        text = mask[np.searchsorted(distinct, codes)].tobytes().decode("utf-32-le")
        at = 0
        for message in mine:
            size = len(message["content"])
            message["content"] = text[at : at + size]
            at += size
    return masked, originals


def _from_source(source: str, name: str, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Template:
    if importlib.util.find_spec("jinja2") is None:
        raise TemplateError(
            f"{name} needs jinja2: pip install 'gemma_py[chat]', or choose one of {', '.join(BUILT_IN)}"
        )
    ends = tuple(end for end in _ENDS if end in source and tokenizer.token_id(end) is not None)
    bos, eos = (None if token is None else tokenizer.piece(token) for token in (tokenizer.bos_id, *eos_token_ids[:1]))
    given = (("bos_token", bos or ""), ("eos_token", eos or ""), ("add_generation_prompt", True))
    RENDERER.start()
    return Jinja(name, ends=ends, source=source, globals=given)


class _Renderer:
    """The process that renders all templates. It is started early, used again, and killed when it takes too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._fresh = True

    def start(self) -> None:
        with self._lock:
            self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.kill()
            program = str(Path(__file__).with_name("sandbox.py"))
            # -P: do not import from the program's directory. A process group of its own, so that Ctrl-C does not reach it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
            self._fresh = True
        return self._process

    def render(self, name: str, source: str, given: Mapping[str, Any], conversations: Sequence[Any]) -> list[str]:
        request = {"template": source, "globals": given, "conversations": conversations}
        with self._lock:
            try:
                answer = self._ask(json.dumps(request, ensure_ascii=False).encode() + b"\n")
            except BaseException as error:
                self.kill()
                if isinstance(error, TimeoutError):
                    raise TemplateError(f"{name}: it does not end; stopped after {_SECONDS:g} seconds") from None
                if isinstance(error, OSError):
                    raise TemplateError(f"{name}: the process that renders it has died") from None
                raise
        document = parse_json(answer, name)
        if "error" in document:
            raise TemplateError(f"{name}: {' '.join(str(document['error']).split()):.300}")
        texts: list[str] = document["texts"]
        return texts

    def _ask(self, line: bytes) -> bytes:
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        until = time.monotonic() + _SECONDS + (_STARTING if self._fresh else 0)
        process.stdin.write(line)
        process.stdin.flush()
        parts: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part or sum(map(len, parts)) > _LARGEST_ANSWER:
                    raise BrokenPipeError
                parts.append(part)
        self._fresh = False
        return b"".join(parts)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            process.wait()

    def forget(self) -> None:
        """In a forked child: the rendering process belongs to the parent, and so may the thread that holds the lock."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0  # it is not a child of this process, so do not wait for it
        self._process = None


RENDERER = _Renderer()
atexit.register(RENDERER.kill)
os.register_at_fork(after_in_child=RENDERER.forget)
