"""What the types cannot say: rules between fields, and known fields that are not built.

A field of the second kind is answered 400 with code ``unsupported``: ignoring it would give a
reply that the client did not ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moonlet.core.errors import RequestError
from moonlet.serve.errors import unsupported
from moonlet.serve.openai.schema import (
    MAX_STOP_CHARS,
    ChatRequest,
    CompletionRequest,
    Message,
    NamedToolChoice,
    PromptFields,
    SamplingFields,
    Tool,
)

__all__ = ["check_chat", "check_completion", "check_prompt", "has_tools"]

_UNBUILT_BODY_FIELDS = (
    "audio",
    "echo",
    "function_call",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "structured_outputs",
    "suffix",
    "thinking_token_budget",
)
_IMAGE_TYPES = ("image", "image_url")


def check_chat(body: ChatRequest, raw: Mapping[str, Any]) -> None:
    """Check a chat request beyond its types.

    Args:
        body: The validated body.
        raw: The same as the client sent it, for fields that no body model has.

    Raises:
        RequestError: Fields contradict each other, or ask for something not built.
    """
    _check_unbuilt(raw)
    _check_sampling(body)
    check_prompt(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.add_generation_prompt is False:
        raise unsupported(
            "add_generation_prompt: false has nothing to generate here", "add_generation_prompt"
        )


def check_completion(body: CompletionRequest, raw: Mapping[str, Any]) -> None:
    """Check a raw completion request beyond its types; arguments and errors as `check_chat`."""
    _check_unbuilt(raw)
    _check_sampling(body)
    if (body.best_of or 1) > 1:
        raise unsupported(f"best_of is {body.best_of}; only 1 is built", "best_of")
    if body.prompt in ("", []):
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")


def check_prompt(body: PromptFields) -> None:
    """Check messages, tools and the options that the prompt carries."""
    for index, message in enumerate(body.messages):
        path = f"messages[{index}]"
        _check_message(body.messages, index)
        if message.partial and index < len(body.messages) - 1:
            raise RequestError(
                f"{path}.partial is set, but only the last message can be continued",
                param=f"{path}.partial",
            )
        if message.partial:
            raise unsupported("continuing an assistant message is not built", f"{path}.partial")
    if body.continue_final_message:
        raise unsupported("continuing an assistant message is not built", "continue_final_message")
    names = _check_tool_names(body)
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {choice.function.name!r}, which is no declared tool; "
                f"declared are {', '.join(names) or 'none'}",
                param="tool_choice.function.name",
            )
        raise unsupported("a named tool_choice is not built; use auto or none", "tool_choice")
    if choice == "required":
        if not names:
            raise RequestError("tool_choice is required, but there is no tool", param="tool_choice")
        raise unsupported("tool_choice required is not built; use auto or none", "tool_choice")
    _check_response_format(body)


def has_tools(body: PromptFields) -> bool:
    """Whether any tool is declared, at the top or inside a message."""
    return any(True for _ in _declared(body))


def _check_unbuilt(raw: Mapping[str, Any]) -> None:
    for name in _UNBUILT_BODY_FIELDS:
        # null and false ask for nothing
        if raw.get(name) not in (None, False):
            raise unsupported(f"{name} is not built", name)


def _check_sampling(body: SamplingFields) -> None:
    if (body.n or 1) > 1:
        raise unsupported(f"n is {body.n}; only 1 is built", "n")
    if body.logit_bias:
        raise unsupported("logit_bias is not built", "logit_bias")
    if body.min_tokens:
        raise unsupported("min_tokens is not built", "min_tokens")
    num_chars = sum(map(len, body.stop_strings))
    if num_chars > MAX_STOP_CHARS:
        raise RequestError(
            f"stop has {num_chars} characters; at most {MAX_STOP_CHARS} together", param="stop"
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")


def _check_message(messages: list[Message], index: int) -> None:
    message, path = messages[index], f"messages[{index}]"
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(
            f"{path}.tool_call_id is missing or empty; {_known_ids(messages[:index])}",
            param=f"{path}.tool_call_id",
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{path}.tool_calls is set on role {message.role}; only assistant messages call tools",
            param=f"{path}.tool_calls",
        )
    if message.tools is not None:
        _check_declaring(message, path)
    if message.partial and message.role != "assistant":
        raise RequestError(
            f"{path}.partial is set on role {message.role}; only an assistant message can be "
            "continued",
            param=f"{path}.partial",
        )
    for position, part in enumerate(message.content if isinstance(message.content, list) else ()):
        where = f"{path}.content[{position}]"
        if part.type in _IMAGE_TYPES:
            raise unsupported(f"{where} is an image; images are not built", where)
        if part.type != "text":
            raise RequestError(
                f"{where}.type is {part.type[:80]!r}; supported is text", param=f"{where}.type"
            )
        if part.text is None:
            raise RequestError(f"{where}.text is missing", param=f"{where}.text")


def _check_declaring(message: Message, path: str) -> None:
    if message.role not in ("system", "developer"):
        raise RequestError(
            f"{path}.tools is set on role {message.role}; only system messages declare tools",
            param=f"{path}.tools",
        )
    if message.content:
        raise RequestError(
            f"{path} declares tools and has content; send two messages", param=f"{path}.content"
        )


def _known_ids(before: list[Message]) -> str:
    for message in reversed(before):
        if message.role == "assistant":
            ids = [call.id for call in message.tool_calls or () if call.id]
            return f"calls of the last assistant message: {', '.join(ids) or 'none'}"
    return "no assistant message comes before it"


def _declared(body: PromptFields) -> Iterable[tuple[Tool, str]]:
    for index, tool in enumerate(body.tools or ()):
        yield tool, f"tools[{index}]"
    for position, message in enumerate(body.messages):
        for index, tool in enumerate(message.tools or ()):
            yield tool, f"messages[{position}].tools[{index}]"


def _check_tool_names(body: PromptFields) -> dict[str, str]:
    """Return the path of every declared tool by its name."""
    names: dict[str, str] = {}
    for tool, path in _declared(body):
        if tool.function.name in names:
            raise RequestError(
                f"{path}.function.name {tool.function.name!r} is declared already at "
                f"{names[tool.function.name]}",
                param=f"{path}.function.name",
            )
        names[tool.function.name] = path
    return names


def _check_response_format(body: PromptFields) -> None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_schema" and wanted.json_schema is None:
        raise RequestError(
            "response_format.json_schema is missing", param="response_format.json_schema"
        )
    raise unsupported(
        f"response_format {wanted.type} is not built; only text is", "response_format.type"
    )
