"""The tiny checkpoints with the outputs of the official code, for the tests of this folder."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from moonlet.kernels.registry import Kernels
from moonlet.model.simple_state import DenseState
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from moonlet.weights.checkpoint import load_model
from tests.golden_data import golden_dir, is_full, require

FAMILIES = ("tiny_k3", "tiny_kimi_linear")
LOGIT_TOLERANCE = {"tiny_k3": 1e-3, "tiny_kimi_linear": 2e-4}
MAX_LEN = 512


@dataclass(frozen=True)
class Expected:
    """Tensors and facts of one family's expected file."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def lengths(self, suffix: str) -> list[int]:
        """Lengths N for which ``lenN.<suffix>`` exists."""
        keys = [k for k in self.tensors if k.endswith(f".{suffix}") and k.startswith("len")]
        return sorted(int(k.split(".")[0].removeprefix("len")) for k in keys)


def checkpoint_dir(family: str) -> Path:
    return require(golden_dir("model") / family / "checkpoint")


@cache
def expected(family: str) -> Expected:
    folder = golden_dir("model") / family
    tensors = load_file(require(folder / "expected.safetensors"))
    return Expected(tensors, json.loads((folder / "expected.json").read_text()))


def model(
    family: str, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None
) -> Transformer:
    return load_model(checkpoint_dir(family), dtype=dtype, kernels=kernels).model.eval()


@cache
def shared_model(family: str) -> Transformer:
    """The unmodified fp32 model; tests must not change it."""
    return model(family)


def fresh_state(transformer: Transformer, num_slots: int = 1) -> DenseState:
    return DenseState(transformer.config, num_slots, MAX_LEN, transformer.dtype)


def prefill(
    transformer: Transformer, ids: Tensor, state: DenseState | None = None, start: int = 0
) -> Tensor:
    """Logits of every row of one sequence."""
    state = state if state is not None else fresh_state(transformer)
    meta = BatchMeta.build([len(ids)], start_positions=[start], logits="all")
    with torch.no_grad():
        return transformer.logits(transformer(ids.long(), meta, state))


def teacher_forced(transformer: Transformer, ids: Tensor, greedy: Tensor) -> Tensor:
    """Logits of the last prefill row and after feeding each greedy id with the cache."""
    state = fresh_state(transformer)
    rows = [prefill(transformer, ids, state)[-1:]]
    rows += [
        prefill(transformer, greedy[j : j + 1], state, len(ids) + j) for j in range(len(greedy))
    ]
    return torch.cat(rows)


def max_error(actual: Tensor, wanted: Tensor) -> float:
    assert actual.shape == wanted.shape
    return (actual.double() - wanted.double()).abs().max().item()


def full_or_subset_lengths(family: str, suffix: str) -> list[int]:
    """Lengths to test; a full set must hold all five."""
    lengths = expected(family).lengths(suffix)
    if is_full() and suffix == "logits":
        assert lengths == [1, 7, 64, 65, 300]
    assert lengths
    return lengths
