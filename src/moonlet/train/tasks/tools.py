"""Tools, requests for them, and the two assistant messages of a tool turn.

A tool comes from a specification of an everyday tool or is invented: a verb with a noun
(``cancel_order``), a looked-up attribute (``get_bridge_height``), or random syllables; the noun or
attribute then stands in its description and in the request, which is how the right tool is found.

Fixed style of the assistant:

* calls give the arguments in alphabetical order, as the declaration shows them;
* the think channel gives the words that the request shares with the tool, then the tool's name on
  a line of its own, so that its tokens are those of the call (low); it adds the argument names
  (high), or writes every argument as JSON on its own line, so that its type and its end are decided
  before the call (max). Copying the shared words first turns the
  choice of a tool into looking up what follows them;
* the final response lists a JSON object as ``key: value, key: value`` and repeats any other result
  word for word.

A declared tool that fits wins over doing the sum oneself: with a calculator declared,
sums go to it.
"""

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from moonlet.train.tasks.lexicon import Lexicon
from moonlet.train.tasks.sample import Expect, ExpectedCall, Message, Style, Turn, assistant
from moonlet.train.tasks.tool_families import family_tool
from moonlet.train.tasks.tool_notation import ToolSpec
from moonlet.train.tasks.tool_specs import LOOKUPS
from moonlet.train.tasks.tool_specs_actions import ACTIONS
from moonlet.train.tasks.tool_specs_heldout import SPECS as HELDOUT_SPECS
from moonlet.train.tasks.values import Value, json_type, make_value

