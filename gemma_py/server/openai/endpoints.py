"""The endpoints that run the model, for the server and for `gemma_py batch`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from gemma_py.server.openai.builders import ChatBuilder, CompletionBuilder, ResponseBuilder
from gemma_py.server.openai.embeddings import EmbeddingBuilder
from gemma_py.server.openai.responses import ResponsesBuilder
from gemma_py.server.openai.schemas import ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest
from gemma_py.server.openai.service import Service


class Endpoint(NamedTuple):
    """One endpoint of OpenAI's API.

    schema: the pydantic model of a request
    builder: the class that builds the response
    prompt_field: the request field that has the prompt
    embeds: whether the endpoint needs an embedding model; otherwise it needs a model that generates text
    """

    schema: Any
    builder: Callable[[Service, Any], ResponseBuilder]
    prompt_field: str
    embeds: bool = False

    def response(self, service: Service, asked: Any) -> ResponseBuilder:
        service.check_model(asked.model)
        service.check_kind(self.embeds)
        return self.builder(service, asked)


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatRequest, ChatBuilder, ChatBuilder.prompt_field),
    "/v1/completions": Endpoint(CompletionRequest, CompletionBuilder, CompletionBuilder.prompt_field),
    "/v1/responses": Endpoint(ResponsesRequest, ResponsesBuilder, ResponsesBuilder.prompt_field),
    "/v1/embeddings": Endpoint(EmbeddingRequest, EmbeddingBuilder, EmbeddingBuilder.prompt_field, embeds=True),
}
