"""The routes. Handlers never touch the model: they prepare requests in threads, and pass on what the scheduler says."""

import asyncio
import contextlib
import difflib
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemma_py.errors import GemmaError
from gemma_py.server import web_ui as page
from gemma_py.server.answers import Answer, ChatAnswer, CompletionAnswer
from gemma_py.server.auth import HEADERS, Guard, Keys
from gemma_py.server.constraint import piece_bytes
from gemma_py.server.errors import ApiError, checked, from_engine
from gemma_py.server.events import Feed
from gemma_py.server.metrics import CONTENT_TYPE, Metrics
from gemma_py.server.openapi import document
from gemma_py.server.responses import ResponsesAnswer
from gemma_py.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, ResponsesRequest, TokenizeRequest
from gemma_py.server.service import Job, Service

LARGEST_BODY = 4 << 20  # bytes
BODY_SECONDS = 30.0  # for a body to arrive
KEEP_ALIVE_SECONDS = 10.0  # between signs of life of a stream whose prompt is being computed
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_EVENT_STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class App:
    """State and handlers. most: requests that may be prepared, wait and run at once."""

    def __init__(self, service: Service, most: int) -> None:
        self.service, self.most = service, most
        self.metrics = Metrics(service.scheduler)
        self.ending = False
        self.feeds: set[Feed] = set()
        self._admitted = 0
        self._tokenizing = asyncio.Lock()  # several at once would be no sooner done, and leave less time to all else

    def asgi(
        self, host: str, names: Collection[str] = (), origins: Collection[str] = (), keys: Keys | None = None
    ) -> ASGIApp:
        guard = Middleware(Guard, host=host, names=names, origins=origins, keys=keys or Keys())
        # Outermost: a preflight brings no key.
        cors = Middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )  # fmt: skip
        counted = Middleware(_Counted, metrics=self.metrics)
        routes = [
            Route("/", page.show),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.show_openapi),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        handlers: dict[Any, Callable[..., Any]] = {
            GemmaError: _gemma_error, HTTPException: _http_error, ClientDisconnect: _gone, Exception: _unexpected,
        }  # fmt: skip
        made = Starlette(
            routes=routes,
            middleware=[counted, *([cors] if origins else []), guard],
            exception_handlers=handlers,
        )
        made.router.redirect_slashes = False  # programs do not follow; an error tells them more
        return made

    # --- generating ---------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, self.service.chat, ChatAnswer)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, self.service.completion, CompletionAnswer)

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, ResponsesRequest, self.service.responses, ResponsesAnswer)

    async def _generate(
        self, request: Request, schema: Any, prepare: Callable[[Any], Job], kind: Callable[[Service, Job, Any], Answer]
    ) -> Response:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._place())
            asked = checked(schema, await _json(request))
            self.service.check_model(asked.model)
            loop = asyncio.get_running_loop()

            def submit() -> tuple[Answer, Feed]:
                job = prepare(asked)
                answer = kind(self.service, job, asked)
                try:
                    return answer, Feed(self.service.scheduler, job, self.metrics, loop)
                except GemmaError as error:
                    raise from_engine(error, job.param) from None

            answer, feed = await run_in_threadpool(submit)
            self.feeds.add(feed)
            stack.callback(self.feeds.discard, feed)
            stack.callback(feed.close)
            if not asked.stream:
                return await _while_connected(request, _whole(answer, feed))
            typed = isinstance(answer, ResponsesAnswer)
            return _Stream(_pieces(answer, feed, typed), stack.pop_all())
        raise AssertionError

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Refused before anything is read."""
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    def _refusal(self) -> ApiError | None:
        """Why nothing more can be generated now, if so."""
        if self.ending:
            return ApiError(503, "The server is ending.", None, "server_ending", 10.0)
        health = self.service.scheduler.health()
        if not health.ok:
            return ApiError(503, f"The engine has failed: {health.why}", None, "engine_failed")
        if self._admitted >= self.most:
            message = f"{self._admitted} requests are being served or wait; try again later."
            return ApiError(429, message, None, "rate_limit_exceeded", 1.0)
        return None

    def refuse(self, path: str) -> Response | None:
        """The answer to a request whose path is enough to refuse it, whoever asks: so that there is no room is said to those
        too who would hear that they may not ask."""
        refusal = self._refusal() if path in _GENERATING else None
        if refusal is None:
            return None
        self.metrics.requests.labels(path, str(refusal.status)).inc()
        response = refusal.response()
        response.headers.update(HEADERS)
        return response

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        with self._place():
            asked = checked(TokenizeRequest, await _json(request))
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
        with self._place():
            asked = checked(DetokenizeRequest, await _json(request))
            self.service.check_model(asked.model)
            try:
                async with self._tokenizing:
                    text = await run_in_threadpool(self.service.tokenizer.decode, asked.tokens)
            except GemmaError as error:
                raise from_engine(error, "tokens") from None
            return JSONResponse({"content": text})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        self.service.check_model(request.path_params["model"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        service = self.service
        return {"id": service.model, "object": "model", "created": service.created, "owned_by": "gemma_py",
                "context_length": service.engine.context, "note": service.template.note}  # fmt: skip

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
        """Tell every client that waits for anything."""
        for feed in self.feeds:
            feed.fail(error)


# --- answers over HTTP ------------------------------------------------------------------------------------------------


class _Stream(StreamingResponse):
    """What was taken for it is given back, however it ends, also before it began."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], held: contextlib.AsyncExitStack) -> None:
        super().__init__(content, headers=_EVENT_STREAM)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def _pieces(answer: Answer, feed: Feed, typed: bool) -> AsyncIterator[bytes]:
    """Server-sent events. typed: with the type of each as its event, and no [DONE], as /v1/responses has it."""
    try:
        yield _events(list(answer.begin()), typed)
        while not answer.done:
            events = await feed.next(KEEP_ALIVE_SECONDS)
            made: list[dict[str, Any]] = []
            try:
                for index, event in events:
                    made += answer.take(index, event)
            finally:
                if made:
                    yield _events(made, typed)
            if not events:
                yield b": still here\n\n"
        yield _events(list(answer.end()), typed)
    except ApiError as error:
        yield _events([answer.failed(error)], typed)
    if not typed:
        yield b"data: [DONE]\n\n"


