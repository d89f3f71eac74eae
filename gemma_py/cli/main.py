"""The command line: arguments in, a command called, errors turned into one line and an exit code."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.cli.common import warn_of_threads
from gemma_py.cli.progress import shown_warnings
from gemma_py.errors import GemmaError

GOOD, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_COMMANDS = (
    "chat", "generate", "serve", "batch", "score", "bench", "sweep", "inspect", "verify", "models", "cache", "completion",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Usage errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see --help)\n")


def parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """Of the command that is wanted, or of all: a command's module brings what the command needs, which takes its time."""
    top = _Parser(
        prog="gemma_py",
        description="Run Gemma models on CPUs. The same prompt gives the same bits, on any machine.",
        epilog="MODEL is a GGUF file, a Hugging Face directory, a name from `gemma_py models`, or hf:owner/name (or "
        f"hf:owner/name/file.gguf, with @revision); {DEFAULT_MODEL} if left out. Exit codes: 0 good, 1 failed, 2 usage, 130 interrupted.",
    )
    top.add_argument("--version", action="version", version=f"gemma_py {gemma_py.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    # (`completion` is about all the others.)
    for name in (wanted,) if wanted in _COMMANDS and wanted != "completion" else _COMMANDS:
        module = importlib.import_module(f"gemma_py.cli.{name}")
        description = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=description.partition("\n")[0].rstrip("."),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # `--api-key SECRET` would pass for --api-key-file, and print the secret
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        command.set_defaults(run=module.run, commands=commands.choices)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        args = parser(given[0] if given else None).parse_args(given)
        if isinstance(getattr(args, "threads", None), int):
            warn_of_threads(args.threads)
        with shown_warnings():
            args.run(args)
        sys.stdout.flush()
        return GOOD
    except GemmaError as error:
        message = str(error)
    except BrokenPipeError:
        # The reader left (`... | head`): nothing more to say, not even at exit.
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
    except OSError:  # what could not be written is said below; Python must not try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"gemma_py: {' '.join(message.split())}", file=sys.stderr)
    return FAILED


def entry() -> NoReturn:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever called
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  (open until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())
