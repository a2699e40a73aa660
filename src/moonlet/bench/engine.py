"""Decode and prefill speed of the engine against the bounds of the same run.

Decode is timed step by step, over the steps in which every stream decodes; its bound is the bytes
of weights that a step touches (every matrix once as stored, of the routed experts those that the
batch really chose) over the read bandwidth. Prefill is timed from the submission of one prompt to
its first token; its bound is the formula's operations over the multiply-add peak. Runs and probes
take turns, medians count. The share of AttnRes comes from a run of its own, with timers around its
operators.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moonlet.bench.bounds import Bounds
from moonlet.bench.costs import Cost, StepFlops, decode_flops, prefill_flops
from moonlet.bench.memory import resident_bytes
from moonlet.bench.step_clock import Step, StepClock, attn_res_clock
from moonlet.bench.weights import ExpertCount, bytes_by_dtype, stored_bytes, touched_bytes
from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.engine.engine import Engine
from moonlet.engine.memory import MemoryOptions
from moonlet.engine.request import EngineRequest, SamplingParams
from moonlet.model.transformer import Transformer
from moonlet.weights.checkpoint import load_for_inference

__all__ = ["DecodeResult", "PrefillResult", "bench_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """One measured run of several streams.

    Attributes:
        streams: Requests decoded together.
        tokens_per_s: Tokens per second of the steps in which every stream decodes.
        step_s: Mean duration of such a step.
        forward_calls: Model calls of the run, prompts included.
        wall_s: Wall time from the first submission to the last token.
        distinct_experts: Mean number of experts a decode step used per MoE layer.
    """

    streams: int
    tokens_per_s: float
    step_s: float
    forward_calls: int
    wall_s: float
    distinct_experts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """One measured run of one prompt; logits are computed for its last row only."""

    prompt_tokens: int
    tokens_per_s: float
    wall_s: float


def bench_engine(
    directory: Path,
    *,
    streams: Sequence[int] = (1, 8),
    prompt_len: int = 32,
    output_len: int = 128,
    prefill: Sequence[int] = (),
    repeats: int = 3,
    moe_activation: str = "bf16",
    trunk: str = "stored",
    trunk_activation: str = "bf16",
    on_run: Callable[[DecodeResult | PrefillResult], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure a checkpoint with its weights as they are stored.

    Args:
        directory: Checkpoint folder.
        streams: Numbers of concurrent requests.
        prompt_len: Tokens of every prompt of the decode runs.
        output_len: Tokens generated per request.
        prefill: Prompt lengths of the prefill runs; none when empty.
        repeats: Runs per number of streams and per prompt length.
        moe_activation: As in `load_for_inference`.
        trunk: As in `load_for_inference`.
        trunk_activation: As in `load_for_inference`.
        on_run: Called after every run.

    Returns:
        JSON values: setting, bounds, memory, and per number of streams (``results``) and prompt
        length (``prefill``) the median run with its bound and their ratio.

    Raises:
        ConfigError: A count is not positive, a prompt is longer than the model's context, or an
            option is unknown.
    """
    _check_counts(streams, prompt_len, output_len, prefill, repeats)
    memory = {"rss_before_load_bytes": resident_bytes()}
    loaded = load_for_inference(
        directory,
        moe_activation=moe_activation,
        trunk=trunk,
        trunk_activation=trunk_activation,
    )
    model = loaded.model.eval()
    longest = max(prompt_len + output_len, max(prefill, default=0) + 1)
    with _Runs(model, max(streams), longest, prompt_len, output_len) as runs:
        runs.warm_up(max(streams), max(prefill, default=0))
        # before the probes take their buffer
        memory |= {"rss_bytes": resident_bytes(), "weight_bytes": stored_bytes(model)}
        bounds = Bounds()
        decode_shares = {count: runs.decode_share(count) for count in streams}
        prefill_shares = {length: runs.prefill_share(length) for length in prefill}
        decoded, prefilled = runs.take_turns(bounds, streams, prefill, repeats, on_run)
    return {
        "checkpoint": directory.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weight_bytes_by_dtype": bytes_by_dtype(model),
        "moe_activation": moe_activation,
        "trunk": trunk,
        "trunk_activation": trunk_activation,
        "kernels": {c.op: c.backend for c in model.kernels.choices},
        "prompt_len": prompt_len,
        "output_len": output_len,
        "repeats": repeats,
        **bounds.to_json(),
        **memory,
        "results": [
            _decode_summary(model, results, bounds, prompt_len + output_len / 2)
            | {"attn_res_share": decode_shares[count]}
            for count, results in decoded.items()
        ],
        "prefill": [
            _prefill_summary(model.config, prompts, bounds)
            | {"attn_res_share": prefill_shares[length]}
            for length, prompts in prefilled.items()
        ],
    }


