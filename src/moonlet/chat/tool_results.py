"""Order, names and indices of tool messages (chat-protocol.md section 3.8).

A run of results is matched against the calls of the most recent assistant message only, so ids
that repeat over a conversation cannot attach a result to an older call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonlet.core.errors import RequestError

__all__ = [
    "Message",
    "PlacedMessage",
    "assign_call_ids",
    "call_name",
    "order_tool_results",
]

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """A message in rendering order.

    Attributes:
        message: The message; a tool message carries its resolved name in ``tool``.
        path: Where it stands in the request, ``messages[3]``.
        tool_index: 1-based index of a tool message since the last assistant message, else 0.
    """

    message: Message
    path: str
    tool_index: int = 0


def call_name(call: object, path: str) -> str:
    """Return the function name of a tool call, with or without the ``function`` wrapper.

    Raises:
        RequestError: The call is no object or has no name.
    """
    if not isinstance(call, Mapping):
        raise RequestError(f"{path} is {type(call).__name__}; want an object", param=path)
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{path}.function.name is missing; name the tool", param=path)
    return name


def assign_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Give tool calls without an id the alias ``name:zero_based_position``.

    A step before rendering for servers: clients that drop ids may still name results that way,
    and matching by position alone would attach swapped results to the wrong calls.

    Returns:
        The messages; those with such calls are copies, the input stays as it is.

    Raises:
        RequestError: A call is malformed.
    """
    assigned: list[Message] = []
    for index, message in enumerate(messages):
        if message.get("role") == "assistant" and message.get("tool_calls"):
            path = f"messages[{index}]"
            names, _ = _calls_of(message, path)
            calls = [
                call if call.get("id") else {**call, "id": f"{names[position]}:{position}"}
                for position, call in enumerate(message["tool_calls"])
            ]
            message = {**message, "tool_calls": calls}
        assigned.append(message)
    return assigned


def order_tool_results(messages: Sequence[Message]) -> Iterator[PlacedMessage]:
    """Yield the messages in rendering order, tool messages resolved; the input stays as it is.

    Every run of consecutive tool messages whose ids all match calls of the most recent
    assistant message is sorted into call order; any other run is left as sent.

    Raises:
        RequestError: A tool message has no resolvable name, or a call is malformed.
    """
    names: list[str] = []
    positions: dict[str, int] = {}
    count = 0
    start = 0
    while start < len(messages):
        role = messages[start].get("role")
        if role != "tool":
            path = f"messages[{start}]"
            if role == "assistant":
                names, positions = _calls_of(messages[start], path)
                count = 0
            yield PlacedMessage(messages[start], path)
            start += 1
            continue
        end = start
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        for placed in _place_run(messages, range(start, end), positions, names):
            count += 1
            yield _resolve(placed, names, count)
        start = end


def _calls_of(message: Message, path: str) -> tuple[list[str], dict[str, int]]:
    """Return call names by position, and call positions by id (the first of equal ids wins)."""
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{path}.tool_calls is not an array", param=f"{path}.tool_calls")
    names = [call_name(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    positions: dict[str, int] = {}
    for position, call in enumerate(calls):
        if isinstance(call.get("id"), str):
            positions.setdefault(call["id"], position)
    return names, positions


def _place_run(
    messages: Sequence[Message],
    run: range,
    positions: Mapping[str, int],
    names: Sequence[str],
) -> list[PlacedMessage]:
    """Sort one run by call position if every id matches, else keep it as sent."""
    matched: list[int] = []
    for index in run:
        result_id = messages[index].get("tool_call_id") or messages[index].get("id")
        position = positions.get(result_id) if isinstance(result_id, str) else None
        if position is None:
            return [PlacedMessage(messages[i], f"messages[{i}]") for i in run]
        matched.append(position)
    placed: list[PlacedMessage] = []
    for offset in sorted(range(len(run)), key=matched.__getitem__):
        index = run[offset]
        message = {**messages[index], "tool": names[matched[offset]]}
        placed.append(PlacedMessage(message, f"messages[{index}]"))
    return placed


def _resolve(placed: PlacedMessage, names: Sequence[str], count: int) -> PlacedMessage:
    """Give a tool message its name and running index."""
    message = placed.message
    name = message.get("tool") or message.get("name")
    if not name and count <= len(names):
        name = names[count - 1]
    if not isinstance(name, str) or not name:
        raise RequestError(
            f"{placed.path} answers no tool call; give a tool_call_id of the last assistant "
            "message, or a name",
            param=f"{placed.path}.tool_call_id",
        )
    return PlacedMessage({**message, "tool": name}, placed.path, count)
