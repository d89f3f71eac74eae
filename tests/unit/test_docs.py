import argparse
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import draw
import pytest
import quickstart
from pages import PAGES, fences
from repository import ROOT

from gemma_py import errors
from gemma_py.cli.main import parser
from gemma_py.models.program import KIND_NAMES

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in fenced blocks and in prose, without comments and the prompt `$`."""
    prose = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    for block in (*fences(text, ""), *prose):
        for line in block.splitlines():
            if re.match(r"(\$ )?(python3? |gemma_py |pip )", line) and line != "python -m gemma_py":
                yield [
                    word for word in shlex.split(line.removeprefix("$ "), comments=True) if word[0] + word[-1] != "[]"
                ]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    action = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def tool_flags(name: str) -> set[str]:
    source = (ROOT / "tools" / name).read_text()
    return set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source))


def refused(words: list[str]) -> str:
    if words[:3] == ["python", "-m", "gemma_py"] or words[0] == "gemma_py":
        arguments = words[3:] if words[0] == "python" else words[1:]
    elif words[:2] == ["python3", "tools/quickstart.py"]:
        task, *rest = words[2:]
        if task not in quickstart.EXTRAS:
            return f"quickstart has no task {task}"
        if task == "test":
            return "" if not rest or rest[0] in quickstart.TIERS else f"no tier {rest[0]}"
        arguments = rest if task == "run" else [task, *rest]
    elif words[0] == "python" and words[1].startswith("tools/"):
        if not (ROOT / words[1]).is_file():
            return f"{words[1]} does not exist"
        unknown = [word for word in words if word.startswith("--")]
        unknown = [word for word in unknown if word not in tool_flags(Path(words[1]).name)]
        return f"{words[1]} has no flag {unknown[0]}" if unknown else ""
    else:
        return "" if words[0] == "pip" else f"no such program: {words}"
    if arguments == ["COMMAND", "..."]:
        return ""
    try:
        parser().parse_args(arguments)
    except SystemExit as stop:
        return "" if not stop.code else f"{shlex.join(words)} is not understood"
    return ""


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_command_parses(page: Path) -> None:
    assert [why for words in commands(page.read_text()) if (why := refused(words))] == []


def curls(text: str) -> Iterator[list[str]]:
    """Yield the words of each curl command in fenced blocks. A command may continue on the next line."""
    for block in fences(text, ""):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("curl "):
                yield shlex.split(line)


def test_every_curl_command_is_a_request() -> None:
    """A curl command must send JSON, with a Content-Type header, to a route that the docs list."""
    text = "".join(page.read_text() for page in PAGES)
    routes, found = re.findall(r"`POST (/[\w./]*)`", text), list(curls(text))
    for _, url, *words in found:
        assert url.startswith("http://127.0.0.1:8080/") and url.removeprefix("http://127.0.0.1:8080") in routes
        options = dict(zip(words[::2], words[1::2], strict=True))
        assert options["-H"] == "Content-Type: application/json" and options.keys() <= {"-H", "-d", "-o"}
        assert options["-d"].startswith("@") or isinstance(json.loads(options["-d"]), dict)
    assert len(found) == 3


def unknown_flags(text: str) -> set[str]:
    known = {flag for one in subparsers().values() for action in one._actions for flag in action.option_strings}
    for tool in (ROOT / "tools").glob("*.py"):
        known |= tool_flags(tool.name)
    return set(_FLAG.findall(text)) - known


def test_every_flag_exists(page: Path) -> None:
    lines = page.read_text().replace("`shtab --shell=bash", "`shtab").splitlines()
    own = [line for line in lines if not re.match(r"(RAY_AUTH_MODE=token )?ray ", line)]  # without commands of Ray
    assert unknown_flags("\n".join(own)) == set()


def test_every_flag_of_every_command_is_documented() -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("cli.md", "server.md"))
    flags = {flag for one in subparsers().values() for action in one._actions for flag in action.option_strings}
    documented = {*_FLAG.findall(text), *re.findall(r" (-[a-z]) ", text)}
    assert flags - documented == {"-h"}


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_relative_link_resolves(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path)
        if target.startswith("https://"):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert wrong == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"({page.relative_to(ROOT)})" not in text] == []


def test_the_routes_are_those_of_the_server() -> None:
    sources = [(ROOT / "gemma_py" / "server" / name).read_text() for name in ("app.py", "openai/endpoints.py")]
    routes = set(re.findall(r'(?:Route\(|^    )"(/[\w./]*)"', "\n".join(sources), re.MULTILINE))
    table = re.findall(r"`(?:GET|POST) (/[\w./]*)`", (ROOT / "docs" / "server.md").read_text())
    assert set(table) == routes and "/v1/responses" in routes and "/health" in routes


def test_the_commands_of_a_chat_are_documented() -> None:
    from gemma_py.cli.chat_commands import COMMANDS

    rows = re.findall(r"^\| `/(\w+)([^`]*)` \| (.*) \|$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert [(name, rest.replace("\\", "").strip()) for name, rest, _ in rows] == [
        (name, command.argument) for name, command in COMMANDS.items() if name != "exit"
    ] + [("exit", "")]


def test_the_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    section = (ROOT / "docs" / "cli.md").read_text().partition("**Extras.**")[2].partition("**Completion.**")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == set(extras)


def test_the_kinds_of_operations_are_those_of_a_program() -> None:
    text = " ".join((ROOT / "docs" / "design.md").read_text().split())
    assert f"The kinds are: {', '.join(KIND_NAMES)}." in text


def test_the_private_parts_of_numba_are_documented() -> None:
    found = set()
    for file in (ROOT / "gemma_py").rglob("*.py"):
        for module, name in re.findall(
            r"^from (numba\.(?:core|np)[\w.]*) import (\w+)$", file.read_text(), re.MULTILINE
        ):
            found.add((str(file.relative_to(ROOT / "gemma_py")), f"{module}.{name}"))
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = set(re.findall(r"^\| `([\w/.]+)` \| `(numba[\w.]+)`", text, re.MULTILINE))
    assert rows == {(file, name) for file, name in found if not name.endswith(".cgutils")}


def test_python_snippets_compile(page: Path) -> None:
    for number, snippet in enumerate(fences(page.read_text(), "python")):
        compile(snippet, f"{page.name}, snippet {number}", "exec")


def test_the_snippet_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = fences((ROOT / "README.md").read_text(), "python")
    exec(compile(snippet.replace('"gemma-3-270m"', '"tiny-gemma3"'), "README", "exec"), {})
    assert re.search(r"\b[1-9]\d* [0-9a-f]{64}$", capsys.readouterr().out.strip())


def test_all_errors_are_documented() -> None:
    section = (ROOT / "docs" / "python.md").read_text().partition("## Errors")[2]
    classes = {name for name, thing in vars(errors).items() if isinstance(thing, type) and name != "GemmaError"}
    assert set(re.findall(r"`([A-Z]\w+)`", section)) == classes


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1000


@pytest.mark.parametrize("name", draw.PICTURES)
def test_pictures_match_the_code(name: str) -> None:
    """If this fails, run `python tools/draw.py`."""
    assert (ROOT / "docs" / name).read_text() == draw.PICTURES[name]()


@pytest.mark.parametrize(
    "line",
    [
        "$ python -m gemma_py chat --temprature 0",
        "python -m gemma_py bench --profil",
        "python -m gemma_py speak",
        "python3 tools/quickstart.py test units",
        "python3 tools/quickstart.py chat --thread 2",
        "python tools/growth.py --plots growth.png",
        "python tools/grow.py",
    ],
)
def test_a_wrong_command_is_caught(line: str) -> None:
    (words,) = commands(f"```\n{line}  # and a comment\n```\n")
    assert refused(words)


def test_a_wrong_flag_in_prose_is_caught() -> None:
    assert unknown_flags("`--thread 2` and `--threads 2`, `--warm-up`") == {"--thread", "--warm-up"}
