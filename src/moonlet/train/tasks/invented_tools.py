"""Invented tools: names, descriptions, parameters and requests from word lists and syllables."""

import random

from moonlet.train.tasks.lexicon import Lexicon
from moonlet.train.tasks.tools import Param, Tool
from moonlet.train.tasks.values import CONCEPTS, NEUTRAL_NAMES, json_type

_LOOKUP_DESCRIBES = (
    "{Verb} the {attr} of a {noun}.", "{Verb} the {attr} of a {noun}",
    "Returns the {attr} of the given {noun}.",
    "{Attr} of a {noun}", "{Verb} {noun} {attr}.", "This tool returns the {attr} for one {noun}.",
    "{Noun} {attr} lookup.", "Use it to {verb} the {attr} of any {noun}.",
    "Gives the {attr} of the {noun}.",
)  # fmt: skip
_LOOKUP_ASKS = (
    "?what is the {attr} of the {noun} {0}?", "?what's the {attr} of {0}?",
    "{verb} the {attr} of {0}",
    "{verb} the {attr} of the {noun} {0}", "?{attr} of {noun} {0}?", "?{attr} of {0}",
    "tell me the {attr} of {0}",
    "?I need the {attr} for {noun} {0}", "give me the {attr} of the {noun} {0}",
    "{verb} the {noun} {attr} for {0}",
    "?what {attr} does the {noun} {0} have?", "?what is the {attr} for {0}?",
)  # fmt: skip
_ACTION_DESCRIBES = (
    "{Verb} a {noun}.", "{Verb} a {noun}", "{Verb} one {noun} in the system.",
    "Use this to {verb} a {noun}.",
    "{Verb} the given {noun}.", "Tool to {verb} {noun} entries.", "{Verb} {noun}",
    "Lets you {verb} a {noun}.",
)  # fmt: skip
_ACTION_ASKS = (
    "{verb} a {noun}", "{verb} the {noun}", "{verb} a {noun}", "{verb} my {noun}", "{verb} {noun}",
    "{verb} one {noun}", "{verb} this {noun}",
)  # fmt: skip
_NAMED_PHRASES = (
    "{p} {v}", "{p} {v}", "{p}={v}", "{p}: {v}", "{p} is {v}", "with {p} {v}", "with {p} {v}",
    "{p} = {v}",
    "the {p} is {v}", "using {p} {v}", "and {p} {v}", "for {p} {v}", "where {p} is {v}",
    "{p} set to {v}",
)  # fmt: skip
_TRUE_PHRASES = ("with {p} on", "with {p}", "{p}: yes", "{p} on")
_FALSE_PHRASES = ("with {p} off", "without {p}", "{p}: no", "{p} off", "no {p}")
_RESULTS_LOOKUP = (
    "{key}=number", "{key}=big", "{key}=word", "{key}=int unit=unit", "~{big}", "~{number} {unit}",
    "~{pair}",
    "~The value is {number}.", "~The {attr} is {word}.", "{key}=pair", "name=word {key}=int",
    "{key}=bool",
    "{key}=date", "~{date}", "{key}=city", "{key}=color", "found=bool {key}=number", "result=word",
)  # fmt: skip
_RESULTS_ACTION = (
    "status=ok", "status=done", "success=bool", "id=big", "id=code", "status=word", "~done", "~OK",
    "ok=bool id=int",
    "~{Noun} {code} is ready.", "~The {noun} has number {big}.", "{key}_id=big", "~{code}",
    "result=number",
    "status=queued position=int", "price=number", "message=text",
)  # fmt: skip
_NEUTRAL_KINDS = {
    "string": (
        "word",
        "word",
        "noun",
        "person",
        "city",
        "code",
        "text",
        "pair",
        "query",
        "level",
        "email",
        "digits",
    ),
    "integer": ("int", "int", "big"),
    "number": ("number", "number", "int"),
    "boolean": ("bool",),
}


def invented_tool(
    rng: random.Random, lexicon: Lexicon, difficulty: float, noun: str | None = None
) -> Tool:
    """Invent a tool with 1-3 parameters.

    Args:
        rng: Source of randomness.
        lexicon: Side of the split.
        difficulty: 0 gives mostly one parameter, 1 up to three.
        noun: The thing that the tool is about; drawn when None.
    """
    noun = noun or lexicon.noun(rng)
    is_lookup = rng.random() < 0.5
    more = difficulty * (0.4 + 0.6 * lexicon.odd_share)
    count = rng.choices((1, 2, 3), weights=(5 - 2 * more, 1 + 1.5 * more, 0.2 + 1.2 * more))[0]
    slots = {
        "noun": noun, "Noun": noun.capitalize(),
        "verb": lexicon.pick(rng, "GET_VERBS" if is_lookup else "ACT_VERBS"),
        "attr": lexicon.attribute(rng),
    }  # fmt: skip
    slots["Verb"], slots["Attr"] = slots["verb"].capitalize(), slots["attr"].capitalize()
    slots["key"] = (slots["attr"] if is_lookup else noun).replace(" ", "_")
    params = _draw_params(rng, lexicon, noun, count, has_subject=is_lookup)
    heads = rng.sample(_LOOKUP_ASKS if is_lookup else _ACTION_ASKS, 3)
    asks = []
    for head in heads:
        mark = "?" if head.startswith("?") else ""
        body = _fill(head.strip("?"), slots)
        asks.append(mark + body + _tail(rng, params, start=1 if is_lookup else 0))
    results = _RESULTS_LOOKUP if is_lookup else _RESULTS_ACTION
    describes = _LOOKUP_DESCRIBES if is_lookup else _ACTION_DESCRIBES
    return Tool(
        name=_tool_name(rng, lexicon, slots, is_lookup=is_lookup),
        description=_fill(rng.choice(describes), slots),
        params=tuple(p for p, _ in params),
        asks=tuple(asks),
        results=tuple(_fill(r, slots) for r in rng.sample(results, 4)),
        topic=slots["attr"] if is_lookup else f"{slots['verb']} {noun}",
    )


