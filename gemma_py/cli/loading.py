"""Load a model with the options of the command line."""

import argparse

import gemma_py
from gemma_py.cli.common import hosts_of, notify
from gemma_py.cli.progress import LoadProgress


def load_engine(args: argparse.Namespace) -> gemma_py.Engine:
    engine = gemma_py.load(
        args.model,
        threads=args.threads,
        context=args.context,
        quant=args.quant,
        progress=LoadProgress(),
        pack=args.pack,
        speculate=getattr(args, "speculate", "off"),
        draft=getattr(args, "draft", None),
        shards=getattr(args, "shards", 1),
        hosts=hosts_of(args) if hasattr(args, "address") else None,
    )
    if args.context is not None and args.context > engine.context:
        notify(
            f"--context {args.context:,} is more than the model's limit, so the context is {engine.context:,} tokens"
        )
    return engine
