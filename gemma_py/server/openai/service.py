"""Convert requests in OpenAI's format to requests for the scheduler."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gemma_py.errors import InputError
from gemma_py.generate.answer import AfterThoughts, Constraint
from gemma_py.generate.base_scheduler import BaseScheduler
from gemma_py.generate.core import Request
from gemma_py.generate.embedding import texts_to_ids
from gemma_py.generate.embedding_scheduler import EmbeddingScheduler
from gemma_py.generate.engine import Engine
from gemma_py.generate.options import RANGES, Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.receipts.envelope import Signer
from gemma_py.receipts.receipt import Receipt
from gemma_py.server.openai.constraint import JsonConstraint, JsonConstraints
from gemma_py.server.openai.errors import ApiError
from gemma_py.server.openai.schemas import (
    MAX_PROMPTS,
    CallItem,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    EmbeddingRequest,
    FunctionCall,
    InputItem,
    ReasoningItem,
    ResponseFormat,
    ResponsesRequest,
    ResultItem,
    Sampled,
    TextFormat,
    ToolCall,
)
from gemma_py.server.openai.schemas import Message as GivenMessage
from gemma_py.templates.chat_format import NO_TOOLS, ChatFormat
from gemma_py.templates.notation import CallConstraint, Marks
from gemma_py.templates.template import Message, Template

DEFAULT_TOKENS = 1024  # limit on the tokens of a response if the request sets no limit
_SEEDS = 1 << 63


@dataclass(frozen=True)
class Job:
    """The scheduler's requests for one HTTP request.

    requests: one for each choice; each prompt has n choices
    echo: the texts of the prompts if the response should repeat them, otherwise empty
    """

    requests: list[Any]
    echo: list[str]


def new_scheduler(engine: Engine, parallel: int, queue: int = 64) -> BaseScheduler[Any, Any]:
    if engine.config.embedding is not None:
        return EmbeddingScheduler(engine, parallel, queue)
    return Scheduler(engine, parallel, queue)


class Service:
    """Converts requests in OpenAI's format. Thread-safe. model: the model's name in requests."""

    def __init__(
        self,
        engine: Engine,
        scheduler: BaseScheduler[Any, Any],
        model: str,
        template: str | None = None,
        signer: Signer | None = None,
    ) -> None:
        """signer: signs all receipts; None for unsigned receipts"""
        self.engine, self.scheduler, self.model, self.signer = engine, scheduler, model, signer
        self.tokenizer = engine.text_tokenizer()
        self.format: ChatFormat = engine.chat_format(engine.template(template))
        self.ends = engine.ends(self.template)
        self.created = int(time.time())
        self._constraints = JsonConstraints(self.tokenizer, engine.config.vocab_size, self.ends)

    def receipt_document(self, receipt: Receipt) -> dict[str, Any]:
        """Return a receipt as JSON: an in-toto statement, which a server with a signer wraps in a signed envelope."""
        return receipt.document() if self.signer is None else self.signer.envelope(receipt).document()

    @property
    def template(self) -> Template:
        return self.format.template

    def prepare(self) -> None:
        """Build the tables for JSON schemas. Called at startup, because building blocks all Python threads for a second."""
        if self.engine.config.embedding is None:
            description = self._constraints.prepare()
            if description is not None:
                self.scheduler.prepare_constraint(description)

    def check_kind(self, embeds: bool) -> None:
        """Raise InputError if the request needs an embedding model and this model generates text, or the reverse.

        embeds: whether the request needs an embedding model
        """
        if embeds and self.engine.config.embedding is None:
            raise InputError(f"The model {self.model!r:.80} generates text; embeddings need an embedding model.")
        if not embeds and self.engine.config.embedding is not None:
            raise InputError(f"The model {self.model!r:.80} is an embedding model; use /v1/embeddings.")

    def check_model(self, wanted: str | None) -> None:
        if wanted is not None and wanted != self.model:
            message = f"The model {wanted!r:.80} does not exist; this server serves {self.model!r}."
            raise ApiError(404, message, "model", "model_not_found")

    # --- requests -----------------------------------------------------------------------------------------------------

    def chat(self, asked: ChatRequest) -> Job:
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", "top_logprobs", "invalid_value")
        thinking, marks = self._thinking(asked), self._marks(asked)
        ids = self._prompt(asked, self._messages(asked.messages), thinking)
        limit = asked.max_completion_tokens or asked.max_tokens
        request = Request(
            ids,
            DEFAULT_TOKENS if limit is None else limit,
            self._sampling(asked, self.ends),
            fit=limit is None,
            stop=(*self._stop(asked), *asked.stops),
            ends=self.ends,
            trim=True,
            logprobs=bool(asked.logprobs),
            top_logprobs=asked.top_logprobs or 0,
            marks=marks,
            speculate=asked.speculate,
            receipt=asked.receipt,
            prediction=[]
            if asked.prediction is None
            else self.engine.encode_prediction(_text(asked.prediction.content)),
        )
        constraint = self._call(asked) or partial(self._constraint, asked.response_format, "response_format")
        return Job(self._choices(request, asked.n, constraint, thinking), [])

    def completion(self, asked: CompletionRequest) -> Job:
        given: Sequence[Any] = [asked.prompt]
        if isinstance(asked.prompt, list) and not isinstance(asked.prompt[0], int):
            given = asked.prompt
        if len(given) * (asked.n or 1) > MAX_PROMPTS:
            raise ApiError(400, f"A request may have at most {MAX_PROMPTS} choices in all.", "n", "invalid_value")
        requests, ends = [], self.engine.end_ids
        for prompt in given:
            ids = self.engine.encode(prompt)
            request = Request(
                ids,
                DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens,
                self._sampling(asked, ends),
                fit=asked.max_tokens is None,
                stop=asked.stops,
                ends=ends,
                logprobs=asked.logprobs is not None,
                top_logprobs=asked.logprobs or 0,
                scored=bool(asked.echo) and asked.logprobs is not None,
                speculate=asked.speculate,
                receipt=asked.receipt,
            )
            constraint = partial(self._constraint, asked.response_format, "response_format")
            requests += self._choices(request, asked.n, constraint)
        echo = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in given] if asked.echo else []
        return Job(requests, echo)

    def responses(self, asked: ResponsesRequest) -> Job:
        if asked.background:
            raise ApiError(
                400, "This server does not support 'background': true.", "background", "unsupported_parameter"
            )
        messages: list[Message] = []
        if asked.instructions is not None:
            messages.append({"role": "system", "content": asked.instructions})
        if isinstance(asked.input, str):
            messages.append({"role": "user", "content": asked.input})
        else:
            messages = _joined_system(messages + self._messages(_turns(asked.input)))
        thinking = self._thinking(asked)
        ids = self._prompt(asked, messages, thinking)
        limit = asked.max_output_tokens
        request = Request(
            ids, DEFAULT_TOKENS if limit is None else limit, self._sampling(asked, self.ends), fit=limit is None,
            stop=self._stop(asked), ends=self.ends, trim=True, logprobs=False, marks=self._marks(asked),
            speculate=asked.speculate,
            receipt=asked.receipt,
        )  # fmt: skip
        form = None if asked.text is None else asked.text.format
        constraint = self._call(asked) or partial(self._constraint, form, "text.format")
        return Job(self._choices(request, 1, constraint, thinking), [])

    def embedding(self, asked: EmbeddingRequest) -> Job:
        return Job([texts_to_ids(self.engine, asked.texts, asked.task)], [])

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _prompt(
        self, asked: ChatRequest | ResponsesRequest, messages: list[Message], thinking: bool | None
    ) -> list[int]:
        if asked.functions and asked.chosen != "none" and not self.format.knows_tools:
            raise ApiError(400, NO_TOOLS, "tools", "unsupported_parameter")
        functions = [{"function": function.model_dump()} for function in asked.functions if asked.chosen != "none"]
        return self.engine.check_ids(self.format.prompt(messages, functions, thinking))

    def _marks(self, asked: ChatRequest | ResponsesRequest) -> Marks | None:
        return self.format.marks(bool(asked.functions) and asked.chosen != "none")

    def _thinking(self, asked: ChatRequest | ResponsesRequest) -> bool | None:
        """Return whether the model should think. None lets the template decide.

        A reasoning effort is ignored for a model that cannot think, because some clients send an effort to every model.
        """
        switch = asked.thinking_switch
        if switch and not self.format.knows_thinking:
            message = "This model does not think before it answers."
            raise ApiError(400, message, "chat_template_kwargs", "unsupported_parameter")
        if switch is not None or not self.format.knows_thinking or asked.effort is None:
            return switch
        return asked.effort != "none"

    def _call(self, asked: ChatRequest | ResponsesRequest) -> Callable[[], CallConstraint] | None:
        """Return a function that creates the constraint for a tool call, or None if no tool call is required."""
        if asked.chosen in ("none", "auto"):
            return None
        names = [function.name for function in asked.functions]
        if not names or asked.chosen not in ("required", *names):
            message = f"'tool_choice' {asked.chosen!r:.80} matches no function in 'tools', which has: {', '.join(names)[:200] or 'none'}."
            raise ApiError(400, message, "tool_choice", "invalid_value")
        possible = names if asked.chosen == "required" else [asked.chosen]
        marks = self._marks(asked)
        assert marks is not None
        return partial(CallConstraint, self.tokenizer, marks, possible[0] if len(possible) == 1 else None)

    def _messages(self, given: Sequence[GivenMessage]) -> list[Message]:
        made = []
        for number, message in enumerate(given):
            param = f"messages[{number}]"
            if (message.tool_calls or message.role == "tool") and not self.format.knows_tools:
                raise ApiError(400, NO_TOOLS, param, "unsupported_parameter")
            if message.content is None and not message.tool_calls:
                raise ApiError(400, f"Missing required parameter: '{param}.content'.", f"{param}.content",
                               "missing_required_parameter")  # fmt: skip
            role = "system" if message.role == "developer" else message.role
            told = {name: value for name, value in message.model_dump().items() if value is not None}
            made.append({**told, "role": role, "content": _text(message.content or "")})
        return _joined_system(made)

    def _stop(self, asked: Sampled) -> tuple[str, ...]:
        return () if asked.ignore_eos else self.template.stop

    def _sampling(self, asked: Sampled, ends: Collection[int]) -> Sampling:
        options = asked.sampling()
        if asked.ignore_eos:
            options["logit_bias"] = {**options.get("logit_bias", {}), **dict.fromkeys(ends, RANGES["logit_bias"][0])}
        return self.engine.chat_sampling(options)

    @staticmethod
    def _choices(
        request: Request, n: int | None, constraint: Callable[[], Constraint | None], thinking: bool | None = None
    ) -> list[Request]:
        """Return n copies of a request, one for each choice. Choice i has seed + i and a constraint of its own.

        Thoughts at the beginning of an answer are not constrained.
        """
        marks = request.marks
        channel = None if marks is None else marks.channel
        begun = marks is not None and marks.thought_begins(request.ids) is not None
        made = []
        for number in range(n or 1):
            sampling, limits = request.sampling, constraint()
            if sampling.seed is not None:
                sampling = replace(sampling, seed=(sampling.seed + number) % _SEEDS)
            if limits is not None and channel is not None and (thinking or begun):
                limits = AfterThoughts(limits, channel, begun)
            made.append(replace(request, sampling=sampling, constraint=limits))
        return made

    def _constraint(self, form: ResponseFormat | TextFormat | None, param: str) -> JsonConstraint | None:
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return self._constraints.compile({"type": "object"}, f"{param}.type")
        named, param = (form, param) if isinstance(form, TextFormat) else (form.json_schema, f"{param}.json_schema")
        if named is None or named.schema_ is None:
            raise ApiError(400, f"Missing required parameter: '{param}.schema'.", f"{param}.schema",
                           "missing_required_parameter")  # fmt: skip
        return self._constraints.compile(named.schema_, f"{param}.schema")


def _text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _turns(items: Sequence[InputItem | CallItem | ResultItem | ReasoningItem]) -> list[GivenMessage]:
    """Convert the input items of the Responses API to messages.

    A tool call joins the preceding assistant message. A thought joins the following assistant message.
    """
    made: list[GivenMessage] = []
    for item in items:
        last = made[-1] if made and made[-1].role == "assistant" else None
        if isinstance(item, ResultItem):
            made.append(GivenMessage(role="tool", tool_call_id=item.call_id, content=item.output))
        elif isinstance(item, ReasoningItem):
            made.append(GivenMessage(role="assistant", reasoning_content=item.text, tool_calls=[]))
        elif isinstance(item, CallItem):
            if last is None:
                last = GivenMessage(role="assistant", tool_calls=[])
                made.append(last)
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            last.tool_calls = [*(last.tool_calls or []), call]
        elif item.role == "assistant" and last is not None and last.content is None and not last.tool_calls:
            last.content = item.content
        else:
            made.append(GivenMessage(role=item.role, content=item.content))
    return [message for message in made if message.content is not None or message.tool_calls]


def _joined_system(messages: list[Message]) -> list[Message]:
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    joined = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": joined}, *messages[count:]]
