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


class _TextItem:
    """An output item with text: a message or a thought. position: the item's index in the output."""

    def __init__(self, reasoning: bool, position: int) -> None:
        self.reasoning, self.position, self.done = reasoning, position, False
        self.id = f"{'rs' if reasoning else 'msg'}_{uuid.uuid4().hex}"
        self.parts: list[str] = []

    def part(self, text: str) -> Document:
        if self.reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def document(self, status: str) -> Document:
        """Return the item as JSON, with the text so far. While an item is in progress, its content is empty."""
        kind: Document = {"summary": []} if self.reasoning else {"role": "assistant"}
        content = [] if status == "in_progress" else [self.part("".join(self.parts))]
        return {"id": self.id, "type": "reasoning" if self.reasoning else "message", **kind, "status": status,
                "content": content}  # fmt: skip


class ResponsesBuilder(ResponseBuilder):
    prompt_field, id_prefix, object = "input", "resp_", "response"
    typed_events = True

    def __init__(self, service: Service, asked: ResponsesRequest) -> None:
        super().__init__(service, service.responses(asked), StreamOptions(), asked.return_progress)
        self._asked = asked
        self._sequence_number = -1
        self._items: list[_TextItem | Call] = []

    def _event(self, kind: str, **fields: Any) -> Document:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number, **fields}

    def begin(self) -> Iterator[Document]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def _open(self, reasoning: bool) -> _TextItem | None:
        """Return the unfinished item to which text is appended, or None. reasoning: whether the text is a thought."""
        items = (item for item in self._items if isinstance(item, _TextItem) and not item.done)
        return next((item for item in items if item.reasoning == reasoning), None)

    def _text(self, text: str, reasoning: bool) -> Iterator[Document]:
        item = self._open(reasoning)
        if item is None:
            item = _TextItem(reasoning, len(self._items))
            self._items.append(item)
            document = item.document("in_progress")
            yield self._event("response.output_item.added", output_index=item.position, item=document)
            yield self._of_part("response.content_part.added", item, part=item.part(""))
        if text:
            item.parts.append(text)
            logprobs: Document = {} if reasoning else {"logprobs": []}
            yield self._of_part(f"response.{item.part('')['type']}.delta", item, delta=text, **logprobs)

    def _of_part(self, kind: str, item: _TextItem, **fields: Any) -> Document:
        return self._event(kind, item_id=item.id, output_index=item.position, content_index=0, **fields)

    def _end_text(self, item: _TextItem) -> Iterator[Document]:
        item.done, part = True, item.part("".join(item.parts))
        logprobs: Document = {} if item.reasoning else {"logprobs": []}
        yield self._of_part(f"response.{part['type']}.done", item, text=part["text"], **logprobs)
        yield self._of_part("response.content_part.done", item, part=part)
        document = item.document(self._status())
        yield self._event("response.output_item.done", output_index=item.position, item=document)

    def _progress(self, index: int, event: PrefillProgress) -> Document:
        told = {"total": event.total, "cache": event.cached, "processed": event.done}
        return self._event("response.in_progress", response=self._response("in_progress"), prompt_progress=told)

    def _made(self, index: int, choice: Choice, event: Generated) -> Iterator[Document]:
        token = event.token
        if token.reasoning:
            yield from self._text(token.reasoning, reasoning=True)
        thought = self._open(reasoning=True)
        if (token.text or token.calls) and thought is not None:
            yield from self._end_text(thought)
        if token.text:
            yield from self._text(token.text, reasoning=False)
        for call in token.calls:
            yield from self._called(call)

    def _called(self, call: Call) -> Iterator[Document]:
        at, item = {"output_index": len(self._items)}, _call_item(call)
        self._items.append(call)
        empty = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", **at, item=empty)
        at_id = {**at, "item_id": item["id"]}
        yield self._event("response.function_call_arguments.delta", **at_id, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **at_id, name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", **at, item=item)

    def _finished(self, index: int, choice: Choice) -> Iterator[Document]:
        if not any(isinstance(item, Call) or not item.reasoning for item in self._items):
            yield from self._text("", reasoning=False)
        for item in self._items:
            if isinstance(item, _TextItem) and not item.done:
                yield from self._end_text(item)
        whole = self.document()
        yield self._event(f"response.{whole['status']}", response=whole)

    def end(self) -> Iterator[Document]:
        yield from ()

    def failed(self, error: ApiError) -> Document:
        return self._event("error", message=str(error), code=error.code, param=error.param)

    def document(self) -> Document:
        return self._response(self._status())

    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

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
                "output_tokens_details": {"reasoning_tokens": self.choices[0].reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            },
            **self.receipts(),
        }  # fmt: skip

    def _output(self) -> list[Document]:
        status = self._status()
        return [_call_item(item) if isinstance(item, Call) else item.document(status) for item in self._items]

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
