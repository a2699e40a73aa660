"""Initialisation rules and the checks before the first step (training.md section 1).

    projections, experts, lm_head    Normal(0, initializer_range) or Normal(0, gain / sqrt(fan_in))
    embedding                        Normal(0, embedding_std), the pad row zero
    router                           Uniform(-1/sqrt(d), 1/sqrt(d))
    norms                            ones
    AttnRes queries, A_log           zeros
    dt_bias                          inverse softplus of exp(Uniform(ln 1e-3, ln 0.1))
    short convolutions               Uniform(-1/2, 1/2)
    e_score_correction_bias          zeros

The fixed standard deviation of the release fits its width (0.02 sqrt(7168) = 1.7); far below it
the width-scaled rule keeps activations alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.train.groups import NORM_LEAVES, QUERY_LEAVES, leaf_of

__all__ = ["InitOptions", "Rule", "check_first_loss", "check_tensors", "initialize", "rule_for"]

DT_RANGE = (1e-3, 0.1)
DT_FLOOR = 1e-4
TOLERANCE = 0.2
_ZEROS = QUERY_LEAVES | {"A_log", "e_score_correction_bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """Choices of the initialisation.

    Attributes:
        projection_gain: Standard deviation of projections is ``gain / sqrt(fan_in)``; None uses
            the configuration's ``initializer_range`` whatever the width.
        embedding_std: Standard deviation of the embedding; None uses ``initializer_range``.
        seed: Seed of the generator.
    """

    projection_gain: float | None = None
    embedding_std: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """How one tensor starts.

    Attributes:
        kind: ``ones``, ``zeros``, ``normal``, ``uniform`` or ``dt_bias``.
        scale: Standard deviation of ``normal``, half-width of ``uniform``.
    """

    kind: str
    scale: float = 0.0

    @property
    def mean_and_std(self) -> tuple[float, float] | None:
        """Expected moments of the entries, or None where only finiteness is checked."""
        if self.kind == "ones":
            return 1.0, 0.0
        if self.kind == "zeros":
            return 0.0, 0.0
        if self.kind == "normal":
            return 0.0, self.scale
        if self.kind == "uniform":
            return 0.0, self.scale / math.sqrt(3)
        return None


def rule_for(name: str, tensor: Tensor, config: ModelConfig, options: InitOptions) -> Rule:
    """Return the rule of one parameter or buffer.

    Raises:
        ConfigError: No rule names the tensor.
    """
    leaf = leaf_of(name)
    base_std = config.initializer_range
    if leaf in NORM_LEAVES:
        return Rule("ones")
    if leaf in _ZEROS:
        return Rule("zeros")
    if leaf == "dt_bias":
        return Rule("dt_bias")
    if leaf.endswith("_conv1d"):
        return Rule("uniform", 1 / math.sqrt(tensor.shape[-1]))
    if leaf == "embed_tokens":
        return Rule("normal", base_std if options.embedding_std is None else options.embedding_std)
    if leaf == "gate":
        return Rule("uniform", 1 / math.sqrt(tensor.shape[-1]))
    if tensor.ndim >= 2:
        gain = options.projection_gain
        return Rule("normal", base_std if gain is None else gain / math.sqrt(tensor.shape[-1]))
    raise ConfigError(
        f"tensor {name} of shape {tuple(tensor.shape)} has no initialisation rule; "
        "add one to moonlet.train.init"
    )


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, options: InitOptions) -> None:
    """Fill every parameter and buffer in place; the order is that of the module tree.

    Args:
        model: A `Transformer`.
        config: Its configuration.
        options: Seed and width rule.
    """
    generator = torch.Generator().manual_seed(options.seed)
    for name, tensor in _named_tensors(model):
        _fill(tensor, rule_for(name, tensor, config, options), generator)
        if name == "embed_tokens.weight":
            tensor[config.pad_token_id].zero_()


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _fill(tensor: Tensor, rule: Rule, generator: torch.Generator) -> None:
    fillers: dict[str, Callable[[], object]] = {
        "ones": lambda: tensor.fill_(1.0),
        "zeros": lambda: tensor.zero_(),
        "normal": lambda: tensor.normal_(0.0, rule.scale, generator=generator),
        "uniform": lambda: tensor.uniform_(-rule.scale, rule.scale, generator=generator),
        "dt_bias": lambda: _fill_dt_bias(tensor, generator),
    }
    fillers[rule.kind]()


def _fill_dt_bias(tensor: Tensor, generator: torch.Generator) -> None:
    low, high = (math.log(x) for x in DT_RANGE)
    uniform = torch.rand(tensor.shape, generator=generator)
    dt = (low + uniform * (high - low)).exp().clamp_min(DT_FLOOR)
    tensor.copy_(dt + (-torch.expm1(-dt)).log())


def check_tensors(model: nn.Module, config: ModelConfig, options: InitOptions) -> None:
    """Check every tensor against its rule: finite, mean and deviation within 20 %.

    Memory that was never written can be finite, so the moments are checked too. The allowance
    grows with the sampling error of small tensors.

    Raises:
        ConfigError: Lists every tensor that fails.
    """
    problems: list[str] = []
    for name, tensor in _named_tensors(model):
        if not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name}: not finite")
            continue
        expected = rule_for(name, tensor, config, options).mean_and_std
        if expected is None:
            continue
        mean, std = expected
        noise = 5 * std / math.sqrt(tensor.numel())
        values = tensor.detach().double()
        seen_mean = float(values.mean())
        seen_std = float(values.std(correction=0)) if tensor.numel() > 1 else std
        if abs(seen_mean - mean) > TOLERANCE * std + noise:
            problems.append(f"{name}: mean {seen_mean:.4g}, expected {mean:.4g}")
        elif abs(seen_std - std) > TOLERANCE * std + noise:
            problems.append(f"{name}: deviation {seen_std:.4g}, expected {std:.4g}")
    if problems:
        raise ConfigError("initial weights break their rules: " + "; ".join(problems))


def check_first_loss(loss: float, vocab_size: int) -> None:
    """Check that the untrained model is close to a uniform guess.

    Args:
        loss: Mean loss of step 0, nats per token.
        vocab_size: Number of classes.

    Raises:
        ConfigError: The loss is further than 5 % from ``ln(vocab_size)``.
    """
    expected = math.log(vocab_size)
    if not abs(loss - expected) <= 0.05 * expected:
        raise ConfigError(
            f"loss before training is {loss:.4f}, expected {expected:.4f} (ln of the vocabulary) "
            "within 5 %; check the initialisation and the label shift"
        )
