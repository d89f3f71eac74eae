"""Build responses in OpenAI's format from the scheduler's events.

For each event, `take` yields the chunks to stream. After the last event, `document` returns the whole response.
"""

import codecs
import time
import uuid
from collections.abc import Iterator
from typing import Any

from gemma_py.generate.core import TopLogprobs
from gemma_py.generate.events import Event, Failed, Finished, Generated, PrefillProgress, Scored
from gemma_py.server.openai.constraint import piece_bytes
from gemma_py.server.openai.errors import ApiError
from gemma_py.server.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from gemma_py.server.openai.service import Job, Service
from gemma_py.templates.tools import Call

Document = dict[str, Any]


class Choice:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.logprobs: list[Document] = []
        self.reasoning: list[str] = []
        self.calls: list[Call] = []
        self.cached = self.generated = self.reasoning_tokens = self.predicted = 0
        self.finish_reason: str | None = None
        self.receipt: Document | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)


class ResponseBuilder:
    """The base class of the builders of all endpoints.

    prompt_field: the request field that has the prompt
    id_prefix: the prefix of response ids
    object: the value of "object" in a whole response
    chunk_object: the value of "object" in a chunk
    typed_events: True for the Responses API: the stream has an "event:" line before each chunk, and no [DONE] at the end
    """

    prompt_field, id_prefix, object, chunk_object = "", "", "", ""
    typed_events = False

    def __init__(self, service: Service, job: Job, options: StreamOptions, wants_progress: bool) -> None:
        self.service, self.job = service, job
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.choices = [Choice() for _ in job.requests]
        self.options, self.wants_progress = options, wants_progress
        self._began = time.monotonic()

    @property
    def done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def begin(self) -> Iterator[Document]:
        yield from ()

    def take(self, index: int, event: Event) -> Iterator[Document]:
        """Yield the chunks of one event. For a Failed event, raise the event's error."""
        choice = self.choices[index]
        if isinstance(event, PrefillProgress):
            choice.cached = event.cached
            if self.wants_progress:
                yield self._progress(index, event)
        elif isinstance(event, Generated):
            choice.generated += 1
            choice.parts.append(event.token.text)
            choice.calls += event.token.calls
            if event.token.reasoning is not None:
                choice.reasoning.append(event.token.reasoning)
                choice.reasoning_tokens += 1
            yield from self._made(index, choice, event)
        elif isinstance(event, Finished):
            if event.reason == "cancelled":
                raise ApiError(503, "The server shut down before the response was complete.", None, "server_ending")
            choice.predicted = event.usage.predicted
            choice.receipt = None if event.receipt is None else self.service.receipt_document(event.receipt())
            choice.finish_reason = event.reason
            yield from self._finished(index, choice)
        elif isinstance(event, Failed):
            raise event.error

    def end(self) -> Iterator[Document]:
        if self.options.include_usage:
            yield {**self._chunk([]), "usage": self.usage()}
        if self.receipts():
            yield {**self._chunk([]), **self.receipts()}

    def receipts(self) -> Document:
        """Return {"receipts": [...]}, or {} if the client asked for no receipts."""
        made = [choice.receipt for choice in self.choices if choice.receipt is not None]
        return {"receipts": made} if made else {}

    def failed(self, error: ApiError) -> Document:
        """Return the last chunk of a stream that ends with an error."""
        return error.document()

    def document(self) -> Document:
        return {
            "id": self.id, "object": self.object, "created": self.created, "model": self.service.model,
            "choices": [self._whole(index, choice) for index, choice in enumerate(self.choices)],
            "usage": self.usage(), **self.receipts(),
        }  # fmt: skip

    def usage(self) -> Document:
        """Return the token counts so far. A prompt with several choices counts once."""
        pairs = zip(self.job.requests, self.choices, strict=True)
        once = {id(request.ids): (len(request.ids), choice.cached) for request, choice in pairs}.values()
        prompt, made = sum(count for count, _ in once), sum(choice.generated for choice in self.choices)
        details = {}
        if self.service.format.knows_thinking:
            details["reasoning_tokens"] = sum(choice.reasoning_tokens for choice in self.choices)
        predictions = sum(len(request.prediction) for request in self.job.requests)
        if predictions:
            accepted = sum(choice.predicted for choice in self.choices)
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": predictions - accepted}
        return {
            "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in once)},
            **({"completion_tokens_details": details} if details else {}),
        }  # fmt: skip

    # --- what differs between endpoints -------------------------------------------------------------------------------------

    def _made(self, index: int, choice: Choice, event: Generated) -> Iterator[Document]:
        raise NotImplementedError

    def _finished(self, index: int, choice: Choice) -> Iterator[Document]:
        raise NotImplementedError

    def _whole(self, index: int, choice: Choice) -> Document:
        raise NotImplementedError

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _chunk(self, choices: list[Document]) -> Document:
        chunk = {
            "id": self.id, "object": self.chunk_object, "created": self.created, "model": self.service.model,
            "choices": choices,
        }  # fmt: skip
        if self.options.include_usage:
            chunk["usage"] = self.usage() if self.options.continuous_usage_stats else None
        return chunk

    def _progress(self, index: int, event: PrefillProgress) -> Document:
        told = {
            "index": index, "total": event.total, "cache": event.cached, "processed": event.done,
            "time_ms": int((time.monotonic() - self._began) * 1e3),
        }  # fmt: skip
        return {**self._chunk([]), "prompt_progress": told}

    def _is_end(self, index: int, event: Generated) -> bool:
        """Return whether the event's token is an end token, whose text is not part of the response."""
        return event.token.id in self.job.requests[index].ends

    def _token(self, token: int) -> tuple[str, bytes]:
        as_bytes = piece_bytes(self.service.tokenizer, token)
        return as_bytes.decode("utf-8", "replace"), as_bytes


