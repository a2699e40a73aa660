"""Decode at a long context, against a twin of the same architecture whose layers are all MLA.

Nothing is prefilled: the state is filled with random rows through the protocols that layers use,
and a step is the forward pass and the logits of one row at the last position of the context.

What need not exist does not:

- Weights are random. A network keeps as many routed experts as four rows choose, so a step reads
  what it would read of all of them. The twin shares every weight with the model but the attention
  of the layers that are KDA there.
- Layers share the memory of cached rows in turn. There are as many distinct buffers as it takes to
  exceed the caches, so a shared one is as cold when it is read again as its own would be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moonlet.bench.bounds import Bounds
from moonlet.bench.costs import F32, Cost, decode_flops, state_bytes
from moonlet.bench.memory import cold_bytes, storage_bytes
from moonlet.bench.weights import stored_bytes, touched_bytes
from moonlet.core.config import ModelConfig
from moonlet.core.errors import CapacityError, ConfigError
from moonlet.core.units import format_bytes
from moonlet.engine.cache.state import PagedState
from moonlet.kernels.registry import resolve
from moonlet.model.layer import DecoderLayer
from moonlet.model.state import BatchMeta, KDAState, MLACache
from moonlet.model.transformer import Transformer

__all__ = ["bench_longctx", "build_pair", "reduced_config"]

PAGE_SIZE = 64
SLOT = 1
# rows written at a time when a state is filled
FILL_ROWS = 4096
# what views and scores of one layer's rows take beside the rows, in their size
TRANSIENT = 3
EXPERT_ROWS = 4


def reduced_config(config: ModelConfig) -> ModelConfig:
    """Return the architecture with few enough experts to hold, enough for a step's traffic."""
    if config.moe is None:
        return config
    experts = min(config.moe.num_experts, EXPERT_ROWS * config.moe.num_experts_per_token)
    moe = replace(config.moe, num_experts=experts, num_expert_group=1, topk_group=1)
    return replace(config, moe=moe)


def build_pair(config: ModelConfig) -> tuple[Transformer, Transformer]:
    """Return a model with random weights and its all-MLA twin, which share what they can."""
    model = Transformer(config, resolve("cpu", config, is_inference=True))
    twin_config = replace(config, kda_layers=())
    twin_kernels = resolve("cpu", twin_config, is_inference=True)
    twin = Transformer(twin_config, twin_kernels, device="meta")
    _randomize(model)
    for index in config.kda_layers:
        attention = _layer(twin, index).self_attn.to_empty(device="cpu")
        _randomize(attention)
        _share(_layer(model, index), _layer(twin, index), but="self_attn")
    for index in config.mla_layers:
        _share(_layer(model, index), _layer(twin, index))
    _share(model, twin, but="layers")
    return model.eval(), twin.eval()


def _layer(model: Transformer, index: int) -> DecoderLayer:
    layer = model.layers[index]
    assert isinstance(layer, DecoderLayer)
    return layer


def _share(source: nn.Module, target: nn.Module, but: str = "") -> None:
    """Give the target's children the tensors of the source's, in modules of their own."""
    for name, child in source.named_children():
        if name == but:
            continue
        for mine, its in zip(child.modules(), target.get_submodule(name).modules(), strict=True):
            for key, value in mine.named_parameters(recurse=False):
                setattr(its, key, value)
            for key, value in mine.named_buffers(recurse=False):
                setattr(its, key, value)


