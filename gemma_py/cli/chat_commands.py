"""The slash commands of a chat, such as /help."""

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_py.chat.conversation import Conversation
from gemma_py.cli.common import advice_on_threads, write_receipt
from gemma_py.errors import InputError
from gemma_py.paths import check_writable

if TYPE_CHECKING:
    from gemma_py.cli.chat import Chat

FILE = "FILE"
# The name of a setting in /set -> the field of `Sampling`. max_tokens is an attribute of `Conversation` instead.
SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repeat": "repetition_penalty",
    "presence": "presence_penalty", "frequency": "frequency_penalty", "max_tokens": "max_tokens", "seed": "seed",
}  # fmt: skip
_WHOLE = ("top_k", "max_tokens", "seed")
_SWITCH = {"on": True, "off": False, "default": None}
_SHOWN_TOKENS = 30


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
        hint = f"did you mean /{near[0]}?" if near else "/help lists all commands"
        raise InputError(
            f"unknown command /{name:.40}; {hint} (to send a message that begins with a slash, put a space before the slash)"
        )
    argument = argument.strip()
    if argument and not command.argument:
        raise InputError(f"/{name} takes no argument, found {argument!r:.40}")
    if not argument and command.argument.startswith(FILE):
        raise InputError(f"/{name} needs a file name: /{name} {command.argument}")
    command.run(chat, argument)


def arguments(name: str) -> tuple[str, ...]:
    """Return the possible arguments of a command, for completion with the Tab key."""
    if name == "set":
        return tuple(SETTINGS)
    if name == "think":
        return tuple(_SWITCH)
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
    chat.screen.note("the conversation is empty again")


def _undo(chat: "Chat", _: str) -> None:
    chat.screen.note(f"removed: {_begin(chat.conversation.undo())}")


def _retry(chat: "Chat", _: str) -> None:
    chat.answer(chat.conversation.retry)


def _edit(chat: "Chat", text: str) -> None:
    if text:
        chat.answer(lambda: chat.conversation.edit(text))
    elif not chat.screen.interactive:
        raise InputError("/edit needs the new text of the message: /edit TEXT")
    else:
        chat.draft = chat.conversation.last_text()


def _set(chat: "Chat", assignment: str) -> None:
    name, _, text = assignment.replace("=", " ").partition(" ")
    if name and name not in SETTINGS:
        raise InputError(f"unknown setting {name!r:.40}; the settings are {', '.join(SETTINGS)}")
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


def _think(chat: "Chat", choice: str) -> None:
    conversation = chat.conversation
    if choice and choice not in _SWITCH:
        raise InputError(f"/think takes {', '.join(_SWITCH)}, found {choice!r:.40}")
    if choice:
        conversation.set_thinking(_SWITCH[choice])
    chosen = next(name for name, thinking in _SWITCH.items() if thinking is conversation.thinking)
    chat.screen.note(f"thoughts: {'as the chat template has them' if chosen == 'default' else chosen}")


def _threads(chat: "Chat", number: str) -> None:
    engine = chat.conversation.engine
    if number:
        if not number.isdecimal():
            raise InputError(f"threads should be a whole number, found {number!r:.40}")
        engine.set_threads(int(number))
        advice = advice_on_threads(engine.threads)
        if advice is not None:
            chat.screen.note(advice)
    chat.screen.note(f"threads {engine.threads}; answers have the same bits with any number of threads")


def _stats(chat: "Chat", _: str) -> None:
    conversation = chat.conversation
    stats = conversation.stats
    if stats is None:
        raise InputError("/stats needs an answer, and this chat has none yet")
    rows = {
        "prompt": f"{stats.prompt_tokens:,} tokens, {stats.cached_tokens:,} of them cached",
        "prefill": f"{stats.prefill_seconds:.3f} s, {stats.prefill_rate:,.1f} tok/s",
        "first token": f"after {stats.first_token_seconds:.3f} s",
        "answer": f"{stats.generated_tokens:,} tokens in {stats.decode_seconds:.3f} s, {stats.decode_rate:,.1f} tok/s",
        "speculation": f"{stats.tokens_a_pass:.2f} tokens a pass, {stats.accepted_tokens:,} of {stats.guessed_tokens:,} guesses accepted",
        "ended": {None: "stopped by you", "stop": "by itself", "length": "cut off"}[stats.finish_reason],
        "seed": "none" if stats.seed is None else str(stats.seed),
        "context": f"{conversation.tokens_used:,} of {conversation.context:,} tokens",
        "threads": str(conversation.engine.threads),
    }
    chat.screen.note("\n".join(f"{name:12} {value}" for name, value in rows.items()))


