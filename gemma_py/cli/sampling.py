"""The options of sampling and speculative decoding, for the commands that generate text."""

import argparse
from typing import Any

from gemma_py.generate.options import MODES, OPTIONS

_NUMBERS = (
    ("temperature", float, "0 always takes the most likely token; larger values, up to 2, make the choice more random"),
    ("top-k", int, "choose among the N most likely tokens; 0: among all"),
    ("top-p", float, "choose among the most likely tokens that together have probability X"),
    ("min-p", float, "choose among tokens whose probability is at least X times the highest probability"),
    ("repetition-penalty", float, "values above 1 make tokens of the prompt and the output less likely to occur again"),
    ("presence-penalty", float, "subtracted from the logit of each token that occurs in the output"),
    ("frequency-penalty", float, "subtracted from the logit of a token for each time it occurs in the output"),
    ("seed", int, "seed of the random choice; the same seed gives the same text, with any number of threads"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, text in _NUMBERS:
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=text)


def add_speculate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculate",
        choices=MODES,
        default=MODES[0],
        help="auto: draft tokens from earlier text, and verify several tokens in one pass where that saves time; off: compute one "
        "token at a time. This option does not change the output (default: %(default)s)",
    )
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        help="a smaller model with the same vocabulary, or a Gemma 4 model's assistant, which drafts tokens where that saves time; "
        "not with --speculate off",
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name, None) for name in OPTIONS}
    return {name: value for name, value in given.items() if value is not None}
