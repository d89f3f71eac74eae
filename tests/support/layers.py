import ast
from pathlib import Path

from repository import ROOT

PACKAGE = ROOT / "gemma_py"

# Lowest layer first. A module may import from its own layer and from lower layers.
LAYERS = (
    ("errors", "paths", "machine", "progress"),
    ("formats", "kernels", "demo", "hub"),
    ("tokenizer",),
    ("models", "catalog"),
    ("weights",),
    ("reference", "runtime"),
    ("cluster",),
    ("templates",),
    ("receipts",),
    ("generate",),
    ("replicas",),
    ("chat",),
    ("checks",),
    ("__init__",),
    ("server",),
    ("cli",),
    ("__main__",),
)


def folder_of(path: Path) -> str:
    """weights for gemma_py/weights/pack.py, and hub for gemma_py/hub.py."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(source: str) -> set[str]:
    """The folders of gemma_py from which a source file imports. `import gemma_py` counts as __init__."""
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


def all_imports() -> dict[str, set[str]]:
    table: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        table.setdefault(folder_of(path), set()).update(imports(path.read_text()) - {folder_of(path)})
    return table
