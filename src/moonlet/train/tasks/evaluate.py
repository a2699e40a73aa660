"""Greedy evaluation of a model on the held-out prompts, with a JSON report.

The model is anything with ``generate(prompts) -> completions`` on token ids at temperature 0. A
tool prompt is a dialogue of two steps: the call is generated and checked, its result is appended to
the conversation as an OpenAI client would do it, and the final response is generated.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moonlet.chat.events import ParsedMessage
from moonlet.chat.parser import Parser
from moonlet.chat.render import render
from moonlet.chat.tokenizer import Tokenizer
from moonlet.train.tasks import checks
from moonlet.train.tasks.heldout import EVAL_SEED, EvalItem, heldout_items
from moonlet.train.tasks.sample import Message

MAIN_FAMILIES = ("arithmetic", "tools", "frame")
# what the shipped model must reach
WANTED = {"arithmetic": 0.97, "tools": 0.85, "frame": 0.95}
WANTED_MARKUP = 0.99
EFFORTS = ("low", "high", "max")


class Generator(Protocol):
    """A model that continues prompts greedily."""

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Continue every prompt until a stop token or a length limit.

        Args:
            prompts: Prompt ids.

        Returns:
            The generated ids of each prompt, the stop token included where one came.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One generated assistant message."""

    ids: list[int]
    message: ParsedMessage
    is_valid: bool
    is_stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one item: its replies and whether the whole item is right."""

    item: EvalItem
    replies: tuple[Reply, ...]
    is_right: bool

    @property
    def failed_step(self) -> str:
        """Which step went wrong: ``"none"``, ``"call"`` or ``"answer"``."""
        if self.is_right:
            return "none"
        return "call" if self.item.expect.calls and len(self.replies) == 1 else "answer"


def evaluate(
    generator: Generator, tokenizer: Tokenizer, count: int = 200, seed: int = EVAL_SEED
) -> dict[str, Any]:
    """Evaluate a model on every family and effort.

    Args:
        generator: The model, at temperature 0.
        tokenizer: Its tokenizer.
        count: Prompts per family.
        seed: Seed of the prompts.

    Returns:
        JSON-ready report: ``families`` (accuracy, share of valid and stopped replies, accuracy per
        category, examples of failures) at effort max, ``efforts`` (sums: accuracy and mean
        reasoning tokens at each effort), ``instruct``, ``markup`` over the main families, and
        ``passes`` against the thresholds of the model card.
    """
    families: dict[str, Any] = {}
    for family in (*MAIN_FAMILIES, "arithmetic_unseen_phrasing"):
        outcomes = run_items(generator, tokenizer, heldout_items(family, count, seed=seed))
        families[family] = summarize(outcomes)
    efforts: dict[str, Any] = {}
    for effort in EFFORTS:
        efforts[effort] = {
            family: summarize(
                run_items(
                    generator,
                    tokenizer,
                    heldout_items(family, max(1, count // 2), thinking_effort=effort, seed=seed),
                )
            )
            for family in MAIN_FAMILIES
        }
    instruct = {
        family: summarize(
            run_items(
                generator,
                tokenizer,
                heldout_items(
                    family, max(1, count // 2), thinking=False, thinking_effort=None, seed=seed
                ),
            )
        )
        for family in MAIN_FAMILIES
    }
    report: dict[str, Any] = {
        "seed": seed,
        "count": count,
        "families": families,
        "efforts": efforts,
        "instruct": instruct,
        "markup": min(families[family]["valid_and_stopped"] for family in MAIN_FAMILIES),
        "reasoning_tokens": {
            effort: efforts[effort]["arithmetic"]["reasoning_tokens"] for effort in EFFORTS
        },
    }
    report["passes"] = passes(report)
    return report


def passes(report: dict[str, Any]) -> dict[str, bool]:
    """Compare a report with the thresholds that the shipped model must reach."""
    accuracy = {family: report["families"][family]["accuracy"] for family in MAIN_FAMILIES}
    lengths = [report["reasoning_tokens"][effort] for effort in EFFORTS]
    return {
        **{family: accuracy[family] >= WANTED[family] for family in MAIN_FAMILIES},
        "markup": report["markup"] >= WANTED_MARKUP,
        "effort": lengths[0] < lengths[1] < lengths[2],
    }


def run_items(
    generator: Generator, tokenizer: Tokenizer, items: Sequence[EvalItem]
) -> list[Outcome]:
    """Run items through the model, tool items in two steps.

    Returns:
        One outcome per item, in order.
    """
    first = _reply(generator, tokenizer, items, [item.messages for item in items])
    outcomes: dict[int, Outcome] = {}
    waiting: list[int] = []
    for index, (item, reply) in enumerate(zip(items, first, strict=True)):
        if item.expect.calls:
            if checks.are_right_calls(reply.message, item.expect):
                waiting.append(index)
                continue
            is_right = False
        else:
            is_worked = not item.thinking and item.turn.task == "arithmetic"
            is_right = checks.is_right_answer(reply.message, item.expect, is_worked=is_worked)
        outcomes[index] = Outcome(item=item, replies=(reply,), is_right=is_right)
    followed = [items[index] for index in waiting]
    histories = [_with_results(items[index], first[index]) for index in waiting]
    second = _reply(generator, tokenizer, followed, histories)
    for index, reply in zip(waiting, second, strict=True):
        item = items[index]
        is_right = checks.uses_result(reply.message, item.expect)
        outcomes[index] = Outcome(item=item, replies=(first[index], reply), is_right=is_right)
    return [outcomes[index] for index in range(len(items))]


def _with_results(item: EvalItem, reply: Reply) -> list[Message]:
    """Append the model's own call message and the tool results, as a client would."""
    calls = []
    results = []
    for index, (call, result) in enumerate(
        zip(reply.message.tool_calls, item.expect.results, strict=True)
    ):
        function = {"name": call.name, "arguments": call.arguments}
        call_id = f"{call.name}_{index}"
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": call_id, "content": result})
    message: Message = {
        "role": "assistant",
        "content": reply.message.content,
        "reasoning_content": reply.message.reasoning_content,
        "tool_calls": calls,
    }
    return [*item.messages, message, *results]


