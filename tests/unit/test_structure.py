import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from repository import ROOT, child_environment

FOLDERS = ("gemma_py", "tests", "tools")
SUFFIXES = (".py", ".js", ".css", ".html")
MOST_LINES = 500
MOST_PARAMETERS, MOST_IN_COMPILED_CODE = 7, 12
COMPILING = {
    "kernel",
    "phase",
    "inlined",
    "force_inlined",
    "jit",
    "intrinsic",
    "overload",
}

# Functions that may have more parameters than the limit, with the reason.
EXCEPTIONS = {
    "tests/bits/test_kernels.py:test_attend_matches_the_reference": "hypothesis draws each dimension of the case",
    "tests/support/serving.py:serving": "its options are those of the server",
    "tests/bits/test_kernels.py:check_attention": "called with the case that hypothesis drew",
}


def sources(root: Path) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in SUFFIXES)


def long_files(root: Path) -> list[str]:
    lines = {path: path.read_bytes().count(b"\n") for path in sources(root)}
    return [f"{path.relative_to(root)}: {count} lines" for path, count in lines.items() if count > MOST_LINES]


def shared_class_names(root: Path) -> list[str]:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "gemma_py").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(root)))
    return [f"{name}: {', '.join(paths)}" for name, paths in homes.items() if len(paths) > 1]


def is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = (ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in function.decorator_list)
    return any(name in COMPILING for name in names)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, public: bool) -> int:
    """Parameters without `self`. Keyword-only parameters of the public API do not count."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    count = len(names) - (names[:1] in (["self"], ["cls"]))
    return count if public else count + len(function.args.kwonlyargs)


def long_signatures(root: Path) -> Iterator[str]:
    for path in sources(root):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                public = path.is_relative_to(root / "gemma_py") and not node.name.startswith("_")
                limit = MOST_IN_COMPILED_CODE if is_compiled(node) else MOST_PARAMETERS
                if parameters(node, public) > limit:
                    yield f"{path.relative_to(root)}:{node.name}"


def test_files_have_at_most_500_lines() -> None:
    assert long_files(ROOT) == []


def test_public_classes_have_names_of_their_own() -> None:
    assert shared_class_names(ROOT) == []


def test_functions_have_few_parameters() -> None:
    assert sorted(long_signatures(ROOT)) == sorted(EXCEPTIONS)


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_too_long_is_found(tmp_path: Path, suffix: str) -> None:
    made(tmp_path, {f"gemma_py/a{suffix}": "\n" * 500, f"tests/unit/b{suffix}": "\n" * 501})
    assert long_files(tmp_path) == [f"tests/unit/b{suffix}: 501 lines"]


def test_two_classes_of_one_name_are_found(tmp_path: Path) -> None:
    made(
        tmp_path,
        {"gemma_py/a.py": "class Part: ...\nclass _Own: ...", "gemma_py/x/b.py": "class Part: ...\nclass _Own: ..."},
    )
    assert shared_class_names(tmp_path) == ["Part: gemma_py/a.py, gemma_py/x/b.py"]


def signature(count: int, before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    return f"f({', '.join([*before, *(f'p{number}' for number in range(count)), *after])}): ..."


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"def {signature(7)}", False),
        (f"def {signature(8)}", True),
        (f"async def {signature(8)}", True),
        (f"class A:\n    def {signature(7, before=['self'])}", False),
        (f"def {signature(7, after=['*', 'option'])}", False),
        (f"def _{signature(7, after=['*', 'option'])}", True),
        (f"@kernel\ndef {signature(12)}", False),
        (f"@kernel\ndef {signature(13)}", True),
        (f"@decorator.force_inlined(1)\ndef {signature(12)}", False),
        (f"@cached\ndef {signature(8)}", True),
    ],
)
def test_a_function_with_too_many_parameters_is_found(tmp_path: Path, source: str, found: bool) -> None:
    made(tmp_path, {"gemma_py/a.py": source})
    name = "_f" if "_f(" in source else "f"
    assert list(long_signatures(tmp_path)) == ([f"gemma_py/a.py:{name}"] if found else [])


EXTRAS = """
import sys
sys.modules |= dict.fromkeys({extras}, None)
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/unit"]))
"""


def test_unit_tests_can_be_collected_without_the_extras() -> None:
    packages = ("cryptography", "gguf", "jinja2", "llguidance", "openai", "pydantic", "rich", "starlette", "uvicorn")
    done = subprocess.run(
        [sys.executable, "-c", EXTRAS.format(extras=packages)],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
