"""What begins with a slash in a chat."""

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_py.chat.conversation import Conversation
from gemma_py.cli.common import advice_on_threads
from gemma_py.errors import InputError

if TYPE_CHECKING:
    from gemma_py.cli.chat import Chat

FILE = "FILE"
# What /set knows, and the names of Sampling; max_tokens is the conversation's.
SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repeat": "repetition_penalty",
    "presence": "presence_penalty", "frequency": "frequency_penalty", "max_tokens": "max_tokens", "seed": "seed",
}  # fmt: skip
_WHOLE = ("top_k", "max_tokens", "seed")
_SHOWN_TOKENS = 30  # of a conversation


@dataclass(frozen=True)
class Command:
    argument: str
    says: str
    run: Callable[["Chat", str], None]


def run_command(chat: "Chat", line: str) -> None:
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists what there is"
        raise InputError(f"no command /{name:.40}; {hint} (a message may begin with a space before the slash)")
    argument = argument.strip()
    if argument and not command.argument:
        raise InputError(f"/{name} takes nothing after it, found {argument!r:.40}")
    if not argument and command.argument.startswith(FILE):
        raise InputError(f"/{name} needs the name of a file: /{name} {command.argument}")
    command.run(chat, argument)


def arguments(name: str) -> tuple[str, ...]:
    """What may follow a command, for completion."""
    if name == "set":
        return tuple(SETTINGS)
    return (FILE,) if COMMANDS[name].argument.startswith(FILE) else ()


def _help(chat: "Chat", _: str) -> None:
    usages = {f"/{name} {command.argument}".rstrip(): command.says for name, command in COMMANDS.items()}
    width = max(map(len, usages))
    chat.screen.note("\n".join(f"{usage:{width}}  {says}" for usage, says in usages.items()))


def _system(chat: "Chat", text: str) -> None:
    conversation = chat.conversation
    if text:
        conversation.set_system(None if text == "none" else text)
    chat.screen.note(f"system: {conversation.system or 'none'}")


def _clear(chat: "Chat", _: str) -> None:
    chat.conversation.clear()
    chat.screen.note("the conversation begins anew")


def _undo(chat: "Chat", _: str) -> None:
    chat.screen.note(f"taken back: {_begin(chat.conversation.undo())}")


def _retry(chat: "Chat", _: str) -> None:
    chat.answer(chat.conversation.retry)


def _edit(chat: "Chat", text: str) -> None:
    if text:
        chat.answer(lambda: chat.conversation.edit(text))
    elif not chat.screen.lasting:
        raise InputError("/edit needs the text here: /edit TEXT")
    else:
        chat.draft = chat.conversation.last_text()


def _set(chat: "Chat", assignment: str) -> None:
    """/set NAME VALUE; without a value it shows, without a name it shows all."""
    name, _, text = assignment.replace("=", " ").partition(" ")
    if name and name not in SETTINGS:
        raise InputError(f"no setting {name!r:.40}; there are {', '.join(SETTINGS)}")
    conversation = chat.conversation
    if text.strip():
        value = _value(name, text.strip())
        if name == "max_tokens":
            conversation.max_tokens = value
        else:
            conversation.sampling = replace(conversation.sampling, **{SETTINGS[name]: value})
    chat.screen.note(", ".join(f"{one} {_show(conversation, one)}" for one in ([name] if name else SETTINGS)))


def _value(name: str, text: str) -> Any:
    if text == "none" and name in ("max_tokens", "seed"):
        return None
    kind = int if name in _WHOLE else float
    try:
        value: Any = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InputError(f"{name} should be {what}, found {text!r:.40}") from None
    if name == "max_tokens" and value < 1:
        raise InputError(f"max_tokens should be at least 1, or none, found {value}")
    return value


def _show(conversation: Conversation, name: str) -> str:
    value = conversation.max_tokens if name == "max_tokens" else getattr(conversation.sampling, SETTINGS[name])
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _threads(chat: "Chat", number: str) -> None:
    engine = chat.conversation.engine
    if number:
        if not number.isdecimal():
            raise InputError(f"threads should be a whole number, found {number!r:.40}")
        engine.set_threads(int(number))
        advice = advice_on_threads(engine.threads)
        if advice is not None:
            chat.screen.note(advice)
    chat.screen.note(f"threads {engine.threads}; no bit depends on it")


