"""The command line: parse the arguments, run a command, and report every error in one line with an exit code."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.cli.common import notify, warn_of_threads
from gemma_py.cli.progress import shown_warnings
from gemma_py.errors import GemmaError

GOOD, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_COMMANDS = (
    "chat", "generate", "serve", "batch", "embed", "score", "bench", "sweep", "inspect", "verify", "audit", "keygen", "nodes",
    "models", "cache",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with a message. A misspelt option is named rather than the argument that is therefore missing."""
        options = [word.partition("=")[0] for word in self._given if word.startswith("--") and word != "--"]
        unknown = [option for option in options if option not in self._option_string_actions]
        if message.endswith(("is required", "are required")) and unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
        self.exit(USAGE, f"{self.prog}: {message} (see --help)\n")


def parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with only the command `wanted`, because importing the modules of all commands takes time.

    If `wanted` is not a command, the parser has all commands.
    """
    top = _Parser(
        prog="gemma_py",
        description="Run Gemma models on CPUs. The same prompt gives the same bits with any number of threads and on any machine.",
        epilog="MODEL is a GGUF file, a Hugging Face directory, a name from `gemma_py models`, or hf:owner/name (or "
        f"hf:owner/name/file.gguf, with @revision); without MODEL, {DEFAULT_MODEL} is used. "
        "Exit codes: 0 success, 1 failure, 2 a command line that cannot be parsed, 130 interrupted.",
    )
    top.add_argument("--version", action="version", version=f"gemma_py {gemma_py.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name in (wanted,) if wanted in _COMMANDS else _COMMANDS:
        module = importlib.import_module(f"gemma_py.cli.{name}")
        description = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=description.partition("\n")[0].rstrip("."),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # Otherwise argparse would read `--api-key SECRET` as --api-key-file, and the error message would show SECRET.
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        args = parser(given[0] if given else None).parse_args(given)
        if isinstance(getattr(args, "threads", None), int):
            warn_of_threads(args.threads)
        with shown_warnings():
            code: int | None = args.run(args)
        sys.stdout.flush()
        return GOOD if code is None else code
    except GemmaError as error:
        message = str(error)
    except BrokenPipeError:
        # The reader of the pipe has ended, as in `gemma_py ... | head`. Redirect stdout, because Python flushes stdout at
        # exit, which would raise this error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError:
        message = "out of memory"
    except OSError as error:
        message = str(error)
    try:
        sys.stdout.flush()
    except OSError:  # redirect stdout, because Python flushes stdout at exit, which would raise this error again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    notify(message)
    return FAILED


def entry() -> NoReturn:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process has closed this stream
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  (it stays open until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())
