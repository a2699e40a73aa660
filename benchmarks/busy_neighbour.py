"""Decode speed with and without another process that is busy on one processor, in turns.

With n threads on n processors the neighbour owns at most one of them, so no more than 1 / n of the
speed may be lost. `python benchmarks/busy_neighbour.py --threads 2`, or with a checkpoint.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from moonlet.engine import Engine, EngineRequest, SamplingParams
from moonlet.weights.checkpoint import load_for_inference


def be_busy(processor: int) -> None:
    """Never return; stay on one processor where the system allows it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {processor})
    while True:
        pass


def tokens_per_s(engine: Engine, name: str, num_tokens: int) -> float:
    """Decode one request; the prompt and its first token are not counted."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens + 1, ignore_eos=True)
    outputs = engine.submit(EngineRequest(request_id=name, prompt_ids=(1, 2, 3), sampling=sampling))
    began = 0.0
    for output in outputs:
        began = began or time.perf_counter()
        if output.finish is not None:
            break
    return num_tokens / (time.perf_counter() - began)


def main() -> None:
    """Print the medians of both and their ratio."""
    nano = Path(__file__).parents[1] / "src" / "moonlet" / "assets" / "moonlet-nano"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=nano)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_for_inference(options.model).model
    # a child of a process without threads: it shares nothing but the processor
    context = multiprocessing.get_context("spawn")
    alone: list[float] = []
    beside: list[float] = []
    with Engine(model, max_num_seqs=1, max_model_len=options.tokens + 16) as engine:
        tokens_per_s(engine, "warm-up", 20)
        for turn in range(options.rounds):
            alone.append(tokens_per_s(engine, f"alone-{turn}", options.tokens))
            neighbour = context.Process(target=be_busy, args=(0,), daemon=True)
            neighbour.start()
            # its interpreter starts on the way
            time.sleep(1.0)
            beside.append(tokens_per_s(engine, f"beside-{turn}", options.tokens))
            neighbour.terminate()
            neighbour.join()
    speeds = statistics.median(alone), statistics.median(beside)
    lost = 1 - speeds[1] / speeds[0]
    lines = (
        f"alone {speeds[0]:.1f} tokens/s, beside a busy process {speeds[1]:.1f}",
        f"lost {lost:.0%}; the neighbour owns at most {1 / options.threads:.0%} of the processors",
        f"load average {os.getloadavg()[0]:.2f}",
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
