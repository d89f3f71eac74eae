"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

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
    """A request that cannot be answered.

    status: of HTTP. param: the field of the request that is at fault. code: the kind of error, for programs. retry_after: seconds
    after which the same request may succeed.
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
    """What a client is told of any error: the only place that decides it. prompt_field: where the request holds its prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return ApiError(400, str(error), prompt_field, "context_length_exceeded")
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), None, "rate_limit_exceeded", error.retry_after)
    if isinstance(error, ToolError):
        return ApiError(400, str(error), error.field, "invalid_value")
    if isinstance(error, InputError | TemplateError | UnsupportedError):
        first = str(error).partition(" ")[0].rstrip(":")  # messages about sampling begin with the name of the option
        return ApiError(400, str(error), first if first in _OPTIONS else prompt_field, "invalid_value")
    return ApiError(500, str(error), None, "internal_error")


_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias", "seed", "stop", "max_tokens")
T = TypeVar("T", bound=BaseModel)


def checked(schema: type[T], given: Any) -> T:
    """The request that a document describes. Raises ApiError about the first thing that is wrong with it."""
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _from_validation(error, given) from None


def _from_validation(error: ValidationError, given: Any) -> ApiError:
    """pydantic reports one error for each type that a field may have. The one deepest in the document is the one to report."""
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
    """`messages[0].content`. pydantic also names the types that it tried, which are left out: they are no keys of the document."""
    path, at = "", given
    for number, place in enumerate(places):
        inside = (isinstance(at, Mapping) and place in at) or (isinstance(at, list) and isinstance(place, int))
        if not inside and not (isinstance(at, Mapping) and number == len(places) - 1):
            continue
        path += f"[{place}]" if isinstance(place, int) else f".{place}" if path else str(place)
        at = at[place] if inside else None
    return path or "body"
