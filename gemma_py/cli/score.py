"""Score a text: the negative log-likelihood of each token, and the perplexity.

With --json: {"ids": [...], "nll": [one number for each token after the first], "mean_nll": x, "perplexity": y}.
"""

import argparse
import math

from gemma_py.cli.common import add_engine, add_input, add_model, note_exceptions, print_json, read_input
from gemma_py.cli.loading import load_engine
from gemma_py.generate.sampling import perplexity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_input(parser, "--text")
    add_engine(parser)


def run(args: argparse.Namespace) -> None:
    with load_engine(args) as engine:
        note_exceptions(engine)
        ids = read_input(args, engine)
        values = []
        for number, value in enumerate(engine.score(ids), 1):
            values.append(value)
            if not args.json:
                piece = engine.tokenizer.piece(ids[number]) if engine.tokenizer else None
                print(
                    f"{number:6} {ids[number]:7} {value:10.5f}  {'' if piece is None else repr(piece)[1:-1]}",
                    flush=True,
                )
        mean = math.fsum(values) / len(values)
        if args.json:
            print_json({"ids": ids, "nll": values, "mean_nll": mean, "perplexity": perplexity(values)})
        else:
            print(f"{len(values)} tokens, mean NLL {mean:.5f}, perplexity {perplexity(values):.3f}")
