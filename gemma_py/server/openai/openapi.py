"""The OpenAPI document of the server, generated from the pydantic models of requests."""

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import gemma_py
from gemma_py.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponsesRequest,
    TokenizeRequest,
)

_POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatRequest, "Generate the next message of a conversation."),
    "/v1/completions": (CompletionRequest, "Continue a text."),
    "/v1/responses": (ResponsesRequest, "Generate a response with the Responses API; nothing is stored."),
    "/v1/embeddings": (EmbeddingRequest, "Embed texts; needs an embedding model."),
    "/tokenize": (TokenizeRequest, "Turn text into token ids."),
    "/detokenize": (DetokenizeRequest, "Turn token ids into text."),
}
_GETS = {
    "/v1/models": ("The model that is served.", "application/json"),
    "/v1/models/{model}": ("One model, by its name.", "application/json"),
    "/health": ("The state of the engine: ok, failed or ending.", "application/json"),
    "/metrics": ("Metrics for Prometheus.", "text/plain"),
    "/openapi.json": ("This document.", "application/json"),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def document() -> dict[str, Any]:
    models = [(schema, "validation") for schema, _ in _POSTS.values()]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, (schema, about) in _POSTS.items():
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if path in _STREAMED:
            content["text/event-stream"] = {}
        reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": {"summary": about, "requestBody": body, "responses": _responses(content)}}
    for path, (about, kind) in _GETS.items():
        form = {"type": "string"} if kind == "text/plain" else {"type": "object"}
        paths[path] = {"get": {"summary": about, "responses": _responses({kind: {"schema": form}})}}
    receipt = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    lines = _responses({"application/x-ndjson": {"schema": {"type": "object"}}})
    paths["/v1/audit"] = {"post": {"summary": "Check receipts.", "requestBody": receipt, "responses": lines}}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [name]
    return {
        "openapi": "3.1.0",
        "info": {"title": "gemma_py", "version": gemma_py.__version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    return {
        "200": {"description": "Success.", "content": content},
        "default": {"description": "An error in OpenAI's format.", "content": {"application/json": error}},
    }
