import sys

try:
    from gemma_py.cli.main import entry

    entry()
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("gemma_py"):
        raise
    sys.exit(
        f"gemma_py: the package {error.name} is not installed for this Python. In a clone, run "
        "`. .venv/bin/activate` first, or `python3 tools/quickstart.py run COMMAND`"
    )
