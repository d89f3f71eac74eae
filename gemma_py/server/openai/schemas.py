"""The pydantic models of requests, with OpenAI's field names. The OpenAPI document is generated from these models.

Fields of OpenAI's API that have no meaning for a local model are accepted and ignored (see `Ignored`). Unknown fields are
errors, as in OpenAI's API. These fields are additions to OpenAI's API: `top_k`, `min_p`, `repetition_penalty`,
`return_progress`, `speculate`, `receipt`, `task`, `chat_template_kwargs`, `ignore_eos` and `continuous_usage_stats`.
Benchmarks of inference servers send the last two.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from gemma_py.generate.options import MOST_TOP_K, RANGES

_SEED = (1 << 63) - 1
_MAX_STOP = 1024
MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_TEXTS = 2048  # limit on the inputs of an embeddings request, as in OpenAI's API


def _ranged(option: str) -> Any:
    least, most = RANGES[option]
    return Field(ge=least, le=most)


def _length(least: int | None = None, most: int | None = None) -> Any:
    """Return a pydantic field that limits the length of a list. `fail_fast` stops validation at the first invalid element,
    because a list can have millions of invalid elements.
    """
    return Field(min_length=least, max_length=most, fail_fast=True)


Count = Annotated[int, Field(ge=1, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Loose(BaseModel):
    """The base class of messages and parts of messages.

    Unknown fields are ignored. Clients send back messages that other servers generated, and these can have more fields.
    """

    model_config = ConfigDict(extra="ignore", strict=True)


class ContentPart(Loose):
    """A part of a message. Only text is supported; a part of another type is an error."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class FunctionCall(Loose):
    name: str
    arguments: str


class ToolCall(Loose):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Loose):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], _length()] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, _length()] = None
    tool_call_id: str | None = None


class JsonSchema(Strict):
    name: Annotated[str, Field(max_length=64)] = "answer"
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfFunctions(Strict):
    type: Literal["function"]


class Tool(OfFunctions):
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(OfFunctions):
    function: NamedFunction


class StreamOptions(Strict):
    """Options of a stream. continuous_usage_stats: with include_usage, add the token counts so far to every chunk."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False


class Ignored(Strict):
    """Fields of OpenAI's API that are accepted without any effect on this server."""

    user: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, Field(max_length=16)] = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class Sampled(Ignored):
    model: str | None = None
    stream: bool | None = False
    temperature: Annotated[float | None, _ranged("temperature")] = None
    top_p: Annotated[float | None, _ranged("top_p")] = None
    top_k: Annotated[int | None, Field(ge=0, le=MOST_TOP_K)] = None
    min_p: Annotated[float | None, _ranged("min_p")] = None
    repetition_penalty: Annotated[float | None, _ranged("repetition_penalty")] = None
    seed: Annotated[int | None, Field(ge=-_SEED - 1, le=_SEED)] = None
    return_progress: bool = False
    ignore_eos: bool | None = False
    speculate: Literal["auto", "off"] | None = None
    receipt: bool = False

    def sampling(self) -> dict[str, Any]:
        """Return the sampling options that the request sets, as keyword arguments of gemma_py.Sampling."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: float(v) if name != "top_k" else v for name in names if (v := getattr(self, name)) is not None}
        if given.get("top_p") == 0:
            given["top_p"] = 1e-9  # OpenAI's API allows top_p=0, which selects the most likely token
        if self.seed is not None:
            given["seed"] = self.seed & _SEED
        return given


class Penalised(Sampled):
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: StopString | Annotated[list[StopString], _length(most=16)] | None = None
    presence_penalty: Annotated[float | None, _ranged("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, _ranged("frequency_penalty")] = None
    logit_bias: Annotated[dict[str, Annotated[float, _ranged("logit_bias")]] | None, Field(max_length=1024)] = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, options: StreamOptions | None, others: ValidationInfo) -> StreamOptions | None:
        if options is not None and not others.data.get("stream"):
            raise ValueError("stream_options needs 'stream': true")
        return options

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        wrong = next(
            (token for token in bias or {} if not (token.isascii() and token.isdigit() and len(token) < 10)), None
        )
        if wrong is not None:
            raise ValueError(f"the keys should be token ids (whole numbers), found {wrong!r:.40}")
        return bias

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                given[name] = float(getattr(self, name))
        if self.logit_bias:
            given["logit_bias"] = {int(token): float(bias) for token, bias in self.logit_bias.items()}
        return given

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


class Prediction(Strict):
    """Text that the client expects in the answer. Correct parts make generation faster. The answer does not depend on the
    prediction.
    """

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], _length()]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateOptions(Strict):
    """Options of a chat template, as in vLLM and llama.cpp. enable_thinking: whether the model thinks before it answers."""

    enable_thinking: bool | None = None


class ChatRequest(Penalised):
    messages: Annotated[list[Message], _length(1, 4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Annotated[list[Tool] | None, _length(most=128)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    modalities: Annotated[list[Literal["text"]] | None, _length()] = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    verbosity: str | None = None

    @property
    def effort(self) -> Effort | None:
        return self.reasoning_effort

    @property
    def thinking_switch(self) -> bool | None:
        return None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking

    @property
    def functions(self) -> list[Function]:
        return [tool.function for tool in self.tools or []]

    @property
    def chosen(self) -> str:
        """The field tool_choice as text: "none", "auto", "required", or the name of the function that must be called."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedTool) else choice or "auto"


