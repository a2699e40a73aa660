"""Everyday tools around a random noun: orders, switches, settings, messages, timers, trackers.

The specifications of `tool_specs` are few, so their forms of request could be learned with their
words only. Here the same forms come with any noun: "could I have 3 small mirrors", "set the attic
window open=no", "send Ben the memo ...".
"""

import random

from moonlet.train.tasks.lexicon import Lexicon
from moonlet.train.tasks.tool_notation import ToolSpec, param

__all__ = ["family_tool"]

FORMS = 8
_SWITCH_VERBS = ("set", "change", "make", "put", "switch", "turn", "have", "update")
_PLACES = ("the {0} NOUN", "the {0} NOUN", "my {0} NOUN", "the NOUN {0}", "the NOUN {0}",
    "NOUN {0}", "the NOUN in the {0}", "the NOUN of the {0}")  # fmt: skip
_JOINTS = (" ", ", ", ": ", " to ", " so that ", " - ")
_ASSIGNMENTS = ("STATE {1}", "STATE={1}", "STATE: {1}", "STATE is {1}", "STATE = {1}")
# kind of value, names of its parameter, and phrases with the value where they do not name it
_SETTINGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("bool", "locked open visible loud sealed public clean private shared", ()),
    ("int", "level depth number height speed floor width", ("to {1}", "by {1}")),
    ("number", "price weight temperature rate value", ("to {1}", "at {1}")),
    ("size", "size format kind", ("to {1}", "in {1}", "as {1}")),
    ("color", "color colour paint", ("in {1}", "to {1}")),
    ("person", "owner user person keeper", ("for {1}", "to {1}")),
    ("code", "code key id reference", ("with code {1}", "under {1}", "to {1}")),
    ("word", "label tag mode name group", ("as {1}", "to {1}")),
)
_NAMED = ("PARAM {1}", "PARAM={1}", "PARAM: {1}", "PARAM is {1}", "PARAM = {1}",
    "with PARAM {1}", "PARAM set to {1}", "using PARAM {1}")  # fmt: skip
_ORDER_VERBS = ("buy", "order", "get", "request", "bring me", "?could I have", "?can I get",
    "?can I have", "?may I have", "?I want", "?I need", "?I would like", "deliver")  # fmt: skip
_AMOUNTS = ("{0} {1} NOUNs", "{0} {1} NOUNs", "{1} NOUNs, {0} of them",
    "NOUNs: number {0}, size {1}", "{0} NOUNs, size {1}", "{0} NOUNs in size {1}",
    "NOUNs, size {1}, {0} pieces")  # fmt: skip

_STATES = ("open", "closed", "on", "active", "armed", "heated", "lit", "shut", "muted", "enabled")
_LETTERS = ("note", "letter", "memo", "line", "card", "word", "report", "wire", "reply", "greeting")
_WATCHES = ("stopwatch", "egg timer", "clock", "break", "pause", "nap", "round", "session", "watch")


def family_tool(rng: random.Random, lexicon: Lexicon) -> ToolSpec:
    """Draw a family and a noun."""
    families = (_order, _order, _switch, _switch, _setting, _setting, _message, _message, _timer,
        _tracker)  # fmt: skip
    return rng.choice(families)(rng, lexicon)


def _forms(rng: random.Random, *parts: tuple[str, ...], **words: str) -> tuple[str, ...]:
    """Join one choice of each part to a form of request, several times; fill in the words."""
    forms = []
    for _ in range(FORMS):
        form = "".join(rng.choice(part) for part in parts)
        for name, word in words.items():
            form = form.replace(name, word)
        forms.append(form)
    return tuple(forms)


def _key(noun: str) -> str:
    return noun.replace(" ", "_")


def _order(rng: random.Random, lexicon: Lexicon) -> ToolSpec:
    n = lexicon.noun(rng)
    key = _key(n)
    return ToolSpec(
        names=(f"order_{key}", f"{key}_order", f"{key}_delivery", f"request_{key}s", f"buy_{key}",
            f"{key}_shop", f"get_{key}s"),
        describes=(f"Order {n}s.", f"Order {n}s in a size.", f"Buys {n}s by number",
            f"A {n} service", f"Delivers {n}s.", f"Request one or more {n}s."),
        params=(
            param("count quantity number amount copies", "int", "How many", f"Number of {n}s",
                "The amount"),
            param("size format kind variant", "size", "The size", f"Size of the {n}",
                "Small, medium or large"),
        ),
        asks=_forms(rng, _ORDER_VERBS, (" ",), _AMOUNTS, NOUN=n),
        results=("order=big", "price=number", "~Ready at {time}", "status=ordered"),
    )  # fmt: skip


def _switch(rng: random.Random, lexicon: Lexicon) -> ToolSpec:
    n = lexicon.noun(rng)
    key, state = _key(n), rng.choice(_STATES)
    name = rng.choice((state, "state", f"is_{state}"))
    subjects = ("room", "place", "name", key, f"{key}_name", "where")
    where = rng.choice([subject for subject in subjects if subject != name])
    return ToolSpec(
        names=(f"set_{key}", f"{key}_control", f"{key}_state", f"switch_{key}", f"change_{key}",
            f"room_{key}", f"set_{key}_{state}"),
        describes=(f"Set a {n}.", f"Whether a {n} is {state}.", f"Controls the {n} of a room",
            f"Change a {n}", f"Sets the state of a {n}."),
        params=(
            param(where, "room", f"Which {n}", "The room", "Where it is"),
            param(name, "bool", f"Whether it is {state}", "New state"),
        ),
        asks=_forms(
            rng, _SWITCH_VERBS, (" ",), _PLACES, _JOINTS, _ASSIGNMENTS, NOUN=n, STATE=state
        ),
        results=(f"{key}=$0 {state}=$1", "status=ok", "~Done in the $0", "ok=bool"),
    )  # fmt: skip


