"""The response of /v1/embeddings."""

import base64
import json
from typing import Any

import numpy as np

from gemma_py.server.openai.schemas import EmbeddingRequest


def embedding_response(rows: np.ndarray, asked: EmbeddingRequest, model: str, tokens: int) -> bytes:
    """Return the JSON document.    rows: f32 [N, D]"""
    in_base64 = asked.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(row) if in_base64 else row.tolist()}
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    document: dict[str, Any] = {"object": "list", "data": data, "model": model, "usage": usage}
    return json.dumps(document, separators=(",", ":")).encode()


def _base64(row: np.ndarray) -> str:
    """Encode an embedding as OpenAI's clients expect it: the bytes of little-endian float32."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
