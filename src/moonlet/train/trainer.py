"""The training loop: draw, forward, backward, reduce, guard, clip, update, balance.

A step is the sum over the recipe's logical shards. Processes own whole shards and add their
gradients, router counts and statistics over the process group, so the data of a step never depends
on the number of processes and a checkpoint resumes on any. With two shards one process and two
give the same weights bit for bit; with more the order of the sum, and so the last bits, may differ.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moonlet.core.errors import CheckpointError, ConfigError
from moonlet.train import qat
from moonlet.train.checkpoint import load_checkpoint, save_checkpoint
from moonlet.train.data import SampleSource, ShardStream
from moonlet.train.groups import assign_groups
from moonlet.train.guard import LossGuard
from moonlet.train.init import check_first_loss, check_tensors, initialize
from moonlet.train.loss import loss_sum
from moonlet.train.metrics import StepMetrics
from moonlet.train.optimizer import ModelOptimizer
from moonlet.train.packing import pack
from moonlet.train.process_group import Alone, ProcessGroup
from moonlet.train.qk_clip import QKClip
from moonlet.train.quantile_balancing import BalanceReport, QuantileBalancer
from moonlet.train.recipe import Recipe

__all__ = ["StepSums", "Trainer"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums of one step over all shards and processes."""

    loss: float
    targets: int
    tokens: int
    cpu_s: float
    stop_votes: int
    positions: tuple[int, ...]


