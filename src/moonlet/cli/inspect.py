"""`moonlet inspect`: architecture, exact budgets and verification of a checkpoint folder.

Reads the configuration and the headers of the weight files; builds no model and imports no torch.
With only a configuration and an index it checks the names and says ``weights: absent``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moonlet.core.budget import Budget, budget_of
from moonlet.core.config import ModelConfig
from moonlet.core.hf_fields import IRRELEVANT
from moonlet.core.units import format_bytes, format_count
from moonlet.weights.checkpoint import Checkpoint
from moonlet.weights.report import VerificationReport

__all__ = ["collect", "inspect_command"]


def inspect_command(directory: Path, json_output: bool = False) -> int:
    """Print what a checkpoint folder holds.

    Args:
        directory: Checkpoint folder.
        json_output: Print one JSON object instead of tables.

    Returns:
        0 when the folder holds what its configuration describes, or no weights at all; 1 when
        the verification found a problem.

    Raises:
        ConfigError: The configuration is absent or unusable.
        CheckpointError: The index or a shard is malformed.
    """
    checkpoint = Checkpoint.open(directory)
    facts = collect(checkpoint)
    if json_output:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        _print(checkpoint, facts)
    return 0 if checkpoint.report.is_ok else 1


def collect(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the facts that `inspect_command` prints, as plain JSON values."""
    config = checkpoint.config
    return {
        "directory": str(checkpoint.directory),
        "model_type": config.model_type,
        "architecture": asdict(config.text),
        "quantization": None if config.quantization is None else asdict(config.quantization),
        "vision": None if config.vision is None else dict(config.vision),
        "ignored_config_keys": sorted(_ignored_keys(config.raw)),
        "budget": _budget_facts(budget_of(config)),
        "verification": checkpoint.report.to_json(),
    }


def _ignored_keys(raw: Mapping[str, Any]) -> Iterator[str]:
    yield from (key for key in raw if key in IRRELEVANT)
    text = raw.get("text_config")
    if isinstance(text, dict):
        yield from (f"text_config.{key}" for key in text if key in IRRELEVANT)


def _budget_facts(budget: Budget) -> dict[str, Any]:
    state = budget.state
    return {
        "components": [
            {
                "name": part.name,
                "count": part.count,
                "parameters_each": part.parameters_each,
                "parameters": part.parameters,
                "bytes": part.num_bytes,
            }
            for part in (*budget.text, *budget.vision)
        ],
        "parameters": {
            "text": budget.text_parameters,
            "total": budget.total_parameters,
            "active": budget.active_parameters,
            "active_without_embedding": budget.active_parameters_without_embedding,
            "active_without_tables": budget.active_parameters_without_tables,
        },
        "bytes": {
            "text": budget.text_bytes,
            "total": budget.total_bytes,
            "weights_per_token": budget.weight_bytes_per_token,
        },
        "state_bytes": {
            "recurrent_per_layer": state.recurrent_bytes_per_layer,
            "recurrent": state.recurrent_bytes,
            "conv_per_layer": state.conv_bytes_per_layer,
            "conv": state.conv_bytes,
            "per_sequence": state.bytes_per_sequence,
            "mla_per_layer_token": state.mla_bytes_per_layer_token,
            "mla_per_token": state.mla_bytes_per_token,
        },
    }


def _print(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> None:
    # names and sizes are data: no markup, no highlighting, no wrapping in a pipe
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, value in _architecture_lines(checkpoint.config.text, facts):
        console.print(f"{name:<20}{value}")
    console.print()
    console.print(_component_table(facts["budget"]["components"]))
    console.print()
    for name, value in _total_lines(facts["budget"]):
        console.print(f"{name:<44}{value}")
    console.print()
    for line in _verification_lines(checkpoint.report):
        console.print(line)


def _architecture_lines(text: ModelConfig, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kda, mla, moe = text.kda, text.mla, text.moe
    yield "directory", facts["directory"]
    yield "model type", facts["model_type"]
    yield (
        "layers",
        f"{text.num_hidden_layers}: {len(text.kda_layers)} KDA, {len(text.mla_layers)} MLA",
    )
    yield "hidden size", f"{text.hidden_size}, vocabulary {text.vocab_size}"
    gate = "softplus" if kda.gate_lower_bound is None else f"sigmoid to {kda.gate_lower_bound:g}"
    yield "KDA", f"{kda.num_heads} heads of {kda.head_dim}, decay gate {gate}"
    query = "direct query" if mla.q_lora_rank is None else f"query latent {mla.q_lora_rank}"
    output = "output gate" if mla.mla_use_output_gate else "no output gate"
    yield (
        "MLA",
        f"{mla.num_attention_heads} heads, {query}, key-value latent {mla.kv_lora_rank}, {output}",
    )
    if moe is not None:
        latent = moe.routed_expert_hidden_size
        yield (
            "experts",
            f"{moe.num_experts_per_token} of {moe.num_experts} in {len(text.moe_layers)} layers, "
            f"width {moe.moe_intermediate_size}, {moe.num_shared_experts} shared"
            + ("" if latent is None else f", latent {latent}"),
        )
    yield "activation", text.hidden_act
    block = text.attn_res_block_size
    yield "residual stream", "plain" if block is None else f"AttnRes, blocks of {block} layers"
    packing = facts["quantization"]
    yield "expert storage", "plain" if packing is None else packing["format"]
    yield "vision", "none" if facts["vision"] is None else "tower and projector"
    ignored = facts["ignored_config_keys"]
    yield "ignored keys", f"{len(ignored)} without effect (listed with --json)"


def _component_table(components: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("component", no_wrap=True)
    for heading in ("count", "parameters", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for part in components:
        if part["parameters"]:
            numbers = (part["count"], part["parameters"], part["bytes"])
            table.add_row(part["name"], *(f"{number:,}" for number in numbers))
    return table


def _total_lines(budget: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    parameters, num_bytes, state = budget["parameters"], budget["bytes"], budget["state_bytes"]
    yield "parameters", _count(parameters["total"])
    yield "bytes", _bytes(num_bytes["total"])
    yield "active parameters per token", _count(parameters["active"])
    yield "  without the input embedding", _count(parameters["active_without_embedding"])
    yield "weight bytes per decoded token", _bytes(num_bytes["weights_per_token"])
    yield "KDA recurrent state per sequence (float32)", _bytes(state["recurrent"])
    yield "KDA convolution state per sequence (bf16)", _bytes(state["conv"])
    yield "state per sequence, any length", _bytes(state["per_sequence"])
    yield "MLA cache per token (bf16)", _bytes(state["mla_per_token"])


def _count(value: int) -> str:
    return f"{value:,} ({format_count(value)})"


def _bytes(value: int) -> str:
    return f"{value:,} ({format_bytes(value)})"


def _verification_lines(report: VerificationReport) -> Iterator[str]:
    yield f"weights: {report.weights}"
    if report.num_tensors:
        what = "tensors" if report.weights == "present" else "tensor names"
        yield f"{report.num_tensors:,} {what}: {report.num_loaded:,} of the text model"
    if report.verified_not_loaded:
        how = "verified" if report.weights == "present" else "verified by name"
        yield f"{len(report.verified_not_loaded):,} vision tensors: {how}, not loaded"
    yield from (f"note: {note}" for note in report.notes)
    yield from (f"problem: {problem}" for problem in report.problems())
    if report.is_ok and report.num_tensors:
        yield "every tensor has exactly one place, none is missing"
