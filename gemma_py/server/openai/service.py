"""Convert requests in OpenAI's format to requests for the scheduler."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gemma_py.generate.core import Constraint, Request
from gemma_py.generate.engine import Engine
from gemma_py.generate.options import RANGES, Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.server.openai.constraint import JsonConstraint, JsonConstraints
from gemma_py.server.openai.errors import ApiError
from gemma_py.server.openai.schemas import (
    MAX_PROMPTS,
    CallItem,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionCall,
    InputItem,
    ResponseFormat,
    ResponsesRequest,
    ResultItem,
    Sampled,
    TextFormat,
    ToolCall,
)
from gemma_py.server.openai.schemas import Message as GivenMessage
from gemma_py.templates.template import ROLES, Message, Tools, checked_messages, encode
from gemma_py.templates.tools import START, CallConstraint, calls_and_results, declarations

DEFAULT_TOKENS = 1024  # the limit for a chat response if the request sets none
_SEEDS = 1 << 63
_NO_TOOLS = "This model's chat template does not support tools."


@dataclass(frozen=True)
class Job:
    """The scheduler's requests for one HTTP request.

    requests: n for each prompt, one for each choice. echo: the text of each prompt if the client asked for `echo`, else empty.
    """

    requests: list[Request]
    echo: list[str]


class Service:
    """Converts requests for the served model, from several threads at once. model: the name of the model in requests."""

    def __init__(self, engine: Engine, scheduler: Scheduler, model: str, template: str | None = None) -> None:
        self.engine, self.scheduler, self.model = engine, scheduler, model
        self.tokenizer = engine.text_tokenizer()
        self.template = engine.template(template)
        self.ends = engine.ends(self.template)
        self.created = int(time.time())
        self.knows_tools = self.template.knows_tools and self.tokenizer.token_id(START) is not None
        self._constraints = JsonConstraints(self.tokenizer, engine.config.vocab_size, self.ends)

    def prepare(self) -> None:
        """Build the tables for JSON schemas at startup, because building them later would delay every running request."""
        self._constraints.prepare()

    def check_model(self, wanted: str | None) -> None:
        if wanted is not None and wanted != self.model:
            message = f"The model {wanted!r:.80} does not exist; this server serves {self.model!r}."
            raise ApiError(404, message, "model", "model_not_found")

    # --- requests -----------------------------------------------------------------------------------------------------

    def chat(self, asked: ChatRequest) -> Job:
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", "top_logprobs", "invalid_value")
        ids = self._prompt(self._messages(asked.messages), self._tools(asked))
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
        )
        constraint = self._call(asked) or partial(self._constraint, asked.response_format, "response_format")
        return Job(self._choices(request, asked.n, constraint), [])

    def completion(self, asked: CompletionRequest) -> Job:
        given: Sequence[Any] = [asked.prompt]
        if isinstance(asked.prompt, list) and not isinstance(asked.prompt[0], int):
            given = asked.prompt
        if len(given) * (asked.n or 1) > MAX_PROMPTS:
            raise ApiError(400, f"A request may have at most {MAX_PROMPTS} choices in all.", "n", "invalid_value")
        requests, ends = [], frozenset(self.engine.config.eos_token_ids)
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
        ids = self._prompt(messages, self._tools(asked))
        limit = asked.max_output_tokens
        request = Request(
            ids, DEFAULT_TOKENS if limit is None else limit, self._sampling(asked, self.ends), fit=limit is None,
            stop=self._stop(asked), ends=self.ends, trim=True, logprobs=False,
        )  # fmt: skip
        form = None if asked.text is None else asked.text.format
        constraint = self._call(asked) or partial(self._constraint, form, "text.format")
        return Job(self._choices(request, 1, constraint), [])

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _prompt(self, messages: list[Message], tools: Tools = ()) -> list[int]:
        roles = (*ROLES, "tool") if self.knows_tools else ROLES
        checked = checked_messages(messages, roles)
        told = [{**message, **text} for message, text in zip(messages, checked, strict=True)]
        return self.engine.check_ids(encode(self.template.pieces(told, tools), self.tokenizer, {}, {}))

    def _tools(self, asked: ChatRequest | ResponsesRequest) -> Tools:
        if asked.functions and asked.chosen != "none" and not self.knows_tools:
            raise ApiError(400, _NO_TOOLS, "tools", "unsupported_parameter")
        functions = [function.model_dump() for function in asked.functions if asked.chosen != "none"]
        return declarations(functions, self.tokenizer)

    def _call(self, asked: ChatRequest | ResponsesRequest) -> Callable[[], CallConstraint] | None:
        """Return a function that creates the constraint for a required tool call, or None if no tool call is required."""
        if asked.chosen in ("none", "auto"):
            return None
        names = [function.name for function in asked.functions]
        if not names or asked.chosen not in ("required", *names):
            message = f"'tool_choice' {asked.chosen!r:.80} matches no function in 'tools', which has: {', '.join(names)[:200] or 'none'}."
            raise ApiError(400, message, "tool_choice", "invalid_value")
        possible = names if asked.chosen == "required" else [asked.chosen]
        return partial(CallConstraint, self.tokenizer, possible[0] if len(possible) == 1 else None)

    def _messages(self, given: Sequence[GivenMessage]) -> list[Message]:
        """Convert OpenAI's messages to messages for `checked_messages`."""
        made = []
        extras = calls_and_results([message.model_dump() for message in given], self.tokenizer)
        for number, (message, extra) in enumerate(zip(given, extras, strict=True)):
            param = f"messages[{number}]"
            if extra and not self.knows_tools:
                raise ApiError(400, _NO_TOOLS, param, "unsupported_parameter")
            if message.content is None and not message.tool_calls:
                raise ApiError(400, f"Missing required parameter: '{param}.content'.", f"{param}.content",
                               "missing_required_parameter")  # fmt: skip
            role = "system" if message.role == "developer" else message.role
            made.append({"role": role, "content": _text(message.content or ""), **extra})
        return _joined_system(made)

    def _stop(self, asked: Sampled) -> tuple[str, ...]:
        """Return the stop strings with which the chat template ends a turn."""
        return () if asked.ignore_eos else self.template.stop

    def _sampling(self, asked: Sampled, ends: Collection[int]) -> Sampling:
        options = asked.sampling()
        if asked.ignore_eos:
            options["logit_bias"] = {**options.get("logit_bias", {}), **dict.fromkeys(ends, RANGES["logit_bias"][0])}
        return self.engine.chat_sampling(options)

    @staticmethod
    def _choices(request: Request, n: int | None, constraint: Callable[[], Constraint | None]) -> list[Request]:
        """Return n copies of a request, one for each choice. Choice i has the seed + i and its own constraint."""
        made = []
        for number in range(n or 1):
            sampling = request.sampling
            if sampling.seed is not None:
                sampling = replace(sampling, seed=(sampling.seed + number) % _SEEDS)
            made.append(replace(request, sampling=sampling, constraint=constraint()))
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


def _turns(items: Sequence[InputItem | CallItem | ResultItem]) -> list[GivenMessage]:
    """Convert the items of a Responses API input to messages. A tool call is added to the assistant message before it."""
    made: list[GivenMessage] = []
    for item in items:
        if isinstance(item, ResultItem):
            made.append(GivenMessage(role="tool", tool_call_id=item.call_id, content=item.output))
        elif isinstance(item, CallItem):
            if not made or made[-1].role != "assistant":
                made.append(GivenMessage(role="assistant", tool_calls=[]))
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            made[-1].tool_calls = [*(made[-1].tool_calls or []), call]
        else:
            made.append(GivenMessage(role=item.role, content=item.content))
    return made


def _joined_system(messages: list[Message]) -> list[Message]:
    """Join the system messages at the beginning into one message, separated by blank lines."""
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    joined = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": joined}, *messages[count:]]