def _receipt(chat: "Chat", name: str) -> None:
    path = Path(name).expanduser()
    check_writable(path)
    with chat.screen.computing() as wanted:
        try:
            receipt = chat.conversation.receipt(chat.watch("making the receipt", wanted))
        finally:
            chat.screen.waiting("")
    write_receipt(path, receipt, chat.signer)
    chat.screen.note(f"wrote {path}: gemma_py audit checks the last answer with it")


def _save(chat: "Chat", name: str) -> None:
    path = Path(name).expanduser()
    chat.conversation.save(path)
    chat.screen.note(f"saved {path}")


def _load(chat: "Chat", name: str) -> None:
    path = Path(name).expanduser()
    chat.conversation = Conversation.load(chat.conversation.engine, path)
    messages = chat.conversation.messages
    last = f"; the last one: {_begin(messages[-1]['content'])}" if messages else ""
    chat.screen.note(f"loaded {path}: {len(messages)} messages, {len(chat.conversation.ids):,} tokens restored{last}")


def _export(chat: "Chat", argument: str) -> None:
    name, _, form = argument.rpartition(" ")
    # A file name may have spaces. A last word with a dot or a slash belongs to the file name and is not the format.
    if not name or "." in form or "/" in form:
        name, form = argument, "json" if argument.endswith(".json") else "markdown"
    path = Path(name).expanduser()
    chat.conversation.export(path, form)
    chat.screen.note(f"exported {path} as {form}")


def _tokens(chat: "Chat", text: str) -> None:
    conversation = chat.conversation
    tokenizer = conversation.engine.text_tokenizer()
    ids = tokenizer.encode(text)[len(tokenizer.encode("")) :] if text else conversation.ids
    shown = ids if text else ids[-_SHOWN_TOKENS:]
    pieces = " ".join(f"{token}:{json.dumps(tokenizer.piece(token), ensure_ascii=False)}" for token in shown)
    note = f"{len(ids):,} tokens{'' if len(shown) == len(ids) else f', of which the last {len(shown)} are'}"
    if not text:
        note = f"context {conversation.tokens_used:,} of {conversation.context:,}; in the KV cache {note}"
    chat.screen.note(f"{note}: {pieces}" if pieces else note)


def _verify(chat: "Chat", _: str) -> None:
    conversation = chat.conversation
    threads = conversation.engine.threads + 1
    with chat.screen.computing() as wanted:
        try:
            tokens = conversation.verify(threads, progress=chat.watch("verifying", wanted))
        finally:
            chat.screen.waiting("")
    chat.screen.note(
        f"{tokens:,} tokens computed again with {threads} threads in chunks of 7: keys and values have the same bits"
    )


def _exit(chat: "Chat", _: str) -> None:
    chat.over = True


def _begin(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


COMMANDS = {
    "help": Command("", "list the commands", _help),
    "system": Command("[TEXT|none]", "show, set or remove the system message", _system),
    "clear": Command("", "forget all messages but the system message", _clear),
    "undo": Command("", "remove the last message and its answer", _undo),
    "retry": Command("", "generate another answer to the last message", _retry),
    "edit": Command("[TEXT]", "change the last message and send it again", _edit),
    "set": Command("[NAME [VALUE]]", f"show or change a setting: {', '.join(SETTINGS)}", _set),
    "think": Command("[on|off|default]", "let the model think before it answers, or not", _think),
    "threads": Command("[N]", "show or change the number of worker threads", _threads),
    "stats": Command("", "show statistics about the last answer", _stats),
    "receipt": Command(
        FILE, "write a receipt, with which anyone who has the model can check the last answer", _receipt
    ),
    "save": Command(FILE, "save the messages, the settings and the KV cache", _save),
    "load": Command(FILE, "continue a saved conversation without computing it again", _load),
    "export": Command("FILE [markdown|json]", "write the messages as text", _export),
    "tokens": Command("[TEXT]", "show the tokens of a text or of the conversation", _tokens),
    "verify": Command(
        "", "recompute the conversation with another number of threads and chunk size, and compare the bits", _verify
    ),
    "exit": Command("", "end the chat, as Ctrl-D does", _exit),
    "quit": Command("", "end the chat", _exit),
}
