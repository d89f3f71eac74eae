"""Answer a file of requests in OpenAI's batch format.

Each row of IN is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}; the URL may also be
/v1/completions or /v1/responses. With an embedding model, the URL is /v1/embeddings. Each row of OUT has the custom_id of a
request, and a response or an error. To continue after an interruption, run the same command again: requests that have a complete
row in OUT are skipped.

With --json: {"rows", "before", "done", "failed", "prompt_tokens", "completion_tokens", "seconds"}.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_py.cli.common import add_model, add_open_cluster, note_exceptions, print_json, signer_of
from gemma_py.cli.loading import load_engine, start_scheduler
from gemma_py.cli.progress import ProgressBar
from gemma_py.cli.serve import add_service, model_name, needs_extra
from gemma_py.generate.embedding import check_generates

if TYPE_CHECKING:
    from gemma_py.server.openai.batch import Counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN", help="the file of requests, one on each line")
    parser.add_argument("output", type=Path, metavar="OUT", help="the file that responses are appended to")
    add_model(parser)
    parser.add_argument(
        "--receipt",
        action="store_true",
        help='add a receipt to every response, as if every request had "receipt": true; gemma_py audit OUT checks receipts',
    )
    add_service(parser)
    add_open_cluster(parser)


def run(args: argparse.Namespace) -> None:
    try:
        from gemma_py.server.openai import batch
        from gemma_py.server.openai.service import Service
    except ModuleNotFoundError as error:
        raise needs_extra(error) from None
    began, signer = time.monotonic(), signer_of(args)
    rows = batch.read_rows(args.source)
    with (
        batch.Output(args.output) as output,
        load_engine(args) as engine,
    ):
        note_exceptions(engine)
        if args.receipt:
            check_generates(engine)
        scheduler = start_scheduler(args, engine)
        try:
            service = Service(engine, scheduler, args.name or model_name(args.model), args.template, signer)
            with ProgressBar("answering", wanted=not args.json) as progress:
                counts = batch.run(
                    service, args.source, rows, output, lambda counts: show(progress, counts), args.receipt
                )
        finally:
            scheduler.close()
    if args.json:
        print_json({**dataclasses.asdict(counts), "seconds": time.monotonic() - began})
    else:
        before = f"; {counts.before} {'was' if counts.before == 1 else 'were'} complete before" if counts.before else ""
        written = f"{counts.done} row{'s' * (counts.done != 1)} written"
        print(f"{written}, {counts.failed} with an error{before}", file=sys.stderr)


def show(progress: ProgressBar, counts: "Counts") -> None:
    """Report progress in steps of 1%, to keep logs short."""
    left = counts.rows - counts.before
    percent = 100 * counts.done // left if left else 100
    progress(f"{percent}% of {left} rows", counts.done / left if left else 1.0)