def _setting(rng: random.Random, lexicon: Lexicon) -> ToolSpec:
    """A named thing of a class gets a value: "change the attic door, locked=yes"."""
    n, verb = lexicon.noun(rng), lexicon.pick(rng, "ACT_VERBS")
    kind, names, phrases = rng.choice(_SETTINGS)
    key, name = _key(n), rng.choice(names.split())
    subject = rng.choice(("room", "person", "word", "city", "code", "noun"))
    subjects = (key, key, "name", "id", f"{key}_name", "place", "target", "which")
    where = rng.choice([subject for subject in subjects if subject != name])
    act = verb.replace(" ", "_")
    return ToolSpec(
        names=(f"{act}_{key}", f"{key}_{act}", f"{key}_{name}", f"{act}_{key}_{name}",
            f"set_{key}_{name}", f"{act}_the_{key}", f"{key}_control"),
        describes=(f"{verb.capitalize()} a {n}.", f"{verb.capitalize()} or change a {n}",
            f"Sets the {name} of a {n}.", f"Lets you {verb} one {n}.", f"{name} of a {n}"),
        params=(
            param(where, subject, f"Which {n}", f"The {n}", f"Name of the {n}"),
            param(name, kind, f"The {name}", f"New {name}", f"{name.capitalize()} to set"),
        ),
        asks=_forms(
            rng, (verb, verb, "set", "change", "update", "make"), (" ",), _PLACES,
            (" ", ", ", ": ", " ", " - "), (*_NAMED, *phrases, *phrases), NOUN=n, PARAM=name,
        ),
        results=(f"{key}=$0 {name}=$1", "status=ok", "~The $0 is changed", f"{name}=$1 ok=bool"),
    )  # fmt: skip


def _message(rng: random.Random, lexicon: Lexicon) -> ToolSpec:
    m = rng.choice(_LETTERS) if rng.random() < 0.6 else lexicon.noun(rng)
    key, verb = _key(m), rng.choice(("send", "give", "write", "pass", "forward", "bring"))
    return ToolSpec(
        names=(f"{verb}_{key}", f"{key}_to", f"{key}_person", f"deliver_{key}", f"{key}_service",
            "tell_someone", "contact_friend", "say_to", f"drop_{key}"),
        describes=(f"Send a {m} to a person.", f"Delivers a {m}.", f"{verb.capitalize()} a {m}",
            "Tell something to a person.", "Says something to a friend", f"A {m} with some words"),
        params=(
            param("to person receiver recipient name friend", "person", "Who gets it",
                "Name of the person", "The friend"),
            param("text words message content body", "text", "The words", "What to say",
                f"Text of the {m}"),
        ),
        asks=(f"{verb} {{0}} the {m} {{1}}", f"{verb} a {m} to {{0}} saying {{1}}",
            f"{m} {{0}}: {{1}}", f"{verb} {{0}} a {m}: {{1}}", f"{verb} {{0}} the {m} {{1}}",
            f"{verb} the {m} {{1}} to {{0}}", f"{m} to {{0}} saying {{1}}",
            f"{verb} the {m} to {{0}}: {{1}}", f"{m} for {{0}}: {{1}}",
            f"{verb} {{0}} a {m} with the words {{1}}"),
        results=("status=sent", "id=big", "~It was given to $0", "sent=bool"),
    )  # fmt: skip


def _timer(rng: random.Random, lexicon: Lexicon) -> ToolSpec:
    n = rng.choice(_WATCHES) if rng.random() < 0.5 else lexicon.noun(rng)
    key = _key(n)
    unit = rng.choice(("minutes", "minutes", "seconds", "hours"))
    return ToolSpec(
        names=(f"start_{key}", f"{key}", f"run_{key}", f"begin_{key}", f"{key}_timer"),
        describes=(f"Start a {n}.", f"Runs a {n} for some {unit}.", f"A {n} of {unit}",
            f"Counts {unit}."),
        params=(param(f"{unit} duration length time", "int", f"How many {unit}", "Length"),),
        asks=(f"start a {n} of {{0}} {unit}", f"?{n} for {{0}} {unit}", f"{n} {{0}} {unit}",
            f"run the {n} for {{0}} {unit}", f"begin a {{0}} {unit} {n}",
            f"start the {n}, {{0}} {unit}"),
        results=("status=running", "ends_at=time", "~$0 from now", "id=int"),
    )  # fmt: skip


def _tracker(rng: random.Random, lexicon: Lexicon) -> ToolSpec:
    n = lexicon.noun(rng)
    key = _key(n)
    return ToolSpec(
        names=(f"track_{key}", f"{key}_position", f"find_{key}", f"{key}_finder", "where_is_it",
            f"follow_{key}", "position_lookup"),
        describes=(f"Find a {n} by its code.", f"Where a {n} is", f"Position of a {n}",
            "Look something up by its code."),
        params=(param("code number id reference key", "code", "The code", f"Code of the {n}"),),
        asks=(f"track the {n} {{0}}", f"?where is the {n} {{0}}?", f"find my {n} {{0}}",
            f"follow {n} {{0}}", f"?where is my {n} with code {{0}}?", f"locate {n} {{0}}",
            f"look for the {n} with number {{0}}"),
        results=("status=word", "city=city", "~It is in {city}.", "found=bool"),
    )  # fmt: skip
