"""Convert messages to token ids with the checkpoint's jinja2 template, Gemma's turns, or a plain transcript.

A message cannot forge a turn, because control tokens such as <start_of_turn> are recognised only in text that the template
itself writes; see masks.py. Text is tokenised in one piece from one control token to the next, even if the template wrote
part of the text and a message another part. So the ids equal the ids of tokenising the whole prompt at once.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gemma_py.errors import InputError, TemplateError, UnsupportedError, install_command
from gemma_py.formats.files import parse_json, read_text
from gemma_py.templates.masks import MESSAGE, OF_OTHERS, Masks
from gemma_py.tokenizer import Tokenizer

# keys: role, content and reasoning_content; with tools also tool_calls, tool_call_id and name
Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]  # in OpenAI's format
ROLES = ("system", "user", "assistant")
_SECONDS = 5.0  # the time limit for rendering a prompt
_STARTING = 30.0  # additional seconds for the first prompt, because the rendering process has to start
_LARGEST_ANSWER = 1 << 30  # limit on the bytes that the rendering process may send


class Piece(NamedTuple):
    """A part of a prompt.

    control: whether the template wrote the text, so that control tokens in the text are recognised
    answer: whether the text is an answer of the model
    """

    text: str
    control: bool
    answer: bool = False


def checked_messages(messages: Any, roles: Sequence[str] = ROLES) -> list[Message]:
    """Check messages in OpenAI's format. Return only role, content and reasoning_content of each, as strings."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError("messages should be a non-empty list of objects with role and content")
    made = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"message {number} should be an object with role and content, found {message!r:.60}")
        role, content = message.get("role"), message.get("content")
        if role not in roles:
            raise InputError(f"message {number}: role should be one of {', '.join(roles)}, found {role!r:.40}")
        if role == "system" and number:
            raise InputError(f"message {number}: a system message should be the first message")
        if content is None and role == "assistant" and message.get("tool_calls"):
            content = ""
        checked = {"role": str(role), "content": _text(content, number)}
        if role == "assistant" and message.get("reasoning_content"):
            checked["reasoning_content"] = _text(message["reasoning_content"], number, "reasoning_content")
        made.append(checked)
    return made


def _text(content: Any, number: int, name: str = "content") -> str:
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UnsupportedError(
                    f"message {number}: {name} has the part {part!r:.60}; only text parts are supported"
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise InputError(f"message {number}: {name} should be text, found {content!r:.60}")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"message {number}: {name} has an unpaired surrogate, which is not a character") from None
    return content


@dataclass(frozen=True)
class Template:
    """A chat template.

    name: for display
    note: a warning for the user
    stop: strings that end an answer
    ends: control tokens that end an answer
    """

    name: str
    note: str | None = None
    stop: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def pieces(self, messages: Sequence[Message], tools: Tools = (), thinking: bool | None = None) -> list[Piece]:
        """Return the pieces of the prompt for checked messages. The last piece begins the model's turn.

        thinking: whether the model should think before an answer; None lets the template decide
        """
        raise NotImplementedError

    @property
    def knows_tools(self) -> bool:
        return False

    @property
    def knows_thinking(self) -> bool:
        return False


@dataclass(frozen=True)
class GemmaTurns(Template):
    """The chat template of Gemma 1 to 3.

    These models have no system role, so a system message becomes the beginning of the first user message.
    """

    def pieces(self, messages: Sequence[Message], tools: Tools = (), thinking: bool | None = None) -> list[Piece]:
        pieces = []
        for message in _system_in_user(messages):
            answer = message["role"] == "assistant"
            pieces += [Piece(f"<start_of_turn>{'model' if answer else 'user'}\n", True)]
            pieces += [Piece(message["content"].strip(), False, answer)]
            pieces += [Piece("<end_of_turn>\n", True)]
        return [*pieces, Piece("<start_of_turn>model\n", True)]


def _system_in_user(messages: Sequence[Message]) -> list[Message]:
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": system["content"]}, *rest]
    first = {"role": "user", "content": f"{system['content'].strip()}\n\n{rest[0]['content'].strip()}"}
    return [first, *rest[1:]]


