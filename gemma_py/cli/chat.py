"""Chat with a model.

In a terminal, Enter sends a message, Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D ends the chat, and /help lists
the commands.

With --prompt or piped input, answers go to stdout and everything else to stderr. Each line of piped input is a message or a
command; `--prompt -` sends all of standard input as one message. The program exits at the first error.

With --json, each answer is printed as one line of JSON: {"text", "reasoning_content", "prompt_tokens", "cached_tokens",
"generated_tokens", "passes", "guessed_tokens", "accepted_tokens", "prefill_seconds", "decode_seconds", "first_token_seconds",
"seed", "finish_reason"}. reasoning_content is null if the model did not think.
"""

import argparse
import sys
from collections.abc import Callable

from gemma_py.chat.conversation import AnswerStats, Conversation, TokenStream
from gemma_py.cli.chat_commands import COMMANDS, arguments, run_command
from gemma_py.cli.common import (
    add_address,
    add_engine,
    add_model,
    add_open_cluster,
    add_shards,
    add_sign,
    note_exceptions,
    positive,
    read_standard_input,
    signer_of,
)
from gemma_py.cli.loading import load_engine
from gemma_py.cli.sampling import add_sampling, add_speculate, sampling_options
from gemma_py.cli.screen import PlainScreen, Screen, Stopped
from gemma_py.errors import ContextError, GemmaError, InputError, install_command
from gemma_py.receipts.envelope import Signer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="send one message, print the answer and exit; - reads the message from standard input",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message, such as who the model should be")
    parser.add_argument(
        "--template",
        metavar="FORM",
        help="the chat template: gemma, gemma4, transcript, or a Jinja file (default: the checkpoint's own)",
    )
    parser.add_argument(
        "--think",
        action="store_true",
        help="let the model think before an answer, if the model can; thoughts are shown dimmed, or printed on stderr",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="the largest number of tokens in an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end answers before this text; may be given several times"
    )
    parser.add_argument(
        "--no-markdown", action="store_true", help="show answers as plain text, without rendering their Markdown"
    )
    add_sampling(parser)
    add_sign(parser)
    add_speculate(parser)
    add_engine(parser)
    add_shards(parser)
    add_address(parser)
    add_open_cluster(parser)


def run(args: argparse.Namespace) -> None:
    screen = open_screen(args)
    signer = signer_of(args)
    prompt = read_standard_input() if args.prompt == "-" else args.prompt
    screen.waiting("loading the model")
    with load_engine(args) as engine:
        sampling = engine.chat_sampling(sampling_options(args))
        conversation = Conversation(
            engine, args.system, sampling, args.template, args.max_tokens, args.stop, True if args.think else None
        )
        conversation.logprobs = False
        screen.waiting("")
        note_exceptions(engine)
        chat = Chat(conversation, screen, signer)
        if prompt is not None:
            chat.answer(lambda: conversation.send(prompt))
        else:
            chat.talk()


def open_screen(args: argparse.Namespace) -> Screen:
    if args.json or args.prompt is not None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return PlainScreen(args.json)
    try:
        from gemma_py.cli.terminal import Terminal
    except ModuleNotFoundError as error:
        raise InputError(
            f"a chat in a terminal needs the package {error.name}: {install_command('chat')}; "
            "--prompt and piped input work without this package"
        ) from None
    return Terminal({f"/{name}": arguments(name) for name in COMMANDS}, markdown=not args.no_markdown)


