"""Build the response of /v1/embeddings."""

import base64
from collections.abc import Iterator

import numpy as np

from gemma_py.generate.embedding import normalised, width_of
from gemma_py.generate.events import Embedded, Event
from gemma_py.server.openai.builders import Choice, Document, ResponseBuilder
from gemma_py.server.openai.schemas import EmbeddingRequest, StreamOptions
from gemma_py.server.openai.service import Service


class EmbeddingBuilder(ResponseBuilder):
    prompt_field, object = "input", "list"

    def __init__(self, service: Service, asked: EmbeddingRequest) -> None:
        self._width = width_of(service.engine, asked.dimensions)
        super().__init__(service, service.embedding(asked), StreamOptions(), False)
        self._in_base64 = asked.encoding_format == "base64"
        self._rows = np.empty((0, self._width), np.float32)

    def take(self, index: int, event: Event) -> Iterator[Document]:
        if isinstance(event, Embedded):
            self._rows = normalised(event.rows, self._width)
        else:
            yield from super().take(index, event)

    def _finished(self, index: int, choice: Choice) -> Iterator[Document]:
        yield from ()

    def document(self) -> Document:
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(row) if self._in_base64 else row.tolist()}
            for index, row in enumerate(self._rows)
        ]
        return {"object": self.object, "data": data, "model": self.service.model, "usage": self.usage()}

    def usage(self) -> Document:
        tokens = sum(len(text) for text in self.job.requests[0])
        return {"prompt_tokens": tokens, "total_tokens": tokens}


def _base64(row: np.ndarray) -> str:
    """Encode an embedding as OpenAI's clients expect it: the bytes of little-endian float32."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
