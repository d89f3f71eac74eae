"""The structure that everything else relies on, read from the sources."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "gemma_py"

# Lowest first. A module may import from its own layer and from those below.
LAYERS = (
    ("errors", "paths", "machine", "progress"),
    ("formats", "kernels", "demo", "hub"),
    ("tokenizer",),
    ("models", "catalog"),
    ("weights",),
    ("reference", "runtime"),
    ("templates",),
    ("generate",),
    ("chat",),
    ("checks",),
    ("__init__",),
    ("server",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Beyond the ranks: kernels know no files and no formats, formats know no kernels.
FORBIDDEN = {("kernels", "formats"), ("formats", "kernels")}


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(source: str) -> set[str]:
    """The rooms of gemma_py that a source imports from; the package itself counts as __init__."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            direct = node.module == "gemma_py"
            names = [f"gemma_py.{alias.name}" for alias in node.names] if direct else [node.module]
        for name in names:
            if name.split(".")[0] == "gemma_py":
                found.add(name.split(".")[1] if "." in name else "__init__")
    return found


def violations(sources: dict[str, set[str]]) -> list[str]:
    wrong = []
    for name, targets in sources.items():
        for target in targets:
            if RANK[target] > RANK[name] or (name, target) in FORBIDDEN:
                wrong.append(f"{name} imports {target}")
    return wrong


def all_imports() -> dict[str, set[str]]:
    table: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        table.setdefault(room(path), set()).update(imports(path.read_text()) - {room(path)})
    return table


def test_imports_go_one_way() -> None:
    assert violations(all_imports()) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from gemma_py.generate import load", "kernels"),
        ("import gemma_py.kernels.simd", "formats"),
        ("import gemma_py", "models"),
    ],
)
def test_an_upward_import_is_caught(source: str, wrong: str) -> None:
    assert violations({wrong: imports(source)})


def test_no_reassociation_on_the_path_of_a_bit() -> None:
    """fastmath, prange and parallel=True hand the order of a sum to the compiler."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword):
                assert node.arg not in ("fastmath", "parallel"), path
            if isinstance(node, ast.Name | ast.Attribute):
                assert getattr(node, "id", getattr(node, "attr", "")) != "prange", path
            if isinstance(node, ast.Constant):
                assert node.value not in ("fastmath", "prange"), path
    ways = ("njit", "CPUDispatcher")
    compiling = [path.name for path in PACKAGE.rglob("*.py") if any(way in path.read_text() for way in ways)]
    assert compiling == ["decorator.py"]
    assert "parallel" not in (PACKAGE / "kernels" / "decorator.py").read_text()
