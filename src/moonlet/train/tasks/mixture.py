"""The training mixture: sample i is a pure function of (seed, i, progress).

Conversations have one turn in about half of the cases, else two to five, so that the effort message
and the tool declarations are paid once for several supervised replies. Early in training
(``progress`` below ``RAMP``) tools are fewer and smaller and plain copying is frequent: copying has
to emerge before calls can become right.

Between the bounds of ``DRILL`` long texts are copied too, with digits that repeat: finding the
place by more than the last token is what sums and calls lack once copying works at all. The number
of declared tools grows with the difficulty, because choosing is learned last.
"""

import random
from collections.abc import Iterator

from moonlet.train.tasks.arithmetic import arithmetic_turn
from moonlet.train.tasks.frame import frame_turn, repeat_turn, reply_turn
from moonlet.train.tasks.invented_tools import invented_tool
from moonlet.train.tasks.lexicon import TRAIN, Lexicon
from moonlet.train.tasks.sample import Message, Sample, Style, Turn
from moonlet.train.tasks.tools import Tool, ask_tool, everyday_tool, tool_turn

RAMP = 0.3
DRILL = (0.1, 0.6)
DRILL_SHARE = 0.25
TOOL_COUNTS_LATE = (2.0, 4.0, 3.0)
# (thinking, thinking_effort, style of the traces, weight)
EFFORTS: tuple[tuple[bool, str | None, Style, float], ...] = (
    (True, "max", "max", 45),
    (True, "high", "high", 20),
    (True, "low", "low", 20),
    (False, None, "instruct", 10),
    (True, None, "max", 5),
)
TOOL_SHARE = 0.55
SYSTEM_SHARE = 0.18
# of declared tools, those that are not invented
EVERYDAY_SHARE, EVERYDAY_SHARE_HELDOUT = 0.45, 0.35
# calls per conversation are few: a tool turn is about three times as long as another turn
_PLAIN_TURNS = ((1, 2, 3, 4, 5), (40, 15, 15, 15, 15))
_TOOL_TURNS = ((1, 2, 3), (58, 32, 10))


def make_sample(seed: int, index: int, progress: float = 1.0) -> Sample:
    """Make training conversation ``index``.

    Args:
        seed: Seed of the run.
        index: Number of the sample, from 0.
        progress: Share of the training that is done, in [0, 1]; sets the difficulty.

    Returns:
        A conversation of the training side of the split.
    """
    rng = random.Random(f"{seed}:{index}")
    difficulty = min(1.0, max(0.0, progress) / RAMP)
    thinking, effort, style = draw_effort(rng)
    if rng.random() < TOOL_SHARE:
        tools, turns = _tool_conversation(rng, TRAIN, style, difficulty)
        task = "tools"
    else:
        drill_share = DRILL_SHARE if DRILL[0] <= progress < DRILL[1] else 0.0
        tools, turns = None, _plain_conversation(rng, TRAIN, style, difficulty, drill_share)
        task = turns[0].task
    messages = _system(rng, TRAIN)
    for turn in turns:
        messages += turn.messages
    return Sample(
        messages=messages, tools=[t.declaration() for t in tools] if tools else None,
        thinking=thinking, thinking_effort=effort, task=task, turns=tuple(turns),
    )  # fmt: skip


def samples(seed: int, start: int = 0, progress: float = 1.0) -> Iterator[Sample]:
    """Yield samples from index ``start`` on, at a fixed progress."""
    while True:
        yield make_sample(seed, start, progress)
        start += 1


def draw_effort(rng: random.Random) -> tuple[bool, str | None, Style]:
    """Draw (thinking, thinking_effort, style) by the shares of ``EFFORTS``."""
    thinking, effort, style, _ = rng.choices(EFFORTS, weights=[e[3] for e in EFFORTS])[0]
    return thinking, effort, style


