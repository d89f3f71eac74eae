"""HTTP responses: a stream of server-sent events, or one JSON document."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gemma_py.errors import GemmaError
from gemma_py.generate.events import Event, Finished
from gemma_py.server.events import EventQueue
from gemma_py.server.openai.builders import ResponseBuilder
from gemma_py.server.openai.errors import api_error

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
KEEP_ALIVE_SECONDS = 10.0  # a stream sends a keep-alive comment after this time without an event


class EventStream(StreamingResponse):
    """Streams a builder's chunks as server-sent events.

    held: resources of the request, which are closed when the stream ends, even if no chunk was sent
    """

    media_type = "text/event-stream"

    def __init__(self, builder: ResponseBuilder, queue: EventQueue, held: contextlib.AsyncExitStack) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_server_sent_events(builder, queue), headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def _server_sent_events(builder: ResponseBuilder, queue: EventQueue) -> AsyncIterator[bytes]:
    typed = builder.typed_events
    try:
        yield encode_events(list(builder.begin()), typed)
        while not builder.done:
            events = await queue.get(KEEP_ALIVE_SECONDS)
            chunks: list[dict[str, Any]] = []
            try:
                for index, event in events:
                    chunks += await _taken(builder, index, event)
            finally:
                if chunks:
                    yield encode_events(chunks, typed)
            if not events:
                yield b": still here\n\n"
        yield encode_events(list(builder.end()), typed)
    except GemmaError as error:
        yield encode_events([builder.failed(api_error(error, builder.prompt_field))], typed)
    if not typed:
        yield b"data: [DONE]\n\n"


async def _taken(builder: ResponseBuilder, index: int, event: Event) -> list[dict[str, Any]]:
    """Return the chunks of an event. Making a receipt takes long, so an event with a receipt is handled in a thread."""
    if isinstance(event, Finished) and event.receipt is not None:
        return await run_in_threadpool(lambda: list(builder.take(index, event)))
    return list(builder.take(index, event))


def encode_events(chunks: list[dict[str, Any]], typed: bool) -> bytes:
    """Encode chunks as server-sent events. typed: write an "event:" line with the chunk's type before each chunk."""
    lines = []
    for chunk in chunks:
        if typed:
            lines.append(f"event: {chunk['type']}\n")
        lines.append(f"data: {_encode(chunk)}\n\n")
    return "".join(lines).encode("utf-8", "replace")


async def whole_response(builder: ResponseBuilder, queue: EventQueue) -> Response:
    while not builder.done:
        for index, event in await queue.get():
            await _taken(builder, index, event)
    # Encoding many embeddings in the event loop would make other requests wait.
    return await run_in_threadpool(lambda: JSONResponse(builder.document()))


async def while_connected(request: Request, response: Awaitable[Response]) -> Response:
    """Wait for a response. Raise ClientDisconnect if the client disconnects first."""
    working = asyncio.ensure_future(response)
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
