"""Request bodies of the OpenAI surface: types and ranges (chat-protocol.md sections 6.1-6.4).

Types are strict: a number in quotes is an error. Unknown fields are ignored, as clients send
many. Conversation content is checked here for shape only and handed to `moonlet.chat.render`
as the client sent it, because tool declarations are rendered with exactly the client's fields.
What is known but not built is refused in `moonlet.serve.openai.refusals`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Message",
    "PromptFields",
    "SamplingFields",
    "StreamOptions",
    "TokenizeRequest",
    "Tool",
]

TOOL_NAME = r"^[a-zA-Z_][a-zA-Z0-9_-]*$"
MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_CHARS = 65_536

Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, StringConstraints(min_length=1)]
# far above any use; every generated character is compared with each of them
StopStrings = Annotated[list[StopString], Field(max_length=1024)]


class Body(BaseModel):
    """Strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


# ---- conversation -------------------------------------------------------------------------------


class FunctionCall(Body):
    """Function part of a call in the history; arguments are JSON text or an object."""

    name: Annotated[str, StringConstraints(min_length=1)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A call the assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(Body):
    """One part of a message's content; which types are served is checked later."""

    type: str
    text: str | None = None


class Function(Body):
    """A function the model may call."""

    name: Annotated[str, StringConstraints(pattern=TOOL_NAME, min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A declared tool."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class Message(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: Tools | None = None
    partial: bool | None = None


# ---- options ------------------------------------------------------------------------------------


class NamedFunction(Body):
    """The function of a named tool choice."""

    name: str


class NamedToolChoice(Body):
    """A tool choice that names its function."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(Body):
    """A JSON schema for the answer."""

    model_config = ConfigDict(
        strict=True, extra="ignore", protected_namespaces=(), serialize_by_alias=True
    )

    name: Annotated[str, StringConstraints(min_length=1)]
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """Form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Thinking(Body):
    """Moonshot's thinking object; a missing type means enabled."""

    type: Literal["enabled", "disabled"] = "enabled"
    effort: str | None = None
    keep: Any = None


class TemplateOptions(Body):
    """The options of ``chat_template_kwargs`` that mean something for this protocol."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    thinking_effort: str | None = None


class StreamOptions(Body):
    """What a stream carries beside its deltas."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_internal_content: bool = False


class SamplingFields(Body):
    """How tokens are chosen, shared by chat and raw completions."""

    temperature: Annotated[Finite, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[Finite, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Finite, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=1e-3, le=10.0)] | None = None
    max_tokens: Count | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    n: Count | None = None
    logit_bias: dict[str, Finite] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class PromptFields(Body):
    """Everything that decides the prompt of a chat."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(SamplingFields, PromptFields):
    """Body of ``POST /v1/chat/completions``."""

    model: str
    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None

    @property
    def output_limit(self) -> int | None:
        """The explicit output limit, if any."""
        return getattr(self, self.limit_field)

    @property
    def limit_field(self) -> str:
        """Name of the field that holds the output limit; the newer one wins."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    model: str
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Count | None = None
    skip_special_tokens: bool | None = None


class TokenizeRequest(PromptFields):
    """Body of ``POST /tokenize``: a raw prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] = Field(default_factory=list)


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