@dataclass(frozen=True)
class Gemma4Turns(Template):
    """The chat template of Gemma 4, without tools, for checkpoints that have no template."""

    def pieces(self, messages: Sequence[Message], tools: Tools = (), thinking: bool | None = None) -> list[Piece]:
        pieces, rest = [], list(messages)
        if thinking or rest[0]["role"] == "system":
            system = rest.pop(0)["content"].strip() if rest[0]["role"] == "system" else ""
            begin = "<|turn>system\n" + ("<|think|>\n" if thinking else "")
            pieces += [Piece(begin, True), Piece(system, False), Piece("<turn|>\n", True)]
        for message in rest:
            answer = message["role"] == "assistant"
            pieces += [Piece(f"<|turn>{'model' if answer else 'user'}\n", True)]
            pieces += [Piece(message["content"].strip(), False, answer), Piece("<turn|>\n", True)]
        return [*pieces, Piece("<|turn>model\n", True)]

    @property
    def knows_thinking(self) -> bool:
        return True


_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_TURN_IN_TEXT = re.compile(rf"([{_BREAKS}])(?=[^\S{_BREAKS}]*(?:User|Assistant)\s*:)")


@dataclass(frozen=True)
class Transcript(Template):
    """A plain transcript with "User:" and "Assistant:", for base models, which were not trained with turn markers.

    A line of a message that begins with "User:" or "Assistant:" gets "> " in front, so that the line does not look like
    a turn.
    """

    def pieces(self, messages: Sequence[Message], tools: Tools = (), thinking: bool | None = None) -> list[Piece]:
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
GEMMA4 = Gemma4Turns("Gemma 4's turns", ends=("<turn|>", "<|tool_response>"))
TRANSCRIPT = Transcript(
    "a transcript",
    note="this is a base model: it continues a transcript and was never taught to answer",
    stop=("\nUser:", "\nAssistant:"),
)
BUILT_IN: dict[str, Template] = {"gemma": GEMMA, "gemma4": GEMMA4, "transcript": TRANSCRIPT}


def choose(
    tokenizer: Tokenizer, own: str | None, eos_token_ids: Sequence[int], wanted: str | Path | None = None
) -> Template:
    """Choose the template of a conversation.

    own: the source of the checkpoint's template, or None
    eos_token_ids: used if the checkpoint has no template. <end_of_turn> selects `gemma`, <turn|> selects `gemma4`, and other
    tokens select `transcript`.
    wanted: `gemma`, `gemma4`, `transcript` or a file, instead of the checkpoint's template
    """
    if isinstance(wanted, str) and wanted in BUILT_IN:
        return BUILT_IN[wanted]
    if wanted is not None:
        path = Path(wanted)
        try:
            exists = path.exists()
        except OSError:  # the name is longer than a file name can be
            exists = False
        if not exists:
            raise InputError(f"template {str(wanted)!r} is neither a file nor one of {', '.join(BUILT_IN)}")
        return _from_source(read_text(path), str(path), tokenizer, eos_token_ids)
    if own is not None:
        return _from_source(own, "the checkpoint's chat template", tokenizer, eos_token_ids)
    for template in (GEMMA, GEMMA4):
        if tokenizer.token_id(template.ends[0]) in eos_token_ids:
            return template
    return TRANSCRIPT


@dataclass
class Encoded:
    """A cache of the last prompt's tokenised texts. The next prompt of a conversation contains most of these texts again.

    texts: text without control tokens -> ids
    parts: text that a template wrote -> result of `Tokenizer.control_parts`
    """

    texts: dict[str, list[int]] = field(default_factory=dict)
    parts: dict[str, list[tuple[str, int | None]]] = field(default_factory=dict)