def draw_tools(
    rng: random.Random,
    lexicon: Lexicon,
    difficulty: float,
    counts: tuple[float, ...] = (3.2, 2.0, 1.1),
) -> list[Tool]:
    """Draw one to three tools with different names; some share a noun to be confusable.

    Args:
        rng: Source of randomness.
        lexicon: Side of the split.
        difficulty: Of invented tools.
        counts: Weights of one, two and three tools.
    """
    count = rng.choices((1, 2, 3), weights=counts)[0]
    shared = lexicon.noun(rng) if rng.random() < 0.3 else None
    everyday_share = EVERYDAY_SHARE_HELDOUT if lexicon.heldout else EVERYDAY_SHARE
    tools: list[Tool] = []
    while len(tools) < count:
        if rng.random() < everyday_share:
            tool = everyday_tool(rng, lexicon)
        else:
            tool = invented_tool(rng, lexicon, difficulty, shared)
        if not any(_conflict(tool, other) for other in tools):
            tools.append(tool)
    rng.shuffle(tools)
    return tools


def _conflict(one: Tool, other: Tool) -> bool:
    """Return whether two tools could answer the same request."""
    if one.is_calculator and other.is_calculator:
        return True
    return (
        one.name == other.name or one.topic == other.topic or bool(set(one.asks) & set(other.asks))
    )


def _system(rng: random.Random, lexicon: Lexicon) -> list[Message]:
    if rng.random() >= SYSTEM_SHARE:
        return []
    text = lexicon.fill(rng, lexicon.pick(rng, "SYSTEM_PROMPTS"))
    return [{"role": "system", "content": text}]


def _plain_conversation(
    rng: random.Random, lexicon: Lexicon, style: Style, difficulty: float, drill_share: float
) -> list[Turn]:
    count = rng.choices(*_PLAIN_TURNS)[0]
    copy_share = 0.30 - 0.26 * difficulty
    turns = []
    for _ in range(count):
        if rng.random() < drill_share:
            turns.append(repeat_turn(rng, lexicon, style, difficulty, is_long=True))
        elif rng.random() < copy_share:
            turns.append(repeat_turn(rng, lexicon, style, difficulty))
        elif rng.random() < 0.66:
            turns.append(arithmetic_turn(rng, lexicon, style))
        else:
            turns.append(frame_turn(rng, lexicon, style))
    return turns


def _tool_conversation(
    rng: random.Random, lexicon: Lexicon, style: Style, difficulty: float
) -> tuple[list[Tool], list[Turn]]:
    late = zip((6.0, 1.0, 0.1), TOOL_COUNTS_LATE, strict=True)
    counts = tuple(early + difficulty * (last - early) for early, last in late)
    tools = draw_tools(rng, lexicon, difficulty, counts)
    turns: list[Turn] = []
    calls = 0
    for _ in range(rng.choices(*_TOOL_TURNS)[0]):
        turn = _turn_with_tools(rng, lexicon, style, difficulty, tools, calls)
        calls += len(turn.expect.calls)
        turns.append(turn)
    return tools, turns


def _turn_with_tools(
    rng: random.Random,
    lexicon: Lexicon,
    style: Style,
    difficulty: float,
    tools: list[Tool],
    calls: int,
) -> Turn:
    draw = rng.random()
    if draw < 0.83:
        asks = [ask_tool(rng, lexicon, rng.choice(tools))]
        if rng.random() < 0.04 * difficulty:
            asks.append(ask_tool(rng, lexicon, rng.choice(tools)))
        return tool_turn(asks, style, calls)
    if draw < 0.90 and not any(tool.is_calculator for tool in tools):
        return arithmetic_turn(rng, lexicon, style)
    if draw < 0.93:
        stranger = invented_tool(rng, lexicon, difficulty)
        return reply_turn(ask_tool(rng, lexicon, stranger).text, "decline", style)
    return frame_turn(rng, lexicon, style, with_tools=True)
