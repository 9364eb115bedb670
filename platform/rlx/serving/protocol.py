"""OpenAI's requests, as far as they are served.

A request with a field that is not listed here is refused, and so is a listed one that asks for what
is not done: nothing is ignored that would change an answer.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

MOST_CHOICES = 128
"""Maximum number of choices per prompt."""
MOST_LIKELIEST = 20
"""Maximum number of likeliest tokens at each place."""
DEFAULT_TEXT_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted without effect."""


def _list_stop_strings(stop: Any) -> Any:
    return () if stop is None else (stop,) if isinstance(stop, str) else stop


def _require_nothing(value: Any) -> Any:
    if value not in (None, 0, {}, []):
        raise ValueError("is not supported here: leave it out")
    return None


Unsupported = Annotated[None, BeforeValidator(_require_nothing)]
"""A field that may be named with the value that has no effect."""


class SamplingRequest(_Body):
    """What both kinds of requests have in common."""

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Not OpenAI's: sample from so many of the likeliest tokens; 0 and -1 disable it."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(_list_stop_strings),
        Field(max_length=16),
    ] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Not OpenAI's: add `prompt_token_ids` and `token_ids` to every choice."""

    frequency_penalty: Unsupported = None
    presence_penalty: Unsupported = None
    logit_bias: Unsupported = None

    # Accepted without effect: they concern OpenAI's accounts, caches and schedules.
    metadata: JsonValue = None
    prompt_cache_key: JsonValue = None
    safety_identifier: JsonValue = None
    service_tier: JsonValue = None
    store: JsonValue = None
    user: JsonValue = None

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, body: Any) -> Any:
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a surrogate pair is no text") from error
        except TypeError as error:
            raise ValueError(
                "the body is no JSON: is the Content-Type application/json?"
            ) from error
        return body

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextRequest(SamplingRequest):
    """The body of `/v1/completions`."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    best_of: int | None = None
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.choices):
            raise ValueError("best_of: is not supported here: leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo: nothing else could be returned")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def token_limit(self) -> tuple[str, int | None]:
        return "max_tokens", DEFAULT_TEXT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


class TextPart(_Body):
    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What a client repeats of an assistant's message.
    annotations: JsonValue = None
    audio: Unsupported = None
    function_call: Unsupported = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates read it: a developer is the system, and a call's arguments
        are an object."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [_parse_arguments(call) for call in self.tool_calls]
        return message


def _parse_arguments(call: ToolCall) -> dict[str, Any]:
    plain = call.model_dump()
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        return plain
    if isinstance(arguments, dict):
        plain["function"]["arguments"] = arguments
    return plain


class FunctionSchema(_Body):
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: FunctionSchema


class ResponseFormat(_Body):
    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    functions: Unsupported = None
    function_call: Unsupported = None

    @field_validator("parallel_tool_calls")
    @classmethod
    def _check_calls(cls, parallel: bool | None) -> bool | None:
        if parallel is False:
            raise ValueError("false is not supported here: leave it out")
        return parallel

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits a message, and its limit, if the request has one."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none" or not self.tools:
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]
