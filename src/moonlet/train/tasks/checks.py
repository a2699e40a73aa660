"""Exact checks of replies: the markup on token ids, the rest on the parsed message."""

import json
import re
from collections.abc import Sequence
from typing import Any

from moonlet.chat.events import ParsedMessage, ToolCall
from moonlet.chat.tokenizer import Tokenizer
from moonlet.train.tasks.sample import Expect, ExpectedCall

# control tokens as single characters, so that one pattern can describe a whole reply
_OPEN, _CLOSE, _SEP, _END, _OTHER = "\ue000\ue001\ue002\ue003\ue004"
_TEXT = f"[^{_OPEN}{_CLOSE}{_SEP}{_END}{_OTHER}]*"


def _close(name: str) -> str:
    return f"{_CLOSE}{name}{_SEP}"


_ARGUMENT = (
    f'{_OPEN}argument key="[^"]*" type="(?:string|number|boolean|null|object|array)"{_SEP}'
    f"{_TEXT}{_close('argument')}"
)
_CALL = f'{_OPEN}call tool="[^"]+" index="[1-9][0-9]*"{_SEP}(?:{_ARGUMENT})*{_close("call")}'
_BODY = (
    f"{_TEXT}{_close('response')}(?:{_OPEN}tools{_SEP}(?:{_CALL})+{_close('tools')})?"
    f"{_close('message')}{_END}"
)
_INSTRUCT = re.compile(_BODY)
_THINKING = re.compile(f"{_TEXT}{_close('think')}{_OPEN}response{_SEP}{_BODY}")


def is_stopped(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return whether a generation ended with its only stop token."""
    stops = [token_id in tokenizer.stop_ids for token_id in ids]
    return bool(stops) and stops[-1] and sum(stops) == 1


def is_valid_xtml(ids: Sequence[int], tokenizer: Tokenizer, *, thinking: bool) -> bool:
    """Return whether a generation is one complete, strictly formed assistant message.

    Stricter than the parser, which repairs what it can: channels in order, every tag closed, known
    argument types, no text between elements, the end-of-message token last.

    Args:
        ids: Generated ids, stop token included.
        tokenizer: Tokenizer of the model.
        thinking: Whether the prompt ended inside the think channel.
    """
    special = tokenizer.special_ids
    marks = {
        special.open: _OPEN,
        special.close: _CLOSE,
        special.sep: _SEP,
        special.end_of_msg: _END,
    }
    parts: list[str] = []
    run: list[int] = []
    for token_id in ids:
        if not tokenizer.is_special(token_id):
            run.append(token_id)
            continue
        parts += [tokenizer.decode(run), marks.get(token_id, _OTHER)]
        run = []
    parts.append(tokenizer.decode(run))
    return bool((_THINKING if thinking else _INSTRUCT).fullmatch("".join(parts)))


def is_same_value(got: Any, wanted: Any) -> bool:
    """Compare two JSON values with their types: ``1`` is not ``"1"`` nor ``true``; 1 is 1.0."""
    if isinstance(wanted, bool) or isinstance(got, bool):
        return got is wanted
    if isinstance(wanted, int | float):
        return isinstance(got, int | float) and got == wanted
    return type(got) is type(wanted) and got == wanted


def is_right_call(call: ToolCall, expected: ExpectedCall) -> bool:
    """Return whether a call has the name and exactly the typed arguments expected."""
    if call.name != expected.name:
        return False
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    if not isinstance(arguments, dict) or arguments.keys() != expected.arguments.keys():
        return False
    return all(is_same_value(arguments[key], value) for key, value in expected.arguments.items())


def are_right_calls(message: ParsedMessage, expect: Expect) -> bool:
    """Return whether the message makes exactly the expected calls, in order."""
    calls = message.tool_calls
    return (
        message.incomplete_call is None
        and len(calls) == len(expect.calls)
        and all(is_right_call(c, e) for c, e in zip(calls, expect.calls, strict=True))
    )


def uses_result(message: ParsedMessage, expect: Expect) -> bool:
    """Return whether a final response contains every value of the tool results, without calls."""
    return not message.tool_calls and all(value in message.content for value in expect.values)


def is_right_answer(message: ParsedMessage, expect: Expect, *, is_worked: bool = False) -> bool:
    """Return whether a response is exactly the expected one.

    Args:
        message: The parsed reply.
        expect: What was expected.
        is_worked: The response shows the work and ends with the line ``=ANSWER`` (sums without a
            think channel).
    """
    if message.tool_calls or message.incomplete_call is not None:
        return False
    if is_worked:
        return message.content.split("\n")[-1] == f"={expect.answer}"
    return message.content == expect.answer
