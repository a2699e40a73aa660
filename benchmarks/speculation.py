"""Speed of drafting from the text beside plain decoding, engines taking turns, as JSON lines.

One line per workload, number of streams and method: tokens per second of every turn, the median of
the turns' ratios to `off` in the same turn, what was drafted and accepted, and whether the ids were
those of `off`. Engines live through all turns; the first turn is not timed.

Workloads of the bundled model (greedy, held-out prompts of its own tasks):
    passage  a raw completion; the prompt is two sentences, six times, which the model goes on with
    copy     chat: "repeat this text", long texts
    tools    chat: tool calls with JSON arguments, and the thoughts before them
    sums     chat: sums with worked columns
    chat     chat: greetings, refusals, one sentence each
and of any model, over random ids:
    cycle    greedy; a prompt that repeats a phrase
    loop     greedy with frequency_penalty -2, which drives any model into saying one id for ever;
             for random weights, whose greedy text repeats neither its prompt nor itself
    sampled  temperature 1, seeded; a prompt in which nothing repeats

Example: python benchmarks/speculation.py --streams 1 --streams 8
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from moonlet.cli.models import model_directory
from moonlet.core.env import bound_threads

if TYPE_CHECKING:
    from moonlet.engine import Engine, SamplingParams
    from moonlet.model.transformer import Transformer

LOOKUP = {"num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
METHODS = {
    "off": None,
    "ngram": {"method": "ngram", **LOOKUP},
    "ngram-always": {"method": "ngram", **LOOKUP, "adaptive": False},
    "suffix": {"method": "suffix", "num_speculative_tokens": 7},
}
RANDOM = ("cycle", "loop", "sampled")
CHATS = ("tools", "sums", "chat")
FAMILY_OF = {"tools": "tools", "sums": "arithmetic", "chat": "frame"}
Prompts = list[list[int]]


def nano_prompts(workload: str, directory: str, count: int) -> Prompts:
    """Return held-out prompts of the bundled model's tasks."""
    from moonlet.chat import Tokenizer, render
    from moonlet.train.tasks.frame import repeat_turn
    from moonlet.train.tasks.heldout import heldout_items
    from moonlet.train.tasks.lexicon import HELDOUT

    tokenizer = Tokenizer.from_dir(directory)
    if workload == "passage":
        items = heldout_items("tools", 2 * count)
        texts = [" ".join(i.turn.user for i in items[n::count]) + "\n" for n in range(count)]
        return [tokenizer.encode(text) * 6 for text in texts]
    if workload == "copy":
        turns = [
            repeat_turn(random.Random(n), HELDOUT, "max", 1.0, is_long=True) for n in range(count)
        ]
        asked = [(turn.messages[:1], None) for turn in turns]
    else:
        items = heldout_items(FAMILY_OF[workload], count)
        asked = [(item.messages, item.tools) for item in items]
    return [
        tokenizer.encode_segments(render(messages, tools, thinking=True, thinking_effort="max"))
        for messages, tools in asked
    ]


def random_prompts(workload: str, vocab_size: int, count: int) -> Prompts:
    """Return prompts of random ids."""
    prompts = []
    for number in range(count):
        rng = random.Random(number)
        phrase = [rng.randrange(100, min(vocab_size, 600)) for _ in range(24)]
        once = [rng.randrange(100, min(vocab_size, 600)) for _ in range(96)]
        prompts.append(once if workload == "sampled" else phrase * 6)
    return prompts


def run(
    engine: Engine, prompts: Prompts, streams: int, sampling: SamplingParams
) -> tuple[float, list[tuple[int, ...]]]:
    """Return tokens per second and the ids of every prompt, ``streams`` of them at a time."""
    from moonlet.engine import EngineRequest

    outputs: list[tuple[int, ...]] = []
    began = time.perf_counter()
    for first in range(0, len(prompts), streams):
        handles = [
            engine.submit(EngineRequest(request_id=str(n), prompt_ids=ids, sampling=sampling))
            for n, ids in enumerate(prompts[first : first + streams])
        ]
        outputs += [handle.result().ids for handle in handles]
    return sum(map(len, outputs)) / (time.perf_counter() - began), outputs