class CompletionRequest(Penalised):
    prompt: (
        str
        | Annotated[list[TokenId], _length(1)]
        | Annotated[list[str], _length(1, MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], _length()]], _length(1, MAX_PROMPTS)]
    )
    max_tokens: Annotated[int | None, Field(ge=0, le=1 << 31)] = 16
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = False
    best_of: Annotated[int | None, Field(ge=1, le=1)] = None
    suffix: None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _something(cls, prompt: object) -> object:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
            raise ValueError("should be a text, or a non-empty list of texts, of token ids, or of lists of token ids")
        return prompt


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] = "answer"
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: str | None = None


class InputItem(Loose):
    """An input item that is a message. Other items, such as files, are not supported and raise an error."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], _length()]


class CallItem(Loose):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Loose):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[ContentPart], _length()]


class ReasoningPart(Loose):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Loose):
    """A thought of the model, from an earlier response."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart] | None, _length()] = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or [])


class Reasoning(Loose):
    effort: Effort | None = None


class FlatTool(Function, OfFunctions):  # OfFunctions is the last base class, so that pydantic checks `type` first
    pass


class NamedFlatTool(NamedFunction, OfFunctions):
    pass


class ResponsesRequest(Sampled):
    """A request to the Responses API. A request cannot refer to earlier responses, because responses are not stored."""

    input: str | Annotated[list[InputItem | CallItem | ResultItem | ReasoningItem], _length(1, 4096)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=0)] = None
    tools: Annotated[list[FlatTool] | None, _length(most=128)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedFlatTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    # `include` is accepted without any effect, because this server does not encrypt reasoning.
    include: Annotated[list[Literal["reasoning.encrypted_content"]] | None, _length()] = None
    background: bool | None = None
    previous_response_id: None = None
    conversation: None = None
    reasoning: Reasoning | None = None

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def thinking_switch(self) -> bool | None:
        return None

    @property
    def functions(self) -> list[FlatTool]:
        return self.tools or []

    @property
    def chosen(self) -> str:
        """The field tool_choice as text: "none", "auto", "required", or the name of the function that must be called."""
        choice = self.tool_choice
        return choice.name if isinstance(choice, NamedFlatTool) else choice or "auto"


class EmbeddingRequest(Strict):
    """A request for embeddings.

    task: the name of a prompt that precedes each text, such as "query". OpenAI's API does not have this field.
    """

    input: (
        str
        | Annotated[list[TokenId], _length(1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], _length(1, MAX_TEXTS)]
        | Annotated[list[Annotated[list[TokenId], _length(1)]], _length(1, MAX_TEXTS)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int | None, Field(ge=1)] = None
    task: str | None = None
    user: str | None = None
    stream: ClassVar[bool] = False

    @field_validator("input", mode="before")
    @classmethod
    def _something(cls, given: object) -> object:
        several = isinstance(given, list) and not isinstance(next(iter(given), None), int)
        if not given or not isinstance(given, str | list) or (several and len(given) > MAX_TEXTS):
            raise ValueError(
                f"should be a text, a list of token ids, or a list of 1 to {MAX_TEXTS} texts or lists of token ids"
            )
        return given

    @property
    def texts(self) -> list[str] | list[list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        ids = [token for token in self.input if isinstance(token, int)]
        return [ids] if ids else self.input  # type: ignore[return-value]


class TokenizeRequest(Strict):
    """add_special: add a BOS token. parse_special: parse control tokens in the text. with_pieces: also return each token's
    text.
    """

    content: str
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False
    model: str | None = None


class DetokenizeRequest(Strict):
    tokens: Annotated[list[TokenId], _length()]
    model: str | None = None
