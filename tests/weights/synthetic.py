"""What the tests of synthetic checkpoints share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moonlet.core.hf_config import parse_config
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.weights import synth
from moonlet.weights.checkpoint import Checkpoint, load_model
from moonlet.weights.reader import ShardReader


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def values(folder: Path, *suffixes: str) -> Iterator[torch.Tensor]:
    """The tensors whose published name ends so."""
    checkpoint = Checkpoint.open(folder)
    with ShardReader(checkpoint.extents) as reader:
        for name in checkpoint.extents:
            if name.endswith(suffixes):
                yield reader.read(name)


def largest_logit(folder: Path, num_tokens: int = 33) -> float:
    """Load a checkpoint and run one sequence; the largest magnitude of its logits."""
    model = load_model(folder).model
    tokens = torch.arange(num_tokens) * 7 % model.config.vocab_size
    with torch.no_grad():
        meta = BatchMeta.build([num_tokens], logits="all")
        logits = model.logits(model(tokens, meta, NoState(model.config)))
    assert logits.shape[-1] == model.config.vocab_size
    assert bool(torch.isfinite(logits).all())
    return float(logits.abs().max())


def plan_size(raw: dict[str, Any]) -> int:
    """Bytes that would be written for a published object."""
    shards = synth._Shards(parse_config(raw))
    return sum(tensor.num_bytes for shard in shards for tensor in shard)
