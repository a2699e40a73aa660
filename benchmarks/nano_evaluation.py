"""Evaluate a nano checkpoint on the held-out prompts, as its model card reports.

Example: python benchmarks/nano_evaluation.py --count 200 > evaluation.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from moonlet.cli.models import model_directory
from moonlet.core.env import bound_threads
from moonlet.train.tasks.heldout import EVAL_SEED


def main() -> None:
    """Print the report as JSON and what it passes on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint directory; the bundled one when absent")
    parser.add_argument("--count", type=int, default=200, help="prompts per task family")
    parser.add_argument("--seed", type=int, default=EVAL_SEED, help="seed of the prompts")
    options = parser.parse_args()
    bound_threads(1)
    # torch reads the thread settings when it is imported
    from moonlet.train.nano import evaluate_model

    directory: Path = model_directory(options.model)
    report = evaluate_model(directory, options.count, options.seed)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    sys.stderr.write(json.dumps(report["passes"]) + "\n")


if __name__ == "__main__":
    main()