class Chat:
    """A chat on a screen. signer: signs the receipts of /receipt; None for unsigned receipts."""

    def __init__(self, conversation: Conversation, screen: Screen, signer: Signer | None = None) -> None:
        self.conversation, self.screen, self.signer = conversation, screen, signer
        self.draft = ""
        self.over = False
        if screen.interactive:
            engine = conversation.engine
            screen.note(
                f"{engine.name}, {count(engine.threads, 'thread')}, context of {engine.context:,} tokens.\n"
                "/help lists the commands, Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D ends the chat."
            )
        if conversation.template.note is not None:
            screen.note(conversation.template.note)

    def talk(self) -> None:
        while not self.over:
            draft, self.draft = self.draft, ""
            line = self.screen.read(draft)
            if line is None:
                return
            if line.strip():
                self.take(line, edited=bool(draft))

    def take(self, line: str, edited: bool) -> None:
        """Handle a message or a command. A terminal shows errors; without a terminal, errors are raised."""
        try:
            if line.startswith("/"):
                run_command(self, line)
            elif edited:
                self.answer(lambda: self.conversation.edit(line))
            else:
                self.answer(lambda: self.conversation.send(line))
        except GemmaError as error:
            if not self.screen.interactive:
                raise
            self.screen.error(str(error))
        except KeyboardInterrupt:
            if not self.screen.interactive:
                raise
            self.screen.note("stopped")

    def answer(self, begin: Callable[[], TokenStream]) -> None:
        """Show an answer while it is generated. If the user stops the answer, the conversation keeps the generated part."""
        tokens = self._with_room(begin)
        before = self.conversation.stats
        stopped = False
        with self.screen.computing() as wanted:
            self.conversation.prefilling = self.watch("reading", wanted)
            try:
                for token in tokens:
                    if token.reasoning:
                        self.screen.think(token.reasoning)
                    if token.text:
                        self.screen.write(token.text)
                    if wanted():
                        stopped = token.finish_reason is None
                        break
            except Stopped:
                stopped = True
            finally:
                tokens.close()
                stats = self.conversation.stats
                self.screen.end_answer(None if stats is before else stats)
        if stats is None or stats is before:
            self.screen.note(
                "stopped before the answer began; the conversation is unchanged" if stopped else "no answer"
            )
            return
        self.screen.note(summary(stats, self.conversation.context))
        if stats.finish_reason == "length":
            self.screen.note(self._why_cut(stats))

    def watch(self, what: str, wanted: Callable[[], bool]) -> Callable[[int, int], None]:
        """Return a callback that shows progress, and that raises Stopped if the user wants to stop."""

        def progress(done: int, total: int) -> None:
            self.screen.progress(what, done, total)
            if wanted():
                raise Stopped

        return progress

    def _with_room(self, begin: Callable[[], TokenStream]) -> TokenStream:
        before = list(self.conversation.messages)
        while True:
            try:
                return begin()
            except ContextError as error:
                first = 0 if self.conversation.system is None else 1
                exchanges = len(self.conversation.messages[first:]) // 2
                if not self.screen.interactive or not exchanges:
                    raise
                self.screen.error(str(error))
                forgotten = (exchanges + 1) // 2
                choice = self.screen.ask(
                    f"o: forget the oldest {forgotten} of {count(exchanges, 'exchange')}, c: forget all, Enter: do not send"
                )
                if choice not in ("o", "c"):
                    self.conversation.messages = before
                    raise ContextError("the message was not sent; the up arrow key brings the message back") from None
                del self.conversation.messages[first : first + 2 * (forgotten if choice == "o" else exchanges)]

    def _why_cut(self, stats: AnswerStats) -> str:
        if stats.prompt_tokens + stats.generated_tokens >= self.conversation.context:
            why, remedy = "because the context is full", "make room with /undo or /clear"
            alone = "shorten the message"
        else:
            why = f"at {self.conversation.max_tokens} tokens"
            remedy, alone = (
                "raise the limit with /set max_tokens N, then use /retry",
                "raise the limit with --max-tokens N",
            )
        return f"the answer was cut off {why}: {remedy if self.screen.interactive else alone}"


def summary(stats: AnswerStats, context: int) -> str:
    cached = f" ({stats.cached_tokens:,} cached)" if stats.cached_tokens else ""
    prompt = f"prompt {count(stats.prompt_tokens, 'token')}{cached} at {stats.prefill_rate:,.0f}/s"
    answer = f"answer {stats.generated_tokens:,}"
    if stats.generated_tokens > 1:
        answer += f" at {stats.decode_rate:,.1f}/s"
    if stats.guessed_tokens:
        accepted = f"{stats.accepted_tokens:,} of {stats.guessed_tokens:,} guesses accepted"
        answer += f" ({stats.tokens_a_pass:.1f} a pass, {accepted})"
    used = stats.prompt_tokens + stats.generated_tokens
    return f"{prompt}, {answer}, first after {stats.first_token_seconds:.2f} s, context {used:,} of {context:,}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
