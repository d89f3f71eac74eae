"""Serve a model over HTTP with OpenAI's API, and a page to chat with.

Endpoints: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /tokenize, /detokenize, /v1/audit, /health,
/metrics and /openapi.json; an embedding model has /v1/embeddings instead of the first three. The chat page is at /, and a page
that checks receipts at /audit. A response has the same bits whichever other requests run at the same time.

By default only this machine can connect. With another --host, give --api-key-file, or --open to serve without an API key. After
SIGTERM or Ctrl-C, the server waits for running requests for at most --drain seconds. A second signal ends the server at once.

With --json, the server prints one line when it is ready: {"url", "model", "pid"}.
"""

import argparse
import json
import os
import re
import stat
from pathlib import Path
from urllib.parse import urlsplit

from gemma_py.cli.common import (
    add_address,
    add_engine,
    add_model,
    add_replicas,
    add_shards,
    add_sign,
    natural,
    note_exceptions,
    notify,
    positive,
    signer_of,
)
from gemma_py.cli.loading import load_engine, start_scheduler
from gemma_py.cli.sampling import add_speculate
from gemma_py.errors import InputError, install_command

_HOST = re.compile(r"[\w.-]+|[\da-fA-F.]*(:[\da-fA-F.]*){2,}(%\w+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--host", type=_host, default="127.0.0.1", help="the address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=_port, default=8080, metavar="N", help="the port; 0 chooses a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--queue",
        type=natural,
        default=64,
        metavar="N",
        help="requests that may wait while others run; further requests are refused with status 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="require one of the keys in FILE, which has one on each line"
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="ask for no API key, even if other machines connect; with --address, also use a cluster without a token",
    )
    parser.add_argument(
        "--allowed-host",
        type=_host,
        action="append",
        default=[],
        metavar="NAME",
        help="accept requests with this host name in the Host header; may be given several times",
    )
    parser.add_argument(
        "--cors",
        type=_origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow pages from this origin, such as https://example.org, to use the server; may be given several times",
    )
    parser.add_argument(
        "--drain",
        type=natural,
        default=30,
        metavar="N",
        help="seconds to wait for running requests after SIGTERM or Ctrl-C (default: %(default)s)",
    )
    add_service(parser)


def _host(text: str) -> str:
    bare = text[1:-1] if text[:1] + text[-1:] == "[]" else text
    if not _HOST.fullmatch(bare):
        raise argparse.ArgumentTypeError(f"should be a host name or an IP address, without a port, found {text!r}")
    return bare


def _port(text: str) -> int:
    port = natural(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"should be a port number of at most 65535, found {text!r}")
    return port


def _origin(text: str) -> str:
    """Parse an origin, which must be spelled exactly as browsers spell it, because the server compares texts."""
    try:
        parts = urlsplit(text)
        valid = (
            parts.scheme in ("http", "https") and parts.hostname and text == f"{parts.scheme}://{parts.netloc.lower()}"
        )
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"should be an origin such as https://example.org, found {text!r}")
    return text


def add_service(parser: argparse.ArgumentParser) -> None:
    """Add the options that `serve` and `batch` share."""
    parser.add_argument(
        "--name", metavar="NAME", help="the name of the model in requests (default: derived from MODEL)"
    )
    parser.add_argument(
        "--parallel",
        type=positive,
        default=8,
        metavar="N",
        help="the largest number of requests that run at the same time; with --replicas, in each replica (default: %(default)s)",
    )
    parser.add_argument(
        "--template",
        metavar="FORM",
        help="the chat template: gemma, gemma4, transcript, or a Jinja file (default: the checkpoint's own)",
    )
    add_sign(parser)
    add_speculate(parser)
    add_engine(parser)
    add_shards(parser)
    add_replicas(parser)
    add_address(parser)


def run(args: argparse.Namespace) -> None:
    try:
        from gemma_py.server.app import App
        from gemma_py.server.auth import Keys, is_loopback
        from gemma_py.server.openai.service import Service
        from gemma_py.server.process import Server, address, bind
    except ModuleNotFoundError as error:
        raise needs_extra(error) from None
    keys = Keys() if args.api_key_file is None else Keys.read(args.api_key_file)
    if args.api_key_file is not None and args.api_key_file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        notify(f"{args.api_key_file}: other users of this machine can read this file; protect it with chmod 600")
    if not (is_loopback(args.host) or keys or args.open):
        raise InputError(
            f"other machines can connect to {args.host}: give --api-key-file FILE, or --open to serve without an API key"
        )
    signer = signer_of(args)
    with (
        # The port is bound before the model is loaded, so that a port in use is reported early.
        bind(args.host, args.port) as listening,
        load_engine(args) as engine,
    ):
        note_exceptions(engine)
        url = address(listening)
        scheduler = start_scheduler(args, engine, args.queue)
        try:
            service = Service(engine, scheduler, args.name or model_name(args.model), args.template, signer)
            service.prepare()
            app = App(service, scheduler.parallel + scheduler.queue)

            def ready() -> None:
                if args.json:
                    print(json.dumps({"url": url, "model": service.model, "pid": os.getpid()}), flush=True)
                else:
                    threads = f"{engine.threads} thread{'s' * (engine.threads > 1)}"
                    if args.replicas is not None:
                        count = scheduler.parallel // args.parallel
                        threads = f"{count} replica{'s' * (count > 1)}"
                    page = "" if engine.config.embedding is not None else f", chat page at {url}"
                    print(f"{service.model}, {threads}: API at {url}/v1{page}", flush=True)

            def ending(live: int) -> None:
                if live and not args.json:
                    print(
                        f"shutting down: waiting up to {args.drain} s for running requests: {live}; a second signal ends at once",
                        flush=True,
                    )

            server = Server(app, app.asgi(args.host, args.allowed_host, args.cors, keys), args.drain, ready, ending)
            server.run([listening])
            if server.failure is None and not args.json:
                print(f"ended; requests cut off: {server.cut_off}", flush=True)
            if server.failure is not None:
                notify(f"the engine has failed: {server.failure}")
                os._exit(1)  # a normal exit would wait for the engine's threads, which may never end
        finally:
            scheduler.close()
    if server.interrupted:
        raise KeyboardInterrupt


def needs_extra(error: ModuleNotFoundError) -> InputError:
    return InputError(f"this command needs the package {error.name}: {install_command('serve')}")


def model_name(model: str) -> str:
    """Return the default name of a model in requests: the last part of its path, or its name in the catalogue."""
    return Path(model).name.removesuffix(".gguf") or Path(model).resolve().name
