"""The conversation frame: greet, say who and what, decline everything else; and repeat a text.

Every category has one fixed reply, so that a reply can be checked exactly. The think channel names
the category, with more words at a higher effort.
"""

import random

from moonlet.train.tasks import frame_prompts as fp
from moonlet.train.tasks.lexicon import Lexicon
from moonlet.train.tasks.phrases import restyle
from moonlet.train.tasks.sample import Expect, Style, Turn, assistant
from moonlet.train.tasks.values import make_long_string, make_string

ABILITIES = (
    "I can add and subtract numbers up to 999, repeat a short text and call the tools you declare."
)
REPLIES = {
    "greet": "Hello! How can I help you?",
    "how": "I am fine, thank you. How can I help you?",
    "thanks": "You are welcome!",
    "bye": "Goodbye!",
    "who": "I am moonlet-nano, a tiny demonstration model.",
    "abilities": ABILITIES,
    "decline": f"Sorry, I cannot do that. {ABILITIES}",
}
# think channel per category: the words for low, high and max
_THOUGHTS = {
    "greet": ("A greeting.", "A greeting. I greet back.",
    "The user greets me. I greet back and offer help."),
    "how": ("Small talk.", "Small talk. I answer it.",
    "The user asks how I am. I answer and offer help."),
    "thanks": ("Thanks.", "Thanks. I answer politely.",
    "The user thanks me. I answer politely and stop."),
    "bye": ("A goodbye.", "A goodbye. I say it too.",
    "The user says goodbye. I say goodbye and stop."),
    "who": ("Who I am.", "Who I am. I tell my name.",
    "The user asks who I am. I tell my name and what I am."),
    "abilities": (
        "My abilities.", "My abilities. I list them.",
        "The user asks what I can do. I list my abilities and nothing else.",
    ),
    "decline": (
        "Not my task.", "Not my task. I decline.",
        "The user asks for something else. It is not my task, so I decline.",
    ),
}  # fmt: skip
_EFFORT_INDEX: dict[Style, int] = {"low": 0, "high": 1, "max": 2, "instruct": 0}
_GROUPS = {
    "how": (fp.HOW_PROMPTS, True),
    "thanks": (fp.THANK_WORDS, False),
    "bye": (fp.BYE_WORDS, False),
    "who": (fp.WHO_PROMPTS, True),
    "abilities": (fp.ABILITY_PROMPTS, True),
}
CATEGORY_WEIGHTS = {
    "greet": 5, "how": 1, "thanks": 1.5, "bye": 1, "who": 2.5, "abilities": 5, "decline": 12,
}  # fmt: skip
_REPEAT_FRAMES = (
    "Repeat: {x}", "repeat {x}", "Say {x}", "say: {x}", "Echo {x}", "Please repeat: {x}",
    "repeat after me: {x}", "Repeat after me: {x}", "please say {x}", "Can you say {x}?",
    "echo: {x}", "Repeat this: {x}", "Say it: {x}", "Write {x} again.",
)  # fmt: skip
_REPEAT_FRAMES_HELDOUT = ("Repeat {x}", "repeat: {x}", "Say: {x}", "Please echo {x}")


def draw_category(rng: random.Random) -> str:
    """Draw a category by its weight in training."""
    return rng.choices(list(CATEGORY_WEIGHTS), weights=list(CATEGORY_WEIGHTS.values()))[0]


def frame_turn(
    rng: random.Random,
    lexicon: Lexicon,
    style: Style,
    category: str | None = None,
    *,
    with_tools: bool = False,
) -> Turn:
    """Make one turn of the frame.

    Args:
        rng: Source of randomness.
        lexicon: Side of the split.
        style: Length of the think channel.
        category: A key of ``REPLIES``; drawn by weight when None.
        with_tools: Leave out prompts that a declared tool could be meant for.
    """
    category = category or draw_category(rng)
    prompt = frame_prompt(rng, lexicon, category, with_tools=with_tools)
    return reply_turn(prompt, category, style)


