"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

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
    """The error that a client receives instead of a response.

    status: the HTTP status
    param: the invalid field of the request
    code: a name of the error for programs, such as "invalid_value"
    retry_after: seconds after which the client may retry
    """

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


def api_error(error: GemmaError, prompt_field: str | None = None) -> ApiError:
    """Convert an exception to the error that the client receives. prompt_field: the request field that has the prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return ApiError(400, str(error), prompt_field, "context_length_exceeded")
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), None, "rate_limit_exceeded", error.retry_after)
    if isinstance(error, ToolError):
        return ApiError(400, str(error), error.field, "invalid_value")
    if isinstance(error, InputError | TemplateError | UnsupportedError):
        # A message about a sampling option begins with the name of the option.
        first = str(error).partition(" ")[0].rstrip(":")
        return ApiError(400, str(error), first if first in _OPTIONS else prompt_field, "invalid_value")
    return ApiError(500, str(error), None, "internal_error")


_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias", "seed", "stop", "max_tokens",
            "dimensions", "task")  # fmt: skip
T = TypeVar("T", bound=BaseModel)


def checked(schema: type[T], given: Any) -> T:
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _from_validation(error, given) from None


def _from_validation(error: ValidationError, given: Any) -> ApiError:
    """Convert pydantic's errors to one ApiError.

    If a field may have several types, pydantic reports an error for each type. Choose the error that is deepest in the
    document: the field matches that type up to this depth, so the client most likely meant that type.
    """
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
    """Return the path of a field, such as `messages[0].content`, without the type names that pydantic inserts."""
    path, at = "", given
    for number, place in enumerate(places):
        inside = (isinstance(at, Mapping) and place in at) or (isinstance(at, list) and isinstance(place, int))
        if not inside and not (isinstance(at, Mapping) and number == len(places) - 1):
            continue
        path += f"[{place}]" if isinstance(place, int) else f".{place}" if path else str(place)
        at = at[place] if inside else None
    return path or "body"
