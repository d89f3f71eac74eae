"""The routes. Handlers never run the model: they submit requests to the scheduler and send events back to the clients."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from gemma_py.errors import GemmaError
from gemma_py.server import http, web_ui
from gemma_py.server.audits import Audits
from gemma_py.server.auth import Auth, Keys
from gemma_py.server.events import EventQueue
from gemma_py.server.metrics import CONTENT_TYPE, Metrics, RequestCounter
from gemma_py.server.openai.builders import ResponseBuilder
from gemma_py.server.openai.constraint import piece_bytes
from gemma_py.server.openai.endpoints import ENDPOINTS, Endpoint
from gemma_py.server.openai.errors import ApiError, checked
from gemma_py.server.openai.openapi import document
from gemma_py.server.openai.schemas import DetokenizeRequest, TokenizeRequest
from gemma_py.server.openai.service import Service
from gemma_py.server.streaming import EventStream, while_connected, whole_response


class App:
    """The server's state and its handlers.

    limit: how many requests may be tokenized, waiting or running at once
    """

    def __init__(self, service: Service, limit: int) -> None:
        self.service, self.limit = service, limit
        self.metrics, self.audits = Metrics(service.scheduler), Audits(service)
        self.ending = False
        self.event_queues: set[EventQueue] = set()
        self._admitted = 0
        # /tokenize and /detokenize handle one request at a time, to leave CPU time for generation.
        self._tokenizing = asyncio.Lock()

    def asgi(
        self, host: str, names: Collection[str] = (), origins: Collection[str] = (), keys: Keys | None = None
    ) -> ASGIApp:
        auth = Middleware(Auth, host=host, names=names, origins=origins, keys=keys or Keys())
        # CORS must come before auth, because a browser's preflight request carries no API key.
        cors = Middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )  # fmt: skip
        counter = Middleware(RequestCounter, metrics=self.metrics)
        routes = [
            Route("/", web_ui.show_chat),
            Route("/audit", web_ui.show_audit),
            Route("/v1/audit", self.audit, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.show_openapi),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            *(Route(path, partial(self._generate, endpoint), methods=["POST"]) for path, endpoint in ENDPOINTS.items()),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        handlers: dict[Any, Callable[..., Any]] = {
            GemmaError: http.gemma_error, HTTPException: http.http_error, ClientDisconnect: http.client_left,
            Exception: http.unexpected_error,
        }  # fmt: skip
        made = Starlette(
            routes=routes,
            middleware=[counter, *([cors] if origins else []), auth],
            exception_handlers=handlers,
        )
        # Starlette would redirect a path with a superfluous slash at the end. Answer with 404 instead, because many clients
        # do not follow a redirect of a POST.
        made.router.redirect_slashes = False
        return made

    # --- generating ---------------------------------------------------------------------------------------------------

    async def _generate(self, endpoint: Endpoint, request: Request) -> Response:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._admission())
            asked = checked(endpoint.schema, await http.read_json(request))
            loop = asyncio.get_running_loop()

            def submit() -> tuple[ResponseBuilder, EventQueue]:
                builder = endpoint.response(self.service, asked)
                return builder, EventQueue(self.service.scheduler, builder.job, self.metrics, loop)

            builder, queue = await run_in_threadpool(submit)
            self.event_queues.add(queue)
            stack.callback(self.event_queues.discard, queue)
            stack.callback(queue.close)
            if not asked.stream:
                return await while_connected(request, whole_response(builder, queue))
            return EventStream(builder, queue, stack.pop_all())
        raise AssertionError

    @contextlib.contextmanager
    def _admission(self) -> Iterator[None]:
        """Count a request as admitted during the `with` block. Raise ApiError if the server cannot take another request."""
        if self.ending:
            raise ApiError(503, "The server is shutting down.", None, "server_ending", 10.0)
        health = self.service.scheduler.health()
        if not health.ok:
            raise ApiError(503, f"The engine has failed: {health.why}", None, "engine_failed")
        if self._admitted >= self.limit:
            message = f"{self._admitted} requests are running or waiting, which is the server's limit; try again later."
            raise ApiError(429, message, None, "rate_limit_exceeded", 1.0)
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    # --- other endpoints ----------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        with self._admission():
            asked = checked(TokenizeRequest, await http.read_json(request))
            self.service.check_model(asked.model)
            async with self._tokenizing:
                return JSONResponse(await run_in_threadpool(self._tokenized, asked))

    def _tokenized(self, asked: TokenizeRequest) -> dict[str, Any]:
        tokenizer = self.service.tokenizer
        ids = tokenizer.encode(asked.content, bos=asked.add_special, control=asked.parse_special)
        if not asked.with_pieces:
            return {"tokens": ids}
        pieces = [(token, piece_bytes(tokenizer, token)) for token in ids]
        return {"tokens": [{"id": token, "piece": _text_or_bytes(piece)} for token, piece in pieces]}

    async def detokenize(self, request: Request) -> Response:
        with self._admission():
            asked = checked(DetokenizeRequest, await http.read_json(request))
            self.service.check_model(asked.model)
            async with self._tokenizing:
                return JSONResponse({"content": await run_in_threadpool(self.service.tokenizer.decode, asked.tokens)})

    async def audit(self, request: Request) -> Response:
        with self._admission():
            self.service.check_kind(embeds=False)
            body = await http.read_body(request)
        return StreamingResponse(self.audits.lines(body), media_type="application/x-ndjson")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        self.service.check_model(request.path_params["model"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        service, embeds = self.service, self.service.engine.config.embedding is not None
        note = "this is an embedding model: it answers requests to /v1/embeddings" if embeds else service.template.note
        return {"id": service.model, "object": "model", "created": service.created, "owned_by": "gemma_py",
                "context_length": service.engine.context, "note": note, "embeddings": embeds,
                "thinking": service.format.knows_thinking, "tools": service.format.knows_tools}  # fmt: skip

    async def health(self, request: Request) -> Response:
        scheduler = self.service.scheduler
        health, stats = scheduler.health(), scheduler.stats()
        status = "ending" if self.ending else "ok" if health.ok else "failed"
        told = {"status": status, "why": health.why, "running": stats.running, "waiting": stats.waiting,
                "seconds_since_step": round(health.waiting, 3)}  # fmt: skip
        return JSONResponse(told, 200 if status == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def show_openapi(self, request: Request) -> Response:
        return JSONResponse(document())

    def fail(self, error: GemmaError) -> None:
        for queue in self.event_queues:
            queue.fail(error)


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