def encode(
    pieces: Sequence[Piece],
    tokenizer: Tokenizer,
    known: Mapping[str, list[int]] | None = None,
    encoded: Encoded | None = None,
) -> list[int]:
    """Return the token ids of the pieces, with one bos token in front.

    known: stripped text of an earlier answer -> the ids that the model generated. Tokenising the text could give other ids,
    which would not match the KV cache.
    encoded: the cache, which `encode` updates
    """
    before, used = encoded or Encoded(), Encoded()
    # texts[i] is a text without control tokens, and following[i] has the ids after this text. Each turn of a conversation
    # runs these loops over all messages, so the loops avoid slow function calls.
    texts: list[str] = []
    following: list[Sequence[int]] = []
    text = ""
    for piece in pieces:
        if piece.control:
            if piece.text not in used.parts:
                known_parts = before.parts.get(piece.text)
                used.parts[piece.text] = tokenizer.control_parts(piece.text) if known_parts is None else known_parts
            for part, token in used.parts[piece.text]:
                text += part
                if token is not None:
                    texts += (text,)
                    following += ((token,),)
                    text = ""
        elif piece.answer and known and (answer := known.get(piece.text.strip())):
            texts += (text,)
            following += (answer,)
            text = ""
        else:
            text += piece.text
    ids: list[int] = []
    for plain, more in zip([*texts, text], [*following, ()], strict=True):
        if plain:
            if plain not in used.texts:
                known_ids = before.texts.get(plain)
                used.texts[plain] = tokenizer.encode(plain, bos=False) if known_ids is None else known_ids
            ids += used.texts[plain]
        ids += more
    if encoded is not None:
        encoded.texts, encoded.parts = used.texts, used.parts
    bos = tokenizer.bos_id
    if bos is None:
        return ids
    first = next((at for at, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[first:]]


# --- templates in jinja2 ----------------------------------------------------------------------------------------------

# A token of this list ends the model's turn if the template contains the token.
_ENDS = ("<end_of_turn>", "<turn|>", "<|tool_response>", "<start_function_response>")


@dataclass(frozen=True)
class Jinja(Template):
    """A jinja2 template. delimiters: the first and last characters of all control tokens, such as "<>"."""

    source: str = ""
    globals: tuple[tuple[str, Any], ...] = ()
    delimiters: str = "<>[]"

    def pieces(self, messages: Sequence[Message], tools: Tools = (), thinking: bool | None = None) -> list[Piece]:
        try:
            return self._rendered(messages, tools, thinking)
        except TemplateError:
            # Many templates refuse a system message. Try again with the system message in the user's turn.
            if messages[0]["role"] != "system":
                raise
            return self._rendered(_system_in_user(messages), tools, thinking)

    @property
    def knows_tools(self) -> bool:
        return re.search(r"\btools\b", self.source) is not None

    @property
    def knows_thinking(self) -> bool:
        return re.search(r"\benable_thinking\b", self.source) is not None

    def _rendered(self, messages: Sequence[Message], tools: Tools, thinking: bool | None) -> list[Piece]:
        masks = Masks(messages, tools, self.delimiters)
        given = {**dict(self.globals), "tools": masks.tools or None}
        if thinking is not None:
            given["enable_thinking"] = thinking
        text, plain = RENDERER.render(self.name, self.source, given, [masks.messages, masks.delimited])
        codes = masks.original(text)
        if not np.array_equal(codes, masks.original_of_delimiters(plain)):
            raise TemplateError(
                f"{self.name} changes the text of messages, so message text and control tokens cannot be separated; "
                f"choose another template, or one of {', '.join(BUILT_IN)}"
            )
        whole = codes.tobytes().decode("utf-32-le")
        pieces, at = [], 0
        for number, part in enumerate(MESSAGE.split(text)):
            control = number % 2 == 0
            if part:
                answer = not control and OF_OTHERS.search(part) is None
                pieces.append(Piece(whole[at : at + len(part)], control, answer))
            at += len(part)
        return pieces


def _from_source(source: str, name: str, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Template:
    if importlib.util.find_spec("jinja2") is None:
        raise TemplateError(f"{name} needs jinja2: {install_command('chat')}, or choose one of {', '.join(BUILT_IN)}")
    ends = tuple(end for end in _ENDS if end in source and tokenizer.token_id(end) is not None)
    bos, eos = (None if token is None else tokenizer.piece(token) for token in (tokenizer.bos_id, *eos_token_ids[:1]))
    given = (("bos_token", bos or ""), ("eos_token", eos or ""), ("add_generation_prompt", True))
    controls = filter(None, map(tokenizer.piece, tokenizer.control_ids))
    delimiters = "".join(sorted({control[at] for control in controls for at in (0, -1)}))
    RENDERER.start()
    return Jinja(name, ends=ends, source=source, globals=given, delimiters=delimiters)


class _Renderer:
    """The process that renders all templates. After a timeout, the process is killed. The next rendering starts another."""

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
            # -P keeps the program's directory out of sys.path. In a process group of its own, the process receives no signal
            # from Ctrl-C.
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
                    raise TemplateError(f"{name}: rendering did not end within {_SECONDS:g} seconds") from None
                if isinstance(error, OSError):
                    raise TemplateError(f"{name}: the rendering process has died") from None
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
        """Reset the renderer in a forked child process. The old lock and rendering process belong to the parent process."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0  # otherwise Popen would wait for the parent's rendering process
        self._process = None


RENDERER = _Renderer()
atexit.register(RENDERER.kill)
os.register_at_fork(after_in_child=RENDERER.forget)
