"""Continue a text.

By default, decoding is greedy: the most likely token is chosen at every step, and a prompt always gives the same text. If a
sampling option is given, tokens are chosen at random. Sampling options that are not given then come from the checkpoint's
generation_config.json.

With --json: {"prompt_ids", "ids", "texts", "logprobs", "text", "finish_reason", "seed", "timings": {"first_token_seconds",
"decode_seconds", "decode_tokens_per_second"}}. The log-probabilities are computed before penalties and sampling filters.
"""

import argparse
import dataclasses
import time
from typing import Any

from gemma_py.cli.common import (
    add_address,
    add_engine,
    add_input,
    add_model,
    add_open_cluster,
    add_receipt,
    add_shards,
    note_exceptions,
    positive,
    print_json,
    read_input,
    signer_of,
    write_receipt,
)
from gemma_py.cli.loading import load_engine
from gemma_py.cli.sampling import add_sampling, add_speculate, sampling_options
from gemma_py.errors import InputError
from gemma_py.generate.options import asked
from gemma_py.paths import check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_input(parser, "-p", "--prompt")
    parser.add_argument(
        "-n",
        "--max-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="the largest number of new tokens (default: 128)",
    )
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the output before this text; may be given several times"
    )
    add_sampling(parser)
    add_receipt(parser)
    add_speculate(parser)
    add_engine(parser)
    add_shards(parser)
    add_address(parser)
    add_open_cluster(parser)


def run(args: argparse.Namespace) -> None:
    if args.sign is not None and args.receipt is None:
        raise InputError("--sign needs --receipt FILE, because only a receipt is signed")
    signer = signer_of(args)
    if args.receipt is not None:
        check_writable(args.receipt)
    with load_engine(args) as engine:
        note_exceptions(engine)
        ids = read_input(args, engine)
        if engine.tokenizer is None and not args.json:
            raise InputError(f"{args.model}: the checkpoint has no tokenizer; use --json to get token ids")
        sampling = asked(sampling_options(args), engine.sampling).seeded()
        tokens, times = [], [time.perf_counter()]
        options = {"stop": args.stop, "logprobs": args.json, **dataclasses.asdict(sampling)}
        for token in engine.generate(ids, args.max_tokens, receipt=args.receipt is not None, **options):
            tokens.append(token)
            times.append(time.perf_counter())
            if not args.json:
                print(token.text, end="", flush=True)
        if tokens[-1].receipt is not None:
            write_receipt(args.receipt, tokens[-1].receipt, signer)
        if not args.json:
            print()
            return
        decoding = times[-1] - times[1]
        report: dict[str, Any] = {
            "prompt_ids": ids,
            "ids": [token.id for token in tokens],
            "texts": [token.text for token in tokens],
            "logprobs": [token.logprob for token in tokens],
            "text": "".join(token.text for token in tokens),
            "finish_reason": tokens[-1].finish_reason,
            "seed": sampling.seed if sampling.temperature else None,
            "timings": {
                "first_token_seconds": times[1] - times[0],
                "decode_seconds": decoding,
                "decode_tokens_per_second": (len(tokens) - 1) / decoding if decoding else None,
            },
        }
        print_json(report)
