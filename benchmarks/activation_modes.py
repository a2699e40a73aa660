"""What rounding the experts' inputs and the trunk does to the logits, as JSON lines.

Random ids, all rows, against exact products on the same stored weights: root mean square and
largest difference over the root mean square of the exact logits, and how often the best id stays.

Example: python benchmarks/activation_modes.py --model src/moonlet/assets/moonlet-nano
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.weights.checkpoint import load_for_inference

OPTIONS = (
    {"moe_activation": "mxfp8"},
    {"moe_activation": "mxfp8-floor"},
    {"moe_activation": "int8"},
    {"trunk": "int8"},
    {"moe_activation": "int8", "trunk": "int8"},
    {"trunk": "int8", "trunk_activation": "int8"},
    {"moe_activation": "int8", "trunk": "int8", "trunk_activation": "int8"},
)


def logits(folder: Path, num_tokens: int, **options: str) -> Tensor:
    """Logits of every row of one random sequence."""
    model = load_for_inference(folder, **options).model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (num_tokens,), generator=generator)
    meta = BatchMeta.build([num_tokens], logits="all")
    with torch.inference_mode():
        return model.logits(model(ids, meta, NoState(model.config)))


def main() -> None:
    """Print one line per option."""
    nano = Path(__file__).parents[1] / "src" / "moonlet" / "assets" / "moonlet-nano"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=nano)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    exact = logits(arguments.model, arguments.tokens)
    size = exact.square().mean().sqrt()
    for options in OPTIONS:
        seen = logits(arguments.model, arguments.tokens, **options)
        line = {
            **options,
            "rms": round(float((seen - exact).square().mean().sqrt() / size), 5),
            "max": round(float((seen - exact).abs().max() / size), 4),
            "same_best": round(float((seen.argmax(1) == exact.argmax(1)).float().mean()), 4),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
