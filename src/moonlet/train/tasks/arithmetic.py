r"""Addition and subtraction with column traces that a tiny model can follow exactly.

The trace is a list of lines, units column first, and every line restates all it needs: the two
digits, the incoming carry (``+1``) or borrow (``-1``), and for a subtraction the borrowed ten
(``+10``),
each decided by what stands directly before it. A subtraction begins with a digit by digit
comparison from the left; ``<`` means that the operands are swapped and the result is negative.

======== =================================================================
effort   think channel for 123 + 45
======== =================================================================
low      ``3+5=8 / 2+4=6 / 1+0=1`` (lines, here parted by slashes)
high     the operands first (``123+45``), the columns, the result ``=168``
max      as high, then ``check 168-45``, its columns, ``=123``, ``ok``
======== =================================================================

Without an effort message the style is ``max``, as for the served default. Without a think channel
(``instruct``) the low columns stand in the response itself and the result follows as the last line,
because the model cannot add in its head. The response in the other styles is the bare number.
"""

import random
from collections.abc import Callable

from moonlet.train.tasks.lexicon import Lexicon, is_heldout_pair
from moonlet.train.tasks.phrases import arithmetic_prompt
from moonlet.train.tasks.sample import Expect, Style, Turn, assistant

MAX_OPERAND = 999


def _digits(value: int, width: int) -> list[int]:
    """Return decimal digits, units first, padded with zeros."""
    return [value // 10**i % 10 for i in range(width)]


def _width(a: int, b: int) -> int:
    return max(len(str(a)), len(str(b)))


def add_columns(a: int, b: int) -> list[str]:
    """Return the column lines of a + b for non-negative operands."""
    width, carry, lines = _width(a, b), 0, []
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        total = x + y + carry
        lines.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return lines


def subtract_columns(a: int, b: int) -> list[str]:
    """Return the column lines of a - b for a >= b >= 0."""
    width, borrow, lines = _width(a, b), 0, []
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        left = f"{x}-{y}{'-1' if borrow else ''}"
        total, borrow = x - y - borrow, 0
        if total < 0:
            left, total, borrow = f"{left}+10", total + 10, 1
        lines.append(f"{left}={total}")
    return lines


def compare_lines(a: int, b: int) -> list[str]:
    """Compare two numbers digit by digit from the left, up to the first difference."""
    width, lines = _width(a, b), []
    for x, y in zip(reversed(_digits(a, width)), reversed(_digits(b, width)), strict=True):
        sign = "=" if x == y else "<" if x < y else ">"
        lines.append(f"{x}{sign}{y}")
        if x != y:
            break
    return lines


def trace(op: str, a: int, b: int, style: Style) -> str:
    """Write the think channel for ``a op b``.

    Args:
        op: ``"+"`` or ``"-"``.
        a: First operand, non-negative.
        b: Second operand, non-negative.
        style: ``instruct`` gives the same lines as ``low`` plus the result line.

    Returns:
        Lines joined by newlines, without a final newline.
    """
    result = a + b if op == "+" else a - b
    restate = style in ("high", "max")
    lines = [f"{a}{op}{b}"] if restate else []
    high, low = max(a, b), min(a, b)
    if op == "+":
        lines += add_columns(a, b)
    else:
        lines += compare_lines(a, b)
        if restate and a < b:
            lines.append(f"{high}-{low}")
        lines += subtract_columns(high, low)
    if style != "low":
        lines.append(f"={result}")
    if style == "max":
        lines += _check_lines(op, a, b)
    return "\n".join(lines)


def _check_lines(op: str, a: int, b: int) -> list[str]:
    if op == "+":
        total = a + b
        return [f"check {total}-{b}", *subtract_columns(total, b), f"={a}", "ok"]
    high, low = max(a, b), min(a, b)
    rest = high - low
    return [f"check {rest}+{low}", *add_columns(rest, low), f"={high}", "ok"]


def _operand(rng: random.Random, length: int) -> int:
    return rng.randint(0 if length == 1 else 10 ** (length - 1), 10**length - 1)


def _near_carry(rng: random.Random, op: str, length_a: int, length_b: int) -> tuple[int, int]:
    """Draw operands whose columns sit at the carry or borrow border."""
    a_digits = [rng.randint(0, 9) for _ in range(length_a)]
    b_digits = []
    for i in range(length_b):
        x = a_digits[i] if i < length_a else 0
        y = 9 - x + rng.choice((-1, 0, 1)) if op == "+" else x + rng.choice((-1, 0, 1))
        b_digits.append(min(9, max(0, y)))
    for digits in (a_digits, b_digits):
        if len(digits) > 1 and digits[-1] == 0:
            digits[-1] = rng.randint(1, 9)
    number = [sum(d * 10**i for i, d in enumerate(digits)) for digits in (a_digits, b_digits)]
    return number[0], number[1]


def draw_operands(
    rng: random.Random, op: str, allows: Callable[[int, int], bool]
) -> tuple[int, int]:
    """Draw a pair of 1-3 digit operands, with extra carry and near-equal cases.

    Args:
        rng: Source of randomness.
        op: ``"+"`` or ``"-"``.
        allows: Filter of the split side.
    """
    lengths = (1, 2, 3) if rng.random() < 0.5 else (2, 3, 3)
    length_a, length_b = rng.choice(lengths), rng.choice(lengths)
    while True:
        kind = rng.random()
        if kind < 0.35:
            a, b = _near_carry(rng, op, length_a, length_b)
        elif kind < 0.45:
            # the same leading digits, or the same number
            a = _operand(rng, length_a)
            b = min(MAX_OPERAND, max(0, a + rng.randint(-12, 12)))
        else:
            a, b = _operand(rng, length_a), _operand(rng, length_b)
        if op == "-" and a < b and rng.random() < 0.4:
            a, b = b, a
        if allows(a, b):
            return a, b
        length_a, length_b = rng.choice(lengths), rng.choice(lengths)


def train_pair(op: str) -> Callable[[int, int], bool]:
    """Return the training filter: neither the pair nor the pair of its check is held out."""

    def allows(a: int, b: int) -> bool:
        check = (a + b, b) if op == "+" else (abs(a - b), min(a, b))
        return not is_heldout_pair(a, b) and not is_heldout_pair(*check)

    return allows


def arithmetic_turn(rng: random.Random, lexicon: Lexicon, style: Style) -> Turn:
    """Make one turn that asks for a sum or a difference."""
    op = rng.choice("+-")
    allows = is_heldout_pair if lexicon.heldout else train_pair(op)
    a, b = draw_operands(rng, op, allows)
    prompt = arithmetic_prompt(rng, op, a, b)
    return solved_turn(prompt, op, a, b, style)


def solved_turn(prompt: str, op: str, a: int, b: int, style: Style) -> Turn:
    """Answer ``prompt``, which asks for ``a op b``, in the given style."""
    answer = str(a + b if op == "+" else a - b)
    worked = trace(op, a, b, style)
    content = worked if style == "instruct" else answer
    return Turn(
        task="arithmetic",
        messages=[{"role": "user", "content": prompt}, assistant(style, worked, content)],
        expect=Expect(answer=answer, category="add" if op == "+" else "subtract"),
    )
