"""Calls of the native training operators: every tensor is checked, then its address handed over.

The operators beside each reference (``<op>/native.py``) are the callers: they check shapes with
`require_shape`, `call` checks dtype, device and layout. All tensors are contiguous and on the CPU;
float32, and int64 for row numbers. The work runs on the calling thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from moonlet.core.errors import BackendError, BackendUnavailable, ShapeError
from moonlet.kernels import _native
from moonlet.kernels.spec import Spec

__all__ = [
    "LANES",
    "MAX_HEAD_SIZE",
    "call",
    "pointers",
    "refusal",
    "require_shape",
    "run_starts",
]

LANES = 16
MAX_HEAD_SIZE = 128
_DTYPES = (torch.float32, torch.int64)


def refusal(spec: Spec) -> str | None:
    """Return why the native training operators cannot serve, or None if they can."""
    is_built, reason = _native.availability()
    if not is_built:
        return reason
    if spec.device.type != "cpu":
        return f"the native kernels run on the CPU, not on {spec.device}"
    if spec.dtype != torch.float32:
        return f"the native kernels compute in float32, not in {spec.dtype}"
    config = spec.config
    if config is None:
        return None
    sizes = {
        "hidden_size": config.hidden_size,
        "head_dim": config.kda.head_dim,
        "q_lora_rank": config.mla.q_lora_rank,
        "kv_lora_rank": config.mla.kv_lora_rank,
        "routed_expert_hidden_size": config.expert_input_size,
    }
    for name, size in sizes.items():
        if size is not None and size % LANES:
            return f"{name} is {size}; the native kernels need a multiple of {LANES}"
    return None


@cache
def _level() -> int:
    level = _native.isa_level()
    if level is None:
        _, reason = _native.availability()
        raise BackendUnavailable("native training operators", {"native": reason})
    return _native.isa_levels().index(level)


def require_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Check a shape that the library would trust.

    Raises:
        ShapeError: ``tensor`` has another shape.
    """
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} has shape {list(tensor.shape)}; {list(shape)} is needed")


def pointers(tensors: Sequence[Tensor]) -> Tensor:
    """Return the addresses of float32 tensors as an int64 tensor, itself an argument of `call`.

    The tensors must stay alive until the call.
    """
    for tensor in tensors:
        _check(tensor)
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)


def run_starts(seq_lens: Sequence[int]) -> Tensor:
    """Return the first row of every sequence and the row count, int64 [S + 1]."""
    return torch.tensor([0, *seq_lens], dtype=torch.int64).cumsum(0)


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Run a function of the library.

    Args:
        name: Function without the ``moonlet_`` prefix.
        arguments: All but the instruction-set level, which is added; None is a null pointer.

    Raises:
        ShapeError: A tensor is not contiguous, on another device or of another dtype.
        BackendUnavailable: The library is not available.
        BackendError: The library refused the call.
    """
    library = _native.shared_library()
    level = _level()
    values = [_value(argument) for argument in arguments]
    status = getattr(library, f"moonlet_{name}")(*values, level)
    if status:
        raise BackendError(f"moonlet_{name} failed with status {status}")


def _value(argument: Tensor | int | float | None) -> int | float | None:
    if isinstance(argument, Tensor):
        _check(argument)
        return argument.data_ptr()
    return argument


def _check(tensor: Tensor) -> None:
    is_fit = tensor.device.type == "cpu" and tensor.dtype in _DTYPES and tensor.is_contiguous()
    if not is_fit:
        raise ShapeError(
            f"native training operators take contiguous float32 on the CPU, got {tensor.dtype} on "
            f"{tensor.device} with strides {tensor.stride()}"
        )
