"""Metrics of a run: one JSON object a line, one line a step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["MetricsFile", "StepMetrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one step did.

    Attributes:
        step: Updates done, this one included.
        total_steps: Updates of the run.
        loss: Mean over supervised tokens, nats.
        lr: Learning rate.
        grad_norm: Global norm before the clip.
        applied: False where the loss guard refused the step.
        tokens: Tokens of the step over all shards.
        targets: Supervised tokens among them.
        tokens_seen: Tokens of the run so far.
        tokens_per_s: Tokens of the step over its wall time.
        cpu_s: Processor seconds of the run so far, all processes.
        elapsed_s: Wall seconds of the run so far.
        eta_s: Wall seconds left at the mean pace so far.
        max_overload: Largest expert load over the mean, minus one, worst layer.
        dead_fraction: Experts without a token, worst layer.
        bias_spread: Largest minus smallest router bias, worst layer.
        max_logit: Largest scaled attention logit.
        clipped_heads: Heads that QK-Clip scaled.
        quantized: Whether experts ran with fake quantisation.
    """

    step: int
    total_steps: int
    loss: float
    lr: float
    grad_norm: float
    applied: bool
    tokens: int
    targets: int
    tokens_seen: int
    tokens_per_s: float
    cpu_s: float
    elapsed_s: float
    eta_s: float
    max_overload: float
    dead_fraction: float
    bias_spread: float
    max_logit: float
    clipped_heads: int
    quantized: bool


class MetricsFile:
    """Appends metrics to a JSONL file.

    Args:
        path: File; its folder must exist.
        keep_steps: On resume, lines of later steps are dropped; None starts a new file.
    """

    def __init__(self, path: Path, keep_steps: int | None = None) -> None:
        lines: list[str] = []
        if keep_steps is not None and path.exists():
            old = path.read_text(encoding="utf-8").splitlines(keepends=True)
            lines = [line for line in old if json.loads(line)["step"] <= keep_steps]
        self._handle = path.open("w", encoding="utf-8")
        self._handle.writelines(lines)
        self._handle.flush()

    def write(self, metrics: StepMetrics) -> None:
        """Append one line and flush it."""
        rounded = {
            k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(metrics).items()
        }
        self._handle.write(json.dumps(rounded) + "\n")
        self._handle.flush()

    def close(self) -> None:
        """Close the file."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
