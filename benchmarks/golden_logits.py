"""Largest logit differences to the official code on the tiny checkpoints, as JSON.

Example: python benchmarks/golden_logits.py ../shared/golden/model
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from moonlet.model.simple_state import DenseState
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from moonlet.weights.checkpoint import load_model

FAMILIES = ("tiny_k3", "tiny_kimi_linear")
MAX_LEN = 512


def logits(model: Transformer, ids: Tensor, state: DenseState, start: int = 0) -> Tensor:
    """Logits of every row of one sequence."""
    meta = BatchMeta.build([len(ids)], start_positions=[start], logits="all")
    return model.logits(model(ids.long(), meta, state))


def differences(folder: Path) -> dict[str, float]:
    """Largest absolute differences of prefill, greedy decoding and split prefill."""
    expected = load_file(folder / "expected.safetensors")
    model = load_model(folder / "checkpoint").model.eval()
    worst = {"prefill": 0.0, "greedy_32_steps": 0.0, "split_prefill": 0.0}

    def note(kind: str, actual: Tensor, wanted: Tensor) -> None:
        worst[kind] = max(worst[kind], (actual - wanted).abs().max().item())

    for key in [k for k in expected if k.endswith(".input_ids")]:
        ids, wanted = expected[key], expected[key.replace("input_ids", "logits")]
        state = DenseState(model.config, 1, MAX_LEN)
        whole = logits(model, ids, state)
        note("prefill", whole, wanted)
        greedy = expected.get(key.replace("input_ids", "greedy_ids"))
        if greedy is not None:
            rows = [whole[-1:]]
            rows += [
                logits(model, token.view(1), state, len(ids) + j) for j, token in enumerate(greedy)
            ]
            note(
                "greedy_32_steps",
                torch.cat(rows),
                expected[key.replace("input_ids", "greedy_logits")],
            )
        for cut in {1, len(ids) // 2, 129} & set(range(1, len(ids))):
            state = DenseState(model.config, 1, MAX_LEN)
            parts = [logits(model, ids[:cut], state), logits(model, ids[cut:], state, cut)]
            note("split_prefill", torch.cat(parts), wanted)
    return worst


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("golden", type=Path, help="folder with tiny_k3 and tiny_kimi_linear")
    golden = parser.parse_args().golden
    torch.set_grad_enabled(False)
    report = {
        family: differences(golden / family) for family in FAMILIES if (golden / family).is_dir()
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