def _check_counts(
    streams: Sequence[int], prompt_len: int, output_len: int, prefill: Sequence[int], repeats: int
) -> None:
    counts = {
        "streams": min(streams, default=0),
        "repeats": repeats,
        "prompt_len": prompt_len,
        "prefill": min(prefill, default=1),
    }
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"bench.{name} is {value}; it must be at least 1")
    if output_len < 2:
        raise ConfigError(f"bench.output_len is {output_len}; one token takes no decode step")


class _Runs:
    """Makes runs on engines of one model and reads the clocks.

    What times or counts single operators runs on an engine of its own, call by call; the ids, and
    with them the chosen experts, are the same there.
    """

    def __init__(
        self, model: Transformer, streams: int, longest: int, prompt_len: int, output_len: int
    ) -> None:
        self._model, self._prompt_len, self._output_len = model, prompt_len, output_len
        self._clock = StepClock()
        self._distinct: dict[int, float] = {}
        self._engine, self._plain = (
            Engine(
                model,
                max_num_seqs=streams,
                max_model_len=longest,
                replay_decode=replays,
                # the runs repeat their prompts, and a prefill that is looked up measures nothing
                memory=MemoryOptions(prefix_caching=False),
                before_step=self._clock.note,
            )
            for replays in (True, False)
        )

    def __enter__(self) -> _Runs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._engine.close()
        self._plain.close()

    def warm_up(self, streams: int, prefill: int) -> None:
        """Touch what the runs will touch."""
        self._generate(self._engine, streams, self._prompt_len, min(4, self._output_len))
        if prefill:
            self._generate(self._engine, 1, prefill, 1)
        self._clock.take()

    def take_turns(
        self,
        bounds: Bounds,
        streams: Sequence[int],
        prefill: Sequence[int],
        repeats: int,
        on_run: Callable[[DecodeResult | PrefillResult], None],
    ) -> tuple[dict[int, list[DecodeResult]], dict[int, list[PrefillResult]]]:
        """Interleave all runs and the probes; return the runs by streams and by prompt length."""
        decoded: dict[int, list[DecodeResult]] = {count: [] for count in streams}
        prefilled: dict[int, list[PrefillResult]] = {length: [] for length in prefill}
        for _ in range(repeats):
            for count, results in decoded.items():
                bounds.sample()
                results.append(self.decode(count))
                on_run(results[-1])
            for length, prompts in prefilled.items():
                bounds.sample()
                prompts.append(self.prefill(length))
                on_run(prompts[-1])
        bounds.sample()
        return decoded, prefilled

    def decode(self, streams: int) -> DecodeResult:
        """Measure one run of some streams."""
        calls, wall, steps = self._decode(self._engine, streams)
        step_s = statistics.fmean(step.seconds for step in steps)
        return DecodeResult(
            streams=streams,
            tokens_per_s=streams / step_s,
            step_s=step_s,
            forward_calls=calls,
            wall_s=wall,
            distinct_experts=self._distinct[streams],
        )

    def prefill(self, length: int) -> PrefillResult:
        """Measure one prompt."""
        _, wall = self._generate(self._engine, 1, length, 1)
        self._clock.take()
        return PrefillResult(prompt_tokens=length, tokens_per_s=length / wall, wall_s=wall)

    def decode_share(self, streams: int) -> float:
        """Return the fraction of decode steps that AttnRes operators take, in a timed run.

        Counts the distinct experts of such steps too, which `decode` reports.
        """
        experts = ExpertCount(self._model)
        experts.rows = streams
        with attn_res_clock(self._model, self._clock):
            _, _, steps = self._decode(self._plain, streams)
        self._distinct[streams] = experts.take()
        experts.remove()
        return _attn_res_share(steps)

    def prefill_share(self, length: int) -> float:
        """Return the fraction of a prompt's steps that AttnRes operators take."""
        with attn_res_clock(self._model, self._clock):
            self._generate(self._plain, 1, length, 1)
        return _attn_res_share(self._clock.take())

    def _generate(
        self, engine: Engine, streams: int, prompt_len: int, output_len: int
    ) -> tuple[int, float]:
        """Run requests that start together; return forward calls and seconds."""
        vocab = engine.config.vocab_size
        sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        before = engine.stats().num_forward_calls
        began = time.perf_counter()
        with self._clock.held():
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
        calls = engine.stats().num_forward_calls - before
        return calls, time.perf_counter() - began

    def _decode(self, engine: Engine, streams: int) -> tuple[int, float, list[Step]]:
        """Forward calls, wall time, and the steps in which every stream decodes.

        Raises:
            ConfigError: There is no such step.
        """
        calls, wall = self._generate(engine, streams, self._prompt_len, self._output_len)
        steps = [step for step in self._clock.take() if step.rows == streams]
        if not steps:
            raise ConfigError(
                f"bench.output_len is {self._output_len}: the first of {streams} streams ends "
                "before the last one starts; raise it"
            )
        return calls, wall, steps


