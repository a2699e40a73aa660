"""Speed of drafting from the text beside plain decoding, engines taking turns.

Example: python benchmarks/speculation.py --repeats 3
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time

from moonlet.cli.models import model_directory
from moonlet.core.env import bound_threads

NUM_IDS = 400
LOOKUP = {"num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
METHODS = {
    "off": None,
    "ngram": {"method": "ngram", **LOOKUP},
    "ngram, always": {"method": "ngram", **LOOKUP, "adaptive": False},
    "suffix": {"method": "suffix", "num_speculative_tokens": 7},
}


def main() -> None:
    """Print one line per workload, number of streams and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint directory; the bundled one when absent")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    bound_threads(1)
    # torch reads the thread settings when it is imported
    from moonlet.engine import Engine, EngineRequest, SamplingParams
    from moonlet.engine.memory import MemoryOptions
    from moonlet.engine.speculative import SpeculativeConfig
    from moonlet.weights.checkpoint import load_for_inference

    model = load_for_inference(model_directory(options.model)).model
    rng = random.Random(1)
    highest = min(model.config.vocab_size, 600)
    phrase = [rng.randrange(100, highest) for _ in range(24)]
    loads = {
        "repeats": (phrase * 6, SamplingParams(max_tokens=NUM_IDS, temperature=0, ignore_eos=True)),
        "sampled": (phrase * 3, SamplingParams(max_tokens=NUM_IDS, seed=3, ignore_eos=True)),
    }
    for streams in (1, 4):
        for name, (prompt, sampling) in loads.items():
            engines = {
                method: Engine(
                    model,
                    max_num_seqs=streams,
                    max_model_len=1024,
                    memory=MemoryOptions(prefix_caching=False),
                    speculative=None if raw is None else SpeculativeConfig.from_dict(raw),
                )
                for method, raw in METHODS.items()
            }
            speeds: dict[str, list[float]] = {method: [] for method in METHODS}
            for turn in range(options.repeats + 1):
                for method, engine in engines.items():
                    began = time.perf_counter()
                    handles = [
                        engine.submit(
                            EngineRequest(request_id=str(s), prompt_ids=prompt, sampling=sampling)
                        )
                        for s in range(streams)
                    ]
                    for handle in handles:
                        handle.result()
                    if turn:
                        speeds[method].append(NUM_IDS * streams / (time.perf_counter() - began))
            plain = statistics.median(speeds["off"])
            for method, engine in engines.items():
                stats, speed = engine.stats(), statistics.median(speeds[method])
                sys.stdout.write(
                    f"{name}, {streams} streams, {method}: {speed:.0f} tok/s, "
                    f"{speed / plain:.2f} of off, {stats.num_accepted_tokens} of "
                    f"{stats.num_draft_tokens} drafts in {stats.num_drafts} windows\n"
                )
                engine.close()
    sys.stdout.write(f"load {os.getloadavg()[0]:.1f}\n")


if __name__ == "__main__":
    main()
