"""Load a model with the options of the command line, and start its scheduler."""

import argparse
from typing import Any

import gemma_py
from gemma_py.catalog import as_other_processes_name
from gemma_py.cli.common import hosts_of, notify
from gemma_py.cli.progress import LoadProgress
from gemma_py.errors import InputError
from gemma_py.generate.base_scheduler import BaseScheduler


def load_engine(args: argparse.Namespace) -> gemma_py.Engine:
    replicas = getattr(args, "replicas", None)
    if replicas is not None:
        _check_replicas(args)
    engine = gemma_py.load(
        args.model,
        threads=args.threads,
        context=args.context,
        quant=args.quant,
        kv=args.kv,
        progress=LoadProgress(),
        pack=args.pack,
        speculate=getattr(args, "speculate", "off"),
        # With replicas, this process answers no requests, so only the replicas load the draft model.
        draft=getattr(args, "draft", None) if replicas is None else None,
        shards=getattr(args, "shards", 1),
        hosts=hosts_of(args) if hasattr(args, "address") and replicas is None else None,
    )
    if args.context is not None and args.context > engine.context:
        notify(
            f"--context {args.context:,} is more than the model's limit, so the context is {engine.context:,} tokens"
        )
    return engine


def _check_replicas(args: argparse.Namespace) -> None:
    if args.shards > 1:
        raise InputError("--replicas and --shards cannot be used together: give one of the two")
    if args.replicas == "all" and args.address is None:
        raise InputError(
            "--replicas all means one replica on each host of a cluster: give --address, or a number of replicas"
        )


def start_scheduler(args: argparse.Namespace, engine: gemma_py.Engine, queue: int = 64) -> BaseScheduler[Any, Any]:
    """Start the scheduler of `serve` or `batch`: in this process, or with --replicas in other processes."""
    from gemma_py.server.openai.described_constraint import constraint_maker
    from gemma_py.server.openai.service import new_scheduler

    if args.replicas is None:
        return new_scheduler(engine, args.parallel, queue)
    # Imported here, so that commands without replicas start faster.
    from gemma_py.cluster.hosts import ThisMachine
    from gemma_py.replicas.pool import Pool, ReplicaOptions

    options = ReplicaOptions(
        count=None if args.replicas == "all" else args.replicas,
        model=as_other_processes_name(args.model),
        constraints=f"{constraint_maker.__module__}:{constraint_maker.__name__}",
        draft=None if args.draft is None else as_other_processes_name(args.draft),
        threads=args.threads,
        report=notify,
    )
    return Pool(engine, options, hosts_of(args) or ThisMachine(), args.parallel, queue)
