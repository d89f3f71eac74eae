"""Build the responses of /v1/responses: a list of output items, streamed as typed events."""

import uuid
from collections.abc import Iterator
from typing import Any

from gemma_py.generate.events import Generated, PrefillProgress
from gemma_py.server.openai.builders import Choice, Document, ResponseBuilder
from gemma_py.server.openai.errors import ApiError
from gemma_py.server.openai.schemas import NamedFlatTool, ResponsesRequest, StreamOptions
from gemma_py.server.openai.service import Service
from gemma_py.templates.tools import Call


class ResponsesBuilder(ResponseBuilder):
    prompt_field, id_prefix, object = "input", "resp_", "response"
    typed_events = True

    def __init__(self, service: Service, asked: ResponsesRequest) -> None:
        super().__init__(service, service.responses(asked), StreamOptions(), asked.return_progress)
        self._asked, self._item = asked, f"msg_{uuid.uuid4().hex}"
        self._sequence_number = -1
        self._items: list[Call | None] = []  # output items in order: tool calls, and None for the text message
        self._expect_calls(asked)

    def _event(self, kind: str, **fields: Any) -> Document:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number, **fields}

    def begin(self) -> Iterator[Document]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def _begin_text(self) -> Iterator[Document]:
        if None not in self._items:
            self._items.append(None)
            item = {**self._message(""), "status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=self._items.index(None), item=item)
            yield self._part("response.content_part.added", part=_text_part(""))

    def _part(self, kind: str, **fields: Any) -> Document:
        position = self._items.index(None)
        return self._event(kind, item_id=self._item, output_index=position, content_index=0, **fields)

    def _progress(self, index: int, event: PrefillProgress) -> Document:
        told = {"total": event.total, "cache": event.cached, "processed": event.done}
        return self._event("response.in_progress", response=self._response("in_progress"), prompt_progress=told)

    def _made(self, index: int, choice: Choice, event: Generated) -> Iterator[Document]:
        text, calls = self._split_calls(index, event)
        choice.parts.append(text)
        if text:
            yield from self._begin_text()
            yield self._part("response.output_text.delta", delta=text, logprobs=[])
        for call in calls:
            yield from self._called(call)

    def _called(self, call: Call) -> Iterator[Document]:
        """Yield the events of a complete tool call."""
        at, item = {"output_index": len(self._items)}, _call_item(call)
        self._items.append(call)
        empty = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", **at, item=empty)
        at_id = {**at, "item_id": item["id"]}
        yield self._event("response.function_call_arguments.delta", **at_id, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **at_id, name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", **at, item=item)

    def _finished(self, index: int, choice: Choice) -> Iterator[Document]:
        text = choice.text
        if not self._items:
            yield from self._begin_text()
        if None in self._items:
            yield self._part("response.output_text.done", text=text, logprobs=[])
            yield self._part("response.content_part.done", part=_text_part(text))
            position = self._items.index(None)
            yield self._event("response.output_item.done", output_index=position, item=self._message(text))
        whole = self.document()
        yield self._event(f"response.{whole['status']}", response=whole)

    def end(self) -> Iterator[Document]:
        yield from ()

    def failed(self, error: ApiError) -> Document:
        return self._event("error", message=str(error), code=error.code, param=error.param)

    def document(self) -> Document:
        status = "incomplete" if self.choices[0].finish_reason == "length" else "completed"
        return self._response(status)

    def _message(self, text: str) -> Document:
        status = "incomplete" if self.choices[0].finish_reason == "length" else "completed"
        return {"id": self._item, "type": "message", "role": "assistant", "status": status,
                "content": [_text_part(text)]}  # fmt: skip

    def _response(self, status: str) -> Document:
        asked, in_progress = self._asked, status == "in_progress"
        usage = None if in_progress else self.usage()
        sampling = self.job.requests[0].sampling
        return {
            "id": self.id, "object": self.object, "created_at": self.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "model": self.service.model, "output": [] if in_progress else self._output(),
            "parallel_tool_calls": False, "previous_response_id": None, "store": False,
            "temperature": sampling.temperature, "top_p": sampling.top_p,
            "text": {"format": self._format()},
            "tool_choice": self._choice(), "tools": [tool.model_dump() for tool in asked.functions],
            "truncation": "disabled", "metadata": asked.metadata or {},
            "usage": None if usage is None else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip

    def _output(self) -> list[Document]:
        text = self.choices[0].text
        return [self._message(text) if item is None else _call_item(item) for item in self._items]

    def _choice(self) -> Any:
        choice = self._asked.tool_choice
        return choice.model_dump() if isinstance(choice, NamedFlatTool) else choice or "auto"

    def _format(self) -> Document:
        form = None if self._asked.text is None else self._asked.text.format
        if form is None or form.type != "json_schema":
            return {"type": "text" if form is None else form.type}
        return {"type": "json_schema", "name": form.name, "schema": form.schema_, "strict": form.strict}


def _call_item(call: Call) -> Document:
    return {"id": call.id.replace("call", "fc"), "type": "function_call", "status": "completed", "call_id": call.id,
            "name": call.name, "arguments": call.arguments}  # fmt: skip


def _text_part(text: str) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
