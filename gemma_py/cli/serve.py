"""Serve a model over HTTP, for programs that speak OpenAI's language, and for a browser.

Endpoints: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /tokenize, /detokenize, /health, /metrics,
/openapi.json; and at / a page to chat with. An answer's bits do not depend on who else is being served.

Only this machine can connect, unless --host says otherwise; then a key is needed (--api-key-file), or --open. SIGTERM and
Ctrl-C let what runs come to its end, for as long as --drain says; a second one ends at once.
"""

import argparse
import json
import os
import re
import stat
import sys
from pathlib import Path
from urllib.parse import urlsplit

import gemma_py
from gemma_py.cli.common import add_engine, add_model, natural, note_kept_float, positive
from gemma_py.cli.progress import LoadProgress
from gemma_py.errors import InputError

_HOST = re.compile(r"[\w.-]+|[\da-fA-F.]*(:[\da-fA-F.]*){2,}(%\w+)?")  # a name, or an address, IPv6 too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--host", type=_host, default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8080, metavar="N", help="0: any free one (default: %(default)s)")
    parser.add_argument(
        "--queue",
        type=natural,
        default=64,
        metavar="N",
        help="requests that may wait beside them (default: %(default)s)",
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="a key a line; one of them is needed then")
    parser.add_argument("--open", action="store_true", help="on an address that others can reach, ask for no key")
    parser.add_argument(
        "--allowed-host",
        type=_host,
        action="append",
        default=[],
        metavar="NAME",
        help="a name that this server goes by; repeatable",
    )
    parser.add_argument(
        "--cors",
        type=_origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages from there may use it, such as https://example.org; repeatable",
    )
    parser.add_argument(
        "--drain", type=natural, default=30, metavar="N", help="seconds for what runs at the end (default: %(default)s)"
    )
    add_service(parser)


def _host(text: str) -> str:
    """A name or an address; one of IPv6 may be in brackets, as in a URL."""
    bare = text[1:-1] if text[:1] + text[-1:] == "[]" else text
    if not _HOST.fullmatch(bare):
        raise argparse.ArgumentTypeError(f"should be a name or an address alone, found {text!r}")
    return bare


def _port(text: str) -> int:
    port = natural(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"should be a port, 65535 at most, found {text!r}")
    return port


def _origin(text: str) -> str:
    """As browsers write it: what it is compared with."""
    try:
        parts = urlsplit(text)
        sound = (
            parts.scheme in ("http", "https") and parts.hostname and text == f"{parts.scheme}://{parts.netloc.lower()}"
        )
    except ValueError:
        sound = False
    if not sound:
        raise argparse.ArgumentTypeError(f"should be an origin such as https://example.org, found {text!r}")
    return text


def add_service(parser: argparse.ArgumentParser) -> None:
    """What answering requests takes, over HTTP or from a file."""
    parser.add_argument("--name", metavar="NAME", help="what requests call the model (default: as MODEL)")
    parser.add_argument(
        "--parallel", type=positive, default=8, metavar="N", help="answers computed at once (default: %(default)s)"
    )
    parser.add_argument(
        "--template", metavar="FORM", help="gemma, transcript, or a jinja file (default: the checkpoint's)"
    )
    add_engine(parser)


def run(args: argparse.Namespace) -> None:
    try:
        from gemma_py.generate.scheduler import Scheduler
        from gemma_py.server.app import App
        from gemma_py.server.auth import Keys, is_loopback
        from gemma_py.server.openai.service import Service
        from gemma_py.server.process import Server, address, bind
    except ModuleNotFoundError as error:
        raise needs_extra(error) from None
    keys = Keys() if args.api_key_file is None else Keys.read(args.api_key_file)
    if args.api_key_file is not None and args.api_key_file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"gemma_py: {args.api_key_file}: others on this machine can read it: chmod 600", file=sys.stderr)
    if not (is_loopback(args.host) or keys or args.open):
        raise InputError(
            f"others could reach {args.host}: give --api-key-file FILE, or --open if anybody may use this server"
        )
    with (
        bind(args.host, args.port) as listening,  # refused before the model is loaded
        gemma_py.load(
            args.model, threads=args.threads, context=args.context, quant=args.quant, progress=LoadProgress()
        ) as engine,
    ):
        note_kept_float(engine)
        url = address(listening)
        scheduler = Scheduler(engine, args.parallel, args.queue)
        try:
            service = Service(engine, scheduler, args.name or model_name(args.model), args.template)
            service.prepare()
            app = App(service, args.parallel + args.queue)

            def ready() -> None:
                if args.json:
                    print(json.dumps({"url": url, "model": service.model, "pid": os.getpid()}), flush=True)
                else:
                    threads = f"{engine.threads} thread{'s' * (engine.threads > 1)}"
                    print(f"{service.model}, {threads}: {url}/v1 for programs, {url} for a browser", flush=True)

            def ending(live: int) -> None:
                if live and not args.json:
                    print(
                        f"ending: answers to come: {live}, within {args.drain} s; a second signal ends at once",
                        flush=True,
                    )

            server = Server(app, app.asgi(args.host, args.allowed_host, args.cors, keys), args.drain, ready, ending)
            server.run([listening])
            if server.failure is None and not args.json:
                print(f"ended; answers cut off: {server.cut_off}", flush=True)
            if server.failure is not None:
                print(f"gemma_py: the engine has failed: {server.failure}", file=sys.stderr, flush=True)
                os._exit(1)  # its threads may never come back
        finally:
            scheduler.close()
    if server.interrupted:
        raise KeyboardInterrupt


def needs_extra(error: ModuleNotFoundError) -> InputError:
    return InputError(f"this needs {error.name}: pip install 'gemma_py[serve]' (in a clone: pip install -e '.[serve]')")


def model_name(model: str) -> str:
    """A name of the catalogue as it is; of a path, its last part."""
    return Path(model).name.removesuffix(".gguf") or Path(model).resolve().name