class ChatBuilder(ResponseBuilder):
    prompt_field, id_prefix = "messages", "chatcmpl-"
    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, asked: ChatRequest) -> None:
        super().__init__(service, service.chat(asked), asked.options, asked.return_progress)
        self._logprobs = bool(asked.logprobs)

    def begin(self) -> Iterator[Document]:
        for index in range(len(self.choices)):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def _delta(
        self, index: int, delta: Document, logprobs: Document | None = None, reason: str | None = None
    ) -> Document:
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _made(self, index: int, choice: Choice, event: Generated) -> Iterator[Document]:
        logprobs, token = None, event.token
        if self._logprobs and token.reasoning is None and not self._is_end(index, event):
            entry = self._entry(token.id, token.logprob)
            entry["top_logprobs"] = [self._entry(other, logprob) for other, logprob in event.top]
            choice.logprobs.append(entry)
            logprobs = {"content": [entry], "refusal": None}
        if token.reasoning:
            yield self._delta(index, {"reasoning_content": token.reasoning})
        if token.text or logprobs:
            yield self._delta(index, {"content": token.text}, logprobs)
        for number, call in enumerate(token.calls, len(choice.calls) - len(token.calls)):
            yield self._delta(index, {"tool_calls": [{"index": number, **call.document()}]})

    def _entry(self, token: int, logprob: float) -> Document:
        text, as_bytes = self._token(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(as_bytes)}

    def _finished(self, index: int, choice: Choice) -> Iterator[Document]:
        if choice.calls and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        yield self._delta(index, {}, reason=choice.finish_reason)

    def _whole(self, index: int, choice: Choice) -> Document:
        message: Document = {"role": "assistant", "content": choice.text, "refusal": None}
        if any(choice.reasoning):
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            calls = [call.document() for call in choice.calls]
            message = {**message, "content": choice.text or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }


class CompletionBuilder(ResponseBuilder):
    prompt_field, id_prefix = "prompt", "cmpl-"
    object, chunk_object = "text_completion", "text_completion"

    def __init__(self, service: Service, asked: CompletionRequest) -> None:
        super().__init__(service, service.completion(asked), asked.options, asked.return_progress)
        self._logprobs, self._n = asked.logprobs is not None, asked.n or 1
        self._texts = [_TextOffsets(self._hidden(index)) for index in range(len(self.choices))]

    def _echo(self, index: int) -> str:
        return self.job.echo[index // self._n] if self.job.echo else ""

    def _hidden(self, index: int) -> int:
        """Return the length of the BOS token's text, which the decoded prompt has and the echoed prompt has not."""
        ids = self.job.requests[index].ids if self.job.echo else []
        return len(self.service.tokenizer.decode(ids)) - len(self._echo(index))

    def begin(self) -> Iterator[Document]:
        for index in range(len(self.choices)):
            if self._echo(index):
                yield self._text(index, self._echo(index))

    def take(self, index: int, event: Event) -> Iterator[Document]:
        if isinstance(event, Scored):
            yield self._text(index, "", self._entry(index, event.id, event.logprob, event.top))
        else:
            yield from super().take(index, event)

    def _text(self, index: int, text: str, logprobs: Document | None = None, reason: str | None = None) -> Document:
        return self._chunk([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])

    def _made(self, index: int, choice: Choice, event: Generated) -> Iterator[Document]:
        entry = None
        if self._logprobs:
            entry = self._entry(index, event.token.id, event.token.logprob, event.top)
        if event.token.text or entry:
            yield self._text(index, event.token.text, entry)

    def _entry(self, index: int, token: int, logprob: float | None, top: TopLogprobs) -> Document:
        """Return the log-probabilities of a token. The first token of a prompt has none (logprob is None)."""
        text, as_bytes = self._token(token)
        entry: Document = {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None]}
        if logprob is not None:
            told = {self._token(at)[0]: max(of_it, -9999.0) for at, of_it in top}
            told.setdefault(text, max(logprob, -9999.0))
            entry["token_logprobs"], entry["top_logprobs"] = [max(logprob, -9999.0)], [told]
        entry["text_offset"] = [self._texts[index].push(as_bytes)]
        self.choices[index].logprobs.append(entry)
        return entry

    def _finished(self, index: int, choice: Choice) -> Iterator[Document]:
        yield self._text(index, "", reason=choice.finish_reason)

    def _whole(self, index: int, choice: Choice) -> Document:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logprobs = {name: [entry[name][0] for entry in choice.logprobs] for name in names} if self._logprobs else None
        text = self._echo(index) + choice.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


class _TextOffsets:
    """Computes where each token begins in the text. A token that begins inside a character gets the character's offset."""

    def __init__(self, hidden: int) -> None:
        self._length, self._characters = -hidden, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: bytes) -> int:
        offset = max(0, self._length)
        self._length += len(self._characters.decode(token))
        return offset