def _stats(chat: "Chat", _: str) -> None:
    conversation = chat.conversation
    stats = conversation.stats
    if stats is None:
        raise InputError("there is no answer yet")
    rows = {
        "prompt": f"{stats.prompt_tokens:,} tokens, {stats.cached_tokens:,} of them kept from before",
        "prefill": f"{stats.prefill_seconds:.3f} s, {stats.prefill_rate:,.1f} tok/s",
        "first token": f"after {stats.first_token_seconds:.3f} s",
        "answer": f"{stats.generated_tokens:,} tokens in {stats.decode_seconds:.3f} s, {stats.decode_rate:,.1f} tok/s",
        "ended": {None: "stopped", "stop": "by itself", "length": "cut"}[stats.finish_reason],
        "seed": "none" if stats.seed is None else str(stats.seed),
        "context": f"{conversation.tokens_used:,} of {conversation.context:,} tokens",
        "threads": str(conversation.engine.threads),
    }
    chat.screen.note("\n".join(f"{name:12} {value}" for name, value in rows.items()))


def _save(chat: "Chat", name: str) -> None:
    path = Path(name).expanduser()
    chat.conversation.save(path)
    chat.screen.note(f"saved {path}")


def _load(chat: "Chat", name: str) -> None:
    path = Path(name).expanduser()
    chat.conversation = Conversation.load(chat.conversation.engine, path)
    messages = chat.conversation.messages
    last = f"; the last: {_begin(messages[-1]['content'])}" if messages else ""
    chat.screen.note(f"loaded {path}: {len(messages)} messages, {len(chat.conversation.ids):,} tokens computed{last}")


def _export(chat: "Chat", argument: str) -> None:
    name, _, form = argument.rpartition(" ")
    if not name or "." in form or "/" in form:  # a name, whose parts blanks may divide
        name, form = argument, "json" if argument.endswith(".json") else "markdown"
    path = Path(name).expanduser()
    chat.conversation.export(path, form)
    chat.screen.note(f"exported {path} as {form}")


def _tokens(chat: "Chat", text: str) -> None:
    """Of a text as a message has it, or of the conversation."""
    conversation = chat.conversation
    tokenizer = conversation.engine.text_tokenizer()
    ids = tokenizer.encode(text)[len(tokenizer.encode("")) :] if text else conversation.ids
    shown = ids if text else ids[-_SHOWN_TOKENS:]
    pieces = " ".join(f"{token}:{json.dumps(tokenizer.piece(token), ensure_ascii=False)}" for token in shown)
    note = f"{len(ids):,} tokens{'' if len(shown) == len(ids) else f', the last {len(shown)}'}"
    if not text:
        note = f"context {conversation.tokens_used:,} of {conversation.context:,}; computed {note}"
    chat.screen.note(f"{note}: {pieces}" if pieces else note)


def _verify(chat: "Chat", _: str) -> None:
    conversation = chat.conversation
    threads = conversation.engine.threads + 1
    with chat.screen.computing() as wanted:
        try:
            tokens = conversation.verify(threads, progress=chat.watch("computing again", wanted))
        finally:
            chat.screen.waiting("")
    chat.screen.note(
        f"{tokens:,} tokens computed again, {threads} threads, chunks of 7: keys and values have the same bits"
    )


def _exit(chat: "Chat", _: str) -> None:
    chat.over = True


def _begin(text: str) -> str:
    """Of a text, what fits on a line."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


COMMANDS = {
    "help": Command("", "this list", _help),
    "system": Command("[TEXT|none]", "what the model should know or be; shows it, sets it, takes it away", _system),
    "clear": Command("", "forget all messages but the system's", _clear),
    "undo": Command("", "take back the last message and its answer", _undo),
    "retry": Command("", "another answer", _retry),
    "edit": Command("[TEXT]", "put the last message differently", _edit),
    "set": Command("[NAME [VALUE]]", f"sampling: {', '.join(SETTINGS)}", _set),
    "threads": Command("[N]", "worker threads", _threads),
    "stats": Command("", "figures of the last answer", _stats),
    "save": Command(FILE, "text, settings, keys and values", _save),
    "load": Command(FILE, "go on with what was saved, without computing it again", _load),
    "export": Command("FILE [markdown|json]", "the text alone", _export),
    "tokens": Command("[TEXT]", "how a text, or the conversation, is cut into tokens", _tokens),
    "verify": Command("", "compute the conversation again, otherwise cut up, and compare the bits", _verify),
    "exit": Command("", "leave, as Ctrl-D does", _exit),
}
