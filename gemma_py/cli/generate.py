"""Continue a text.

The likeliest token is taken at every step, so the same prompt always gives the same continuation.
"""

import argparse
from typing import Any

import gemma_py
from gemma_py.cli.common import add_engine, add_input, add_model, note_kept_float, positive, print_json, read_input
from gemma_py.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_input(parser, "--prompt")
    parser.add_argument(
        "--max-tokens", type=positive, default=128, metavar="N", help="at most N new tokens (default: 128)"
    )
    add_engine(parser)


def run(args: argparse.Namespace) -> None:
    with gemma_py.load(args.model, threads=args.threads, context=args.context, quant=args.quant) as engine:
        note_kept_float(engine)
        ids = read_input(args, engine)
        if engine.tokenizer is None and not args.json:
            raise InputError(f"{args.model}: the checkpoint brings no tokenizer; ask for --json to get token ids")
        tokens = []
        for token in engine.generate(ids, max_tokens=args.max_tokens):
            tokens.append(token)
            if not args.json:
                print(token.text, end="", flush=True)
        if not args.json:
            print()
            return
        report: dict[str, Any] = {
            "prompt_ids": ids,
            "ids": [token.id for token in tokens],
            "logprobs": [token.logprob for token in tokens],
            "text": "".join(token.text for token in tokens),
            "finish_reason": tokens[-1].finish_reason,
        }
        print_json(report)