def report(
    engine: Engine, speeds: dict[str, list[float]], method: str, is_same: bool
) -> dict[str, Any]:
    """Return the figures of one method."""
    stats = engine.stats()
    ratios = [mine / off for mine, off in zip(speeds[method], speeds["off"], strict=True)]
    drafted, accepted = stats.num_draft_tokens, stats.num_accepted_tokens
    return {
        "method": method,
        "tok_s": [round(speed, 1) for speed in speeds[method]],
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "windows": stats.num_drafts,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / drafted, 3) if drafted else None,
        "tokens_per_window": round(1 + accepted / stats.num_drafts, 2) if drafted else None,
        "accepted_per_pos": list(stats.num_accepted_tokens_per_pos),
        "same_ids_as_off": is_same,
    }


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint directory; the bundled one when absent")
    parser.add_argument("--workload", action="append", help="repeatable; all when absent")
    parser.add_argument("--streams", type=int, action="append", help="repeatable; 1 when absent")
    parser.add_argument("--method", action="append", choices=list(METHODS), help="beside off")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a turn")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of a reply at most")
    parser.add_argument("--warm-tokens", type=int, help="the same in the turn that is not timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="say each speed when it is known")
    return parser.parse_args()


def make_engine(model: Transformer, method: str, streams: int) -> Engine:
    """Return an engine that drafts by a method."""
    from moonlet.engine import Engine
    from moonlet.engine.memory import MemoryOptions
    from moonlet.engine.speculative import SpeculativeConfig

    raw = METHODS[method]
    return Engine(
        model,
        max_num_seqs=streams,
        max_model_len=2048,
        memory=MemoryOptions(prefix_caching=False),
        speculative=None if raw is None else SpeculativeConfig.from_dict(raw),
    )


def measure(
    engines: dict[str, Engine], prompts: Prompts, workload: str, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[tuple[int, ...]]]]:
    """Let engines take turns; return the speeds of the timed ones and the ids of all."""
    from moonlet.engine import SamplingParams

    params: dict[str, Any] = {"seed": 3} if workload == "sampled" else {"temperature": 0.0}
    if workload == "loop":
        params["frequency_penalty"] = -2.0
    params["ignore_eos"] = workload == "passage" or workload in RANDOM
    count = len(prompts) // (options.repeats + 1)
    limits = next(iter(engines.values())).limits
    speeds: dict[str, list[float]] = {method: [] for method in engines}
    outputs: dict[str, list[tuple[int, ...]]] = {method: [] for method in engines}
    for turn in range(options.repeats + 1):
        tokens = options.tokens if turn else options.warm_tokens or options.tokens
        sampling = SamplingParams(max_tokens=tokens, **params)
        mine = prompts[turn * count : (turn + 1) * count]
        # whoever goes first meets the machine as the turn before left it
        for method in list(engines)[:: 1 if turn % 2 else -1]:
            speed, ids = run(engines[method], mine, limits.max_num_seqs, sampling)
            outputs[method].extend(ids)
            if turn:
                speeds[method].append(speed)
            if options.verbose:
                sys.stderr.write(f"{workload}, turn {turn}, {method}: {speed:.1f} tok/s\n")
    return speeds, outputs


def main() -> None:
    """Print one JSON line per workload, number of streams and method."""
    options = parsed()
    bound_threads(options.threads)
    # torch reads the thread settings when it is imported
    from moonlet.weights.checkpoint import load_for_inference

    directory = model_directory(options.model)
    model = load_for_inference(directory).model
    own = ["passage", "copy", *CHATS] if options.model is None else []
    methods = ["off", *(options.method or ["ngram", "suffix"])]
    for streams in options.streams or [1]:
        for workload in options.workload or [*own, *RANDOM]:
            count = -(-options.prompts // streams) * streams
            # every turn has its own: nobody may remember what it said
            total = count * (options.repeats + 1)
            if workload in RANDOM:
                prompts = random_prompts(workload, model.config.vocab_size, total)
            else:
                prompts = nano_prompts(workload, str(directory), total)
            engines = {method: make_engine(model, method, streams) for method in methods}
            speeds, outputs = measure(engines, prompts, workload, options)
            for method, engine in engines.items():
                head = {"workload": workload, "streams": streams, "prompts": count}
                same = outputs[method] == outputs["off"]
                load = {"load": round(os.getloadavg()[0], 2)}
                line = head | report(engine, speeds, method, same) | load
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
                engine.close()


if __name__ == "__main__":
    main()
