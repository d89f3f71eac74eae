"""From a fresh clone to a running model: makes .venv, installs gemma_py into it, and runs a command.

    python3 tools/quickstart.py test [PYTEST ARGUMENTS]    lint, types, and all tests
    python3 tools/quickstart.py test TIER [...]            the tests of one tier alone
    python3 tools/quickstart.py chat [MODEL] [ARGUMENTS]   talk to the demo model, or to your own
    python3 tools/quickstart.py serve [MODEL] [ARGUMENTS]  serve a model over HTTP, with a chat page
    python3 tools/quickstart.py run COMMAND [ARGUMENTS]    any `python -m gemma_py` command

A tier is a folder of tests/:
    unit     single modules; under a minute once kernels are compiled; needs only pytest, hypothesis and the core packages
    bits     equivalence with the specification, negative controls, kernels, stores
    chat     templates, conversations, the terminal
    server   HTTP, the scheduler, the web page
    model    models of the workers' synchronisation

Uses only the standard library. May be run again at any time, and keeps an environment that exists.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
EXTRAS = {
    "test": "test",
    "chat": "demo,chat,hf,sign",
    "serve": "demo,serve,schema,hf,sign",
    "run": "demo,chat,serve,schema,hf,sign",
}
# Each of two processes runs a test file at a time, because tests often wait for child processes, and a core would be
# idle.
IN_TWO_PROCESSES = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
TIERS = ("unit", "bits", "chat", "server", "model")
MEGABYTES = {"test": 450}  # MB that a task downloads; other tasks download 350


def say(message: str) -> None:
    print(f"quickstart: {message}", file=sys.stderr, flush=True)


def fingerprint(extra: str) -> str:
    """A digest that changes with the packages to install and with the path of the environment."""
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + f"{extra} {ROOT} {sys.version}".encode()).hexdigest()


def works() -> bool:
    """Whether the environment's Python starts and has pip. An incomplete or moved environment does not."""
    command = [str(PYTHON), "-c", "import pip"]
    return PYTHON.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def prepare(task: str) -> None:
    extra = EXTRAS[task]
    if not works():
        say(f"making {ENVIRONMENT.name} (a few seconds)")
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        venv.create(ENVIRONMENT, with_pip=True)
    stamp, wanted = ENVIRONMENT / f"installed-{extra}", fingerprint(extra)
    for enough in EXTRAS.values():  # another task may have installed the same packages and more
        made = ENVIRONMENT / f"installed-{enough}"
        if {*extra.split(",")} <= {*enough.split(",")} and made.exists() and made.read_text() == fingerprint(enough):
            return
    there = any(ENVIRONMENT.glob("installed-*"))
    what = "only what is not there yet" if there else f"at most {MEGABYTES.get(task, 350)} MB, the demo model among it"
    say(f"installing gemma_py with the extra '{extra}' (downloads {what})")
    start = time.monotonic()
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", f"{ROOT}[{extra}]"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        say("the installation failed; the output of pip is above. To try again, run this command again.")
        sys.exit(1)
    stamp.write_text(wanted)
    say(f"installed in {time.monotonic() - start:.0f} s")


def run(*command: str, folder: Path | None = None) -> int:
    say("running " + " ".join(command))
    try:
        return subprocess.run([str(PYTHON), "-m", *command], cwd=folder, check=False).returncode
    except KeyboardInterrupt:
        return 130


def become(*command: str) -> NoReturn:
    """Replace this process by the command, which then receives Ctrl-C and Ctrl-Z."""
    say("running " + " ".join(command))
    os.execv(PYTHON, [str(PYTHON), "-m", *command])


def checks(arguments: list[str]) -> list[tuple[str, ...]]:
    """The commands of `test`: the tests of a tier, or else lint, types and all tests."""
    if arguments and arguments[0] in TIERS:
        return [("pytest", f"tests/{arguments[0]}", *arguments[1:])]
    return [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("pytest", *IN_TWO_PROCESSES, *arguments),
    ]


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in EXTRAS:
        helped = arguments[:1] in (["-h"], ["--help"])
        print(__doc__, file=sys.stdout if helped else sys.stderr)
        if arguments and not helped:
            say(f"unknown task {arguments[0]!r}; for a command of gemma_py, use: run {arguments[0]}")
        return 0 if helped else 2
    if sys.version_info < (3, 11):  # noqa: UP036  (this file must say so before anything is installed)
        say(f"Python 3.11 or later is needed; this is {sys.version.split()[0]}")
        return 2
    task, rest = arguments[0], arguments[1:]
    prepare(task)
    if task == "test":
        return next((code for code in (run(*check, folder=ROOT) for check in checks(rest)) if code != 0), 0)
    become("gemma_py", *([] if task == "run" else [task]), *rest)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; to continue, run this command again")
        sys.exit(130)