class Trainer:
    """State of one run and the loop over its steps.

    Args:
        recipe: Everything that decides the result.
        model: A float32 `Transformer` of ``recipe.model``; initialised here.
        source: Sample source.
        group: Process group; `Alone` when absent.

    Raises:
        ConfigError: The processes do not divide the shards, routing is limited to expert groups,
            or the initial weights break a rule.
    """

    def __init__(
        self, recipe: Recipe, model: Any, source: SampleSource, group: ProcessGroup | None = None
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.group = group or Alone()
        num_shards = recipe.data.num_shards
        _check_recipe(recipe, self.group.world_size)
        initialize(model, recipe.model, recipe.init)
        check_tensors(model, recipe.model, recipe.init)
        options = recipe.optimizer
        assignments = assign_groups(
            model,
            recipe.model,
            router_optimizer=options.router_optimizer,
            split_kv=options.split_kv,
        )
        self.optimizer = ModelOptimizer(model, assignments, options)
        modules = dict(model.named_modules())
        routers = {n: m for n, m in modules.items() if hasattr(m, "e_score_correction_bias")}
        attentions = {n: m for n, m in modules.items() if hasattr(m, "max_logit_observer")}
        moe = recipe.model.moe
        self.balancer = QuantileBalancer(
            routers,
            moe.num_experts_per_token if moe is not None else 1,
            num_bins=recipe.balancing.num_bins,
            ema=recipe.balancing.ema,
        )
        self.qk_clip = QKClip(attentions, recipe.model.mla, recipe.run.qk_clip_tau)
        self.guard = LossGuard(max_ratio=recipe.run.max_loss_ratio)
        self.streams = [
            ShardStream(source, recipe.data.seed, shard, num_shards) for shard in range(num_shards)
        ]
        self.step_number = 0
        self.tokens_seen = 0
        self._cpu_before = 0.0
        self._cpu_start = time.process_time()
        self._elapsed_before = 0.0
        self._started = time.monotonic()
        self._cpu_seen = 0.0

    @property
    def total_steps(self) -> int:
        """Updates of the whole run."""
        return self.recipe.schedule.total_steps

    @property
    def elapsed_s(self) -> float:
        """Wall seconds of the run, earlier parts included."""
        return self._elapsed_before + time.monotonic() - self._started

    @property
    def quantizes(self) -> bool:
        """Whether the next step runs with fake quantisation."""
        fraction = self.recipe.quantization.start_fraction
        return fraction < 1 and self.step_number >= fraction * self.total_steps

    def step(self, vote_stop: bool = False) -> tuple[StepMetrics, bool]:
        """Run one step.

        Args:
            vote_stop: This process wants to stop after the step.

        Returns:
            Metrics, and whether any process voted to stop.

        Raises:
            TrainingDiverged: The loss guard refused too many steps in a row.
        """
        began = time.monotonic()
        quantized = self.quantizes
        self._set_quantization(quantized)
        sums = self._reduce(*self._accumulate(), vote_stop)
        loss = sums.loss / sums.targets
        if self.step_number == 0:
            check_first_loss(loss, self.recipe.model.vocab_size)
        grad_norm = self.optimizer.scale_and_clip(sums.targets)
        # a finite loss may still have a gradient that is not
        applied = self.guard.accept(loss if math.isfinite(grad_norm) else grad_norm)
        lr = self.recipe.schedule.lr(self.step_number + 1)
        max_logit = self.qk_clip.max_logit
        if applied:
            self.optimizer.step(lr, self.group)
        clipped = self.qk_clip.apply(clip=applied)
        balance = self.balancer.update(apply=applied)
        self.step_number += 1
        self.tokens_seen += sums.tokens
        self._cpu_seen = sums.cpu_s
        for stream, position in zip(self.streams, sums.positions, strict=True):
            stream.position = position
        facts = (loss, lr, grad_norm, applied, quantized, max_logit, clipped)
        metrics = self._metrics(sums, facts, balance, time.monotonic() - began)
        return metrics, sums.stop_votes > 0

    def run(
        self,
        on_step: Callable[[StepMetrics], None],
        *,
        checkpoints: Path | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train until the schedule ends or a process asks to stop.

        Args:
            on_step: Called after every step, on every process.
            checkpoints: Folder for checkpoints, or None for none.
            should_stop: Asked before every step; the run ends after a step it said yes to.

        Returns:
            Whether the schedule was completed.
        """
        last_save = self.elapsed_s
        stopped = False
        while self.step_number < self.total_steps and not stopped:
            metrics, stopped = self.step(should_stop())
            on_step(metrics)
            is_due = self.elapsed_s - last_save >= 60 * self.recipe.run.checkpoint_minutes
            is_last = stopped or self.step_number == self.total_steps
            if checkpoints is not None and (is_due or is_last):
                self.save(checkpoints)
                last_save = self.elapsed_s
        return self.step_number == self.total_steps

    def _set_quantization(self, quantized: bool) -> None:
        experts = qat.expert_modules(self.model)
        if quantized:
            qat.enable(experts, self.recipe.quantization.activations)
        else:
            qat.disable(experts)

    def _accumulate(self) -> tuple[float, int, int]:
        """Add up the gradients of this process's shards; return loss sum, targets, tokens."""
        recipe = self.recipe
        budget = recipe.data.tokens_per_step // recipe.data.num_shards
        progress = self.step_number / self.total_steps
        self.model.train()
        self.optimizer.zero_gradients()
        loss, targets, tokens = 0.0, 0, 0
        for stream in self.streams[self.group.rank :: self.group.world_size]:
            batch = pack(stream.take(budget, progress))
            shard_loss = loss_sum(self.model, batch)
            shard_loss.backward()
            loss += float(shard_loss.detach())
            targets += batch.labels_Q.numel()
            tokens += batch.num_tokens
        return loss, targets, tokens

    def _reduce(self, loss: float, targets: int, tokens: int, vote_stop: bool) -> StepSums:
        """Add gradients, counts and statistics over the processes."""
        cpu_s = time.process_time() - self._cpu_start
        owned = range(self.group.rank, len(self.streams), self.group.world_size)
        positions = [s.position if i in owned else 0 for i, s in enumerate(self.streams)]
        numbers = [loss, targets, tokens, cpu_s, float(vote_stop), *positions]
        sums = torch.tensor(numbers, dtype=torch.float64)
        self.group.sum_(sums)
        self.group.sum_(self.optimizer.flat.gradients)
        self.balancer.reduce(self.group)
        self.qk_clip.reduce(self.group)
        loss, targets, tokens, cpu_s, votes, *positions = sums.tolist()
        total_cpu = self._cpu_before + cpu_s
        return StepSums(
            loss, int(targets), int(tokens), total_cpu, int(votes), tuple(map(int, positions))
        )

    def _metrics(
        self,
        sums: StepSums,
        facts: tuple[float, float, float, bool, bool, float, int],
        balance: BalanceReport,
        step_s: float,
    ) -> StepMetrics:
        loss, lr, grad_norm, applied, quantized, max_logit, clipped = facts
        elapsed = self.elapsed_s
        return StepMetrics(
            step=self.step_number,
            total_steps=self.total_steps,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            applied=applied,
            tokens=sums.tokens,
            targets=sums.targets,
            tokens_seen=self.tokens_seen,
            tokens_per_s=sums.tokens / step_s,
            cpu_s=sums.cpu_s,
            elapsed_s=elapsed,
            eta_s=elapsed / self.step_number * (self.total_steps - self.step_number),
            max_overload=balance.max_overload,
            dead_fraction=balance.dead_fraction,
            bias_spread=balance.bias_spread,
            max_logit=max_logit,
            clipped_heads=clipped,
            quantized=quantized,
        )

    def save(self, folder: Path) -> None:
        """Write a checkpoint; only the first process touches the disk."""
        if self.group.rank != 0:
            return
        tensors = self.optimizer.named_tensors()
        for name, tensor in self.balancer.state_tensors().items():
            tensors[f"balance.{name}"] = tensor
        tensors["generator"] = torch.get_rng_state()
        state = {
            "recipe": self.recipe.digest(),
            "tokens_seen": self.tokens_seen,
            "total_steps": self.total_steps,
            "positions": [s.position for s in self.streams],
            "guard": self.guard.state(),
            "balance": self.balancer.state(),
            "cpu_s": self._cpu_seen,
            "elapsed_s": self.elapsed_s,
        }
        path = save_checkpoint(folder, self.step_number, tensors, state)
        logger.info("saved %s", path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same recipe.

        Raises:
            CheckpointError: The checkpoint belongs to another recipe or lacks a tensor.
        """
        saved = load_checkpoint(path)
        if saved.state["recipe"] != self.recipe.digest():
            raise CheckpointError(
                f"{path} was written by another recipe; resume with the recipe it started with"
            )
        try:
            self.optimizer.restore(saved.tensors)
            for name, tensor in self.balancer.state_tensors().items():
                tensor.copy_(saved.tensors[f"balance.{name}"])
            torch.set_rng_state(saved.tensors["generator"])
        except KeyError as error:
            raise CheckpointError(f"{path} lacks tensor {error}") from error
        self.balancer.restore(saved.state["balance"])
        self.guard.restore(saved.state["guard"])
        for stream, position in zip(self.streams, saved.state["positions"], strict=True):
            stream.position = position
        self.step_number = saved.state["step"]
        self.tokens_seen = saved.state["tokens_seen"]
        self._cpu_before = saved.state["cpu_s"]
        self._elapsed_before = saved.state["elapsed_s"]


def _check_recipe(recipe: Recipe, num_processes: int) -> None:
    num_shards, moe = recipe.data.num_shards, recipe.model.moe
    if num_shards % num_processes:
        raise ConfigError(
            f"data.num_shards is {num_shards}; {num_processes} processes do not divide it"
        )
    if moe is not None and moe.num_expert_group > max(1, moe.topk_group):
        raise ConfigError(
            f"model.moe.num_expert_group is {moe.num_expert_group}, topk_group {moe.topk_group}; "
            "Quantile Balancing needs routing without a group limit"
        )