def _fill(template: str, slots: dict[str, str]) -> str:
    for key, value in slots.items():
        template = template.replace("{" + key + "}", value)
    return template


def _tool_name(
    rng: random.Random, lexicon: Lexicon, slots: dict[str, str], *, is_lookup: bool
) -> str:
    noun, attr = slots["noun"].replace(" ", "_"), slots["attr"]
    verb = slots["verb"].replace(" ", "_").replace("look_up", "lookup")
    if rng.random() < 0.25 * lexicon.odd_share:
        parts = [lexicon.pseudo_word(rng, rng.choice((1, 2))) for _ in range(rng.choice((1, 2, 2)))]
    elif is_lookup:
        # names of listed words only would repeat across the split; every form holds an open word
        parts = rng.choice(([verb, noun, attr], [verb, attr], [noun, attr], [attr, "of", noun]))
    else:
        parts = rng.choice(([verb, noun], [verb, noun], [noun, verb], [verb, "the", noun]))
    draw = rng.random()
    if draw < 0.08:
        return parts[0] + "".join(p.capitalize() for p in parts[1:])
    return ("-" if draw < 0.12 else "_").join(parts)


def _draw_params(
    rng: random.Random, lexicon: Lexicon, noun: str, count: int, *, has_subject: bool
) -> list[tuple[Param, tuple[str, ...]]]:
    """Draw parameters, each with the phrases that give its value without naming it."""
    params: list[tuple[Param, tuple[str, ...]]] = []
    taken: set[str] = set()
    slots: set[str] = set()
    if has_subject:
        key = noun.replace(" ", "_")
        name = rng.choice((key, f"{key}_name", "name", "id", key))
        kind = rng.choice(("word", "word", "code", "pair", "person", "city", "big", "digits"))
        describe = rng.choice(("", f"The {noun}", f"Name of the {noun}", f"Which {noun}"))
        params.append((Param(name=name, kind=kind, description=describe), ()))
        taken.add(name)
    while len(params) < count:
        if rng.random() < 0.45:
            concept = rng.choice(CONCEPTS)
            if concept.slot in slots:
                continue
            slots.add(concept.slot)
            name, kind, phrases = rng.choice(concept.names), concept.kind, concept.phrases
            describe = rng.choice(concept.describes) if rng.random() < 0.45 else ""
        else:
            json_kind = rng.choice(("string", "string", "integer", "number", "boolean"))
            name = rng.choice(NEUTRAL_NAMES[json_kind])
            if rng.random() < 0.2 * lexicon.odd_share:
                name = lexicon.pseudo_word(rng)
            kind, phrases, describe = rng.choice(_NEUTRAL_KINDS[json_kind]), (), ""
            if rng.random() < 0.33:
                spoken = name.replace("_", " ")
                describe = rng.choice(
                    (f"The {spoken}", f"{spoken.capitalize()} of the {noun}", f"{spoken} value")
                )
        if name in taken:
            continue
        taken.add(name)
        params.append((_with_enum(rng, lexicon, name, kind, describe), phrases))
    if len(params) > 1 and rng.random() < 0.12:
        last, phrases = params[-1]
        params[-1] = (
            Param(
                name=last.name,
                kind=last.kind,
                description=last.description,
                enum=last.enum,
                required=False,
            ),
            phrases,
        )
    return params


def _with_enum(rng: random.Random, lexicon: Lexicon, name: str, kind: str, describe: str) -> Param:
    enum: tuple[str, ...] = ()
    if json_type(kind) == "string" and kind not in ("text", "query") and rng.random() < 0.08:
        kind = "enum"
        enum = tuple({lexicon.pseudo_word(rng, rng.choice((1, 2))) for _ in range(3)})
        enum = tuple(sorted(enum))
    return Param(name=name, kind=kind, description=describe, enum=enum)


def _tail(rng: random.Random, params: list[tuple[Param, tuple[str, ...]]], start: int) -> str:
    """Write the part of a request that gives the parameters from ``start`` on."""
    pieces: list[str] = []
    for index in range(start, len(params)):
        param, phrases = params[index]
        if not param.required and rng.random() < 0.6:
            continue
        spoken = param.name.replace("_", " ") if rng.random() < 0.6 else param.name
        if phrases and rng.random() < 0.55:
            phrase = rng.choice(phrases)
        elif param.kind == "bool" and rng.random() < 0.5:
            flag = rng.random() < 0.5
            phrase = rng.choice(_TRUE_PHRASES if flag else _FALSE_PHRASES)
            phrase += f"<{index}={'true' if flag else 'false'}>"
        else:
            phrase = rng.choice(_NAMED_PHRASES)
        pieces.append(phrase.replace("{p}", spoken).replace("{v}", f"{{{index}}}"))
    if rng.random() < 0.5:
        rng.shuffle(pieces)
    if not pieces:
        return ""
    joint = rng.choice((" ", ", ", " and ", ", "))
    text = pieces[0] + "".join(
        (" " if p.startswith(("and ", "with ")) else joint) + p for p in pieces[1:]
    )
    return rng.choice((" ", " ", ", ", ": ")) + text