_ORDER_FRAMES = (
    "{x}", "{x}", "{x}", "{x}", "{x}.", "please {x}", "please {x}.", "{x} please", "can you {x}?",
    "could you {x}?", "{x}, please", "hey, {x}", "I want you to {x}", "now {x}",
    "can you please {x}",
    "{x}!", "I'd like to {x}", "let's {x}", "hi, {x}", "{x} for me", "would you {x}?",
)  # fmt: skip
_QUESTION_FRAMES = (
    "{x}",
    "{x}",
    "{x}",
    "{x}",
    "{x}",
    "hi, {x}",
    "hello! {x}",
    "tell me: {x}",
    "so, {x}",
    "and {x}",
)
_HIDDEN = re.compile(r"<(\d)=(true|false)>")
_SLOT = re.compile(r"\{(\d)\}")
_RESULT_SLOT = re.compile(r"\{(\w+)\}|\$(\d)")
_WORD = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PLAIN_WORDS = frozenset(
    {
        "a", "an", "any", "are", "as", "at", "be", "by", "can", "do", "for", "from", "given", "i",
        "in", "into", "is", "it", "me", "my", "of", "on", "one", "or", "and", "please", "that",
        "the", "this", "to", "use", "what", "with", "you", "your",
    }
)  # fmt: skip
MAX_SHARED = 3
_HELDOUT_TEXTS = frozenset(
    text for spec in HELDOUT_SPECS for text in (*spec.names, *spec.describes)
)
# of everyday tools, those around a random noun
FAMILY_SHARE = 0.55
_QUOTABLE = ("text", "query", "pair", "person", "noun", "word", "city")
_FREE_TEXT = ("text", "query", "pair", "noun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A parameter of a concrete tool."""

    name: str
    kind: str
    description: str = ""
    enum: tuple[str, ...] = ()
    required: bool = True

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the parameter."""
        schema: dict[str, Any] = {"type": json_type(self.kind)}
        if self.description:
            schema["description"] = self.description
        if self.enum:
            schema["enum"] = list(self.enum)
        return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A concrete tool with the ways to ask for it and its possible results.

    ``topic`` holds what tells it from other tools; two tools of one conversation differ in it.
    """

    name: str
    description: str
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    results: tuple[str, ...]
    topic: str = ""
    is_calculator: bool = False

    def declaration(self) -> dict[str, Any]:
        """Return the tool in the form of the OpenAI API."""
        parameters: dict[str, Any] = {
            "type": "object",
            "properties": {p.name: p.schema() for p in self.params},
        }
        required = [p.name for p in self.params if p.required]
        if required:
            parameters["required"] = required
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for one call: its text, the expected call, and a tool result."""

    text: str
    call: ExpectedCall
    result: str
    values: tuple[str, ...]
    shared: tuple[str, ...]


def from_spec(rng: random.Random, spec: ToolSpec) -> Tool:
    """Draw a concrete tool of a specification."""
    params: list[Param] = []
    for p in spec.params:
        names = [n for n in p.names if n not in {q.name for q in params}]
        describe = rng.choice(p.describes) if p.describes and rng.random() < 0.55 else ""
        params.append(
            Param(
                name=rng.choice(names), kind=p.kind, description=describe, enum=p.enum,
                required=not p.optional,
            )
        )  # fmt: skip
    # a family around a random noun may hit the name of a tool that training must not know
    names, describes = spec.names, spec.describes
    if spec not in HELDOUT_SPECS:
        names = tuple(name for name in names if name not in _HELDOUT_TEXTS)
        describes = tuple(text for text in describes if text not in _HELDOUT_TEXTS)
    return Tool(
        name=rng.choice(names), description=rng.choice(describes), params=tuple(params),
        asks=spec.asks, results=spec.results, topic=spec.asks[0], is_calculator=spec.is_calculator,
    )  # fmt: skip


def everyday_tool(rng: random.Random, lexicon: Lexicon) -> Tool:
    """Draw a tool from the specifications of this side of the split."""
    if lexicon.heldout:
        return from_spec(rng, rng.choice(HELDOUT_SPECS))
    if rng.random() < FAMILY_SHARE:
        return from_spec(rng, family_tool(rng, lexicon))
    # the first lookups are the ones that people try first
    if rng.random() < 0.25:
        return from_spec(rng, rng.choice(LOOKUPS[:6]))
    return from_spec(rng, rng.choice(LOOKUPS + ACTIONS))


def ask_tool(rng: random.Random, lexicon: Lexicon, tool: Tool) -> Ask:
    """Make a request that needs one call of ``tool``, with a random result."""
    template = rng.choice(tool.asks)
    is_question, template = template.startswith("?"), template.removeprefix("?")
    arguments: dict[str, Any] = {}
    for index, flag in _HIDDEN.findall(template):
        arguments[tool.params[int(index)].name] = flag == "true"
    template = _HIDDEN.sub("", template)
    template = _frame(rng, template, is_question=is_question)
    texts: dict[str, str] = {}
    for index in dict.fromkeys(_SLOT.findall(template)):
        param = tool.params[int(index)]
        value = _draw(rng, lexicon, param)
        arguments[param.name] = value.value
        is_last = template.rstrip("?.! ").endswith("{" + index + "}")
        texts[index] = _spell(rng, lexicon, param, value, is_last=is_last)
    text = _SLOT.sub(lambda match: texts[match[1]], template)
    call = ExpectedCall(name=tool.name, arguments=dict(sorted(arguments.items())))
    result, values = _make_result(rng, lexicon, tool, arguments)
    shared = _shared_words(text, f"{tool.name} {tool.description}", tuple(texts.values()))
    return Ask(text=text, call=call, result=result, values=values, shared=shared)


def _shared_words(request: str, tool: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the content words of a request that a tool's name or description has too.

    Words of argument values do not count. The words keep the request's spelling and order.
    """
    known = {_stem(word) for word in _WORD.findall(_CAMEL.sub(" ", tool))}
    for value in values:
        request = request.replace(value, " ", 1)
    words = _WORD.findall(request)
    found = (w for w in words if _stem(w) in known and w.lower() not in _PLAIN_WORDS)
    return tuple(dict.fromkeys(found))[:MAX_SHARED]


def _stem(word: str) -> str:
    return word.lower().removesuffix("s")


def _frame(rng: random.Random, template: str, *, is_question: bool) -> str:
    """Wrap a request template and vary its case; values are filled in afterwards."""
    frame = rng.choice(_QUESTION_FRAMES if is_question else _ORDER_FRAMES)
    if "?" in frame or "please" in frame:
        template = template.rstrip("?")
    text = frame.format(x="\0").replace("\0", template)
    draw = rng.random()
    if draw < 0.5:
        text = text[:1].upper() + text[1:]
    if is_question and rng.random() < 0.15:
        text = text.rstrip("?")
    return text


def _draw(rng: random.Random, lexicon: Lexicon, param: Param) -> Value:
    if param.enum:
        choice = rng.choice(param.enum)
        return Value(choice, choice)
    return make_value(rng, lexicon, param.kind)


def _spell(
    rng: random.Random, lexicon: Lexicon, param: Param, value: Value, *, is_last: bool
) -> str:
    """Spell a value in a request; a text of several words has quotes unless it ends the request."""
    quoted = 0.1
    if " " in value.text:
        quoted = lexicon.quoted_share if is_last or param.kind not in _FREE_TEXT else 1.0
    if param.kind in _QUOTABLE and rng.random() < quoted:
        mark = rng.choice("\"'")
        return f"{mark}{value.text}{mark}"
    return value.text


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _make_result(
    rng: random.Random, lexicon: Lexicon, tool: Tool, arguments: dict[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """Draw a tool result.

    Returns:
        The text of the tool message and the pieces that the final response must contain.
    """
    usable = [
        r
        for r in tool.results
        if all(tool.params[int(i)].name in arguments for i in re.findall(r"\$(\d)", r))
    ]
    template = rng.choice(usable) if rng.random() < 0.97 else "error=error"

    def fill(kind: str) -> Any:
        if kind.startswith("$"):
            return arguments[tool.params[int(kind[1:])].name]
        return _result_value(rng, lexicon, kind)

    if template.startswith("~"):
        values: list[str] = []

        def slot(match: re.Match[str]) -> str:
            values.append(_as_text(fill(match[1] or f"${match[2]}")))
            return values[-1]

        text = _RESULT_SLOT.sub(slot, template[1:])
        return text, tuple(values) or (text,)
    pairs = (item.split("=") for item in template.split())
    data = {key: fill(kind) for key, kind in pairs}
    separators = (",", ":") if rng.random() < 0.3 else (", ", ": ")
    text = json.dumps(data, ensure_ascii=False, separators=separators)
    return text, tuple(_as_text(value) for value in data.values())


def _result_value(rng: random.Random, lexicon: Lexicon, kind: str) -> Any:
    if kind == "deg":
        return rng.randint(-20, 42)
    if kind == "pct":
        return rng.randint(5, 99)
    if kind == "error":
        return rng.choice(("not found", "timeout", "invalid input", "no access"))
    try:
        return make_value(rng, lexicon, kind).value
    except KeyError:
        return kind  # a literal word such as "sent"


def present(result: str) -> str:
    """Write a tool result in the fixed style of the final response."""
    try:
        data = json.loads(result)
    except ValueError:
        return result
    if not isinstance(data, dict):
        return result
    return ", ".join(f"{key}: {_as_text(value)}" for key, value in data.items())


def tool_turn(asks: list[Ask], style: Style, first_id: int = 0) -> Turn:
    """Join requests into one user message and answer it with one call per request.

    Args:
        asks: One request, or several for parallel calls.
        style: Length of the think channel.
        first_id: Number of tool calls made earlier in the conversation.
    """
    user = asks[0].text
    if len(asks) > 1:
        user = " and ".join(a.text.rstrip("?.! ") for a in asks)
    calls: list[Message] = []
    results: list[Message] = []
    for position, ask in enumerate(asks):
        call_id = f"{ask.call.name}_{first_id + position}"
        arguments = json.dumps(ask.call.arguments, ensure_ascii=False)
        function = {"name": ask.call.name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": call_id, "content": ask.result})
    plan = "\n".join(_plan(ask, style) for ask in asks)
    answer = "\n".join(present(ask.result) for ask in asks)
    return Turn(
        task="tools",
        messages=[
            {"role": "user", "content": user},
            assistant(style, plan, "", calls),
            *results,
            assistant(style, _closing(asks[-1].call.name, style), answer),
        ],
        expect=Expect(
            answer=answer,
            calls=tuple(ask.call for ask in asks),
            results=tuple(ask.result for ask in asks),
            values=tuple(value for ask in asks for value in ask.values),
            category="call" if len(asks) == 1 else "parallel",
        ),
    )


def _plan(ask: Ask, style: Style) -> str:
    call = ask.call
    lines = [" ".join(("Use", *ask.shared)) if style != "low" else " ".join(ask.shared)]
    if style == "max":
        lines.append(call.name)
        lines += [
            f"{key}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in call.arguments.items()
        ]
    elif style == "high" and call.arguments:
        lines.append(f"{call.name}: {', '.join(call.arguments)}")
    else:
        lines.append(call.name)
    return "\n".join(line for line in lines if line)


def _closing(name: str, style: Style) -> str:
    if style == "max":
        return f"{name} has answered. I use the result."
    return "I use the result." if style == "high" else "Result."
