"""The options of commands that generate: how tokens are chosen."""

import argparse
from typing import Any

from gemma_py.generate.options import OPTIONS

_NUMBERS = (
    ("temperature", float, "0 takes the likeliest token; above 0, to 2, draws, the higher the wilder"),
    ("top-k", int, "draw among the N likeliest tokens; 0: all"),
    ("top-p", float, "draw among the likeliest tokens that together have this probability"),
    ("min-p", float, "draw among tokens at least this share as likely as the likeliest"),
    ("repetition-penalty", float, "above 1: tokens that have occurred, in the prompt too, are less likely"),
    ("presence-penalty", float, "taken off the logits of tokens generated before"),
    ("frequency-penalty", float, "the same, once for each time"),
    ("seed", int, "the same seed, the same text, with any threads"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, text in _NUMBERS:
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=text)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, by the names of `Sampling`."""
    given = {name: getattr(args, name, None) for name in OPTIONS}
    return {name: value for name, value in given.items() if value is not None}
