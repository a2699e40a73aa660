"""The model card of a trained nano: what it is, how it was made, what it scored.

Everything in the card is computed from the run's own files (recipe, metrics, evaluation, exported
weights); nothing is typed in by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonlet.core.budget import derive_budget
from moonlet.core.hf_config import read_config
from moonlet.core.storage import storage_of
from moonlet.core.units import format_bytes, format_count
from moonlet.train.recipe import Recipe
from moonlet.train.tasks.evaluate import EFFORTS, MAIN_FAMILIES, WANTED

__all__ = ["model_card"]

_WHAT = {
    "arithmetic": "add or subtract up to three digits",
    "tools": "call the right one of 1-3 declared tools, then use its result",
    "frame": "greet, say what it can do, decline the rest",
}


def model_card(
    recipe: Recipe, directory: Path, last_step: Mapping[str, Any], report: Mapping[str, Any]
) -> str:
    """Return the card as Markdown.

    Args:
        recipe: What was trained.
        directory: The exported checkpoint.
        last_step: Last line of ``metrics.jsonl``: totals and times of the run.
        report: Result of `tasks.evaluate.evaluate`.
    """
    return "\n".join(
        [
            f"# moonlet-{recipe.name}",
            "",
            *_purpose(),
            *_architecture(recipe, directory),
            *_training(recipe, last_step),
            *_scores(report),
            *_limits(),
        ]
    )


def _purpose() -> list[str]:
    return [
        "A real, trained model of the Kimi K3 architecture at toy size: Kimi Delta Attention,",
        "Gated MLA, Attention Residuals, Stable LatentMoE with MXFP4 experts, and the XTML chat",
        "protocol with thinking, tools and effort. It exists to develop and test against.",
        "",
        "It is **not** Kimi K3, has none of its weights and is no assistant. It knows nothing of",
        "the world. It can add and subtract numbers up to 999, call tools that the request",
        "declares and use their results, repeat a short text, greet, and say what it can do. It",
        "declines everything else, and outside these tasks it is confidently wrong.",
        "",
    ]


def _architecture(recipe: Recipe, directory: Path) -> list[str]:
    config = recipe.model
    published = read_config(directory)
    budget = derive_budget(config, storage=storage_of(published))
    kinds = " ".join("K" if config.is_kda(i) else "M" for i in range(config.num_hidden_layers))
    size = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
    lines = [
        "## Architecture",
        f"- {format_count(budget.text_parameters)} parameters, "
        f"{format_count(budget.active_parameters_without_embedding)} active per token without "
        f"the embedding; {format_bytes(size)} on disk",
        f"- hidden size {config.hidden_size}, {config.num_hidden_layers} layers {kinds} "
        "(K: Kimi Delta Attention, M: Gated MLA), "
        f"AttnRes blocks of {config.attn_res_block_size}",
    ]
    if config.moe is not None:
        lines.append(
            f"- {config.moe.num_experts} experts, {config.moe.num_experts_per_token} per token, "
            f"latent width {config.expert_input_size}, {config.moe.num_shared_experts} shared"
        )
    lines += [
        f"- vocabulary {config.vocab_size}: byte-level BPE in K3's file format, one token per "
        "digit, the 256 reserved names at K3's offsets",
        "",
    ]
    return lines


def _training(recipe: Recipe, last: Mapping[str, Any]) -> list[str]:
    return [
        "## Training",
        f"`moonlet train {recipe.name} --out DIR --processes {recipe.data.num_shards}`: "
        f"{last['step']:,} steps, {format_count(last['tokens_seen'])} tokens, "
        f"{last['elapsed_s'] / 60:.0f} minutes of wall time and {last['cpu_s'] / 60:.0f} processor "
        "minutes on two CPU cores.",
        "Per-Head Muon and AdamW, Quantile Balancing, QK-Clip; the experts' MXFP4 rounding is part "
        f"of the last {1 - recipe.quantization.start_fraction:.0%} of the steps. All data is "
        "procedural and made by `moonlet.train.tasks`; no text of others is in it.",
        "",
    ]


def _scores(report: Mapping[str, Any]) -> list[str]:
    families = report["families"]
    lines = [
        "## Held-out results",
        f"{report['count']} prompts per family at temperature 0 and effort max. Operands, tool "
        "names, cities, argument values and descriptions do not occur in training.",
        "",
        "| family | right | wanted | valid markup and stopped |",
        "|---|---:|---:|---:|",
    ]
    for family in MAIN_FAMILIES:
        row = families[family]
        lines.append(
            f"| {_WHAT[family]} | {row['accuracy']:.1%} | {WANTED[family]:.0%} | "
            f"{row['valid_and_stopped']:.1%} |"
        )
    unseen = families["arithmetic_unseen_phrasing"]
    lines += [
        f"| sums in phrasings never trained | {unseen['accuracy']:.1%} | | "
        f"{unseen['valid_and_stopped']:.1%} |",
        "",
        "| effort | sums right | reasoning tokens per sum | tools right |",
        "|---|---:|---:|---:|",
    ]
    for effort in EFFORTS:
        row = report["efforts"][effort]
        lines.append(
            f"| {effort} | {row['arithmetic']['accuracy']:.1%} | "
            f"{row['arithmetic']['reasoning_tokens']:.0f} | {row['tools']['accuracy']:.1%} |"
        )
    instruct = report["instruct"]
    lines.append(
        f"| none (no think channel) | {instruct['arithmetic']['accuracy']:.1%} | 0 | "
        f"{instruct['tools']['accuracy']:.1%} |"
    )
    return [*lines, ""]


def _limits() -> list[str]:
    return [
        "## Limits",
        "Text only. English phrasings only. Numbers as digits only; no products, no quotients, no",
        "more than two operands. Nested tool results and parallel calls are rare in training.",
        "`generation_config.json` sets temperature 0: sampling makes it worse.",
        "",
        "Licence: Apache-2.0, like the code that made it.",
        "",
    ]
