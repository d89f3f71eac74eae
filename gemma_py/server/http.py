"""Read request bodies, with limits on size and time, and write errors in OpenAI's format."""

import asyncio
import difflib
import json
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gemma_py.errors import GemmaError
from gemma_py.server.openai.endpoints import ENDPOINTS
from gemma_py.server.openai.errors import ApiError, api_error

MAX_BODY = 4 << 20
BODY_SECONDS = 30.0  # time limit for receiving a body
_PROMPT_FIELDS = {**{path: endpoint.prompt_field for path, endpoint in ENDPOINTS.items()}, "/detokenize": "tokens"}


async def read_json(request: Request) -> Any:
    body = await read_body(request)
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        message = f"The body is not valid JSON: {' '.join(str(error).split()):.120}"
        raise ApiError(400, message, None, "invalid_json") from None


async def read_body(request: Request) -> bytes:
    """Return the unparsed body of a request with Content-Type application/json."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"Content-Type should be application/json, found {kind!r:.60}.", None, "unsupported_media_type"
        )
    length = request.headers.get("content-length", "0")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if int(length) <= MAX_BODY:
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_BODY:
                        break
            if size > MAX_BODY or int(length) > MAX_BODY:
                raise ApiError(413, f"The body is larger than {MAX_BODY} bytes.", None, "request_too_large")
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:g} seconds.", None, "timeout") from None
    return b"".join(parts)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a valid JSON number")


# --- errors -----------------------------------------------------------------------------------------------------------


def error_response(error: ApiError) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    return JSONResponse(error.document(), error.status, headers)


async def gemma_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GemmaError)
    return error_response(api_error(error, _PROMPT_FIELDS.get(request.url.path)))


async def http_error(request: Request, error: Exception) -> Response:
    """Describe an error that Starlette raised: an unknown path, or a method that the path does not support."""
    assert isinstance(error, HTTPException)
    path, code, message = request.url.path[:80], "unknown_url", error.detail
    headers = error.headers or {}
    if error.status_code == 404:
        near = difflib.get_close_matches(path, [r.path for r in request.app.routes if isinstance(r, Route)], 1, 0.8)
        message = f"Unknown path: {path!r}; " + (f"did you mean {near[0]!r}?" if near else "/openapi.json lists all.")
    elif error.status_code == 405:
        message = f"{path!r} does not accept {request.method}, only {headers['Allow']}."
        code = "method_not_supported"
    response = error_response(ApiError(error.status_code, message, None, code))
    response.headers.update(headers)
    return response


async def client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has disconnected, so only the metrics see this status


async def unexpected_error(request: Request, error: Exception) -> Response:
    message = "The request failed because of an internal error; the server's log has the details."
    return error_response(ApiError(500, message, None, "internal_error"))