def _reply(
    generator: Generator,
    tokenizer: Tokenizer,
    items: Sequence[EvalItem],
    histories: Sequence[list[Message]],
) -> list[Reply]:
    if not items:
        return []
    prompts = [
        tokenizer.encode_segments(
            render(
                history,
                item.tools,
                thinking=item.thinking,
                thinking_effort=item.thinking_effort,
            )
        )
        for item, history in zip(items, histories, strict=True)
    ]
    replies = []
    for item, ids in zip(items, generator.generate(prompts), strict=True):
        stopped = checks.is_stopped(ids, tokenizer)
        parser = Parser(tokenizer, mode="thinking" if item.thinking else "instruct")
        parser.feed(ids)
        parser.finish("stop" if stopped else "length")
        replies.append(
            Reply(
                ids=ids,
                message=parser.result(),
                is_valid=checks.is_valid_xtml(ids, tokenizer, thinking=item.thinking),
                is_stopped=stopped,
            )
        )
    return replies


def summarize(outcomes: Sequence[Outcome], num_examples: int = 8) -> dict[str, Any]:
    """Aggregate outcomes of one family.

    Args:
        outcomes: At least one outcome.
        num_examples: Failures to describe.
    """
    by_category: defaultdict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        by_category[outcome.item.expect.category].append(outcome.is_right)
    replies = [reply for outcome in outcomes for reply in outcome.replies]
    steps = [outcome.failed_step for outcome in outcomes]
    reasoning = [outcome.replies[0].message.reasoning_tokens for outcome in outcomes]
    return {
        "count": len(outcomes),
        "accuracy": _mean([outcome.is_right for outcome in outcomes]),
        "valid_and_stopped": _mean([reply.is_valid and reply.is_stopped for reply in replies]),
        "failed_calls": steps.count("call"),
        "failed_answers": steps.count("answer"),
        "reasoning_tokens": _mean(reasoning),
        "completion_tokens": _mean([len(reply.ids) for reply in replies]),
        "categories": {
            category: {"count": len(marks), "accuracy": _mean(marks)}
            for category, marks in sorted(by_category.items())
        },
        "failures": [_describe(o) for o in outcomes if not o.is_right][:num_examples],
    }


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def _describe(outcome: Outcome) -> dict[str, Any]:
    message = outcome.replies[-1].message
    expect = outcome.item.expect
    return {
        "prompt": outcome.item.messages[-1]["content"],
        "step": outcome.failed_step,
        "reasoning": message.reasoning_content,
        "content": message.content,
        "calls": [f"{call.name}({call.arguments})" for call in message.tool_calls],
        "wanted_calls": [
            f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})"
            for call in expect.calls
        ],
        "wanted": expect.answer,
    }
