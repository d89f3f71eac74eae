"""List the hosts of a Ray cluster, and check that they can run shards and replicas.

Each line has a host, its available memory, its number of worker threads, and whether its gemma_py has the same code as this one.
With MODEL, a line also says whether the host has the same files of the model.

With --json: {"hosts": [{"host", "memory", "threads", "same_code", "same_model", "error"}]}.
"""

import argparse
from typing import Any

from gemma_py.catalog import as_other_processes_name, resolve
from gemma_py.cli.common import add_address, add_open_cluster, hosts_of, markdown, print_json, size
from gemma_py.errors import ComputationError, InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model whose files the hosts should have")
    add_address(parser)
    add_open_cluster(parser)


def run(args: argparse.Namespace) -> None:
    from gemma_py.cluster.hosts import (
        Facts,
        facts,
        package_digest,
    )  # imported here, because numba would slow down --help

    hosts = hosts_of(args)
    if hosts is None:
        raise InputError("give the address of the cluster: --address HOST:PORT")
    model = None if args.model is None else as_other_processes_name(args.model)
    mine = () if args.model is None else facts(str(resolve(args.model))).model
    table: list[dict[str, Any]] = []
    for name, found in sorted(hosts.ask(model).items()):
        known = found if isinstance(found, Facts) else None
        table.append({
            "host": name,
            "memory": known and known.memory,
            "threads": known and known.threads,
            "same_code": known and known.package == package_digest(),
            "same_model": None if known is None or model is None else known.model == mine,
            "error": known.error if known else found,
        })  # fmt: skip
    if args.json:
        print_json({"hosts": table})
    else:
        print(markdown(["host", "memory", "threads", "code", *(["model"] if model else []), ""], _cells(table, model)))
    if any(row["error"] or not row["same_code"] or (model and not row["same_model"]) for row in table):
        raise ComputationError("not every host can be used")


def _cells(table: list[dict[str, Any]], model: str | None) -> list[list[str]]:
    said = {True: "same", False: "other", None: ""}
    return [
        [
            row["host"], "" if row["memory"] is None else size(row["memory"]), str(row["threads"] or ""),
            said[row["same_code"]], *([said[row["same_model"]]] if model else []), row["error"],
        ]
        for row in table
    ]  # fmt: skip