def _attn_res_share(steps: Sequence[Step]) -> float:
    return sum(step.attn_res_s for step in steps) / sum(step.seconds for step in steps)


def _decode_summary(
    model: Transformer, results: list[DecodeResult], bounds: Bounds, context: float
) -> dict[str, Any]:
    median = sorted(results, key=lambda r: r.tokens_per_s)[len(results) // 2]
    touched = touched_bytes(model, median.streams, median.distinct_experts)
    bound = median.streams * bounds.bandwidth() / touched
    flops = decode_flops(model.config, median.streams, context)
    return {
        **asdict(median),
        "all_tokens_per_s": [round(r.tokens_per_s, 2) for r in results],
        "weight_bytes_per_step": touched,
        "bytes_per_s": touched / median.step_s,
        "bound_tokens_per_s": bound,
        "ratio": median.tokens_per_s / bound,
        "gflop_per_token": flops.total / median.streams / 1e9,
        "flops_per_s": flops.total / median.step_s,
        "flop_shares": _flop_shares(flops),
    }


def _prefill_summary(
    config: ModelConfig, results: list[PrefillResult], bounds: Bounds
) -> dict[str, Any]:
    median = sorted(results, key=lambda r: r.tokens_per_s)[len(results) // 2]
    flops = prefill_flops(config, median.prompt_tokens)
    related = bounds.relate(Cost(0.0, flops.total), median.wall_s)
    return {
        **asdict(median),
        "all_tokens_per_s": [round(r.tokens_per_s, 2) for r in results],
        "flops_per_s": related["flops_per_s"],
        "bound_tokens_per_s": median.prompt_tokens / related["bound_s"],
        "ratio": related["ratio"],
        "gflop_per_token": flops.total / median.prompt_tokens / 1e9,
        "flop_shares": _flop_shares(flops),
    }


def _flop_shares(flops: StepFlops) -> dict[str, float]:
    return {name: part / flops.total for name, part in asdict(flops).items()}