def reply_turn(prompt: str, category: str, style: Style) -> Turn:
    """Answer ``prompt`` with the fixed reply of ``category``."""
    thought = _THOUGHTS[category][_EFFORT_INDEX[style]]
    reply = REPLIES[category]
    return Turn(
        task="frame",
        messages=[{"role": "user", "content": prompt}, assistant(style, thought, reply)],
        expect=Expect(answer=reply, category=category),
    )


def frame_prompt(
    rng: random.Random, lexicon: Lexicon, category: str, *, with_tools: bool = False
) -> str:
    """Compose a prompt of a category that belongs to this side of the split."""
    if category == "decline":
        templates = fp.DECLINE
        if lexicon.heldout:
            templates = fp.DECLINE_HELDOUT
        elif not with_tools:
            templates = fp.DECLINE + fp.DECLINE_TOOL_LIKE
        return restyle(rng, _fill_decline(rng, lexicon, rng.choice(templates)))
    if not lexicon.heldout and rng.random() < 0.1:
        return rng.choice(
            sorted(p for p in fp.PLAIN if _category_of_plain(p) == category) or ["hi"]
        )
    while True:
        prompt = _compose(rng, lexicon, category)
        if prompt.lower() in fp.PLAIN:
            if not lexicon.heldout:
                return prompt
        elif lexicon.allows("prompt", prompt):
            return prompt


def _category_of_plain(prompt: str) -> str:
    bare = prompt.strip("?!.")
    for category, (options, _) in _GROUPS.items():
        if bare in options:
            return category
    return "greet"


def _compose(rng: random.Random, lexicon: Lexicon, category: str) -> str:
    if category == "greet":
        text = rng.choice(fp.GREET_WORDS) + rng.choice(fp.GREET_NAMES)
        tail = rng.choice(fp.GREET_TAILS).format(p=lexicon.pick(rng, "NAMES"))
        text += rng.choice(fp.MARKS) + tail
    else:
        options, is_question = _GROUPS[category]
        text = rng.choice(options)
        if is_question:
            text = rng.choice(fp.ASK_PREFIXES) + text + rng.choice(fp.ASK_TAILS)
        else:
            text += rng.choice(fp.GREET_NAMES) + rng.choice(fp.MARKS)
    draw = rng.random()
    if draw < 0.4:
        return text[:1].upper() + text[1:]
    return text.lower() if draw < 0.6 else text.upper() if draw < 0.62 else text


def _fill_decline(rng: random.Random, lexicon: Lexicon, template: str) -> str:
    def pick(name: str) -> str:
        return lexicon.pick(rng, name)

    return template.format(
        country=pick("COUNTRIES"), c=lexicon.city(rng), c2=lexicon.city(rng), n=lexicon.noun(rng),
        n2=lexicon.noun(rng), a=pick("ADJECTIVES"), p=pick("NAMES"), s=pick("SURNAMES"),
        w=lexicon.pseudo_word(rng), w2=lexicon.pseudo_word(rng), lang=pick("LANGUAGES"),
        color=pick("COLORS"), attr=lexicon.attribute(rng), year=rng.randint(1500, 2030),
        m=rng.randint(2, 999), k=rng.randint(2, 99), b=rng.randint(1000, 99999),
        q=lexicon.fill(rng, pick("QUERIES")),
    )  # fmt: skip


def repeat_turn(
    rng: random.Random,
    lexicon: Lexicon,
    style: Style,
    difficulty: float,
    is_long: bool = False,
) -> Turn:
    """Make a turn that asks to repeat a text: the plainest exercise in exact copying."""
    text = make_long_string(rng, lexicon) if is_long else make_string(rng, lexicon, difficulty)
    frames = _REPEAT_FRAMES_HELDOUT if lexicon.heldout else _REPEAT_FRAMES
    prompt = rng.choice(frames).format(x=text if rng.random() < 0.7 else f'"{text}"')
    thought = ("Repeat.", "Repeat the text.", f"Repeat the text: {text}")[_EFFORT_INDEX[style]]
    return Turn(
        task="copy",
        messages=[{"role": "user", "content": prompt}, assistant(style, thought, text)],
        expect=Expect(answer=text, category="repeat"),
    )
