"""One model, ready for requests: from what a program asks to what the scheduler takes."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gemma_py.errors import GemmaError
from gemma_py.generate.core import Constraint, Request
from gemma_py.generate.engine import Engine
from gemma_py.generate.options import RANGES, Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.server.constraint import JsonConstraint, JsonConstraints
from gemma_py.server.errors import ApiError, from_engine
from gemma_py.server.schemas import (
    MOST_PROMPTS,
    CallItem,
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    InputItem,
    Part,
    ResponseFormat,
    ResponsesRequest,
    ResultItem,
    Sampled,
    TextFormat,
    ToolCall,
)
from gemma_py.server.schemas import Message as GivenMessage
from gemma_py.templates.template import ROLES, Message, Tools, checked_messages, encode
from gemma_py.templates.tools import START, CallConstraint, calls_and_results, declarations

DEFAULT_TOKENS = 1024  # of a chat's answer, where the request does not say
_SEEDS = 1 << 63
_NO_TOOLS = "The template of this model knows no tools."


@dataclass(frozen=True)
class Job:
    """What a request comes to. requests: one a choice, n for each prompt. param: the field that holds the prompt."""

    requests: list[Request]
    param: str
    prompts: list[str]  # as text, where it is to be echoed


class Service:
    """model: the name that requests may use. Several threads may ask at once."""

    def __init__(self, engine: Engine, scheduler: Scheduler, model: str, template: str | None = None) -> None:
        self.engine, self.scheduler, self.model = engine, scheduler, model
        self.tokenizer = engine.text_tokenizer()
        self.template = engine.template(template)
        self.ends = engine.ends(self.template)
        self.created = int(time.time())
        self.knows_tools = self.template.knows_tools and self.tokenizer.token_id(START) is not None
        self._constraints = JsonConstraints(self.tokenizer, engine.config.vocab_size, self.ends)

    def prepare(self) -> None:
        """Make now what would hold everybody up later."""
        self._constraints.prepare()

    def check_model(self, wanted: str | None) -> None:
        if wanted is not None and wanted != self.model:
            message = f"The model {wanted!r:.80} does not exist; this server has {self.model!r}."
            raise ApiError(404, message, "model", "model_not_found")

    # --- requests -----------------------------------------------------------------------------------------------------

    def chat(self, asked: ChatRequest) -> Job:
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", "top_logprobs", "invalid_value")
        ids = self._prompt(self._messages(asked.messages), "messages", self._tools(asked))
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
        return Job(self._choices(request, asked.n, constraint), "messages", [])

    def completion(self, asked: CompletionRequest) -> Job:
        given: Sequence[Any] = [asked.prompt]
        if isinstance(asked.prompt, list) and not isinstance(asked.prompt[0], int):
            given = asked.prompt
        if len(given) * (asked.n or 1) > MOST_PROMPTS:
            raise ApiError(400, f"more than {MOST_PROMPTS} answers asked for at once", "n", "invalid_value")
        requests, ends = [], frozenset(self.engine.config.eos_token_ids)
        for prompt in given:
            ids = self._ids(prompt)
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
        echoed = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in given] if asked.echo else []
        return Job(requests, "prompt", echoed)

    def responses(self, asked: ResponsesRequest) -> Job:
        if asked.background:
            raise ApiError(400, "Nothing is done in the background here.", "background", "unsupported_parameter")
        messages: list[Message] = []
        if asked.instructions is not None:
            messages.append({"role": "system", "content": asked.instructions})
        if isinstance(asked.input, str):
            messages.append({"role": "user", "content": asked.input})
        else:
            messages = _joined_system(messages + self._messages(_turns(asked.input)))
        ids = self._prompt(messages, "input", self._tools(asked))
        limit = asked.max_output_tokens
        request = Request(
            ids, DEFAULT_TOKENS if limit is None else limit, self._sampling(asked, self.ends), fit=limit is None,
            stop=self._stop(asked), ends=self.ends, trim=True, logprobs=False,
        )  # fmt: skip
        form = None if asked.text is None else asked.text.format
        constraint = self._call(asked) or partial(self._constraint, form, "text.format")
        return Job(self._choices(request, 1, constraint), "input", [])

    # --- parts of them ------------------------------------------------------------------------------------------------

    def _prompt(self, messages: list[Message], param: str, tools: Tools = ()) -> list[int]:
        roles = (*ROLES, "tool") if self.knows_tools else ROLES
        try:
            checked = checked_messages(messages, roles)
            told = [{**message, **text} for message, text in zip(messages, checked, strict=True)]
            return self.engine.check_ids(encode(self.template.pieces(told, tools), self.tokenizer, {}, {}))
        except GemmaError as error:
            raise from_engine(error, param) from None

    def _tools(self, asked: ChatRequest | ResponsesRequest) -> Tools:
        if asked.functions and asked.chosen != "none" and not self.knows_tools:
            raise ApiError(400, _NO_TOOLS, "tools", "unsupported_parameter")
        functions = [function.model_dump() for function in asked.functions if asked.chosen != "none"]
        try:
            return declarations(functions, self.tokenizer)
        except GemmaError as error:
            raise from_engine(error) from None

    def _call(self, asked: ChatRequest | ResponsesRequest) -> Callable[[], CallConstraint] | None:
        """What makes an answer begin with a call, if it has to."""
        if asked.chosen in ("none", "auto"):
            return None
        names = [function.name for function in asked.functions]
        if not names or asked.chosen not in ("required", *names):
            message = f"'tool_choice' is {asked.chosen!r:.80}, and 'tools' has {', '.join(names)[:200] or 'none'}."
            raise ApiError(400, message, "tool_choice", "invalid_value")
        possible = names if asked.chosen == "required" else [asked.chosen]
        return partial(CallConstraint, self.tokenizer, possible[0] if len(possible) == 1 else None)

    def _messages(self, given: Sequence[GivenMessage]) -> list[Message]:
        """In the form of templates.checked_messages."""
        made = []
        try:
            extras = calls_and_results([message.model_dump() for message in given], self.tokenizer)
        except GemmaError as error:
            raise from_engine(error) from None
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

    def _ids(self, prompt: str | list[int]) -> list[int]:
        try:
            return self.engine.encode(prompt)
        except GemmaError as error:
            raise from_engine(error, "prompt") from None

    def _stop(self, asked: Sampled) -> tuple[str, ...]:
        """Where a turn of the template ends."""
        return () if asked.ignore_eos else self.template.stop

    def _sampling(self, asked: Sampled, ends: Collection[int]) -> Sampling:
        options = asked.sampling()
        if asked.ignore_eos:
            options["logit_bias"] = {**options.get("logit_bias", {}), **dict.fromkeys(ends, RANGES["logit_bias"][0])}
        try:
            return self.engine.chat_sampling(options)
        except GemmaError as error:
            raise from_engine(error) from None

    @staticmethod
    def _choices(request: Request, n: int | None, constraint: Callable[[], Constraint | None]) -> list[Request]:
        """One request a choice: seeds count up, and each has a constraint of its own."""
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


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _turns(items: Sequence[InputItem | CallItem | ResultItem]) -> list[GivenMessage]:
    """As messages: calls belong to the model's message before them."""
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
    """Several system messages in front are one, with blank lines between."""
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    joined = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": joined}, *messages[count:]]
