"""Decode speed of the engine at several numbers of streams, against the memory bound.

Runs are interleaved over the stream counts and repeated, medians are reported. The bound of a step
is the bytes of weights it touches in memory (every matrix once, of the routed experts those that
the batch really chose) over the read bandwidth measured before and after the runs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moonlet.bench.memory import read_bandwidth
from moonlet.core.errors import ConfigError
from moonlet.engine.engine import Engine
from moonlet.engine.request import EngineRequest, SamplingParams
from moonlet.model.latent_moe import Experts, Router
from moonlet.model.transformer import Transformer
from moonlet.weights.checkpoint import load_model

__all__ = ["DecodeResult", "bench_engine", "decode_once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """One measured run.

    Attributes:
        streams: Requests decoded together.
        tokens_per_s: Generated tokens of all streams over the wall time of the whole run.
        forward_calls: Model calls of the run, prefill included.
        wall_s: Wall time from the first submission to the last token.
        distinct_experts: Mean number of experts a decode step used per MoE layer.
    """

    streams: int
    tokens_per_s: float
    forward_calls: int
    wall_s: float
    distinct_experts: float


class _ExpertCount:
    """Counts the distinct experts of every decode step."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: list[int] = []
        self.max_rows = 0
        self._handles = [
            module.register_forward_hook(self._record)
            for module in model.modules()
            if isinstance(module, Router)
        ]

    def _record(self, _: nn.Module, __: object, routed: tuple[Tensor, Tensor]) -> None:
        if routed[0].shape[0] <= self.max_rows:
            self.counts.append(len(routed[0].unique()))

    def take(self) -> float:
        """Return the mean since the last call."""
        mean = statistics.fmean(self.counts) if self.counts else 0.0
        self.counts.clear()
        return mean

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def decode_once(
    engine: Engine, streams: int, prompt_len: int, output_len: int
) -> tuple[int, float]:
    """Decode ``streams`` requests of ``output_len`` tokens; return forward calls and seconds."""
    vocab = engine.config.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    before = engine.stats().num_forward_calls
    began = time.perf_counter()
    handles = [
        engine.submit(
            EngineRequest(
                request_id=f"bench-{s}",
                prompt_ids=tuple((7 * s + 3 * t + 1) % vocab for t in range(prompt_len)),
                sampling=sampling,
            )
        )
        for s in range(streams)
    ]
    for handle in handles:
        for _ in handle:
            pass
    return engine.stats().num_forward_calls - before, time.perf_counter() - began


def bench_engine(
    directory: Path,
    *,
    streams: Sequence[int] = (1, 8),
    prompt_len: int = 32,
    output_len: int = 128,
    repeats: int = 3,
    on_run: Callable[[DecodeResult], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure a checkpoint.

    Args:
        directory: Checkpoint folder.
        streams: Numbers of concurrent requests.
        prompt_len: Tokens of every prompt.
        output_len: Tokens generated per request.
        repeats: Runs per number of streams.
        on_run: Called after every run.

    Returns:
        JSON values: setting, bandwidth, load average, and per number of streams the median run
        with its bound and their ratio.

    Raises:
        ConfigError: A count is not positive.
    """
    for name, value in (("streams", min(streams, default=0)), ("repeats", repeats)):
        if value < 1:
            raise ConfigError(f"bench.{name} is {value}; it must be at least 1")
    model = load_model(directory).model.eval()
    bandwidth = [read_bandwidth()]
    counter = _ExpertCount(model)
    runs: dict[int, list[DecodeResult]] = {s: [] for s in streams}
    with Engine(model, max_num_seqs=max(streams), max_model_len=prompt_len + output_len) as engine:
        decode_once(engine, max(streams), prompt_len, min(4, output_len))
        for _ in range(repeats):
            for count in streams:
                counter.max_rows = count
                counter.take()
                calls, wall = decode_once(engine, count, prompt_len, output_len)
                result = DecodeResult(
                    streams=count,
                    tokens_per_s=count * output_len / wall,
                    forward_calls=calls,
                    wall_s=wall,
                    distinct_experts=counter.take(),
                )
                runs[count].append(result)
                on_run(result)
    counter.remove()
    bandwidth.append(read_bandwidth())
    best = max(bandwidth)
    return {
        "checkpoint": directory.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": {c.op: c.backend for c in model.kernels.choices},
        "threads": torch.get_num_threads(),
        "prompt_len": prompt_len,
        "output_len": output_len,
        "read_bandwidth_bytes_per_s": best,
        "load_average": os.getloadavg()[0],
        "results": [_summary(model, results, best) for results in runs.values()],
    }


def _summary(model: Transformer, results: list[DecodeResult], bandwidth: float) -> dict[str, Any]:
    median = sorted(results, key=lambda r: r.tokens_per_s)[len(results) // 2]
    touched = touched_bytes(model, median.streams, median.distinct_experts)
    bound = median.streams * bandwidth / touched
    return {
        **asdict(median),
        "all_tokens_per_s": [round(r.tokens_per_s, 2) for r in results],
        "weight_bytes_per_step": touched,
        "bound_tokens_per_s": bound,
        "ratio": median.tokens_per_s / bound,
    }


def touched_bytes(model: Transformer, rows: int, distinct_experts: float) -> int:
    """Bytes of weights in memory that one decode step of ``rows`` rows reads."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    table = model.embed_tokens.weight
    row_bytes = table.shape[1] * table.element_size()
    total -= table.numel() * table.element_size() - rows * row_bytes
    for module in model.modules():
        if isinstance(module, Experts):
            weights = (module.w1, module.w3, module.w2)
            stacked = sum(w.numel() * w.element_size() for w in weights)
            total -= round(stacked * (1 - distinct_experts / module.w1.shape[0]))
    return total
