"""Which optimizer updates which parameter, and in which blocks (training.md section 2.1).

    muon per head   KDA q/k/v_proj and f_b_proj, MLA q_b_proj (or q_proj) and kv_b_proj
    muon whole      every other 2-D weight of a projection, the router included
    muon batched    routed experts w1, w2, w3 stored [E, out, in]: one block per expert
    adamw           embedding, lm_head, norms, conv kernels, A_log, dt_bias, AttnRes queries
    none            e_score_correction_bias (a buffer set by Quantile Balancing)

A parameter that no rule names is an error: nothing falls into a default group unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError

__all__ = [
    "NORM_LEAVES",
    "QUERY_LEAVES",
    "Assignment",
    "GroupKind",
    "assign_groups",
    "block_views",
    "leaf_of",
]


class GroupKind(StrEnum):
    """The optimizer group of one parameter."""

    MUON_PER_HEAD = "muon_per_head"
    MUON_WHOLE = "muon_whole"
    MUON_EXPERTS = "muon_experts"
    ADAMW_DECAY = "adamw_decay"
    ADAMW_PLAIN = "adamw_plain"

    @property
    def is_muon(self) -> bool:
        """Whether Muon updates the parameter."""
        return self.value.startswith("muon")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One parameter's place.

    Attributes:
        name: Path in the module tree.
        kind: Optimizer group.
        num_blocks: Blocks (heads or experts) along the leading axis; 1 for a whole matrix and
            for AdamW.
        row_pattern: Rows of the parts of one block that are orthogonalised apart; one entry
            except for ``split_kv``. Empty for AdamW.
    """

    name: str
    kind: GroupKind
    num_blocks: int = 1
    row_pattern: tuple[int, ...] = ()


_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")
NORM_LEAVES = frozenset(
    {
        "input_layernorm",
        "post_attention_layernorm",
        "self_attention_res_norm",
        "mlp_res_norm",
        "output_attn_res_norm",
        "norm",
        "o_norm",
        "q_a_layernorm",
        "kv_a_layernorm",
        "routed_expert_norm",
    }
)
QUERY_LEAVES = frozenset({"self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj"})
_CONV_LEAVES = frozenset({"q_conv1d", "k_conv1d", "v_conv1d"})
_KDA_HEAD_LEAVES = frozenset({"q_proj", "k_proj", "v_proj", "f_b_proj"})
_WHOLE_LEAVES = frozenset(
    {
        "o_proj",
        "g_proj",
        "g_a_proj",
        "g_b_proj",
        "q_a_proj",
        "kv_a_proj_with_mqa",
        "f_a_proj",
        "b_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "routed_expert_down_proj",
        "routed_expert_up_proj",
    }
)


def leaf_of(name: str) -> str:
    """Return the last meaningful word of a tensor's path: ``layers.0.ffn.gate.weight -> gate``."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def assign_groups(
    model: nn.Module,
    config: ModelConfig,
    *,
    router_optimizer: str = "muon",
    split_kv: bool = False,
) -> list[Assignment]:
    """List the group of every parameter, in the order of ``named_parameters``.

    Args:
        model: A `Transformer` (its module tree gives the names).
        config: Its configuration: head counts and layer kinds.
        router_optimizer: ``muon`` or ``adamw`` for the router weight.
        split_kv: Orthogonalise the key and value rows of ``kv_b_proj`` apart.

    Raises:
        ConfigError: An option has an unknown value, or a parameter matches no rule.
    """
    if router_optimizer not in ("muon", "adamw"):
        raise ConfigError(
            f"optimizer.router_optimizer is {router_optimizer!r}; choose muon or adamw"
        )
    return [
        _assign(name, parameter, config, router_optimizer, split_kv)
        for name, parameter in model.named_parameters()
    ]


def _assign(
    name: str, parameter: Tensor, config: ModelConfig, router_optimizer: str, split_kv: bool
) -> Assignment:
    if name in ("embed_tokens.weight", "lm_head.weight"):
        return Assignment(name, GroupKind.ADAMW_DECAY)
    leaf = leaf_of(name)
    if leaf in NORM_LEAVES | QUERY_LEAVES | _CONV_LEAVES or leaf in ("A_log", "dt_bias"):
        return Assignment(name, GroupKind.ADAMW_PLAIN)
    if leaf in ("w1", "w2", "w3") and parameter.ndim == 3:
        experts, rows, _ = parameter.shape
        return Assignment(name, GroupKind.MUON_EXPERTS, experts, (rows,))
    match = _LAYER.match(name)
    if match is not None and parameter.ndim == 2:
        if ".self_attn." in name:
            per_head = _per_head(name, leaf, int(match[1]), parameter, config, split_kv)
            if per_head is not None:
                return per_head
        if leaf == "gate":
            if router_optimizer == "adamw":
                return Assignment(name, GroupKind.ADAMW_DECAY)
            return Assignment(name, GroupKind.MUON_WHOLE, 1, (parameter.shape[0],))
        if leaf in _WHOLE_LEAVES:
            return Assignment(name, GroupKind.MUON_WHOLE, 1, (parameter.shape[0],))
    raise ConfigError(
        f"parameter {name} of shape {tuple(parameter.shape)} belongs to no optimizer group; "
        "add a rule to moonlet.train.groups"
    )


def _per_head(
    name: str, leaf: str, layer: int, parameter: Tensor, config: ModelConfig, split_kv: bool
) -> Assignment | None:
    """Return the head blocks of an attention projection, or None if it is not head-structured."""
    kind = GroupKind.MUON_PER_HEAD
    if config.is_kda(layer):
        if leaf in _KDA_HEAD_LEAVES:
            return Assignment(name, kind, config.kda.num_heads, (config.kda.head_dim,))
        return None
    mla = config.mla
    if leaf in ("q_proj", "q_b_proj"):
        return Assignment(name, kind, mla.num_attention_heads, (mla.qk_head_dim,))
    if leaf == "kv_b_proj":
        parts = (mla.qk_nope_head_dim, mla.v_head_dim)
        pattern = parts if split_kv else (sum(parts),)
        return Assignment(name, kind, mla.num_attention_heads, pattern)
    return None


def block_views(assignment: Assignment, tensor: Tensor) -> Iterator[Tensor]:
    """Yield views ``[num_blocks, rows, in]`` of a tensor laid out like the parameter.

    Args:
        assignment: A Muon assignment.
        tensor: The parameter, its gradient or its momentum; the views share its memory.
    """
    rows_per_block = sum(assignment.row_pattern)
    blocks = tensor.view(assignment.num_blocks, rows_per_block, tensor.shape[-1])
    start = 0
    for rows in assignment.row_pattern:
        yield blocks[:, start : start + rows]
        start += rows