def _events(documents: list[dict[str, Any]], typed: bool) -> bytes:
    parts = []
    for piece in documents:
        if typed:
            parts.append(f"event: {piece['type']}\n")
        parts.append(f"data: {json.dumps(piece, ensure_ascii=False, separators=(',', ':'))}\n\n")
    return "".join(parts).encode("utf-8", "replace")


async def _whole(answer: Answer, feed: Feed) -> Response:
    while not answer.done:
        for index, event in await feed.next():
            for _ in answer.take(index, event):
                pass
    return JSONResponse(answer.document())


async def _while_connected(request: Request, work: Any) -> Response:
    """The work's response, unless the client goes before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json(request: Request) -> Any:
    """The body, within limits of size and time."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"The body should be application/json, found {kind!r:.60}.", None, "unsupported_media_type")
    length = request.headers.get("content-length", "0")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if int(length) <= LARGEST_BODY:
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > LARGEST_BODY:
                        break
            if size > LARGEST_BODY or int(length) > LARGEST_BODY:
                raise ApiError(413, f"A body may take {LARGEST_BODY} bytes at most.", None, "request_too_large")
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:g} seconds.", None, "timeout") from None
    try:
        return json.loads(b"".join(parts), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON: {' '.join(str(error).split()):.120}", None, "invalid_json") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


# --- errors -----------------------------------------------------------------------------------------------------------


async def _gemma_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GemmaError)
    return from_engine(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, code = request.url.path[:80], "unknown_url"
    message = error.detail
    if error.status_code == 404:
        near = difflib.get_close_matches(path, [r.path for r in request.app.routes if isinstance(r, Route)], 1, 0.8)
        message = f"Unknown path: {path!r}; " + (f"did you mean {near[0]!r}?" if near else "/openapi.json lists all.")
    elif error.status_code == 405:
        message, code = (
            f"{request.method} is not for {path!r}; {(error.headers or {})['Allow']} is.",
            "method_not_supported",
        )
    response = ApiError(error.status_code, message, None, code).response()
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the metrics count it


async def _unexpected(request: Request, error: Exception) -> Response:
    return ApiError(500, "The server failed at this request; its log says how.", None, "internal_error").response()


class _Counted:
    """Counts requests by path and status; what is no path of ours counts as one."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = route.path if isinstance(route, Route) else "other"
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, send_counted)
