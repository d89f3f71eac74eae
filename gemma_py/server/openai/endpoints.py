"""The endpoints that generate, over HTTP and in a batch alike."""

from collections.abc import Callable
from typing import Any, NamedTuple

from gemma_py.server.openai.builders import ChatBuilder, CompletionBuilder, ResponseBuilder
from gemma_py.server.openai.responses import ResponsesBuilder
from gemma_py.server.openai.schemas import ChatRequest, CompletionRequest, ResponsesRequest
from gemma_py.server.openai.service import Service


class Endpoint(NamedTuple):
    """schema: what a request is checked with. builder: prepares a request, then builds its response. prompt_field: see there."""

    schema: Any
    builder: Callable[[Service, Any], ResponseBuilder]
    prompt_field: str


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatRequest, ChatBuilder, ChatBuilder.prompt_field),
    "/v1/completions": Endpoint(CompletionRequest, CompletionBuilder, CompletionBuilder.prompt_field),
    "/v1/responses": Endpoint(ResponsesRequest, ResponsesBuilder, ResponsesBuilder.prompt_field),
}
