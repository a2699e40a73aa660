"""How people type a sum or a difference, and small disturbances of a typed line."""

import random

# cores that name a value, and cores that give an order; {a} and {b} in reading order of the result
_VALUES = {
    "+": (
        "{a}+{b}", "{a} + {b}", "{a}+{b}", "{a} + {b}", "{a} +{b}", "{a}+ {b}", "{a} plus {b}",
        "{a} plus {b}", "the sum of {a} and {b}", "sum of {a} and {b}", "{a} added to {b}",
        "the total of {a} and {b}", "{a} and {b} together", "{a} increased by {b}",
        "{b} more than {a}", "the sum {a} + {b}",
    ),
    "-": (
        "{a}-{b}", "{a} - {b}", "{a}-{b}", "{a} - {b}", "{a} -{b}", "{a}- {b}", "{a} minus {b}",
        "{a} minus {b}", "{a} take away {b}", "{a} less {b}", "{a} decreased by {b}",
        "{b} less than {a}", "{b} subtracted from {a}", "{a} reduced by {b}",
        "the difference {a} - {b}", "{a} \u2212 {b}",
    ),
}  # fmt: skip
_ORDERS = {
    "+": (
        "add {a} and {b}", "add {a} to {b}", "add {a} + {b}", "sum {a} and {b}", "add {a} {b}",
        "add up {a} and {b}", "add {a} with {b}", "increase {a} by {b}", "add together {a} and {b}",
    ),
    "-": (
        "subtract {b} from {a}", "take {b} from {a}", "take {b} away from {a}",
        "deduct {b} from {a}",
        "subtract {b} from {a}", "reduce {a} by {b}", "decrease {a} by {b}", "remove {b} from {a}",
    ),
}  # fmt: skip
_VALUE_FRAMES = (
    "{x}", "{x}", "{x}", "{x}?", "{x}=", "{x} =", "{x}=?", "{x} = ?", "What is {x}?",
    "What is {x}?",
    "What is {x}?", "what is {x}", "What's {x}?", "what's {x}", "whats {x}", "whats {x}?",
    "How much is {x}?", "how much is {x}", "Calculate {x}", "Calculate {x}.", "Compute {x}.",
    "Please calculate {x}.", "please compute {x}", "Can you tell me what {x} is?", "Solve {x}",
    "Solve: {x}", "Evaluate {x}", "Tell me {x}", "What does {x} equal?", "what does {x} make?",
    "hey, what is {x}?", "Hi, what is {x}?", "Hello, what's {x}?", "I need {x}", "Work out {x}.",
    "work out {x} please", "What would {x} be?", "{x} please", "{x} is?", "{x} equals",
    "{x} equals?", "Find {x}.", "Give me {x}", "Do you know {x}?", "Quick: {x}",
    "What do I get for {x}?",
    "What is the result of {x}?", "the answer to {x}?", "Could you compute {x}?", "so {x} is what?",
    "Ok, now {x}", "and {x}?", "And what is {x}?", "calc {x}", "Can you do {x}?",
    "can you solve {x}",
    "Question: what is {x}?", "Help me with {x}", "{x}, please.", "How many is {x}?",
    "{x}? Just the number.", "What is {x}? Think step by step.", "What is {x}? Show your work.",
    "what's {x}? answer with a number", "I have a question: {x}?", "{x} ... what is it?",
)  # fmt: skip
_ORDER_FRAMES = (
    "{x}", "{x}.", "{x}", "please {x}", "Please {x}.", "Please {x}", "Can you {x}?", "can you {x}",
    "Could you {x}?", "could you please {x}", "{x} please", "{x}, please.", "Now {x}.",
    "I want to {x}",
    "Hey, {x}", "If you {x}, what do you get?", "What do you get when you {x}?",
    "I need you to {x}.",
    "Would you {x}?", "Hello! Please {x}.", "What happens if I {x}?", "Let's {x}", "and {x}",
)  # fmt: skip
# kept out of training: the evaluation reports them as a family of their own
_UNSEEN_VALUE_FRAMES = (
    "I'd like to know {x}",
    "any idea what {x} comes to?",
    "Quick question: {x}?",
    "yo what is {x}",
    "Mind telling me {x}?",
    "My homework says {x}",
    "Determine {x}",
    "Result for {x}?",
)
_UNSEEN_ORDER_FRAMES = (
    "Kindly {x}",
    "hi there, {x} for me",
    "Try to {x}",
    "Will you {x}?",
    "{x} and show the result",
)
_WORD_LENGTH_FOR_TYPO = 4


def arithmetic_prompt(rng: random.Random, op: str, a: int, b: int, *, unseen: bool = False) -> str:
    """Phrase the question for ``a op b``.

    Args:
        rng: Source of randomness.
        op: ``"+"`` or ``"-"``.
        a: First operand.
        b: Second operand.
        unseen: Use frames that training never uses.
    """
    is_value = rng.random() < 0.72
    cores = (_VALUES if is_value else _ORDERS)[op]
    core = rng.choice(cores)
    if op == "-" and a >= b and is_value and rng.random() < 0.08:
        core = rng.choice(("the difference between {a} and {b}", "the difference of {a} and {b}"))
    if unseen:
        frame = rng.choice(_UNSEEN_VALUE_FRAMES if is_value else _UNSEEN_ORDER_FRAMES)
    else:
        frame = rng.choice(_VALUE_FRAMES if is_value else _ORDER_FRAMES)
    return restyle(rng, frame.format(x=core.format(a=a, b=b)))


def restyle(rng: random.Random, text: str) -> str:
    """Change the case or the final mark of a typed line, or put a typing slip into it."""
    draw = rng.random()
    if draw < 0.16:
        text = text.lower()
    elif draw < 0.36:
        text = text[:1].upper() + text[1:]
    elif draw < 0.39:
        text = text.upper()
    elif draw < 0.42:
        text = _slip(rng, text)
    if rng.random() < 0.06:
        text = text.rstrip("?.!")
    elif rng.random() < 0.04 and text[-1:].isalnum():
        text += rng.choice(("?", "!", ".", " ?", "??"))
    return text


def _slip(rng: random.Random, text: str) -> str:
    """Drop, double or swap one letter of one longer word."""
    words = text.split(" ")
    places = [i for i, w in enumerate(words) if w.isalpha() and len(w) >= _WORD_LENGTH_FOR_TYPO]
    if not places:
        return text
    place = rng.choice(places)
    word = words[place]
    at = rng.randrange(1, len(word) - 1)
    words[place] = rng.choice(
        (
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        )
    )
    return " ".join(words)
