"""Load a model with the options of the command line."""

import argparse

import gemma_py
from gemma_py.cli.progress import LoadProgress


def load_engine(args: argparse.Namespace) -> gemma_py.Engine:
    """Load the model with the arguments of `add_engine`, and with --speculate and --draft if the command has them."""
    return gemma_py.load(
        args.model,
        threads=args.threads,
        context=args.context,
        quant=args.quant,
        progress=LoadProgress(),
        pack=args.pack,
        speculate=getattr(args, "speculate", "off"),
        draft=getattr(args, "draft", None),
    )