@torch.no_grad()
def _randomize(module: nn.Module) -> None:
    """Fill parameters so that activations stay near 1 through the layers."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif tensor.ndim < 2:
            tensor.zero_()
        else:
            tensor.uniform_(-1.0, 1.0, generator=generator).mul_(1.7 * tensor.shape[-1] ** -0.5)


def _filled_state(config: ModelConfig, num_buffers: int, context: int) -> PagedState:
    """Return the model's KDA layers first, then the buffers, full of random values."""
    num_kda = len(config.kda_layers)
    layers = num_kda + num_buffers
    inner = replace(
        config, num_hidden_layers=layers, kda_layers=tuple(range(num_kda)), moe_layers=()
    )
    num_pages = -(-context // PAGE_SIZE)
    state = PagedState(
        inner, num_slots=1, num_pages=num_pages, page_size=PAGE_SIZE, max_model_len=context
    )
    state.bind(SLOT, list(range(1, num_pages + 1)))
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.rand(size, generator=generator) * 2 - 1

    mla, kda = config.mla, config.kda
    for start in range(0, context, FILL_ROWS):
        rows = min(FILL_ROWS, context - start)
        meta = BatchMeta.build([rows], slots=[SLOT], start_positions=[start])
        for layer in range(num_kda, layers):
            latent, shared = random(rows, mla.kv_lora_rank), random(rows, mla.qk_rope_head_dim)
            state.mla(layer).append(meta, latent, shared)
    meta = BatchMeta.build([1], slots=[SLOT], start_positions=[context - 1])
    taps = kda.short_conv_kernel_size - 1
    for layer in range(num_kda):
        recurrent = random(1, kda.num_heads, kda.head_dim, kda.head_dim)
        conv = random(1, 3 * kda.projection_size, taps)
        state.kda(layer).store(meta, recurrent, conv, None, None)
    return state


class _View:
    """What one network sees of the shared state: its layers take the buffers in turn."""

    def __init__(self, state: PagedState, config: ModelConfig, num_kda: int, num_buffers: int):
        self._state = state
        self._kda = {layer: rank for rank, layer in enumerate(config.kda_layers)}
        self._mla = {
            layer: num_kda + rank % num_buffers for rank, layer in enumerate(config.mla_layers)
        }

    def kda(self, layer: int) -> KDAState:
        """State of a KDA layer."""
        return self._state.kda(self._kda[layer])

    def mla(self, layer: int) -> MLACache:
        """The buffer of an MLA layer."""
        return self._state.mla(self._mla[layer])

    def commit(self, meta: BatchMeta, num_rows: Sequence[int]) -> None:
        """Do nothing: no step here is tentative."""


@torch.inference_mode()
def bench_longctx(
    name: str,
    config: ModelConfig,
    *,
    contexts: Sequence[int],
    repeats: int = 3,
    memory_bytes: int = 16 << 30,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure decode steps of a model and of its all-MLA twin.

    Args:
        name: What the architecture is called in the report.
        config: Architecture.
        contexts: Lengths of the sequence, the new row included. There are no positions in the
            architecture, so a context may exceed what the model was trained for.
        repeats: Timed steps per network and context, in turns.
        memory_bytes: What weights and state may take together.
        on_progress: Told what is measured next.

    Returns:
        JSON values: bounds, sizes, and per context each network's median step with its bound.

    Raises:
        ConfigError: A count is not positive.
        CapacityError: Weights and one layer's rows do not fit.
    """
    _check(contexts, repeats)
    reduced = reduced_config(config)
    on_progress("weights")
    _require_memory(reduced, max(contexts), memory_bytes)
    pair = dict(zip(("model", "twin"), build_pair(reduced), strict=True))
    weight_bytes = storage_bytes(t for m in pair.values() for t in (*m.parameters(), *m.buffers()))
    bounds = Bounds()
    results: list[dict[str, Any]] = []
    for context in contexts:
        on_progress(f"context {context}")
        buffers = _num_buffers(reduced, context, memory_bytes - weight_bytes)
        state = _filled_state(reduced, buffers, context)
        networks = [
            _Network(name, model, _View(state, model.config, len(config.kda_layers), buffers))
            for name, model in pair.items()
        ]
        results.append(
            {"context": context, "buffers": buffers} | _measure(networks, context, repeats, bounds)
        )
    return {
        "architecture": name,
        "layers": config.num_hidden_layers,
        "kda_layers": len(config.kda_layers),
        "num_experts": 0 if reduced.moe is None else reduced.moe.num_experts,
        "kernels": {c.op: c.backend for c in pair["model"].kernels.choices},
        "weight_bytes": weight_bytes,
        "repeats": repeats,
        **bounds.to_json(),
        "results": results,
    }


def _check(contexts: Sequence[int], repeats: int) -> None:
    for what, least in (("context", min(contexts, default=0)), ("repeats", repeats)):
        if least < 1:
            raise ConfigError(f"bench.{what} is {least}; it must be at least 1")


def _row_bytes(config: ModelConfig, context: int) -> int:
    """Bytes of one MLA layer's rows."""
    return context * config.mla.cache_size * F32


def _require_memory(config: ModelConfig, context: int, memory_bytes: int) -> None:
    model = Transformer(config, device="meta")
    twin = Transformer(replace(config, kda_layers=()), device="meta")
    weights = stored_bytes(model)
    weights += sum(stored_bytes(_layer(twin, i).self_attn) for i in config.kda_layers)
    needed = weights + (1 + TRANSIENT) * _row_bytes(config, context)
    if needed > memory_bytes:
        raise CapacityError(
            f"weights of {format_bytes(weights)} and one layer's {context} rows need "
            f"{format_bytes(needed)}, but --memory-gib allows {format_bytes(memory_bytes)}; "
            "raise it or choose a smaller architecture or context"
        )


def _num_buffers(config: ModelConfig, context: int, free_bytes: int) -> int:
    """As many buffers as exceed the caches, but no more than fit or than there are layers."""
    each = _row_bytes(config, context)
    wanted = min(-(-cold_bytes() // each), config.num_hidden_layers)
    return max(1, min(wanted, free_bytes // each - TRANSIENT))


@dataclass(frozen=True, slots=True)
class _Network:
    name: str
    model: Transformer
    state: _View

    def step(self, context: int) -> float:
        """Run the row at the last position; the rows before stay, so every step is the same."""
        meta = BatchMeta.build([1], slots=[SLOT], start_positions=[context - 1])
        began = time.perf_counter()
        hidden_TD = self.model.forward(torch.tensor([1]), meta, self.state)
        self.model.logits(hidden_TD)
        return time.perf_counter() - began

    def cost(self, context: int) -> Cost:
        """Bytes and operations of a step."""
        config = self.model.config
        active = 0 if config.moe is None else config.moe.num_experts_per_token
        moved = touched_bytes(self.model, 1, active) + state_bytes(config, 1, context)
        return Cost(moved, decode_flops(config, 1, context).total)


def _measure(
    networks: Sequence[_Network], context: int, repeats: int, bounds: Bounds
) -> dict[str, Any]:
    """Each network's median step, the networks and the probes in turns."""
    steps: dict[str, list[float]] = {network.name: [] for network in networks}
    for network in networks:
        network.step(context)
    since = bounds.mark
    for _ in range(repeats):
        bounds.sample()
        for network in networks:
            steps[network.name].append(network.step(context))
    result: dict[str, Any] = {}
    for network in networks:
        all_s = steps[network.name]
        seconds = statistics.median(all_s)
        related = bounds.relate(network.cost(context), seconds, since)
        result[network.name] = {"step_s": seconds, "all_step_s": all_s, **related}
    result["twin_over_model"] = result["twin"]["step_s"] / result["model"]["step_s"]
    return result
