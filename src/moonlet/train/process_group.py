"""Data-parallel processes on one host: sums and maxima over gloo.

Each process runs one thread; a busy neighbour then costs its share and not a multiple
(training.md section 17). `Alone` is the same interface for a single process.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Alone", "Gloo", "ProcessGroup", "prepare_process"]

TIMEOUT_S = 1800


def prepare_process() -> None:
    """Set this process up for training on one core: one thread, denormals flushed."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


class ProcessGroup:
    """What the trainer asks of its peers.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes.
    """

    rank: int = 0
    world_size: int = 1

    def sum_(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over all processes."""

    def max_(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its maximum over all processes."""

    def close(self) -> None:
        """Leave the group."""


class Alone(ProcessGroup):
    """A single process: every reduction is the identity."""


class Gloo(ProcessGroup):
    """A gloo group that meets through a file.

    Args:
        rank: Number of this process.
        world_size: Number of processes.
        rendezvous: File that does not exist yet, the same for all processes.
    """

    def __init__(self, rank: int, world_size: int, rendezvous: Path) -> None:
        self.rank = rank
        self.world_size = world_size
        store = dist.FileStore(str(rendezvous), world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )

    def sum_(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over all processes."""
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its maximum over all processes."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
