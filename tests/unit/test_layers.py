import ast
from collections.abc import Collection
from pathlib import Path

import pytest
from layers import LAYERS, PACKAGE, all_imports, imports

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Kernels and formats are in the same layer, but must not import each other.
FORBIDDEN = {("kernels", "formats"), ("formats", "kernels")}


def violations(sources: dict[str, set[str]]) -> list[str]:
    wrong = []
    for name, targets in sources.items():
        for target in targets:
            if RANK[target] > RANK[name] or (name, target) in FORBIDDEN:
                wrong.append(f"{name} imports {target}")
    return wrong


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


# --- the specification stands alone -----------------------------------------------------------------------------------

# Descriptions of models and weights, and errors: modules that compute nothing.
SPECIFICATION_MAY_IMPORT = ("errors", "formats", "models.config", "weights.tensors")
MAY_IMPORT_THE_SPECIFICATION = ("__init__", "checks")


def module_name(path: Path) -> str:
    """weights.pack for gemma_py/weights/pack.py, and reference for gemma_py/reference/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def modules(source: str, known: Collection[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("gemma_py.") in known else str(node.module) for name in within]
        else:
            continue
        found |= {name.partition(".")[2] or "__init__" for name in names if name.split(".")[0] == "gemma_py"}
    return found


def is_within(name: str, allowed: Collection[str]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


def shared_arithmetic(sources: dict[str, str]) -> list[str]:
    """Forbidden imports by the specification, and forbidden imports of the specification."""
    wrong = []
    table = {name: modules(source, sources) for name, source in sources.items()}
    for name, targets in table.items():
        for target in targets:
            if is_within(name, ["reference"]) and not is_within(target, ["reference", *SPECIFICATION_MAY_IMPORT]):
                wrong.append(f"{name} imports {target}")
            if is_within(target, ["reference"]) and not is_within(name, ["reference", *MAY_IMPORT_THE_SPECIFICATION]):
                wrong.append(f"{name} imports {target}")
    reached, waiting = set(), [name for name in table if is_within(name, ["reference"])]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting += [target for target in table.get(name, ()) if target not in reached]
    return wrong + [f"the specification reaches {name}" for name in reached if is_within(name, ["kernels", "runtime"])]


def package_sources() -> dict[str, str]:
    return {module_name(path): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_the_specification_stands_alone() -> None:
    sources = package_sources()
    assert {"reference", "reference.operations", "weights.pack", "__init__"} <= set(sources)
    assert shared_arithmetic(sources) == []


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        ("reference.operations", "from gemma_py.kernels.elementary import exp", "imports kernels.elementary"),
        ("reference.gemma", "from gemma_py.kernels import intrinsics", "imports kernels.intrinsics"),
        ("reference", "from gemma_py.runtime.cache import digest", "imports runtime.cache"),
        ("formats.blocks", "import gemma_py.kernels.panels", "the specification reaches kernels.panels"),
        ("weights.pack", "from gemma_py.reference.operations import rope_frequencies", "imports reference.operations"),
        ("generate.sampling", "from gemma_py import reference", "imports reference"),
        ("runtime.forward", "import gemma_py.reference.elementary", "imports reference.elementary"),
    ],
)
def test_shared_arithmetic_is_caught(module: str, line: str, message: str) -> None:
    sources = package_sources()
    sources[module] += f"\ndef planted():\n    {line}\n"
    wrong = shared_arithmetic(sources)
    assert any(message in each for each in wrong)


def test_no_reassociation_on_the_path_of_a_bit() -> None:
    """With fastmath, prange or parallel=True, the compiler would choose the order of a sum."""
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
    # arithmetic.py compiles the specification, and decorator.py compiles the kernels.
    assert sorted(compiling) == ["arithmetic.py", "decorator.py"]
    assert "parallel" not in (PACKAGE / "kernels" / "decorator.py").read_text()


def test_one_file_imports_ray() -> None:
    importing = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            importing += [path.name for name in names if name.split(".")[0] == "ray"]
    assert set(importing) == {"ray_hosts.py"}
