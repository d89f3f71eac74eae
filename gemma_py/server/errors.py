"""What goes wrong with a request, in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

from gemma_py.errors import (
    ContextError,
    GemmaError,
    InputError,
    Overloaded,
    TemplateError,
    ToolError,
    UnsupportedError,
)

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(GemmaError):
    """param: the field that is meant. code: for programs. retry_after: seconds after which it may be tried again."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def document(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after))
        return JSONResponse(self.document(), self.status, headers)


def from_engine(error: GemmaError, param: str | None = None) -> ApiError:
    """What a failure below means to a client. param: the field that holds the prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return ApiError(400, str(error), param, "context_length_exceeded")
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), None, "rate_limit_exceeded", error.retry_after)
    if isinstance(error, ToolError):
        return ApiError(400, str(error), error.field, "invalid_value")
    if isinstance(error, InputError | TemplateError | UnsupportedError):
        named = str(error).partition(" ")[0].rstrip(":")  # messages about sampling begin with the name of the option
        return ApiError(400, str(error), named if named in _OPTIONS else param, "invalid_value")
    return ApiError(500, str(error), None, "internal_error")


_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias", "seed", "stop", "max_tokens")
T = TypeVar("T", bound=BaseModel)


def checked(schema: type[T], given: Any) -> T:
    """A document as a request; ApiError about the first thing that is wrong with it."""
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _from_validation(error, given) from None


def _from_validation(error: ValidationError, given: Any) -> ApiError:
    """Where a field may be several things, each says why it is not that: the one that got furthest was meant."""
    errors = error.errors(include_url=False, include_context=False)
    same = [(_path(e["loc"], given), e) for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    path, first = max(same, key=lambda pair: pair[0].count("[") + pair[0].count("."))
    kind = first["type"]
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{path}'.", path, "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    found = "" if first["input"] is given else f" Found {first['input']!r:.60}."
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return ApiError(400, f"Invalid '{path}': {first['msg'].removeprefix('Value error, ')}.{found}", path, code)


def _path(places: tuple[int | str, ...], given: Any) -> str:
    """`messages[0].content`. pydantic also names the alternatives that it tried; those lead nowhere in the document."""
    path, at = "", given
    for number, place in enumerate(places):
        inside = (isinstance(at, Mapping) and place in at) or (isinstance(at, list) and isinstance(place, int))
        if not inside and not (isinstance(at, Mapping) and number == len(places) - 1):
            continue
        path += f"[{place}]" if isinstance(place, int) else f".{place}" if path else str(place)
        at = at[place] if inside else None
    return path or "body"
