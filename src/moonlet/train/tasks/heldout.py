"""Held-out prompts of the evaluation, with what a right reply is.

They are drawn from the other side of the split (``lexicon.HELDOUT``) with a seed of their own:
operand pairs, tool names, descriptions, places, names, argument words and the prompts to decline
are not in any training conversation.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moonlet.train.tasks.arithmetic import arithmetic_turn, draw_operands, solved_turn
from moonlet.train.tasks.frame import draw_category, frame_turn
from moonlet.train.tasks.lexicon import HELDOUT, is_heldout_pair
from moonlet.train.tasks.mixture import draw_tools
from moonlet.train.tasks.phrases import arithmetic_prompt
from moonlet.train.tasks.sample import Expect, Message, Style, Turn
from moonlet.train.tasks.tools import ask_tool, tool_turn

EVAL_SEED = 20_001
STYLE_OF: dict[tuple[bool, str | None], Style] = {
    (True, "low"): "low",
    (True, "high"): "high",
    (True, "max"): "max",
    (True, None): "max",
    (False, None): "instruct",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalItem:
    """One prompt of the evaluation.

    Attributes:
        family: ``"arithmetic"``, ``"tools"``, ``"frame"`` or ``"arithmetic_unseen_phrasing"``.
        messages: The prompt; one user message.
        tools: Declared tools in OpenAI form, or None.
        thinking: Whether the reply has a think channel.
        thinking_effort: Effort message of the prompt, or None.
        turn: The whole right turn.
    """

    family: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    thinking: bool
    thinking_effort: str | None
    turn: Turn

    @property
    def expect(self) -> Expect:
        """What the reply must contain."""
        return self.turn.expect


_Draw = Callable[[random.Random, Style], tuple[Turn, list[dict[str, Any]] | None]]


def _arithmetic(rng: random.Random, style: Style) -> tuple[Turn, None]:
    return arithmetic_turn(rng, HELDOUT, style), None


def _unseen_phrasing(rng: random.Random, style: Style) -> tuple[Turn, None]:
    op = rng.choice("+-")
    a, b = draw_operands(rng, op, is_heldout_pair)
    prompt = arithmetic_prompt(rng, op, a, b, unseen=True)
    return solved_turn(prompt, op, a, b, style), None


def _frame(rng: random.Random, style: Style) -> tuple[Turn, None]:
    return frame_turn(rng, HELDOUT, style, draw_category(rng)), None


def _tools(rng: random.Random, style: Style) -> tuple[Turn, list[dict[str, Any]]]:
    tools = draw_tools(rng, HELDOUT, 1.0)
    turn = tool_turn([ask_tool(rng, HELDOUT, rng.choice(tools))], style)
    return turn, [tool.declaration() for tool in tools]


FAMILIES: dict[str, _Draw] = {
    "arithmetic": _arithmetic,
    "tools": _tools,
    "frame": _frame,
    "arithmetic_unseen_phrasing": _unseen_phrasing,
}


def heldout_items(
    family: str,
    count: int = 200,
    *,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    seed: int = EVAL_SEED,
) -> list[EvalItem]:
    """Draw the evaluation prompts of a family; the same ones for every effort.

    Args:
        family: A key of ``FAMILIES``.
        count: Number of different prompts.
        thinking: Whether replies have a think channel.
        thinking_effort: Effort message; ``max`` is what the server sends by default.
        seed: Seed of the prompts.

    Returns:
        Items with pairwise different user messages.
    """
    style = STYLE_OF[thinking, thinking_effort]
    items: list[EvalItem] = []
    seen: set[str] = set()
    index = 0
    while len(items) < count:
        rng = random.Random(f"heldout:{family}:{seed}:{index}")
        index += 1
        turn, tools = FAMILIES[family](rng, style)
        if turn.user in seen:
            continue
        seen.add(turn.user)
        items.append(
            EvalItem(
                family=family,
                messages=[turn.messages[0]],
                tools=tools,
                thinking=thinking,
                thinking_effort=thinking_effort,
                turn=turn,
            )
        )
    return items
