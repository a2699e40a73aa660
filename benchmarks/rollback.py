"""Windows of KDA rolled back by replay and by snapshot, in turns, as JSON lines.

Layers of a scale with random weights and their states in an arena: time of a layer's forward pass
over windows of Q rows of S sequences, time of the commit, and bytes kept per row. The bytes are
those of the memory itself, the times are medians per layer.

Example: python benchmarks/rollback.py --rows 8 --rows 1
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from moonlet.bench.scales import k3_quarter
from moonlet.core.config import ModelConfig
from moonlet.engine.cache.state import PagedState
from moonlet.kernels.registry import resolve
from moonlet.model.kda import KDA
from moonlet.model.state import BatchMeta

STRATEGIES = ("replay", "snapshot")


def layer_of(config: ModelConfig) -> KDA:
    """A layer with random weights."""
    kernels = resolve("cpu", config, is_inference=True)
    layer = KDA(config, kernels, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        scale = parameter.shape[-1] ** -0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return layer


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(config: ModelConfig, num_seqs: int, rows: int, rounds: int) -> dict[str, object]:
    """Medians per layer of both strategies."""
    layer, num_layers = layer_of(config), len(config.kda_layers)
    x_TD = torch.randn(num_seqs * rows, config.hidden_size)
    slots = list(range(1, num_seqs + 1))
    sizes = {"num_slots": num_seqs, "num_pages": num_seqs, "page_size": 64, "max_model_len": 64}
    states = {name: PagedState(config, **sizes, rollback=name) for name in STRATEGIES}
    for state in states.values():
        for slot in slots:
            state.bind(slot, [slot])
        for index in config.kda_layers:
            memory = state.kda(index).in_place(BatchMeta.build([1] * num_seqs, slots=slots))
            memory.recurrent_GHKV.normal_()
            memory.conv_GCW.normal_()
    starts, windows = [8] * num_seqs, [True] * num_seqs
    times: dict[str, list[float]] = {}
    held: dict[str, int] = {}
    for _ in range(rounds + 1):
        for name, state in states.items():
            for label, count in (("all", rows), ("half", -(-rows // 2)), ("none", 0)):
                meta = BatchMeta.build(
                    [rows] * num_seqs, slots=slots, start_positions=starts, tentative=windows
                )

                def forward(meta: BatchMeta = meta, state: PagedState = state) -> None:
                    for index in config.kda_layers:
                        layer(x_TD, meta, state.kda(index))

                def commit(
                    meta: BatchMeta = meta, state: PagedState = state, count: int = count
                ) -> None:
                    state.commit(meta, [count] * num_seqs)

                times.setdefault(f"{name}_forward", []).append(timed(forward) / num_layers)
                held[name] = state.window_bytes
                times.setdefault(f"{name}_commit_{label}", []).append(timed(commit) / num_layers)
    result: dict[str, object] = {"seqs": num_seqs, "rows": rows, "layers": num_layers}
    for name, values in times.items():
        # the first round touches fresh memory
        result[f"{name}_ms"] = round(
            1e3 * statistics.median(values[len(values) // (rounds + 1) :]), 3
        )
    for name in STRATEGIES:
        result[f"{name}_bytes_per_row"] = held[name] // (num_layers * num_seqs * rows)
    return result


def main() -> None:
    """Print one line per window length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--seqs", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = replace(k3_quarter(), kda_layers=tuple(range(options.layers)))
    with torch.inference_mode():
        for rows in options.rows or [8, 1]:
            result = measure(config, options.seqs, rows, options.rounds)
            load = [round(x, 2) for x in os.getloadavg()]
            sys.stdout.write(json.dumps(result | {"threads": options.threads, "load": load}) + "\n")


if __name__ == "__main__":
    main()
